"""Our metrics in slime's tracker, whoever plays: slime's own rollout function, or ours."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fsm_rollout.adapters import slime
from fsm_rollout.adapters.slime import tracker
from fsm_rollout.adapters.slime.trainer import part_of
from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine import Rule, faults
from tests.playing import TOKENIZER
from tests.slime_stub import (
    LOGGED,
    DataSource,
    Status,
    flattened,
    generate_rollout,
    log,
    log_eval_rollout_data,
    log_rollout_data,
)
from tests.test_slime_step import ROWS, DataSet, serving

OURS = "fsm_rollout.adapters.slime"
HOOKS = {
    "custom_rollout_log_function_path": f"{OURS}.log_rollout_data",
    "custom_eval_rollout_log_function_path": f"{OURS}.log_eval_rollout_data",
}
PLAYS = pytest.mark.parametrize(
    "play", [generate_rollout, slime.generate_rollout], ids=["slime", "ours"]
)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for waiting in tracker._WAITING.values():
        waiting.clear()
    TOKENIZER.save_pretrained(tmp_path)
    yield from serving(monkeypatch, str(tmp_path))


def train(play: Any, args: Any, *, rollout_id: int = 3, metrics: bool = True) -> Any:
    """A step as slime's rollout manager has it; `metrics` as from a function that returns some."""
    output = play(args, rollout_id, DataSource(args, ROWS))
    extra = output.metrics if metrics else None
    log_rollout_data(rollout_id, args, samples := flattened(output.samples), extra, 2.0)
    return samples


@PLAYS
def test_a_step_is_told_once_beside_slimes_own(start: Any, play: Any) -> None:
    with start() as step:
        train(play, step.args(**HOOKS))
        [logged] = LOGGED
        assert (logged["rollout/step"], logged["rollout/truncated_ratio"]) == (3, 0.0)
        assert (logged["rollout/requests"], logged["rollout/abort/alarm"]) == (4, 0)
        assert (logged["tool/echo/calls"], logged["tools/failure_rate"]) == (4, 0.0)
        assert "zero_std/count_0" not in logged
        train(play, step.args(**HOOKS))
        assert LOGGED[1]["rollout/requests"] == 4  # and not those of the step before


def test_a_function_that_returns_no_metrics_is_told_too(start: Any) -> None:
    """slime's fully asynchronous one returns its samples alone."""
    with start() as step:
        train(generate_rollout, step.args(**HOOKS), metrics=False)
        ours, theirs = LOGGED
        assert (ours["rollout/step"], ours["rollout/requests"], ours["perf/seconds"]) == (3, 4, 2.0)
        assert "rollout/requests" not in theirs


@PLAYS
def test_an_evaluation_is_told_under_names_of_its_own(start: Any, play: Any) -> None:
    with start() as step:
        args = step.args(**HOOKS, eval_datasets=[DataSet()])
        output = play(args, 3, None, evaluation=True)
        log_eval_rollout_data(3, args, output.data, output.metrics)
        found: dict[str, Any] = {}
        for one in LOGGED:
            found |= one
        assert (found["eval/step"], found["eval/held_out"]) == (3, 0.5)
        assert (found["eval/rollout/requests"], found["eval/tool/echo/calls"]) == (2, 2)
        assert "rollout/requests" not in found
        assert not any(tracker._WAITING.values())


@PLAYS
def test_the_alarm_counts_and_is_heard(
    start: Any,
    play: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = Rule(fault=faults.Status(status=400), nth=[1, 2])
    with start(refused) as step, caplog.at_level(logging.ERROR):
        train(play, step.args(**HOOKS))
    assert LOGGED[0]["rollout/abort/alarm"] == 1
    assert LOGGED[0]["rollout/abort_rate/engine_error"] == 0.5
    assert "abort rate alarm: 50.0% of 4 requests (2)" in caplog.text


def test_a_sample_that_servers_aborted_does_not_end_the_step_in_slimes_metrics(
    start: Any,
) -> None:
    """slime's own rollout function puts it into the batch, with no reward to round."""
    aborted = Rule(fault=faults.Abort(), nth=1)
    with start(aborted) as step:
        samples = train(generate_rollout, step.args(**HOOKS, n_samples_per_prompt=1))
    assert sorted(sample.status.value for sample in samples) == ["completed", "failed"]
    assert LOGGED[0]["rollout/abort/engine_abort"] == 1


@PLAYS
def test_without_the_hooks_nothing_is_kept(start: Any, play: Any) -> None:
    with start() as step:
        args = step.args(eval_datasets=[DataSet()])
        samples = train(play, args)
        play(args, 3, None, evaluation=True)
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert not any(tracker._WAITING.values())


@pytest.mark.parametrize("key", ["reward_key", "eval_reward_key"])
@PLAYS
def test_a_failed_sample_of_an_evaluation_has_what_slime_looks_up(
    start: Any,
    play: Any,
    key: str,
) -> None:
    refused = Rule(fault=faults.Status(status=400), nth=1)
    with start(refused) as step:
        keys = {"reward_key": "score", key: "score" if key == "reward_key" else "accuracy"}
        args = step.args(**HOOKS, **keys, eval_datasets=[DataSet()])
        output = play(args, 3, None, evaluation=True)
        log_eval_rollout_data(3, args, output.data, output.metrics)
    statuses = {sample.status for sample in output.data["held_out"]["samples"]}
    assert statuses == {Status.COMPLETED, Status.FAILED}


def test_a_tool_that_says_nothing_costs_one_result_of_an_evaluation(start: Any) -> None:
    config = {"tools": ["tests.test_slime:Silent"]}
    with start() as step:
        path = f"{OURS}.reward"
        args = step.args(
            fsm_rollout=config,
            custom_rm_path=path,
            eval_reward_key="accuracy",
            eval_datasets=[DataSet()],
        )
        output = generate_rollout(args, 3, None, evaluation=True)
    assert output.data["held_out"]["rewards"] == [0.0, 0.0]
    assert {sample.status for sample in output.data["held_out"]["samples"]} == {Status.FAILED}


def test_the_parts_of_a_trainer_are_found_where_a_release_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """miles has logging_utils too, but its `log` is elsewhere."""
    for name in ("miles", "miles.utils", "miles.utils.logging_utils", "miles.utils.tracking"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["miles.utils.tracking"], "log", log, raising=False)
    places = "observability.logging_utils", "utils.logging_utils", "utils.tracking"
    assert part_of("log", *places) is log
    with pytest.raises(ConfigError, match=r"no observability.logging_utils or utils.logging_utils"):
        part_of("log", *places[:2])

"""Metrics of a batch, the alarm on aborts, the trainers' names, and the gap to the trainer."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import logging
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.agent import Context
from fsm_rollout.engines.scripted import Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError, EngineError, HandOverError, ToolError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.log_prob_gap import log_prob_gap
from fsm_rollout.metrics import NAMES, Alarm, AlarmError, facts_of, metrics_of, named
from fsm_rollout.request import Group, Request
from fsm_rollout.rewards import RewardPart, Rewards
from fsm_rollout.rollout import Rollout
from fsm_rollout.sample import Sample
from fsm_rollout.tools.base import Tool, ToolResponse
from fsm_rollout.trace import summarise
from tests.playing import CALL, TOKENIZER, ids

PAGE = Path(__file__).parents[1] / "docs/reference/metrics.md"
DOWN = EngineError("down", reason=StopReason.ENGINE_ERROR, final=True)


class Echo(Tool):
    """Say it again, or refuse."""

    def execute(self, text: str) -> ToolResponse:
        """text: what to say"""
        if text == "no":
            raise ToolError("not today")
        return ToolResponse(text, metrics={"said": 1})


def call(text: str) -> str:
    return CALL.replace('"hi"', f'"{text}"')


SCRIPTS: Sequence[Sequence[Any]] = (
    [call("hi"), "done"],
    [call("no"), call("hi"), "done"],
    [Reply([65, 66], finish="length")],
    [DOWN],
    ["done"],
    ["done"],
)
"""what each request is answered: three rows of two requests"""


def index_of(asked: Any) -> int:
    return int(asked.session_id.partition("-")[2])


def batch(**kwargs: Any) -> list[Group]:
    asked_of: dict[int, int] = {}

    def answer(asked: Any) -> Any:
        index = index_of(asked)
        asked_of[index] = asked_of.get(index, -1) + 1
        return SCRIPTS[index][asked_of[index]]

    def right(request: Request) -> float | None:
        return None if request.index == 5 else float(request.index == 0)

    rewards = Rewards({"right": right, "length": RewardPart(lambda request: 0.5, weight=0)})
    rollout = Rollout(
        ScriptedEngine(answer, tokenizer=TOKENIZER),
        TOKENIZER,
        tools=[Echo],
        reward=rewards,
        limits=Limits(max_context=4_096),
        **kwargs,
    )
    return asyncio.run(rollout.generate(["a", "b", "c"], num_samples=2))


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return batch()


def test_samples_are_no_batch_of_requests() -> None:
    with pytest.raises(ConfigError, match=r"got Sample; give it what `generate` returned"):
        metrics_of([Sample()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="got Group"):
        metrics_of(Group(0, []))  # type: ignore[arg-type]


def test_a_batch_is_counted(groups: list[Group]) -> None:
    metrics = metrics_of(groups, seconds=2.0)
    expected = {
        "rollout/requests": 6,
        "rollout/groups": 3,
        "rollout/attempts": 6,
        "rollout/retries": 0,
        "rollout/status/completed": 4,
        "rollout/status/truncated": 1,
        "rollout/status/aborted": 1,
        "rollout/stop_reason/stop": 4,
        "rollout/stop_reason/length": 1,
        "rollout/abort/engine_error": 1,
        "rollout/abort_rate": 1 / 6,
        "rollout/abort_rate/engine_error": 1 / 6,
        "rollout/truncated_ratio": 1 / 5,
        "rollout/clip_ratio": 1 / 5,
        "rollout/turns/mean": (2 + 3 + 1 + 1 + 1) / 5,
        "rollout/turns/max": 3,
        "rollout/tool_calls/mean": 3 / 5,
        "rollout/rows": 5,
        "rollout/tokens/aborted": 0,
        "rollout/reward/mean": 1 / 4,
        "rollout/reward/std": 0.1875**0.5,
        "rollout/reward/missing": 1,
        "rollout/reward/zero_std_groups": 0.0,
        "rollout/reward_part/length/mean": 0.5,
        "rollout/reward_part/right/max": 1.0,
        "tool/echo/calls": 3,
        "tool/echo/ok": 2,
        "tool/echo/tool_error": 1,
        "tools/said": 2,
        "tools/tool_refusals": 1,
        "tools/failure_rate": 1 / 3,
        "perf/seconds": 2.0,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)
    usable = [sample for group in groups for sample in group.samples]
    sampled = sum(int(sample.sampled.sum()) for sample in usable)
    assert metrics["rollout/tokens/sampled"] == metrics["rollout/tokens/trained"] == sampled
    assert metrics["rollout/tokens/tool"] == sum(s.response_length for s in usable) - sampled
    assert metrics["perf/tokens_per_s"] == sampled / 2
    assert all(isinstance(name, str) and math.isfinite(value) for name, value in metrics.items())


def test_requests_and_groups_are_the_same_batch(groups: list[Group]) -> None:
    requests = [request for group in groups for request in group.requests]
    assert metrics_of(requests) == metrics_of(groups)
    assert metrics_of([]) == {}


@given(workers=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_facts_of_several_processes_are_counted_as_one_batch(
    groups: list[Group], workers: list[int]
) -> None:
    """However requests are dealt to workers: their means, medians and groups are of all."""
    requests = [request for group in groups for request in group.requests]
    sent = [
        pickle.dumps([facts_of(r) for r, at in zip(requests, workers, strict=True) if at == worker])
        for worker in range(3)
    ]
    assert all(len(played) < 4_000 for played in sent)
    facts = [one for played in sent for one in pickle.loads(played)]
    assert metrics_of(facts, seconds=2.0) == pytest.approx(metrics_of(groups, seconds=2.0))


def test_what_there_is_nothing_to_say_about_has_no_entry() -> None:
    engine = ScriptedEngine([DOWN], tokenizer=TOKENIZER)
    groups = asyncio.run(Rollout(engine, TOKENIZER).generate(["a"], num_samples=2))
    metrics = metrics_of(groups)
    assert metrics["rollout/abort_rate/engine_error"] == 1.0
    for name in ("rollout/reward/mean", "rollout/turns/mean", "perf/tokens_per_s"):
        assert name not in metrics
    assert not any(math.isnan(value) for value in metrics.values())


def test_aborted_tokens_are_counted_as_such() -> None:
    replies: list[Any] = [CALL, DOWN]
    engine = ScriptedEngine(replies, tokenizer=TOKENIZER)
    groups = asyncio.run(Rollout(engine, TOKENIZER, tools=[Echo]).generate(["a"]))
    metrics = metrics_of(groups)
    assert metrics["rollout/tokens/aborted"] == metrics["rollout/tokens/sampled"] == len(ids(CALL))
    assert metrics["rollout/tokens/trained"] == 0


def test_rows_of_forks_and_children_count_once() -> None:
    request = Request(index=1)
    request.set_prompt([1, 2, 3])
    request._status = request._status.GENERATING
    request.append_response_tokens([4, 5], [-0.5, -0.5], meta_info={"finish_reason": "stop"})
    request.fork([1, 2, 3, 9])
    request.append_response_tokens([6], [-0.5], meta_info={"finish_reason": "stop"})
    child = request.spawn("b")
    child.set_prompt([7])
    child._status = request._status.GENERATING
    child.append_response_tokens([8], [-0.5], meta_info={"finish_reason": "stop"})
    lost = request.spawn("c")
    lost.set_prompt([7])
    lost._status = request._status.GENERATING
    lost.append_response_tokens([8, 9], [-0.5, -0.5], meta_info={"finish_reason": "stop"})
    lost._status, lost.stop_reason = StopReason.STALE.status, StopReason.STALE
    for one in (child, request):
        one._status, one.stop_reason = StopReason.STOP.status, StopReason.STOP
    metrics = metrics_of([request])
    assert (metrics["rollout/requests"], metrics["rollout/rows"]) == (1, 3)
    assert (metrics["rollout/tokens/trained"], metrics["rollout/tokens/aborted"]) == (4, 2)
    assert metrics["rollout/tokens/sampled"] == 6
    assert metrics["rollout/tokens/prompt"] == 3 + 4 + 1


def test_turns_and_calls_of_sub_agents_count_with_their_request() -> None:
    async def lead(ctx: Context) -> None:
        await ctx.generate()
        await ctx.spawn("x", limits=Limits(max_turns=1, max_attempts=1))
        await ctx.spawn("y")

    script = [call("hi") + call("no") + "<tool_call>x</tool_call>", "done"]
    answers: dict[str, int] = {}

    def answer(asked: Any) -> Any:
        if not answers:
            answers[asked.session_id] = 0
            return "let me ask"
        position = answers.get(asked.session_id, 0)
        answers[asked.session_id] = position + 1
        return script[position]

    engine = ScriptedEngine(answer, tokenizer=TOKENIZER)
    [group] = asyncio.run(Rollout(engine, TOKENIZER, tools=[Echo], agent=lead).generate(["a"]))
    metrics = metrics_of([group])
    assert metrics["rollout/turns/mean"] == 1 + 1 + 2
    assert metrics["rollout/tool_calls/mean"] == metrics["tool/echo/calls"] == 4
    assert metrics["rollout/invalid_calls"] == metrics["tools/tool_calls_malformed"] == 2


def test_the_summary_shows_the_same_figures(groups: list[Group]) -> None:
    requests = [request for group in groups for request in group.requests]
    summary = summarise(requests, 2.0)
    assert summary.metrics == metrics_of(groups, seconds=2.0)
    assert summary.reward == 0.25
    column = summary.table().columns[1]
    shown = " | ".join(map(str, column.cells))
    assert "6 in 6 attempts | 4 completed, 1 aborted, 1 truncated | 4 stop" in shown
    assert "2 said, 1 tool_refusals" in shown
    assert "0.250 (of 4)" in shown
    assert summarise([], 0.0).table().row_count == 9


# -- the alarm -------------------------------------------------------------------------------------


def test_the_alarm_is_raised_by_the_rate_of_one_reason(
    groups: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = metrics_of(groups)
    with caplog.at_level(logging.ERROR):
        assert Alarm({"engine_error": 0.2}, default=0.0)(metrics) == {"rollout/abort/alarm": 0}
        assert not caplog.records
        assert Alarm({"engine_error": 0.1}, default=1.0)(metrics) == {"rollout/abort/alarm": 1}
    assert "16.7% of 6 requests (1) were aborted for engine_error, allowed are 10.0%" in caplog.text
    with pytest.raises(AlarmError, match="engine_error"):
        Alarm(default=0.1, raises=True)(metrics)
    watched = Alarm(default=0.1).watch(groups, seconds=2.0)
    assert watched == metrics_of(groups, seconds=2.0) | {"rollout/abort/alarm": 1}
    assert Alarm(default=0.1, raises=True).watch([]) == {}


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ({"engine_eror": 0.1}, "did you mean 'engine_error'"),
        ({"length": 0.1}, "no request is aborted for 'length'"),
        ({"stale": 2}, r"within \[0, 1\], got 2"),
    ],
)
def test_a_threshold_that_cannot_be_is_a_config_error(thresholds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Alarm(thresholds, default=0.2)


# -- names -----------------------------------------------------------------------------------------


def everything(groups: list[Group]) -> dict[str, float]:
    """The metrics of a batch that has something of each."""
    for request in groups[0].requests:
        request.metrics |= {"engine/prompt_tokens": 10, "engine/cached_tokens": 4}
    samples = [sample for group in groups for sample in group.samples]
    rows = [sample.rollout_log_probs for sample in samples]
    assert all(row is not None for row in rows)
    gap = log_prob_gap(samples, rows)  # type: ignore[arg-type]
    metrics = metrics_of(groups, seconds=1.0) | gap
    more = {"rollout/top_p_kept": 1.0, "rollout/weight_version/min": 1.0}
    more |= {"rollout/weight_version/max": 1.0, "rollout/weight_version/mixed_rows": 0.0}
    return metrics | Alarm(default=1.0)(metrics) | more


@pytest.mark.parametrize("trainer", NAMES)
def test_every_name_of_a_trainer_comes_from_one_of_ours(trainer: str) -> None:
    metrics = everything(batch())
    found = named(metrics, trainer)
    assert [theirs for theirs in NAMES[trainer] if "*" not in theirs and theirs not in found] == []
    if trainer == "trl":
        assert found["rewards/right/mean"] == metrics["rollout/reward_part/right/mean"]
    with pytest.raises(ConfigError, match="known: verl, slime, trl"):
        named(metrics, "ppo")


def test_the_page_of_names_is_the_code() -> None:
    shown = set(re.findall(r"^\| `([^`]+)`", PAGE.read_text().partition("## Names")[0], re.M))
    patterns = {name: re.compile(_pattern(name)) for name in shown}
    metrics = everything(batch())
    unnamed = [n for n in metrics if not any(p.fullmatch(n) for p in patterns.values())]
    assert unnamed == []
    idle = [name for name, p in patterns.items() if not any(map(p.fullmatch, metrics))]
    assert idle == []


def _pattern(name: str) -> str:
    """A name of the page: {a,b} are alternatives, <x> stands for any one."""
    pattern = re.sub(r"\\\{(.+?)\\\}", lambda m: f"({m[1].replace(',', '|')})", re.escape(name))
    return re.sub(r"<\w+>", ".+", pattern)


def test_the_page_lists_the_names_of_the_trainers() -> None:
    page = PAGE.read_text().partition("## Names")[2]
    for trainer, names in NAMES.items():
        _, _, table = page.partition(f"| {trainer} |")
        rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines()[2:]]
        assert [[cell.strip(" `") for cell in row] for row in rows] == [
            list(p) for p in names.items()
        ]


# -- the gap ---------------------------------------------------------------------------------------


def played(turns: Sequence[tuple[int, int, Any]], *, name: str = "7-0") -> Sample:
    """A sealed sample: for each turn its sampled tokens, the observation behind it, the version."""
    request = Request(index=int(name.partition("-")[0]))
    request.set_prompt([1, 2])
    request._status = request._status.GENERATING
    for sampled, observed, version in turns:
        meta = {"finish_reason": "stop", "weight_version": version}
        request.append_response_tokens([5] * sampled, [-1.0] * sampled, meta_info=meta)
        request.append_response_tokens([6] * observed, trainable=False)
    request._status, request.stop_reason = StopReason.STOP.status, StopReason.STOP
    request.seal()
    return request.samples[0]


def test_the_gap_is_that_of_trained_tokens_by_version_turn_and_position() -> None:
    sample = played([(3, 2, 1), (300, 0, 2)])
    trainer = np.full(sample.response_length, -1.0)
    trainer[:3] += [0.5, -0.5, 0.0]
    trainer[3:5] = 99.0  # observed tokens: whatever stands there
    trainer[-1] -= 0.25
    metrics = log_prob_gap([sample], [trainer])
    d = np.array([0.5, -0.5, *[0.0] * 300, -0.25])
    expected = {
        "log_prob_gap/tokens": 303,
        "log_prob_gap/mean": 1.25 / 303,
        "log_prob_gap/max": 0.5,
        "log_prob_gap/kl_k1": -d.mean(),
        "log_prob_gap/kl_k3": (np.exp(d) - 1 - d).mean(),
        "log_prob_gap/ratio/mean": np.exp(d).mean(),
        "log_prob_gap/ratio/min": math.exp(-0.5),
        "log_prob_gap/ratio/max": math.exp(0.5),
        "log_prob_gap/version/1/mean": 1 / 3,
        "log_prob_gap/version/1/max": 0.5,
        "log_prob_gap/version/2/mean": 0.25 / 300,
        "log_prob_gap/version/2/max": 0.25,
        "log_prob_gap/turn/1/mean": 1 / 3,
        "log_prob_gap/turn/1/max": 0.5,
        "log_prob_gap/turn/2/mean": 0.25 / 300,
        "log_prob_gap/turn/2/max": 0.25,
        "log_prob_gap/position/0/mean": 1 / (256 - 2),
        "log_prob_gap/position/0/max": 0.5,
        "log_prob_gap/position/256/mean": 0.25 / (305 - 256),
        "log_prob_gap/position/256/max": 0.25,
    }
    assert metrics == pytest.approx(expected)


@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 3), st.sampled_from([None, 1, "b"])),
        min_size=1,
        max_size=12,
    ),
    noise=st.floats(-50, 50),
)
def test_what_stands_on_untrained_tokens_changes_nothing(
    turns: list[tuple[int, int, Any]], noise: float
) -> None:
    sample = played(turns)
    rng = np.random.default_rng(0)
    trainer = -rng.random(sample.response_length)
    plain = log_prob_gap([sample], [trainer])
    assert log_prob_gap([sample], [np.where(sample.loss_mask, trainer, noise)]) == plain
    assert log_prob_gap([sample], [np.where(sample.loss_mask, trainer, math.nan)]) == plain
    weights = [plain[f"log_prob_gap/turn/{n}/mean"] for n in range(1, min(len(turns), 8) + 1)]
    assert min(weights) - 1e-9 <= plain["log_prob_gap/mean"] <= max(weights) + 1e-9
    assert ("log_prob_gap/version/unknown/mean" in plain) == any(v is None for *_, v in turns)


def test_a_sample_without_trained_tokens_is_left_out() -> None:
    sample, removed = played([(2, 0, 1)]), played([(2, 0, 1)], name="8-0")
    removed.remove_sample = True
    alone = log_prob_gap([sample], [[-1.5, -1.0]])
    assert alone["log_prob_gap/tokens"] == 2
    assert log_prob_gap([removed, sample], [[-9.0, -9.0], [-1.5, -1.0]]) == alone
    assert log_prob_gap([removed], [[-9.0, -9.0]]) == {}


def test_a_tensor_of_the_trainer_may_be_half_precision() -> None:
    torch = pytest.importorskip("torch")
    row = torch.tensor([-1.5, -1.0], dtype=torch.bfloat16, requires_grad=True)
    assert log_prob_gap([played([(2, 0, 1)])], [row])["log_prob_gap/mean"] == 0.25


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[-1.0]], r"sample 7-0: log-probs of shape \(1,\), it has 2 response tokens"),
        ([[[-1.0, -1.0]]], r"sample 7-0: log-probs of shape \(1, 2\)"),
        ([[-1.0, math.nan]], "sample 7-0: .* response token 1 is nan"),
        ([], "0 rows of log-probs for 1 samples"),
    ],
)
def test_a_row_that_does_not_fit_its_sample_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(HandOverError, match=message):
        log_prob_gap([played([(2, 0, 1)])], rows)

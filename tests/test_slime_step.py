"""A whole rollout step, as slime calls it: real HTTP, a stub of slime, groups in and out."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from fsm_rollout.adapters import slime
from fsm_rollout.adapters.slime import generate_rollout, post_process_rewards
from fsm_rollout.adapters.slime import player as players
from fsm_rollout.agent import Context
from fsm_rollout.errors import ConfigError
from fsm_rollout.request import Request
from fsm_rollout.testing.fake_engine import FakeEngine, Latency, LogNormal, Rule, faults
from fsm_rollout.tools.base import Tool
from tests.playing import CALL, TOKENIZER
from tests.slime_stub import (
    DataSource,
    DynamicFilterOutput,
    RolloutFnTrainOutput,
    Status,
    consume,
    flattened,
    install,
    slime_args,
)

SCRIPT = [f"Let me see. {CALL}", "It says hi."]
CONFIG = {"tools": ["tests.playing:Echo"], "reward": "tests.test_slime_step:by_index"}
ROWS = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(5)]
events: list[str] = []
"""what the reward models of this file were asked, and what became of it"""


def by_index(request: Request) -> float:
    return float(request.index % 2)


async def slow_for_some(args: Any, sample: Any) -> float:
    """The judge of group 0 is quick; the others take for ever."""
    if sample.group_index:
        try:
            await asyncio.sleep(600)
        finally:
            events.append("ended")
    return 1.0


async def fails_for_one(args: Any, sample: Any) -> float:
    if sample.index == 1:
        raise ValueError("no such label")
    return float(sample.index)


async def of_the_group(args: Any, samples: list[Any]) -> list[float]:
    events.append(f"group of {len(samples)}")
    return [float(sample.index) for sample in samples]


async def nothing_for_each(args: Any, sample: Any) -> float | None:
    return None if sample.index == 1 else 1.0


async def nothing_for_group(args: Any, samples: list[Any]) -> list[float | None]:
    return [await nothing_for_each(args, sample) for sample in samples]


def adds_up(args: Any, group: list[Any]) -> DynamicFilterOutput:
    return DynamicFilterOutput(sum(sample.reward for sample in group) > -1, "never")


def not_the_first(args: Any, group: list[Any]) -> DynamicFilterOutput:
    return DynamicFilterOutput(group[0].group_index != 0, "first")


async def sometimes_two(ctx: Context) -> None:
    """An agent of which every second rollout has two samples."""
    if ctx.request.index % 2:
        await ctx.generate()
        await ctx.rewrite([{"role": "user", "content": "shorter"}])
    await ctx.generate()


class DataSet:
    """slime's EvalDatasetConfig, as far as a rollout reads it."""

    name, rows = "held_out", ROWS[:2]


class Hangs(Tool):
    """In rows that say so it takes longer than a step, until `is_mended`."""

    name = "echo"
    opened = alive = 0
    is_mended = False

    def create(self, hangs: bool = False) -> None:
        self.hangs = hangs
        Hangs.opened += 1
        Hangs.alive += 1

    async def execute(self, text: str) -> str:
        """text: what to say"""
        await asyncio.sleep(600 if self.hangs and not Hangs.is_mended else 0)
        return text

    def release(self) -> None:
        Hangs.alive -= 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(path)
    return str(path)


class Step:
    """slime's loop, a server in it, and what it takes to call the rollout function."""

    def __init__(self, loop: Any, fake: FakeEngine, checkpoint: str) -> None:
        self.loop, self.fake = loop, fake
        self._where = {
            "hf_checkpoint": checkpoint,
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": fake.port,
        }

    def args(self, **given: Any) -> Any:
        return slime_args(**{"fsm_rollout": CONFIG, **self._where, **given})

    def play(self, args: Any, source: DataSource | None = None, *, rollout_id: int = 0) -> Any:
        events.clear()
        return generate_rollout(args, rollout_id, source or DataSource(args, ROWS))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> Iterator[Any]:
    yield from serving(monkeypatch, checkpoint)


def serving(monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> Iterator[Any]:
    """slime's loop, and how to start a server in it."""
    loop = install(monkeypatch)
    players._PLAYERS.clear()

    @contextmanager
    def started(*rules: Rule, script: Sequence[Any] = SCRIPT, **options: Any) -> Iterator[Step]:
        fake = FakeEngine(script, tokenizer=TOKENIZER, faults=rules, **options)
        loop.run(fake.start())
        try:
            yield Step(loop, fake, checkpoint)
        finally:
            loop.run(fake.stop())

    yield started
    loop.close()


def flat(groups: Any) -> list[Any]:
    return [sample for group in groups for sample in group]


def test_a_step_is_a_batch_of_whole_groups_in_order(start: Any) -> None:
    with start() as step:
        args = step.args(over_sampling_batch_size=3)
        output = step.play(args)
    assert isinstance(output, RolloutFnTrainOutput)
    assert output.metrics is not None
    assert [len(group) for group in output.samples] == [2, 2]
    samples = flat(output.samples)
    assert [s.index for s in samples] == sorted(s.index for s in samples)
    consume(args, samples)
    assert post_process_rewards(args, samples)[1] == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-3)
    metrics = output.metrics
    assert metrics["rollout/turns/mean"] == 2
    assert 4 <= metrics["rollout/requests"] <= 6  # the third group may not have ended
    assert metrics["rollout/failed"] == metrics["rollout/aborted_groups"] == 0


def test_what_is_not_needed_is_cancelled_at_once_with_its_tools(start: Any) -> None:
    """slime waits for the reward model of samples that it throws away (its issue 2176)."""
    config = {"tools": ["tests.playing:Echo"]}
    with start() as step:
        args = step.args(
            fsm_rollout=config,
            custom_rm_path="tests.test_slime_step.slow_for_some",
            rollout_batch_size=1,
            over_sampling_batch_size=3,
        )
        started = time.monotonic()
        output = step.play(args)
        assert time.monotonic() - started < 40
    assert [sample.group_index for sample in flat(output.samples)] == [0, 0]
    assert events == ["ended"] * len(events)


def test_a_failed_sample_does_not_end_the_step(start: Any) -> None:
    with start(Rule(fault=faults.Status(status=400), nth=2)) as step:
        args = step.args()
        output = step.play(args)
        samples = flat(output.samples)
        assert [s.status for s in samples].count(Status.FAILED) == 1
        consume(args, samples)
        assert output.metrics["rollout/failed"] == 1
        assert post_process_rewards(args, samples)[1].count(0.0) >= 1


def test_a_reward_model_that_fails_costs_the_sample(start: Any) -> None:
    with start() as step:
        args = step.args(
            fsm_rollout={"tools": ["tests.playing:Echo"]},
            custom_rm_path="tests.test_slime_step.fails_for_one",
        )
        samples = flat(step.play(args).samples)
    assert [s.status is Status.FAILED for s in samples] == [s.index == 1 for s in samples]
    assert "no such label" in samples[1].metadata["fsm_rollout"]["error"]
    consume(args, samples)


@pytest.mark.parametrize("kind", ["each", "group"])
def test_a_reward_model_that_says_nothing_costs_the_sample(start: Any, kind: str) -> None:
    with start() as step:
        args = step.args(
            fsm_rollout={"tools": ["tests.playing:Echo"]},
            custom_rm_path=f"tests.test_slime_step.nothing_for_{kind}",
            group_rm=kind == "group",
            dynamic_sampling_filter_path="tests.test_slime_step.adds_up",
        )
        samples = flat(step.play(args).samples)
    assert [s.status is Status.FAILED for s in samples] == [s.index == 1 for s in samples]
    assert "said None" in samples[1].metadata["fsm_rollout"]["error"]
    consume(args, samples)


def test_an_aborted_group_is_played_again_and_never_trained(start: Any) -> None:
    with start(Rule(fault=faults.Abort(), nth=3)) as step:
        args = step.args()
        source = DataSource(args, ROWS)
        output = step.play(args, source)
    samples = flat(output.samples)
    assert {s.status for s in samples} == {Status.COMPLETED}
    assert output.metrics["rollout/aborted_groups"] == 1
    consume(args, samples)


def test_servers_that_abort_everything_do_not_keep_a_step_for_ever(start: Any) -> None:
    with start(Rule(fault=faults.Abort())) as step:
        args = step.args()
        output = step.play(args)
    assert {s.status for s in flat(output.samples)} == {Status.FAILED}
    assert output.metrics["rollout/aborted_groups"] >= 6
    consume(args, flat(output.samples))


def test_the_dynamic_filter_drops_groups_and_is_told_in_the_metrics(start: Any) -> None:
    with start() as step:
        path = "tests.test_slime_step.not_the_first"
        output = step.play(step.args(dynamic_sampling_filter_path=path))
    assert 0 not in {sample.group_index for sample in flat(output.samples)}
    assert output.metrics["rollout/dynamic_filter/drop_first"] == 1


def test_the_filter_sees_samples_and_a_batch_has_one_shape(start: Any) -> None:
    """slime flattens a batch, and reads its filters' groups, as if no rollout had two samples."""
    config = {**CONFIG, "agent": "tests.test_slime_step:sometimes_two"}
    refused = Rule(fault=faults.Status(status=400), nth=2)
    with start(refused) as step:
        path = "tests.test_slime_step.adds_up"
        args = step.args(fsm_rollout=config, dynamic_sampling_filter_path=path)
        out = step.play(args)
        assert all(isinstance(one, list) for group in out.samples for one in group)
        post_process_rewards(args, samples := flattened(out.samples))
        consume(args, samples)
        assert {sample.status for sample in samples} == {Status.COMPLETED, Status.FAILED}


def test_a_reward_model_of_groups_sees_whole_groups(start: Any) -> None:
    with start() as step:
        path = "tests.test_slime_step.of_the_group"
        samples = flat(step.play(step.args(group_rm=True, custom_rm_path=path)).samples)
    assert [sample.reward for sample in samples] == [float(sample.index) for sample in samples]
    assert set(events) == {"group of 2"}


def test_partial_rollout_parks_what_runs_and_goes_on_in_the_next_step(start: Any) -> None:
    latency = Latency(total_s=LogNormal(mean=0.15, sigma=1.0))
    with start(latency=latency, seed=3) as step:
        args = step.args(partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=4)
        source = DataSource(args, ROWS)
        seen: set[int] = set()
        for _ in range(4):
            output = step.play(args, source)
            samples = flat(output.samples)
            assert {s.status for s in samples} == {Status.COMPLETED}
            assert seen.isdisjoint(s.index for s in samples)
            seen |= {s.index for s in samples}
            consume(args, samples)
            for waiting in flat(source.buffer):
                assert waiting.status in (Status.ABORTED, Status.COMPLETED)
                length = waiting.response_length
                assert len(waiting.loss_mask or []) == length
                assert not length or waiting.metadata["start_rollout_id"] == 0
        assert source.num_groups <= 8


def test_mask_offpolicy_masks_what_was_over_before_the_rest_of_its_group(start: Any) -> None:
    with start() as step:
        args = step.args(
            partial_rollout=True,
            rollout_batch_size=1,
            over_sampling_batch_size=3,
            mask_offpolicy_in_partial_rollout=True,
        )
        source = DataSource(args, ROWS)
        first = flat(step.play(args, source, rollout_id=0).samples)
        spare = [s for s in flat(source.buffer) if s.status is Status.COMPLETED]
        args.over_sampling_batch_size = 1
        later = [s for n in (1, 2) for s in flat(step.play(args, source, rollout_id=n).samples)]
    assert all(any(sample.loss_mask) for sample in first)
    assert spare
    assert all(sample in later and not any(sample.loss_mask) for sample in spare)


def test_a_tool_that_hangs_is_parked_with_its_sample_and_called_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsm_rollout.adapters.slime.step._ENDING_S", 0.3)
    monkeypatch.setattr("fsm_rollout.adapters.slime.step._ABORT_AGAIN_S", 0.1)
    Hangs.opened = Hangs.alive = 0
    Hangs.is_mended = False
    hanging = {"tools_kwargs": {"echo": {"create_kwargs": {"hangs": True}}}}
    config = {**CONFIG, "tools": ["tests.test_slime_step:Hangs"]}
    with start() as step:
        args = step.args(partial_rollout=True, rollout_batch_size=1, fsm_rollout=config)
        source = DataSource(args, [ROWS[0], {**ROWS[1], "metadata": hanging}])
        first = flat(step.play(args, source).samples)
        waiting = flat(source.buffer)
        assert (Hangs.opened, Hangs.alive) == (4, 2)
        assert [s.status for s in waiting] == [Status.ABORTED] * 2
        Hangs.is_mended, args.over_sampling_batch_size = True, 1
        second = flat(step.play(args, source).samples)
    assert [s.index for s in second] == [s.index for s in waiting]
    assert (Hangs.opened, Hangs.alive) == (4, 0)
    consume(args, first + second)


async def twice(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function of the user's around ours, which may change its own mapping."""
    sampling_params["max_new_tokens"] = 5
    return await slime.generate(args, sample, sampling_params)


def test_a_generate_function_of_the_users_plays_in_the_place_of_ours(start: Any) -> None:
    path = "tests.test_slime_step.twice"
    with start() as step:
        samples = flat(step.play(step.args(custom_generate_function_path=path)).samples)
    assert {(s.status, s.response_length) for s in samples} == {(Status.TRUNCATED, 5)}


async def breaks_for_one(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    if sample.index == 1:
        raise KeyError("no such row")
    return await slime.generate(args, sample, sampling_params)


async def hook(args: Any, sample: Any, *, evaluation: bool) -> Any:
    if sample.index == 1:
        raise KeyError("no such row")
    return sample


@pytest.mark.parametrize("what", ["the generate function", "a sample hook"])
def test_a_function_of_the_users_that_raises_costs_one_sample(
    start: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    given = {"rollout_sample_hook_path": "some"}
    if what == "the generate function":
        given = {"custom_generate_function_path": "tests.test_slime_step.breaks_for_one"}
    hooks = types.ModuleType("slime.rollout.sample_hooks")
    hooks.apply_rollout_sample_hooks = hook  # type: ignore[attr-defined]
    with start() as step:
        monkeypatch.setitem(sys.modules, "slime.rollout.sample_hooks", hooks)
        output = step.play(args := step.args(**given))
        samples = flat(output.samples)
    broken = [s for s in samples if s.status is Status.FAILED]
    assert [s.index for s in broken] == [1]
    assert broken[0].metadata["fsm_rollout"]["error"] == f"{what} raised KeyError: 'no such row'"
    assert output.metrics["rollout/failed"] == 1
    consume(args, samples)


async def no_number_for_one(args: Any, sample: Any) -> Any:
    value = np.float32("nan") if sample.index == 1 else 1.0
    if args.reward_key:
        return {args.reward_key: None if sample.index == 1 else value, "why": "so"}
    return value


@pytest.mark.parametrize("reward_key", [None, "score"])
def test_what_filters_would_fall_over_is_failed_before_they_see_it(
    start: Any, reward_key: str | None
) -> None:
    with start() as step:
        args = step.args(
            reward_key=reward_key,
            fsm_rollout={"tools": CONFIG["tools"]},
            custom_rm_path="tests.test_slime_step.no_number_for_one",
        )
        samples = flat(step.play(args).samples)
    assert [s.index for s in samples if s.status is Status.FAILED] == [1]
    values = [s.reward[reward_key] if reward_key else s.reward for s in samples]
    assert values == [1.0, 0.0, 1.0, 1.0]


def test_groups_that_are_ready_beyond_the_batch_wait_for_the_next_step(start: Any) -> None:
    with start() as step:
        args = step.args(partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=3)
        source = DataSource(args, ROWS)
        found = [flat(step.play(args, source).samples)[0].group_index for _ in range(3)]
    assert sorted(found) == [0, 1, 2]
    assert source.num_groups <= 7


def test_a_set_up_that_cannot_work_ends_the_step_as_what_it_is(start: Any) -> None:
    with start() as step:
        for broken in (
            {"fsm_rollout": {"tools": ["nothing"]}},
            {"rollout_top_p": 0.0},
            {"hf_checkpoint": "/nowhere"},
        ):
            with pytest.raises(ConfigError):
                step.play(step.args(**broken))


def test_a_data_source_that_is_empty_is_an_error_and_no_endless_loop(start: Any) -> None:
    class Empty(DataSource):
        def get_samples(self, num_samples: int) -> list[list[Any]]:
            return []

    with start() as step, pytest.raises(ConfigError, match="no more samples"):
        step.play(step.args(), Empty(step.args(), ROWS))


def test_an_evaluation_is_slimes_own_plays_through_generate_and_is_told(start: Any) -> None:
    with start() as step:
        args = step.args(eval_datasets=[DataSet()])
        out = generate_rollout(args, 3, None, evaluation=True)
        assert out.data["held_out"]["rewards"] == [0.0, 1.0]
        assert out.metrics["eval/rollout/requests"] == 2
        assert out.metrics["eval/tool/echo/ok"] == 2
        args.custom_generate_function_path = None
        with pytest.raises(ConfigError, match="--custom-generate-function-path"):
            generate_rollout(args, 3, None, evaluation=True)


class Played(DataSource):
    """As slime's contract test of rollout functions has it: all is over, and there are no flags."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        for sample in flat(groups):
            sample.tokens, sample.response_length, sample.reward = [5, 6], 2, 0.0
            sample.status = Status.COMPLETED
        return groups


def test_without_flags_what_is_over_stays_and_what_is_not_fails(start: Any) -> None:
    """slime's contract for --rollout-function-path calls with args None."""
    with start() as step:
        source = Played(step.args(), ROWS)
        found = flat(generate_rollout(None, 2, source).samples)
        assert [sample.tokens for sample in found] == [[5, 6]] * 2
        out = generate_rollout(None, 2, source, evaluation=True)
        [rows] = out.data.values()
        assert (rows["rewards"], rows["truncated"]) == ([0.0, 0.0], [False, False])
        assert [sample.status for sample in rows["samples"]] == [Status.COMPLETED] * 2
        found = flat(generate_rollout(None, 2, DataSource(step.args(), ROWS)).samples)
        assert [sample.status for sample in found] == [Status.FAILED] * 2
        assert "hf_checkpoint is not set" in found[0].metadata["fsm_rollout"]["error"]


def test_a_step_can_run_beside_another_loop(start: Any) -> None:
    """Each event loop has a player of its own; nothing is shared between two threads."""
    with start() as step:
        args = step.args()
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.append(asyncio.run(_one(args, DataSource(args, ROWS))))
        )
        thread.start()
        samples = flat(step.play(args).samples)
        thread.join()
    assert found[0].status is Status.COMPLETED
    consume(args, [*samples, found[0]])


async def _one(args: Any, source: DataSource) -> Any:
    return await slime.generate(args, source.get_samples(1)[0][0], {"max_new_tokens": 500})

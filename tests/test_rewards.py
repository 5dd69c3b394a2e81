"""Rewards: parts by name, functions of a request, of a batch, of a group; none hurts another's."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.config import RewardConfig
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Group, Request
from fsm_rollout.rewards import RewardError, RewardPart, Rewards, Score, model_turns
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool, ToolResponse
from tests.clock import FastForward
from tests.playing import CALL, TOKENIZER, Echo, play

LIMITS = Limits(max_context=4_096, tool_timeout_s=0.3, max_attempts=1)


def rollout_with(reward: Any, script: Any = lambda _: "done", **kwargs: Any) -> Rollout:
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    return Rollout(engine, TOKENIZER, reward=reward, **{"limits": LIMITS, **kwargs})


def generate(
    reward: Any, labels: Sequence[Any], *, num_samples: int = 1, **kwargs: Any
) -> list[Group]:
    """One row per label, through `Rollout.generate`."""
    rows = [{"prompt": "hello", "label": label} for label in labels]
    return asyncio.run(rollout_with(reward, **kwargs).generate(rows, num_samples=num_samples))


def outcomes(groups: Sequence[Group]) -> list[float | StopReason | None]:
    """The reward of each request, or why it was aborted."""
    requests = [request for group in groups for request in group.requests]
    assert all(request.is_sealed for request in requests)
    return [r.stop_reason if r.status is Status.ABORTED else r.reward for r in requests]


class Steps(Tool):
    """Rewards each of its steps with 0.5, and the whole with 3."""

    name = "echo"

    def execute(self, text: str) -> ToolResponse:
        """text: anything"""
        return ToolResponse("ok", reward=0.5)

    def calc_reward(self) -> float:
        return 3.0


# -- parts by name ---------------------------------------------------------------------------------


def test_the_reward_is_the_weighted_sum_of_the_named_parts() -> None:
    async def asynchronous(request: Request) -> float:
        await asyncio.sleep(0)
        return 4.0

    rewards = Rewards(
        {
            "tool/echo": 2.0,
            "turns": 0.5,
            "answer": lambda request: 1.0,
            "style": RewardPart(lambda request: {"short": 1.0, "polite": 0.5}, weight=0.1),
            "slow": RewardPart(asynchronous, weight=-1.0),
        }
    )
    request, _ = play([CALL, CALL, "done"], tools=[Steps], reward=rewards)
    assert request.reward_parts == {
        "tool/echo": 3.0,
        "turns": 1.0,
        "answer": 1.0,
        "style/short": 1.0,
        "style/polite": 0.5,
        "slow": 4.0,
    }
    assert request.reward == pytest.approx(2 * 3 + 0.5 * 1 + 1 + 0.1 * 1.5 - 4)
    assert request.sample.reward == request.reward


def test_what_is_not_named_is_recorded_but_not_counted() -> None:
    request, _ = play(["done"], reward=Rewards({"answer": lambda request: 1.0}))
    assert (request.reward, request.reward_parts) == (1.0, {"tool/echo": 0.25, "answer": 1.0})


def test_a_part_that_is_none_is_left_out_and_all_none_is_none() -> None:
    missing = {"a": lambda request: None, "b": lambda request: {"x": None, "steps": [None]}}
    request, _ = play(["done"], reward=Rewards({**missing, "c": lambda request: 0.0}))
    assert (request.reward, request.reward_parts) == (0.0, {"tool/echo": 0.25, "c": 0.0})
    request, _ = play(["done"], reward=Rewards({**missing, "turns": 1.0}))
    assert (request.reward, request.reward_parts) == (None, {"tool/echo": 0.25})
    assert request.status is Status.COMPLETED


def test_a_part_of_weight_zero_is_watched_but_makes_no_reward() -> None:
    watched = RewardPart(lambda request: 5.0, weight=0)
    request, _ = play(["done"], tools=[], reward=Rewards({"watched": watched}))
    assert (request.reward, request.reward_parts) == (None, {"watched": 5.0})


def test_one_part_alone_may_be_the_reward() -> None:
    request, _ = play(["done"], reward=RewardPart(lambda request: 1.0, weight=0.5))
    assert (request.reward, request.reward_parts) == (0.5, {"tool/echo": 0.25, "reward": 1.0})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tool/ehco": 1.0}, "did you mean 'echo'"),
        ({"tool/browser": 1.0}, "no such tool; known: echo"),
        ({"tool/echo": "much"}, "a weight must be a number"),
        ({"turns": float("nan")}, "finite"),
        ({"answer": 1.0}, "give a function"),
        ({"": lambda request: 1.0}, "give it a name"),
    ],
)
def test_a_part_that_is_none_of_these_is_a_config_error(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rollout_with(Rewards(parts), tools=[Echo])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": float("inf")}, "weight"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"batch": 0}, "batch"),
        ({"batch": 2.5}, "batch"),
        ({"processes": -1}, "processes"),
        ({"batch_wait_s": -1}, "batch_wait_s"),
        ({"batch": 4, "group": True}, "not both"),
    ],
)
def test_options_that_cannot_be_are_a_config_error(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardPart(outcomes, **options)


def test_what_is_no_function_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="not callable"):
        RewardPart(3)  # type: ignore[arg-type]


def test_each_part_has_a_clock_of_its_own() -> None:
    async def slow(request: Request) -> float:
        await asyncio.sleep(0.2)
        return 1.0

    patient, hurried = RewardPart(slow, timeout_s=5), RewardPart(slow, timeout_s=0.05)
    limits = Limits(tool_timeout_s=0.1)
    request, _ = play(["done"], tools=[], reward=patient, limits=limits)
    assert request.reward == 1.0
    request, _ = play(["done"], reward=Rewards({"patient": patient, "hurried": hurried}))
    assert request.stop_reason is StopReason.REWARD_ERROR
    assert "no value within 0.05 s" in request.error
    assert (request.reward, request.reward_parts) == (None, {})


def test_the_functions_of_a_request_run_at_the_same_time() -> None:
    meet = asyncio.Barrier(2)

    async def meets(request: Request) -> float:
        await meet.wait()
        return 1.0

    async def also_meets(request: Request) -> float:
        await meet.wait()
        return 2.0

    request, _ = play(["done"], reward=Rewards({"a": meets, "b": also_meets}))
    assert request.reward == 3.0


# -- step rewards ----------------------------------------------------------------------------------


def test_step_rewards_go_to_the_turns_of_the_model_beside_those_of_its_tools() -> None:
    def process(request: Request) -> Score:
        assert [turn.kind for turn in model_turns(request)] == ["model"] * 3
        return {"progress": [0.25, None, 1.0], "answer": 2.0}

    rewards = Rewards({"turns": 1.0, "judge": RewardPart(process, weight=2.0)})
    request, _ = play([CALL, CALL, "done"], tools=[Steps], reward=rewards)
    rewarded = [turn.reward for turn in request.sample.turns if turn.kind == "model"]
    assert rewarded == [0.5 + 0.5, 0.5, 2.0]
    expected = {"tool/echo": 3.0, "turns": 1.0, "judge/progress": 1.25, "judge/answer": 2.0}
    assert request.reward_parts == expected
    assert request.reward == 1.0 + 2 * 3.25


def test_step_rewards_may_be_an_array() -> None:
    steps = np.array([0.5, 0.25], np.float32)
    request, _ = play([CALL, "done"], reward=lambda request: {"steps": steps})
    assert [t.reward for t in model_turns(request)] == [0.5, 0.25]
    assert request.reward == 0.75


class Odd(dict[str, float]):
    """A value that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("no")


class Tensor:
    """Another one."""

    def tolist(self) -> list[float]:
        raise RuntimeError("no")


@pytest.mark.parametrize("how", [{}, {"batch": 2}, {"group": True}], ids=str)
def test_a_value_that_cannot_be_read_costs_one_request(how: Any) -> None:
    def score(request: Request) -> Any:
        return {1: Odd(), 2: {"steps": Tensor()}}.get(request.index, 1.0)

    many = bool(how)
    part = RewardPart((lambda requests: list(map(score, requests))) if many else score, **how)
    scored = outcomes(generate(part, ["a"], num_samples=4))
    assert scored == [1.0, StopReason.REWARD_ERROR, StopReason.REWARD_ERROR, 1.0]


@pytest.mark.parametrize("steps", [[], [1.0], [1.0, 2.0, 3.0], [1.0, "x"], [1.0, float("nan")]])
def test_step_rewards_that_do_not_fit_the_turns_abort_that_request(steps: Any) -> None:
    request, _ = play([CALL, "done"], reward=lambda request: {"steps": steps})
    assert request.stop_reason is StopReason.REWARD_ERROR
    assert "steps" in request.error
    assert [turn.reward for turn in model_turns(request)] == [None, None]


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_is_one_call_with_a_list() -> None:
    sizes: list[int] = []

    async def judge(requests: list[Request]) -> list[Score]:
        sizes.append(len(requests))
        await asyncio.sleep(0.05)
        return [float(request.label) for request in requests]

    groups = generate(RewardPart(judge, batch=4), range(10))
    assert outcomes(groups) == [float(n) for n in range(10)]
    assert sum(sizes) == 10
    assert max(sizes) == 4
    assert len(sizes) <= 4


def test_a_batch_that_is_not_full_waits_only_so_long() -> None:
    groups = generate(RewardPart(lambda rs: [1.0] * len(rs), batch=64, batch_wait_s=0.1), range(3))
    assert outcomes(groups) == [1.0] * 3


def test_calls_of_a_batch_do_not_overlap() -> None:
    running: list[int] = []

    def model(requests: list[Request]) -> Any:
        running.append(1)
        assert len(running) == 1
        time.sleep(0.02)
        running.pop()
        return np.ones(len(requests))

    groups = generate(RewardPart(model, batch=2, batch_wait_s=0), range(9))
    assert outcomes(groups) == [1.0] * 9


@pytest.mark.parametrize("fault", ["raise", "hang", "short", "nan"])
def test_a_request_that_breaks_its_batch_costs_no_other_its_reward(fault: str) -> None:
    async def judge(requests: list[Request]) -> list[float]:
        bad = any(request.label == fault for request in requests)
        if bad and fault == "raise":
            raise ValueError("cannot judge this")
        if bad and fault == "hang":
            await asyncio.sleep(60)
        scores = [float("nan") if request.label == "nan" else 1.0 for request in requests]
        return scores[: len(scores) - (bad and fault == "short")]

    part = RewardPart(judge, batch=8, timeout_s=0.2)
    groups = generate(part, ["good", fault, "good", "good"])
    assert outcomes(groups) == [1.0, StopReason.REWARD_ERROR, 1.0, 1.0]


def test_a_batch_function_that_always_hangs_ends_after_two_deadlines() -> None:
    async def judge(requests: list[Request]) -> list[float]:
        calls.append(len(requests))
        await asyncio.sleep(600)
        return []

    calls: list[int] = []
    groups = generate(RewardPart(judge, batch=8, timeout_s=0.2), range(8))
    assert outcomes(groups) == [StopReason.REWARD_ERROR] * 8
    assert sum(calls) <= 16  # in a batch, then alone


def test_a_cancelled_run_stops_the_call_that_its_batch_waits_for() -> None:
    called, stopped = asyncio.Event(), asyncio.Event()

    async def judge(requests: list[Request]) -> list[float]:
        assert len(requests) == 2
        called.set()
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()
        return []

    rollout = rollout_with(RewardPart(judge, batch=2, batch_wait_s=60, timeout_s=600))

    async def drive() -> None:
        running = asyncio.create_task(rollout.generate(["a", "b"]))
        await called.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await stopped.wait()

    asyncio.run(drive())


def test_one_cancelled_request_leaves_the_batch_of_the_others_alone() -> None:
    called = asyncio.Event()

    async def judge(requests: list[Request]) -> list[float]:
        called.set()
        await asyncio.sleep(0.1)
        return [1.0] * len(requests)

    rollout = rollout_with(RewardPart(judge, batch=2))
    requests = [rollout.request("a"), rollout.request("b")]

    async def drive() -> None:
        tasks = [asyncio.create_task(rollout.run(request)) for request in requests]
        await called.wait()
        tasks[0].cancel()
        await asyncio.wait(tasks)

    asyncio.run(drive())
    assert [request.stop_reason for request in requests] == [StopReason.CANCELLED, StopReason.STOP]
    assert [request.reward for request in requests] == [None, 1.0]


@settings(deadline=None, max_examples=60)
@given(
    fates=st.lists(
        st.sampled_from(["good", "good", "raise", "hang", "cancel"]), min_size=1, max_size=9
    ),
    size=st.integers(1, 4),
    wait_s=st.sampled_from([0, 0.002]),
    gap=st.integers(0, 3),
)
def test_each_request_of_a_batch_gets_its_own_score_or_error(
    fates: list[str], size: int, wait_s: float, gap: int
) -> None:
    """Whoever waits with it; calls are never larger than `size`, nor overlap before one fails."""
    running: list[int] = []

    async def judge(requests: list[Request]) -> list[float]:
        assert len(requests) <= size
        assert len(requests) == 1 or not running, "calls overlap"
        running.append(1)
        try:
            labels = {request.label for request in requests}
            await asyncio.sleep(60 if "hang" in labels else 0.001)
            if "raise" in labels:
                raise ValueError("no")
            return [float(request.index) for request in requests]
        finally:
            running.pop()

    part = RewardPart(judge, batch=size, batch_wait_s=wait_s, timeout_s=10)

    async def drive() -> list[Any]:
        tasks = []
        for index, fate in enumerate(fates):
            tasks.append(asyncio.create_task(part.score(Request(index=index, label=fate))))
            await asyncio.sleep(gap / 1000)
        for task, fate in zip(tasks, fates, strict=True):
            if fate == "cancel":
                task.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 300)

    with asyncio.Runner(loop_factory=FastForward) as runner:
        scores = runner.run(drive())
    for index, (fate, got) in enumerate(zip(fates, scores, strict=True)):
        if fate == "cancel":
            assert isinstance(got, asyncio.CancelledError) or got == index
        elif fate in ("raise", "hang"):
            assert isinstance(got, RewardError)
        else:
            assert got == index


@pytest.mark.parametrize("size", [1, 3])
def test_a_request_that_comes_as_the_last_call_ends_is_not_left_waiting(size: int) -> None:
    async def judge(requests: list[Request]) -> list[float]:
        return [1.0] * len(requests)

    async def drive() -> None:
        for steps in range(40):  # one of them comes in that very moment
            part = RewardPart(judge, batch=size, batch_wait_s=0)
            first = asyncio.create_task(part.score(Request(index=1)))
            for _ in range(steps):
                await asyncio.sleep(0)
            assert await asyncio.wait_for(part.score(Request(index=2)), 5) == 1.0, steps
            await first

    with asyncio.Runner(loop_factory=FastForward) as runner:
        runner.run(drive())


def test_a_part_serves_one_event_loop_after_the_other() -> None:
    part = RewardPart(lambda requests: [1.0] * len(requests), batch=2)
    for _ in range(3):
        assert outcomes(generate(part, range(3))) == [1.0] * 3


def test_a_part_serves_the_event_loops_of_two_threads_at_once() -> None:
    part = RewardPart(lambda requests: [r.index for r in requests], batch=3, batch_wait_s=0.001)

    def score_many() -> list[object]:
        async def drive() -> list[object]:
            return await asyncio.gather(*(part.score(Request(index=n)) for n in range(50)))

        return [score for _ in range(5) for score in asyncio.run(drive())]

    with ThreadPoolExecutor(3) as threads:
        scored = [threads.submit(score_many) for _ in range(3)]
        assert [one.result(timeout=50) for one in scored] == [[*range(50)] * 5] * 3


# -- groups ----------------------------------------------------------------------------------------


def relative(requests: list[Request]) -> list[float]:
    """1 for each request that is longer than the mean of its group."""
    sizes = [len(request.sample.response or "") for request in requests]
    return [float(size > np.mean(sizes)) for size in sizes]


def by_index(asked: Any) -> str:
    return "done" + "!" * int(asked.session_id.partition("-")[2])


def test_a_group_function_is_called_once_with_all_requests_of_the_group() -> None:
    seen: list[tuple[int, list[int], list[float | None]]] = []

    def group(requests: list[Request]) -> list[float]:
        seen.append(
            (requests[0].group_index, [r.index for r in requests], [r.reward for r in requests])
        )
        return relative(requests)

    rewards = Rewards({"answer": lambda request: 0.5, "longer": RewardPart(group, group=True)})
    groups = generate(rewards, range(2), num_samples=3, script=by_index, max_concurrent=1)
    assert sorted(seen) == [(0, [0, 1, 2], [0.5] * 3), (1, [3, 4, 5], [0.5] * 3)]
    assert outcomes(groups) == [0.5, 0.5, 1.5] * 2
    assert groups[0].samples[2].reward_parts == {"answer": 0.5, "longer": 1.0}


def test_a_group_function_that_fails_costs_its_own_group_only() -> None:
    def group(requests: list[Request]) -> list[float]:
        if requests[0].label == "bad":
            raise ValueError("cannot compare these")
        return [1.0] * len(requests)

    groups = generate(RewardPart(group, group=True), ["bad", "good"], num_samples=2)
    assert outcomes(groups) == [StopReason.REWARD_ERROR] * 2 + [1.0] * 2
    assert "cannot compare these" in groups[0].requests[0].error
    assert groups[0].samples == []


@pytest.mark.parametrize("scores", [[1.0], [1.0, 2.0, 3.0], 1.0, None, {"a": 1.0}])
def test_a_group_function_must_score_each_request(scores: Any) -> None:
    groups = generate(RewardPart(lambda rs: scores, group=True), ["a"], num_samples=2)
    assert outcomes(groups) == [StopReason.REWARD_ERROR] * 2
    assert "return a list with one score for each" in groups[0].requests[0].error


def test_one_bad_score_of_a_group_is_one_bad_request() -> None:
    scores = [1.0, "x", None]
    groups = generate(RewardPart(lambda rs: scores, group=True), ["a"], num_samples=3)
    assert outcomes(groups) == [1.0, StopReason.REWARD_ERROR, None]


def test_a_single_request_cannot_have_the_reward_of_a_group() -> None:
    rollout = rollout_with(Rewards({"longer": RewardPart(relative, group=True)}))
    with pytest.raises(ConfigError, match=r"'longer' is a group's: .* `generate`"):
        asyncio.run(rollout.run(rollout.request("a")))


def test_a_request_that_is_aborted_while_its_group_is_scored_stays_aborted() -> None:
    rollout: Rollout

    async def group(requests: list[Request]) -> list[float]:
        rollout.loop.machine.fire(Event.ABORT, requests[0], StopReason.STALE)
        return [1.0] * len(requests)

    rollout = rollout_with(RewardPart(group, group=True))
    [played] = asyncio.run(rollout.generate(["a"], num_samples=2))
    assert outcomes([played]) == [StopReason.STALE, 1.0]
    assert played.requests[0].reward is None


def test_a_request_that_is_retried_while_its_group_is_scored_gets_nothing() -> None:
    rollout: Rollout

    async def group(requests: list[Request]) -> list[float]:
        rollout.loop.machine.fire(Event.ABORT, requests[0], StopReason.STALE)
        rollout.loop.machine.fire(Event.RETRY, requests[0])
        return [1.0] * len(requests)

    limits = Limits(max_attempts=2)
    rollout = rollout_with(RewardPart(group, group=True), limits=limits)
    [played] = asyncio.run(rollout.generate(["a"], num_samples=2))
    first, second = played.requests
    assert (first.status, first.reward, first.is_sealed) == (Status.PENDING, None, False)
    assert (second.status, second.reward, second.is_sealed) == (Status.COMPLETED, 1.0, True)


def test_a_request_that_is_aborted_before_its_group_ends_is_not_compared() -> None:
    seen: list[int] = []
    others: list[Request] = []
    rollout: Rollout

    def own(request: Request) -> float:
        if others:  # the second one aborts the first, which has ended
            rollout.loop.machine.fire(Event.ABORT, others[0], StopReason.STALE)
        others.append(request)
        return 1.0

    def group(requests: list[Request]) -> list[float]:
        seen.extend(request.index for request in requests)
        return [1.0] * len(requests)

    rewards = Rewards({"own": own, "group": RewardPart(group, group=True)})
    rollout = rollout_with(rewards, max_concurrent=1)
    [played] = asyncio.run(rollout.generate(["a"], num_samples=2))
    assert seen == [1]
    assert outcomes([played]) == [StopReason.STALE, 2.0]
    assert (played.requests[0].reward, played.requests[0].reward_parts) == (None, {})


Fate = str
FATES = ("good", "engine", "reward", "hang", "retried")


@settings(deadline=None, max_examples=60)
@given(
    fates=st.lists(st.lists(st.sampled_from(FATES), min_size=1, max_size=4), min_size=1, max_size=3)
    .filter(lambda rows: len({len(row) for row in rows}) == 1),
    max_concurrent=st.integers(1, 4),
    cancel_at=st.one_of(st.none(), st.integers(0, 60)),
    bad_group=st.one_of(st.none(), st.integers(0, 2)),
)  # fmt: skip
def test_groups_end_whatever_their_requests_do(
    fates: list[list[Fate]],
    max_concurrent: int,
    cancel_at: int | None,
    bad_group: int | None,
) -> None:
    """Never hangs; each group with a usable request is scored once, with just these; all sealed."""
    size = len(fates[0])
    fate_of: Mapping[int, Fate] = dict(enumerate(fate for row in fates for fate in row))
    called: Counter[int] = Counter()
    given_to: dict[int, list[int]] = {}
    tries: Counter[int] = Counter()

    def engine(asked: Any) -> Any:
        index = int(asked.session_id.partition("-")[2])
        tries[index] += 1
        failed = EngineError("down", reason=StopReason.ENGINE_ERROR)
        if fate_of[index] == "engine" or (fate_of[index] == "retried" and tries[index] == 1):
            return failed
        return "done"

    async def own(request: Request) -> float:
        if fate_of[request.index] == "reward":
            raise ValueError("no")
        await asyncio.sleep(60 if fate_of[request.index] == "hang" else 0)
        return 1.0

    async def scored(requests: list[Request]) -> list[float]:
        index = requests[0].group_index
        called[index] += 1
        given_to[index] = [request.index for request in requests]
        await asyncio.sleep(0.002)
        if index == bad_group:
            raise ValueError("bad group")
        return [0.5] * len(requests)

    rewards = Rewards(
        {"own": RewardPart(own, timeout_s=10), "group": RewardPart(scored, group=True)}
    )
    sealed: list[Request] = []
    rollout = rollout_with(
        rewards,
        engine,
        max_concurrent=max_concurrent,
        limits=Limits(max_attempts=2),
        listeners=[lambda transition: sealed.append(transition.request)],
    )

    async def drive() -> list[Group] | None:
        rows = [f"row {n}" for n in range(len(fates))]
        task = asyncio.create_task(rollout.generate(rows, num_samples=size))
        if cancel_at is not None:
            for _ in range(cancel_at):
                await asyncio.sleep(0)
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=3_600)
        assert done, "it hangs"
        return None if task.cancelled() else task.result()

    with asyncio.Runner(loop_factory=FastForward) as runner:
        groups = runner.run(drive())
    assert all(request.is_sealed for request in sealed if request.is_done)
    assert all(count == 1 for count in called.values())
    if groups is None:
        return
    good = {index for index, fate in fate_of.items() if fate in ("good", "retried")}
    for group in groups:
        indices = [request.index for request in group.requests if request.index in good]
        assert given_to.get(group.index, []) == indices
        for request in group.requests:
            assert request.is_sealed
            is_usable = request.index in good and group.index != bad_group
            assert request.reward == (1.5 if is_usable else None)
            assert (request.status is Status.COMPLETED) is is_usable


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda: 1.0, r"takes \(\), .* called with a finished request"),
        (lambda prompts, completions: [1.0], r"takes \(prompts, completions\), which is not one"),
        (lambda request, *, weight: 1.0, "is not one argument"),
        ({"tidy": lambda request: 1.0}, r"mapping of parts; give Rewards\({\.\.\.}\)"),
    ],
)
def test_what_no_request_could_be_scored_with_is_refused_at_once(reward: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rollout_with(reward)


def test_a_config_has_the_options_of_a_part() -> None:
    in_config = [(f.name, f.default) for f in msgspec.structs.fields(RewardConfig)][1:]
    in_code = [(f.name, f.default) for f in dataclasses.fields(RewardPart)][1:]
    assert in_config == in_code

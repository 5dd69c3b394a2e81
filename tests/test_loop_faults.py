"""The loop when engines, codecs and rewards misbehave: one attempt, or one request, and no more."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsm_rollout.codec import Codec
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.errors import EngineError, IllegalEvent
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.parsers import Parsed
from fsm_rollout.parsers.hermes import Hermes
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.turn import ToolCall
from tests.playing import (
    CALL,
    TOKENIZER,
    Echo,
    cancel_itself,
    fail,
    ids,
    play,
    said_by_tools,
    swallow,
)


class Failing:
    """An engine whose code misbehaves in one way, then answers."""

    def __init__(self, fault: Callable[[], Any], times: int = 1) -> None:
        self.fault, self.times = fault, times
        self.good = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        if self.times:
            self.times -= 1
            await self.fault()
        return await self.good.generate(
            columns, max_new_tokens, params, request_id=request_id, session_id=session_id
        )

    async def abort(self, request_id: str) -> None:
        raise AssertionError("not asked for")

    async def close(self) -> None:
        pass


async def _timeout_itself() -> None:
    raise TimeoutError


async def _bad_request() -> None:
    raise EngineError("HTTP 400", reason=StopReason.ENGINE_ERROR, final=True)


async def _overflow() -> None:
    raise EngineError("context overflow", reason=StopReason.MAX_CONTEXT)


@pytest.mark.parametrize(
    "fault",
    [fail, cancel_itself, _timeout_itself, lambda: asyncio.sleep(600)],
    ids=["raises", "raises CancelledError", "raises TimeoutError", "hangs"],
)
def test_an_engine_that_misbehaves_costs_one_attempt(fault: Callable[[], Any]) -> None:
    limits = Limits(turn_timeout_s=0.05)
    rollout = Rollout(Failing(fault), TOKENIZER, limits=limits)
    request = Request("hello", limits=limits)
    asyncio.run(rollout.run(request))
    assert (request.status, request.attempt) == (Status.COMPLETED, 2)


def test_a_final_engine_error_is_not_retried() -> None:
    rollout = Rollout(Failing(_bad_request), TOKENIZER)
    request = Request("hello")
    asyncio.run(rollout.run(request))
    assert (request.status, request.attempt, request.final) == (Status.ABORTED, 1, True)
    assert request.error == "HTTP 400"


def test_a_context_overflow_of_the_server_is_a_truncation() -> None:
    rollout = Rollout(Failing(_overflow), TOKENIZER)
    request = Request("hello")
    asyncio.run(rollout.run(request))
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_CONTEXT)


class Generous:
    """Builds its Generation by hand and gives more than it was asked for."""

    def __init__(self) -> None:
        self.extra = 1

    async def generate(
        self, columns: Columns, max_new_tokens: int, params: SamplingParams, **_: Any
    ) -> Generation:
        count, self.extra = max_new_tokens + self.extra, -1
        return Generation(
            token_ids=np.full(count, 65, np.int32),
            log_probs=np.full(count, -1.0, np.float32),
            finish="stop",
        )

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


def test_more_tokens_than_asked_are_a_bad_reply_though_there_is_room() -> None:
    limits = Limits(max_new_tokens=4, max_attempts=1)
    request = Request("hello", limits=limits)
    asyncio.run(Rollout(Generous(), TOKENIZER, limits=limits).run(request))
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.BAD_REPLY)
    assert request.sample.response_length == 0


def test_a_sealed_request_is_not_played_again() -> None:
    request, _ = play(["done"])
    with pytest.raises(IllegalEvent, match="sealed"):
        asyncio.run(Rollout(Generous(), TOKENIZER).run(request))


def test_the_attempts_end() -> None:
    rollout = Rollout(Failing(fail, times=99), TOKENIZER, limits=Limits(max_attempts=3))
    request = Request("hello", limits=Limits(max_attempts=3))
    asyncio.run(rollout.run(request))
    assert (request.stop_reason, request.attempt) == (StopReason.ENGINE_ERROR, 3)


def test_a_request_that_takes_too_long_is_truncated_with_what_it_has() -> None:
    limits = Limits(request_timeout_s=0.1)
    rollout = Rollout(Failing(lambda: asyncio.sleep(600)), TOKENIZER, limits=limits)
    request = Request("hello", limits=limits)
    asyncio.run(rollout.run(request))
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.TIMEOUT)


class Answers:
    """An engine that answers with whatever it is told to, once, and then properly."""

    def __init__(self, answer: Any) -> None:
        self.answers = [answer]
        self.aborted: list[str] = []
        self.good = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)

    async def generate(
        self, columns: Columns, max_new_tokens: int, params: SamplingParams, **kwargs: Any
    ) -> Generation:
        if self.answers:
            answer: Generation = self.answers.pop()
            return answer
        return await self.good.generate(columns, max_new_tokens, params, **kwargs)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def close(self) -> None: ...


def generation(**changes: Any) -> Generation:
    values: dict[str, Any] = {
        "token_ids": np.array([65, 66], np.int32),
        "log_probs": np.array([-1.0, -1.0], np.float32),
        "finish": "stop",
    }
    return Generation(**values | changes)


@pytest.mark.parametrize(
    "answer",
    [
        generation(finish=None),
        generation(finish="eos"),
        generation(token_ids=np.array([65, 5_000], np.int32)),
        generation(log_probs=np.array([-1.0], np.float32)),
        generation(log_probs=None),
        generation(weight_versions=(("v1", 7),)),
    ],
    ids=["no finish", "unknown finish", "padding id", "short", "no log-probs", "versions"],
)
def test_a_generation_that_does_not_add_up_costs_one_attempt(answer: Generation) -> None:
    request = Request("hello")
    asyncio.run(Rollout(Answers(answer), TOKENIZER).run(request))
    assert (request.status, request.attempt) == (Status.COMPLETED, 2)
    assert request.sample.response == "done<|im_end|>"


JUNK = [None, 5, "x", ["a"], [None], [1.5], [[1]], {"a": None}, {"a": "x"}, {"a": float("nan")}]


@pytest.mark.parametrize("value", JUNK, ids=str)
@pytest.mark.parametrize(
    "field", ["token_ids", "log_probs", "finish", "weight_versions", "counters"]
)
def test_nonsense_in_a_generation_costs_one_attempt_and_no_run(field: str, value: Any) -> None:
    if (field, value) == ("weight_versions", None):
        return  # it is not known
    test_a_generation_that_does_not_add_up_costs_one_attempt(generation(**{field: value}))


@pytest.mark.parametrize("answer", [None, {"token_ids": [1]}, ([1], [-1.0])], ids=str)
def test_an_answer_that_is_no_generation_is_final_and_says_how_to_build_one(answer: Any) -> None:
    request = Request("hello")
    asyncio.run(Rollout(Answers(answer), TOKENIZER).run(request))
    assert (request.status, request.final, request.attempt) == (Status.ABORTED, True, 1)
    assert "checked" in request.error


@pytest.mark.parametrize(
    ("kind", "params", "is_good"),
    [
        ("scaled", SamplingParams(temperature=0.5, top_p=0.5), True),
        ("raw", SamplingParams(), True),
        ("raw", SamplingParams(temperature=0.5), False),
        ("processed", SamplingParams(temperature=0.5), True),
        ("processed", SamplingParams(top_p=0.9), False),
        ("processed", SamplingParams(top_k=5), False),
    ],
    ids=str,
)
def test_log_probs_of_another_definition_arerefused(
    kind: str, params: SamplingParams, is_good: bool
) -> None:
    request = Request("hello")
    engine = Answers(generation(log_prob_kind=kind))
    asyncio.run(Rollout(engine, TOKENIZER, params=params).run(request))
    assert (request.status is Status.COMPLETED) is is_good
    assert request.final is not is_good


def test_an_engine_error_with_a_reason_of_completed_does_not_complete() -> None:
    async def wrong() -> None:
        raise EngineError("odd", reason=StopReason.STOP)

    request = Request("hello", limits=Limits(max_attempts=1))
    asyncio.run(Rollout(Failing(wrong), TOKENIZER).run(request))
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.ENGINE_ERROR)


def test_an_engine_thatswallows_its_cancellation_is_left_behind_and_told_to_abort() -> None:
    aborted: list[str] = []

    class Swallows(Failing):
        async def abort(self, request_id: str) -> None:
            aborted.append(request_id)

    limits = Limits(turn_timeout_s=0.05, max_attempts=1)
    request = Request("hello", limits=limits)
    asyncio.run(Rollout(Swallows(swallow), TOKENIZER, limits=limits).run(request))
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.DEADLINE)
    assert len(aborted) == 1


@pytest.mark.parametrize("where", ["prompt_async", "delta_async", "fit_async", "parse"])
def test_a_codec_that_fails_aborts_that_request_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capped(Echo):
        name = "echo"
        max_response_tokens = 4

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    async def fails_later(*_: Any, **__: Any) -> Any:
        fails()

    engine = ScriptedEngine([CALL, "done"], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Capped])
    monkeypatch.setattr(rollout.codec, where, fails if where == "parse" else fails_later)
    request = Request("hello")
    asyncio.run(rollout.run(request))
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.INVARIANT)
    assert (request.attempt, request.is_sealed) == (1, True)
    assert "a bug" in request.error


@pytest.mark.parametrize(
    "parsed",
    [
        None,
        Parsed("", "", (ToolCall(None, {}),), ((0, 1),)),  # type: ignore[arg-type]
        Parsed("", "", (ToolCall("echo", None),), ((0, 1),)),  # type: ignore[arg-type]
        Parsed("", "", (ToolCall("echo", {}),), ()),
        Parsed("", "", (None,), ((0, 1),)),  # type: ignore[arg-type]
    ],
    ids=["nothing", "no name", "no arguments", "no span", "no call"],
)
def test_a_parser_that_returns_nonsense_aborts_that_request_alone(parsed: Any) -> None:
    class Odd(Hermes):
        def parse(self, text: str, **kwargs: Any) -> Parsed:
            found = super().parse(text, **kwargs)
            return parsed if "odd" in text else found

    codec = Codec(TOKENIZER, tools=Toolset([Echo]).schemas, parser=Odd())

    def say(asked: Asked) -> str:
        return "odd" if "odd" in TOKENIZER.decode(asked.ids) else "done"

    rollout = Rollout(ScriptedEngine(say, tokenizer=TOKENIZER), codec=codec, tools=[Echo])
    groups = asyncio.run(rollout.generate(["be odd", "be good"]))
    (odd, good) = (group.requests[0] for group in groups)
    assert (odd.stop_reason, odd.attempt) == (StopReason.INVARIANT, 1)
    assert good.status is Status.COMPLETED


def test_a_retry_from_outside_while_a_tool_runs_releases_the_tools_of_both_attempts() -> None:
    lived: list[str] = []
    is_running = asyncio.Event()

    class Slow(Tool):
        """Slow in its first life."""

        def create(self) -> None:
            lived.append("create")

        async def execute(self, text: str) -> str:
            """text: anything"""
            if lived.count("create") == 1:
                is_running.set()
                await asyncio.sleep(0.1)
            return "ok"

        def calc_reward(self) -> float:
            return 1.0

        def release(self) -> None:
            lived.append("release")

    engine = ScriptedEngine([CALL.replace("echo", "slow")] * 2 + ["done"], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Slow])
    request = Request("hello")

    async def drive() -> None:
        task = asyncio.create_task(rollout.run(request))
        await is_running.wait()
        rollout.loop.machine.fire(Event.ABORT, request, StopReason.STALE)
        rollout.loop.machine.fire(Event.RETRY, request)
        await task

    asyncio.run(drive())
    assert (request.status, request.attempt, request.reward) == (Status.COMPLETED, 2, 1.0)
    assert lived.count("create") == lived.count("release") == 2


def test_a_cancel_during_the_last_release_leaves_the_request_sealed() -> None:
    releasing: list[int] = []

    class Held(Echo):
        name = "echo"

        async def release(self) -> None:
            releasing.append(1)
            await asyncio.sleep(0.1)

    rollout = Rollout(ScriptedEngine(["done"], tokenizer=TOKENIZER), TOKENIZER, tools=[Held])
    request = Request("hello")

    async def drive() -> None:
        task = asyncio.create_task(rollout.run(request))
        while not releasing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(drive())
    assert (request.status, request.is_sealed) == (Status.COMPLETED, True)


@pytest.mark.parametrize(
    "value",
    [10**400, 1e39, {"a": 3e38, "b": 3e38}, {"a": 1.0, "b": float("inf")}, [1.0]],
    ids=["huge", "no float32", "sum overflows", "part inf", "list"],
)
def test_a_reward_without_a_finite_value_is_an_error_of_that_request(value: Any) -> None:
    request, _ = play(["done"], reward=lambda _: value)
    assert request.stop_reason is StopReason.REWARD_ERROR


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(2), 3, True, np.bool_(True)], ids=repr)
def test_any_real_number_is_a_reward(value: Any) -> None:
    request, _ = play(["done"], reward=lambda _: value)
    assert request.reward == float(value)
    assert type(request.reward) is float


def test_a_turn_of_hundreds_of_calls_is_answered_call_by_call() -> None:
    empty = '<tool_call>\n{"name": "echo", "arguments": {"text": ""}}\n</tool_call>'
    limits = Limits(max_context=200_000, max_new_tokens=100_000)
    request, _ = play([empty * 150, "done"], limits=limits)
    assert (request.status, request.num_tool_calls) == (Status.COMPLETED, limits.max_parallel_calls)
    assert len(said_by_tools(request)) == 150
    assert request.metrics["tool_calls_dropped"] == 150 - limits.max_parallel_calls


@pytest.mark.parametrize("again", [False, True], ids=["aborted", "retried"])
@pytest.mark.parametrize("fails", [False, True], ids=["value", "raises"])
def test_a_late_reward_changes_nothing(again: bool, fails: bool) -> None:
    async def slow(request: Request) -> float:
        await asyncio.sleep(0.05)
        if fails:
            raise ValueError("late")
        return 1.0

    rollout = Rollout(ScriptedEngine(["done"] * 2, tokenizer=TOKENIZER), TOKENIZER, reward=slow)
    request = Request("hello")

    async def drive() -> None:
        task = asyncio.create_task(rollout.loop.play(request))
        while not request.is_done:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        rollout.loop.machine.fire(Event.ABORT, request, StopReason.STALE)
        if again:
            rollout.loop.machine.fire(Event.RETRY, request)
        await task

    asyncio.run(drive())
    assert (request.reward, request.reward_parts) == (None, {})
    assert request.status is (Status.PENDING if again else Status.ABORTED)
    assert request.stop_reason is (None if again else StopReason.STALE)


def test_a_keyboard_interrupt_of_a_tool_stays_in_its_call() -> None:
    class Interrupts(Tool):
        """Raises what only a user should."""

        async def execute(self, text: str) -> str:
            """text: anything"""
            raise KeyboardInterrupt

    request, _ = play([CALL.replace("echo", "interrupts"), "done"], tools=[Interrupts])
    assert request.stop_reason is StopReason.STOP
    assert "KeyboardInterrupt" in said_by_tools(request)[0]


def test_an_abort_that_used_up_the_turn_is_a_truncation_not_a_lost_attempt() -> None:
    reply = Reply(ids("done"), finish="abort")
    limits = Limits(max_new_tokens=len(ids("done")) - 1)
    request, engine = play([Reply(ids("done")[:-1], finish="abort")], limits=limits)
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.LENGTH)
    assert (request.attempt, len(engine.asked)) == (1, 1)
    request, _ = play([reply])
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)


def test_a_prompt_without_tokens_is_refused() -> None:
    rollout = Rollout(ScriptedEngine(["done"], tokenizer=TOKENIZER), TOKENIZER)
    request = Request(prompt_ids=[])
    asyncio.run(rollout.run(request))
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.PROMPT_OVERFLOW)


def test_without_tools_the_text_of_a_call_stays_in_the_messages() -> None:
    request, _ = play([CALL], tools=())
    assert request.sample.messages[-1]["content"] == CALL


def test_two_runs_on_one_engine_never_share_an_id() -> None:
    engine = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)
    for _ in range(2):
        asyncio.run(Rollout(engine, TOKENIZER).generate(["a"] * 11, num_samples=2))
    seen = [asked.request_id for asked in engine.asked]
    assert len(set(seen)) == 44
    assert len({asked.session_id for asked in engine.asked}) == 44
    assert not any(a != b and b.startswith(a) for a in seen for b in seen)


def test_what_a_reward_function_does_to_the_metadata_stays_with_its_request() -> None:
    def reward(request: Request) -> float:
        request.metadata["seen"].append(request.index)  # no way to treat an input
        return 0.0

    rollout = Rollout(ScriptedEngine(["done"], tokenizer=TOKENIZER), TOKENIZER, reward=reward)
    row = {"prompt": "a", "metadata": {"seen": []}}
    (group,) = asyncio.run(rollout.generate([row], num_samples=3))
    assert [request.metadata["seen"] for request in group.requests] == [[0], [1], [2]]
    assert row["metadata"] == {"seen": []}


def test_a_request_that_ends_while_its_prompt_is_encoded_stays_as_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_encoding, is_over = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> list[int]:
        is_encoding.set()
        await is_over.wait()
        return [1, 2, 3]

    rollout = Rollout(ScriptedEngine(["done"], tokenizer=TOKENIZER), TOKENIZER)
    monkeypatch.setattr(rollout.codec, "prompt_async", slow)
    request = Request("hello")

    async def drive() -> None:
        task = asyncio.create_task(rollout.run(request))
        await is_encoding.wait()
        rollout.loop.machine.fire(Event.TRUNCATE, request, StopReason.TIMEOUT)
        is_over.set()
        await task

    asyncio.run(drive())
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.TIMEOUT)


def test_a_retry_from_outside_while_the_tools_are_released_is_the_retry() -> None:
    releasing: list[int] = []
    has_begun = asyncio.Event()

    class Slow(Tool):
        """Slow."""

        def execute(self) -> str:
            return ""

        async def release(self) -> None:
            releasing.append(len(releasing))
            has_begun.set()
            await asyncio.sleep(0.05)

    async def main() -> Request:
        script: list[Any] = [Reply(ids("x"), log_probs=None), "done"]
        engine = ScriptedEngine(script, tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, tools=[Slow])
        request = rollout.request("hello")
        running = asyncio.ensure_future(rollout.run(request))
        await has_begun.wait()
        rollout.loop.machine.fire(Event.RETRY, request)
        return await running

    request = asyncio.run(main())
    assert (request.status, request.attempt, request.is_sealed) == (Status.COMPLETED, 2, True)
    assert releasing == [0, 1]

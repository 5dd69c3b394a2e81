"""Agents that cancel what they asked for, leave it running, or go on behind their end."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import contextlib
from collections.abc import Callable
from copy import copy
from typing import Any

import fsm_rollout
from fsm_rollout.agent import Agent, Context
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rewards import model_turns
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool, ToolResponse
from tests.playing import CALL, TOKENIZER, ids, play, said_by_tools

NEVER_S = 600.0
"""nothing here waits for so long"""


def calling(*texts: str) -> str:
    return "".join(CALL.replace('"hi"', f'"{text}"') for text in texts)


class Echo(Tool):
    """Says it again, and hangs at "slow" while `hangs` says so."""

    hangs = 1
    started: asyncio.Event
    released = 0

    async def execute(self, text: str) -> ToolResponse:
        """text: what to say"""
        if text == "slow" and Echo.hangs:
            Echo.hangs -= 1
            Echo.started.set()
            await asyncio.sleep(NEVER_S)
        return ToolResponse(f"<{text}>", reward=0.5)

    def release(self) -> None:
        Echo.released += 1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Echo.hangs, Echo.started, Echo.released = 1, asyncio.Event(), 0


async def cut_short(ctx: Context) -> None:
    """Cancels `call_tools` while a call hangs."""
    calling = asyncio.ensure_future(ctx.call_tools())
    await Echo.started.wait()
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling


LIMITS = Limits(max_context=4_096, tool_timeout_s=NEVER_S)


def count_of(request: Request, outcome: str) -> int:
    return int(request.metrics.get(f"tool/echo/{outcome}", 0))


# -- calls -----------------------------------------------------------------------------------------


def test_a_call_that_the_agent_cancels_counts_and_what_the_turn_called_can_be_run_again() -> None:
    seen: list[Any] = []

    async def impatient(ctx: Context) -> None:
        await ctx.generate()
        await cut_short(ctx)
        seen.append((ctx.request.status, ctx.request.num_tool_calls, len(ctx.request.sample.turns)))
        await ctx.observe(await ctx.call_tools())
        await ctx.generate()

    script = [calling("quick", "slow"), "done"]
    request, _ = play(script, agent=impatient, tools=(Echo,), limits=LIMITS)
    assert seen == [(Status.TOOL_CALLING, 2, 1)]
    assert (request.status, request.num_tool_calls) == (Status.COMPLETED, 4)
    assert said_by_tools(request) == ["<quick>", "<slow>"]
    assert [turn.reward for turn in model_turns(request)] == [1.0, None]  # once
    assert (count_of(request, "ok"), count_of(request, "cancelled")) == (3, 1)
    assert Echo.released == 1


def test_no_agent_runs_more_calls_than_are_allowed_however_often_it_cancels() -> None:
    Echo.hangs = 9

    async def endless(ctx: Context) -> None:
        turn = await ctx.generate()
        while True:
            for _ in range(9):
                Echo.started.clear()
                running = asyncio.ensure_future(ctx.call_tools())
                waits = asyncio.ensure_future(Echo.started.wait())
                await asyncio.wait([running, waits], return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()
                running.cancel()
                await asyncio.wait([running])
            await ctx.observe([{"role": "tool", "content": "none", "name": "echo"}])
            turn = await ctx.generate()
            assert turn.calls

    limits = Limits(max_context=4_096, tool_timeout_s=NEVER_S, max_tool_calls=3)
    request, _ = play(lambda asked: calling("slow"), agent=endless, tools=(Echo,), limits=limits)
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TOOL_CALLS)
    assert 9 - Echo.hangs == request.num_tool_calls == 3


@pytest.mark.parametrize("then", ["answers", "rewrites", "returns"])
def test_an_agent_that_cancelled_its_calls_may_go_on_without_them(then: str) -> None:
    async def impatient(ctx: Context) -> None:
        await ctx.generate()
        await cut_short(ctx)
        if then == "answers":
            await ctx.observe([{"role": "tool", "name": "echo", "content": "out of time"}])
        elif then == "rewrites":
            await ctx.rewrite("once more")
        else:
            return
        await ctx.generate()

    request, _ = play([calling("slow"), "done"], agent=impatient, tools=(Echo,), limits=LIMITS)
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert (request.num_turns, request.num_tool_calls) == (1 + (then != "returns"), 1)
    assert said_by_tools(request) == (["out of time"] if then == "answers" else [])


@pytest.mark.parametrize("is_agent", [False, True])
def test_calls_that_run_again_after_a_pause_count_once(is_agent: bool) -> None:
    async def agent(ctx: Context) -> None:
        turn = await ctx.generate()
        while turn.calls:
            await ctx.observe(await ctx.call_tools())
            turn = await ctx.generate()

    async def main() -> Request:
        engine = ScriptedEngine(
            [calling("slow", "b") + "<tool_call>x", "done"], tokenizer=TOKENIZER
        )
        limits = Limits(max_tool_calls=2, max_invalid_calls=1, tool_timeout_s=NEVER_S)
        rollout = Rollout(
            engine, TOKENIZER, tools=[Echo], agent=agent if is_agent else None, limits=limits
        )
        request = rollout.request("hello")
        playing = asyncio.ensure_future(rollout.loop.play(request))
        await Echo.started.wait()
        assert request.num_tool_calls == 2
        rollout.loop.machine.fire(Event.ABORT, request, StopReason.PAUSED)
        playing.cancel()
        await asyncio.wait([playing])
        rollout.loop.machine.fire(Event.RESUME, request)
        return await rollout.run(request)

    request = asyncio.run(main())
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert (request.num_tool_calls, request.num_invalid_calls) == (2, 1)
    assert said_by_tools(request)[:2] == ["<slow>", "<b>"]


# -- turns -----------------------------------------------------------------------------------------


async def cancelled(coroutine: Any, event: asyncio.Event) -> None:
    running = asyncio.ensure_future(coroutine)
    await event.wait()
    running.cancel()
    await asyncio.wait([running])


class Stuck(ScriptedEngine):
    """Its first `stuck` calls swallow their cancellation until they are told to abort."""

    def __init__(self, script: Any, *, calls: range) -> None:
        super().__init__(script, tokenizer=TOKENIZER)
        self.calls = calls
        self.is_asked = asyncio.Event()
        self.ended = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self.asked)
        self.asked.append(Asked([], 0, args[2], kwargs["request_id"], kwargs["session_id"]))
        if number not in self.calls:
            await asyncio.sleep(0)
            self.asked.pop()
            return await super().generate(*args, **kwargs)
        event = self._aborts[kwargs["request_id"]] = asyncio.Event()
        self.is_asked.set()
        while not event.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await event.wait()
        self.ended += 1
        raise asyncio.CancelledError


def test_an_abort_of_a_turn_that_was_cancelled_does_not_meet_the_next_one() -> None:
    async def impatient(ctx: Context) -> None:
        await cancelled(ctx.generate(), engine.is_asked)
        await ctx.generate()

    engine = Stuck([Reply(ids("it is four"), delay_s=0.05)], calls=range(1))
    rollout = Rollout(engine, TOKENIZER, agent=impatient)
    request = fsm_rollout.run(rollout.run(rollout.request("hello")))
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert request.sample.messages[-1]["content"] == "it is four"
    assert engine.ended == 1
    assert len({asked.request_id for asked in engine.asked}) == 2


@pytest.mark.parametrize("has_answered", [False, True])
def test_an_agent_may_return_behind_a_turn_that_it_cancelled(has_answered: bool) -> None:
    tries: list[int] = []

    async def impatient(ctx: Context) -> None:
        tries.append(ctx.request.attempt)
        if has_answered:
            await ctx.generate()
            await ctx.observe("go on")
        asked = asyncio.Event()
        ctx._loop.engine, engine = Asking(asked), ctx._loop.engine
        await cancelled(ctx.generate(), asked)
        ctx._loop.engine = engine
        if len(tries) == 2:
            await ctx.generate()

    class Asking(ScriptedEngine):
        def __init__(self, asked: asyncio.Event) -> None:
            super().__init__([Reply(ids("never"), delay_s=NEVER_S)])
            self.is_asked = asked

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.is_asked.set()
            return await super().generate(*args, **kwargs)

    request, _ = play(["four", "done"], agent=impatient, tools=())
    assert request.status is Status.COMPLETED
    if has_answered:  # nothing is lost
        assert (request.stop_reason, tries) == (StopReason.ENV_DONE, [1])
    else:  # there was nothing: the engine may be faster in the next attempt
        assert (request.stop_reason, tries) == (StopReason.STOP, [1, 2])


def test_a_cancelled_answer_is_not_in_the_record_and_may_be_given_again() -> None:
    async def impatient(ctx: Context) -> None:
        await ctx.generate()
        ctx._loop.codec = slow = copy(ctx._loop.codec)
        begun = asyncio.Event()

        async def delta_async(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            await asyncio.sleep(NEVER_S)

        fast, slow.delta_async = slow.delta_async, delta_async  # type: ignore[method-assign]
        await cancelled(ctx.observe("go on"), begun)
        slow.delta_async = fast  # type: ignore[method-assign]
        await ctx.observe("go on, please")
        await ctx.generate()

    request, _ = play(["a", "b"], agent=impatient, tools=())
    assert [m["content"] for m in request.sample.messages] == ["hello", "a", "go on, please", "b"]


def test_a_turn_that_is_paused_before_it_was_read_is_read_when_it_is_resumed() -> None:
    async def agent(ctx: Context) -> None:
        turn = await ctx.generate()
        while turn.calls:
            await ctx.observe(await ctx.call_tools())
            turn = await ctx.generate()

    async def main() -> Request:
        engine = ScriptedEngine([calling("hi"), "done"], tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, tools=[Echo], agent=agent, limits=LIMITS)
        loop, request = rollout.loop, rollout.request("hello")
        loop.codec = slow = copy(loop.codec)
        parse, begun = slow.parse_async, asyncio.Event()

        async def parse_async(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            await asyncio.sleep(0.01)
            return await parse(*args, **kwargs)

        slow.parse_async = parse_async  # type: ignore[method-assign]
        playing = asyncio.ensure_future(rollout.run(request))
        await begun.wait()
        loop.machine.fire(Event.ABORT, request, StopReason.PAUSED)
        loop.machine.fire(Event.RESUME, request)
        return await playing

    request = asyncio.run(main())
    assert (request.status, request.attempt) == (Status.COMPLETED, 1)
    assert [turn.kind for turn in request.sample.turns] == ["model", "observation", "model"]
    assert said_by_tools(request) == ["<hi>"]


def test_an_agent_that_slept_while_its_request_was_resumed_is_started_anew() -> None:
    starts: list[int] = []

    async def main(then: Callable[[Context], Any]) -> Request:
        asleep, awake = asyncio.Event(), asyncio.Event()

        async def agent(ctx: Context) -> None:
            starts.append(ctx.request.num_turns)
            await ctx.generate()
            if len(starts) == 1:
                asleep.set()
                await awake.wait()
                await then(ctx)

        engine = ScriptedEngine([calling("hi"), "done"], tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, tools=[Echo], agent=agent)
        request = rollout.request("hello")
        playing = asyncio.ensure_future(rollout.run(request))
        await asleep.wait()
        rollout.loop.machine.fire(Event.ABORT, request, StopReason.PAUSED)
        rollout.loop.machine.fire(Event.RESUME, request)
        awake.set()
        return await playing

    for then in (lambda ctx: ctx.call_tools(), lambda ctx: asyncio.sleep(0)):
        starts.clear()
        request = asyncio.run(main(then))
        assert (request.status, request.error, starts) == (Status.COMPLETED, "", [0, 1])


# -- what is left running --------------------------------------------------------------------------


def test_a_turn_that_is_left_running_ends_with_its_agent() -> None:
    left: list[asyncio.Task[Any]] = []

    async def careless(ctx: Context) -> None:
        left.append(asyncio.ensure_future(ctx.generate()))
        await asyncio.sleep(0.01)

    async def main() -> Request:
        engine = ScriptedEngine([Reply(ids("late"), delay_s=NEVER_S)])
        rollout = Rollout(engine, TOKENIZER, agent=careless, limits=Limits(max_attempts=1))
        request = await rollout.run(rollout.request("hello"))
        assert left[0].done()
        assert not engine._aborts  # it waits no more
        return request

    request = asyncio.run(main())
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.AGENT_ERROR)


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_a_sub_agent_that_is_cancelled_is_aborted_whatever_it_does(is_stubborn: bool) -> None:
    done = asyncio.Event()

    async def inner(ctx: Context) -> None:
        await ctx.generate()
        begun.set()
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise

    async def outer(ctx: Context) -> None:
        await cancelled(ctx.spawn("part one", agent=inner), begun)
        [child] = ctx.request.children
        assert (child.status, child.stop_reason) == (Status.ABORTED, StopReason.CANCELLED)
        await ctx.generate()

    async def main() -> Request:
        engine = ScriptedEngine(lambda asked: "x", tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, tools=[Echo], agent=outer)
        request = await rollout.run(rollout.request("hello"))
        done.set()
        await asyncio.sleep(0.05)
        return request

    begun = asyncio.Event()
    request = asyncio.run(main())
    assert (request.status, len(request.rows), Echo.released) == (Status.COMPLETED, 1, 2)
    assert all(not violations(s) for r in (request, *request.children) for s in r.samples)


def test_a_sub_agent_left_while_it_is_rewarded_is_no_row() -> None:
    rewarding = asyncio.Event()

    class Slow(Tool):
        """Its reward takes long, and swallows its cancellation."""

        def execute(self) -> str:
            return ""

        async def calc_reward(self) -> float:
            rewarding.set()
            for _ in range(4):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.3)
            return 1.0

    async def outer(ctx: Context) -> None:
        await cancelled(ctx.spawn("part one"), rewarding)
        assert ctx.request.children[0].status is Status.ABORTED
        await ctx.generate()

    request, _ = play(lambda asked: "x", agent=outer, tools=(Slow,), limits=LIMITS)
    assert len(request.rows) == 1


# -- what goes on behind its end -------------------------------------------------------------------


async def _generates(ctx: Context) -> None:
    await ctx.generate()


async def _answers_nothing(ctx: Context) -> None:
    await ctx.observe("too early")


async def _says_nonsense(ctx: Context) -> None:
    await ctx.rewrite([{"role": "oracle", "content": "a"}])


async def _spawns_nonsense(ctx: Context) -> None:
    await ctx.spawn("part", tools_kwargs={"nope": {}})


@pytest.mark.parametrize(
    ("step", "catches"),
    [
        (_generates, BaseException),
        (_answers_nothing, BaseException),
        (_answers_nothing, Exception),
        (_says_nonsense, Exception),
        (_spawns_nonsense, Exception),
    ],
)
def test_an_agent_that_catches_everything_without_end_holds_up_nobody(
    step: Agent, catches: type[BaseException]
) -> None:
    async def stubborn(ctx: Context) -> None:
        while ctx.request.index == 0:
            with contextlib.suppress(catches):
                await step(ctx)
        await ctx.generate()

    async def main() -> list[Request]:
        engine = ScriptedEngine(lambda asked: "x", tokenizer=TOKENIZER)
        limits = Limits(max_turns=3, request_timeout_s=0.5)
        rollout = Rollout(engine, TOKENIZER, agent=stubborn, limits=limits)
        groups = await rollout.generate(["a", "b"])
        return [request for group in groups for request in group.requests]

    first, second = asyncio.run(main())
    assert (first.status, first.stop_reason) == (Status.TRUNCATED, StopReason.TIMEOUT)
    assert (second.status, second.stop_reason) == (Status.COMPLETED, StopReason.STOP)


def test_an_agent_that_goes_on_behind_its_end_is_stopped_at_once() -> None:
    async def stubborn(ctx: Context) -> None:
        while True:
            with contextlib.suppress(BaseException):
                await ctx.generate()
                await ctx.observe("go on")

    limits = Limits(max_turns=2, request_timeout_s=NEVER_S)
    request, _ = play(lambda asked: "x", agent=stubborn, tools=(), limits=limits)
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert len(model_turns(request)) == 2

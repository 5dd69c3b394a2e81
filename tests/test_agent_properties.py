"""Whatever an agent does, beside whatever engines, tools and callers do: what always holds.

Hypothesis draws agents as lists of steps, sub-agents among them, with what they catch, what the
engine answers, and what happens to the request from outside meanwhile. Each sampled token has a
log-prob of its own, so it can be told where, and how often, it is trained.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout import agent as agent_module
from fsm_rollout.agent import Agent, Context
from fsm_rollout.codec import Codec
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.errors import EngineError, GuardRefused, IllegalEvent, RolloutError, ToolError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.tools import supervisor
from fsm_rollout.tools.base import Tool, ToolResponse
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.result import EXECUTED
from tests.playing import CALL, TOKENIZER, ids

STEPS = (
    "generate", "tools", "one by one", "call again", "say", "answer", "rewrite", "nonsense",
    "raise", "return", "sleep",
)  # fmt: skip
CANCELS = ("generate", "tools", "say", "rewrite", "spawn")
CATCHES: dict[str, type[BaseException]] = {
    "nothing": GuardRefused,  # which never gets out
    "errors of ours": RolloutError,
    "errors": Exception,
    "everything": BaseException,
}
SAYS = ("hi", "slow", "bad", "refuse", "stop", "endless")
REPLIES = (
    "text", "call", "calls", "malformed", "unknown", "long", "aborted", "late", "no log-probs",
    "error", "final error", "bug", "cancelled",
)  # fmt: skip
OUTSIDE = ("nothing", "cancel", "cancel twice", "abort", "pause and resume", "pause and retry")


class Step(NamedTuple):
    """One step of an agent; `ticks`: after how many it is cancelled, None: never."""

    what: str
    ticks: int | None = None
    child: Any = None
    tools: list[str] | None = None


class Script(NamedTuple):
    """An agent."""

    steps: list[Step]
    catches: str
    leaves: bool
    """it returns while a sub-agent and a turn still run"""


def steps(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    tools = st.sampled_from([None, [], ["echo"]])
    return st.one_of(
        st.sampled_from([*STEPS, "generate", "generate", "tools"]).map(Step),
        st.tuples(st.sampled_from(CANCELS), st.integers(0, 12), children).map(lambda a: Step(*a)),
        st.tuples(st.sampled_from(["spawn", "gather"]), st.none(), children, tools).map(
            lambda a: Step(*a)
        ),
    )


def scripts(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Script]:
    parts = st.lists(steps(children), max_size=8), st.sampled_from([*CATCHES]), st.booleans()
    return st.tuples(*parts).map(lambda parts: Script(*parts))


SCRIPTS = scripts(st.none() | scripts(st.none()))


class Echo(Tool):
    """Does what it is told."""

    async def execute(self, text: str) -> ToolResponse:
        """text: what to do"""
        raise NotImplementedError


class World:
    """One run: what was sampled, made and released in it."""

    def __init__(self, script: Script, replies: Sequence[str], says: Sequence[str]) -> None:
        self.sampled: dict[float, int] = {}
        self.created: Counter[int] = Counter()
        self.released: Counter[int] = Counter()
        self.started = 0
        self.swallows = False
        self._replies = itertools.cycle(replies)
        self._says = itertools.cycle(says)
        self._numbers = itertools.count(1)
        self.agent = self.agent_of(script)
        self.tool = self._tool()

    def reply(self, asked: Asked) -> Any:
        kind = next(self._replies)
        if kind == "cancelled":
            raise asyncio.CancelledError
        if kind in ("error", "final error"):
            raise EngineError("down", reason=StopReason.ENGINE_ERROR, final=kind == "final error")
        if kind == "bug":
            raise OSError("a bug of the engine")
        call = CALL.replace("hi", next(self._says))
        text = {
            "call": call,
            "calls": call + call,
            "malformed": "<tool_call>{</tool_call>",
            "unknown": CALL.replace("echo", "nope"),
        }.get(kind, "fine")
        tokens = ids(text)[: asked.max_new_tokens]
        finish = "stop" if len(tokens) == len(ids(text)) and kind != "long" else "length"
        if kind == "aborted":
            tokens, finish = tokens[: len(tokens) // 2], "abort"
        if kind == "no log-probs":
            return Reply(tokens, None)
        log_probs = [-next(self._numbers) / 4_096 for _ in tokens]
        self.sampled |= dict(zip(log_probs, tokens, strict=True))
        return Reply(tokens, log_probs, finish, delay_s=0.001 if kind == "late" else 0.0)

    def _tool(self) -> type[Tool]:
        world = self

        class Told(Echo):
            __doc__ = Echo.__doc__
            name = Echo.name

            async def create(self) -> None:
                world.created[id(self)] += 1
                world.kept.append(self)
                await asyncio.sleep(0)

            async def execute(self, text: str) -> ToolResponse:
                """text: what to do"""
                world.started += 1
                if text == "slow":
                    await asyncio.sleep(0.001)
                elif text == "endless":
                    await asyncio.sleep(600)
                elif text == "bad":
                    raise ValueError("boom")
                elif text == "refuse":
                    raise ToolError("no")
                return ToolResponse(text, reward=0.5, stop=text == "stop")

            async def calc_reward(self) -> float:
                await asyncio.sleep(0)
                return 0.25

            async def release(self) -> None:
                world.released[id(self)] += 1
                await asyncio.sleep(0)

        self.kept: list[Tool] = []  # so that no two have the same id
        return Told

    def agent_of(self, script: Script) -> Agent:
        async def agent(ctx: Context) -> None:
            tasks: list[asyncio.Future[Any]] = []
            for step in script.steps:
                if step.what == "return":
                    break
                with contextlib.suppress(CATCHES[script.catches]):
                    await self._take(ctx, step)
            if script.leaves:
                tasks += [
                    asyncio.ensure_future(ctx.spawn("part")),
                    asyncio.ensure_future(ctx.generate()),
                ]
                await asyncio.sleep(0)

        self.swallows |= script.catches == "everything"
        return agent

    async def _take(self, ctx: Context, step: Step) -> None:
        work = asyncio.ensure_future(self._do(ctx, step))
        if step.ticks is None:
            await work
            return
        for _ in range(step.ticks):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _do(self, ctx: Context, step: Step) -> Any:
        agent = None if step.child is None else self.agent_of(step.child)
        match step.what:
            case "generate":
                return await ctx.generate()
            case "tools":
                return await ctx.observe(await ctx.call_tools())
            case "one by one":
                said = [m for call in ctx.request.calls for m in await ctx.call_tools([call])]
                return await ctx.observe(said or "nothing was called")
            case "call again":
                return await ctx.call_tools()
            case "say":
                return await ctx.observe("go on")
            case "answer":
                return await ctx.observe([{"role": "tool", "name": "echo", "content": "mine"}])
            case "rewrite":
                return await ctx.rewrite([*ctx.messages[:1], {"role": "user", "content": "again"}])
            case "nonsense":
                return await ctx.observe([{"role": "oracle", "content": "?"}])
            case "spawn":
                return await ctx.spawn("part", agent=agent, tools=step.tools)
            case "gather":
                return await asyncio.gather(*(ctx.spawn("part", agent=agent) for _ in range(2)))
            case "raise":
                raise OSError("no network")
            case _:
                await asyncio.sleep(0.001)


def family(request: Request) -> Iterator[Request]:
    yield request
    for child in request.children:
        yield from family(child)


@pytest.fixture(autouse=True, scope="module")
def _short_grace() -> Iterator[None]:
    """What is left behind is left behind sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "GRACE_S", 0.02)
        patch.setattr(agent_module, "GRACE_S", 0.02)
        yield


def yielding(codec: Codec) -> Codec:
    """Each part of the codec's work lets others go first, as it does for long texts."""
    codec = copy(codec)

    def slow(method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            value = await method(*args, **kwargs)
            await asyncio.sleep(0)
            return value

        return call

    for name in ("prompt_async", "delta_async", "parse_async", "decode_async"):
        setattr(codec, name, slow(getattr(codec, name)))
    return codec


CODEC = yielding(Codec(TOKENIZER, tools=Toolset([Echo]).schemas))
"""one for all: its proofs take longer than a run"""


async def meddle(rollout: Rollout, target: Request, outside: str, playing: Any) -> None:
    machine = rollout.loop.machine
    if outside.startswith("cancel"):
        playing.cancel()
        await asyncio.sleep(0)
        if outside == "cancel twice":
            playing.cancel()
    elif outside != "nothing":
        reason = StopReason.CANCELLED if outside == "abort" else StopReason.PAUSED
        with contextlib.suppress(IllegalEvent, GuardRefused):
            machine.fire(Event.ABORT, target, reason)
            if outside == "pause and resume":
                machine.fire(Event.RESUME, target)
            elif outside == "pause and retry":
                machine.fire(Event.RETRY, target)


@given(
    SCRIPTS,
    st.lists(st.sampled_from(["text", "call"]) | st.sampled_from(REPLIES), min_size=1, max_size=6),
    st.lists(st.sampled_from(SAYS), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(OUTSIDE), st.integers(0, 3)), min_size=1, max_size=2),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(260, 900),
)
def test_whatever_an_agent_does_the_record_holds_and_nothing_is_left(
    script: Script,
    replies: Sequence[str],
    says: Sequence[str],
    outside: Sequence[tuple[str, int]],
    ticks: int,
    max_calls: int,
    max_context: int,
) -> None:
    world = World(script, replies, says)

    async def main() -> Request:
        limits = Limits(
            max_context=max_context, max_turns=4, max_attempts=2, max_tool_calls=max_calls,
            max_invalid_calls=2, tool_timeout_s=0.02, request_timeout_s=5.0,
        )  # fmt: skip
        engine = ScriptedEngine(world.reply, tokenizer=TOKENIZER)
        tools, agent = Toolset([world.tool]), world.agent
        assert tuple(tools.schemas) == CODEC.tools
        rollout = Rollout(engine, codec=CODEC, tools=tools, agent=agent, limits=limits)
        request = rollout.request("hello")
        playing = asyncio.ensure_future(rollout.run(request))
        for _ in range(ticks):
            await asyncio.sleep(0)
        for what, whose in outside:  # of the sub-agents that still run, or the parent
            targets = [request, *(one for one in family(request) if not one.is_done)]
            await meddle(rollout, targets[whose % len(targets)], what, playing)
            await asyncio.sleep(0)
        await asyncio.wait([playing], timeout=60)
        assert playing.done()
        if not playing.cancelled():
            playing.result()
        before = [s.to_dict() for one in family(request) for s in one.samples]
        await drained(world)
        assert [s.to_dict() for one in family(request) for s in one.samples] == before
        return request

    request = asyncio.run(main())
    assert request.is_done
    assert request.is_sealed
    assert all(one.is_done for one in family(request))
    assert world.released == world.created
    assert set(world.created.values()) <= {1}
    for one in family(request):
        assert not [v for sample in one.samples for v in violations(sample)]
    assert not [v for row in request.rows for v in violations(row, at_rest=True)]
    trained = [
        (log_prob, token)
        for row in request.rows
        for log_prob, token, is_trained in zip(
            np.asarray(row.rollout_log_probs).tolist(),
            row.tokens[row.prompt_length :].tolist(),
            row.loss_mask.tolist(),
            strict=True,
        )
        if is_trained
    ]
    assert len(trained) == len(dict(trained)), "a sampled token is trained twice"
    assert all(world.sampled[log_prob] == token for log_prob, token in trained)
    for one in family(request):
        assert one.num_tool_calls <= max_calls
        if not any(what.startswith("pause") for what, _ in outside):
            ran = sum(one.metrics.get(f"tool/echo/{outcome}", 0) for outcome in EXECUTED)
            assert ran == one.num_tool_calls
    if request.status is Status.ABORTED:
        assert request.rows == []


async def drained(world: World) -> None:
    """Wait until no task is left, but those of an agent that swallows whatever ends it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 30
    while True:
        kept = {f for f in supervisor._kept if isinstance(f, asyncio.Task) and not f.done()}
        left = asyncio.all_tasks() - {asyncio.current_task()}
        left |= {task for task in kept if task.get_loop() is loop}  # not of an earlier example
        if not left or (world.swallows and world.released == world.created):
            return
        assert loop.time() < deadline, left
        await asyncio.sleep(0.01)

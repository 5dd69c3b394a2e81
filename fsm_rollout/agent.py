"""Agent: a loop of your own in place of the built-in one, through the same machine and record.

    async def agent(ctx: Context) -> None:
        turn = await ctx.generate()
        while turn.calls:
            await ctx.observe(await ctx.call_tools())
            turn = await ctx.generate()

`Rollout(engine, tokenizer, agent=agent)` runs it once per attempt of each request. Tokens, masks,
log-probs and budgets stay the record's, whatever it does: it sees messages, never token ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from fsm_rollout.codec import Codec
from fsm_rollout.codec.messages import Message, checked_messages
from fsm_rollout.errors import ConfigError, InvariantError, RolloutError
from fsm_rollout.failures import describe, log_failure
from fsm_rollout.hops import is_unread
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.loop import Loop, Player
from fsm_rollout.request import Request
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset, ToolSpec
from fsm_rollout.tools.session import ToolSession
from fsm_rollout.tools.signature import why_not_one_argument
from fsm_rollout.tools.supervisor import GRACE_S, Flight, join
from fsm_rollout.turn import ToolCall, Turn

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ended(BaseException):
    """The request of an agent has ended (a budget, a fault, a cancel): nothing more can be done.

    Let it pass. Like CancelledError it is no Exception, so that `except Exception` does.
    """


class Context:
    """What an agent holds: its request, and everything that it may do to it.

    Every method raises Ended once the request has ended. All but `spawn` run one at a time: two at
    once would write the record from two histories, so the second raises RolloutError.
    """

    def __init__(self, loop: Loop, request: Request, session: ToolSession) -> None:
        self.request = request
        """read it: label, metadata, limits, num_turns …"""
        self._loop = loop
        self._session = session
        self._attempt = request.attempt
        self._tool_stops = False
        self._has_begun = request.status is not Status.PENDING
        self._is_over = False
        self._is_busy = False
        self._was_told = False
        """Ended was raised: a call behind it means that the agent swallowed that"""
        self._tasks: set[asyncio.Task[Any]] = set()
        """those that are in a call of this context"""
        self._children: dict[Request, Flight] = {}
        self.on_swallowed: Callable[[], None] = lambda: None
        """called when the agent goes on behind Ended"""

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the prompt first."""
        view = self.request.sample.messages
        return [{k: v for k, v in message.items() if k != "span"} for message in view]

    @property
    def was_moved(self) -> bool:
        """Somebody aborted and resumed the request: it wants a fresh start of its agent."""
        return self._has_begun and self.request.status is Status.PENDING

    async def generate(self) -> Turn:
        """Let the policy take a turn. What it says is in `messages`, its calls in `turn.calls`.

        In a request that was resumed, the first call gives the turn that nobody answered yet.
        Behind a call that you cancelled it asks again, and what was sampled is dropped. Raises
        RolloutError when the turn before has no answer: observe something, or return.
        """
        async with self._alone() as request:
            loop = self._loop
            if request.status is Status.PENDING:
                await loop.start(request)
                self._has_begun = True
            elif _is_unread(request):  # the agent cancelled the call before this one
                return self._whole(await loop.read(request))
            elif _is_finished(request):
                raise RolloutError(
                    f"{self._where()}: the turn before has no answer; `await ctx.observe(...)` "
                    "first, or return to end the request"
                )
            elif request.status is Status.TOOL_CALLING:
                loop.machine.settle(Event.GENERATE, request)
            if self._alive().status is Status.TOOL_CALLING:
                return request.sample.turns[-1]
            return self._whole(await loop.turn(request))

    async def call_tools(self, calls: Sequence[ToolCall] | None = None) -> list[Message]:
        """Run calls, default: all of the last turn, and give what to tell the model, in order.

        Malformed and unknown ones are answered too. Nothing is recorded before `observe`. If you
        cancel it, the calls that had started count, and what they said is dropped: call again, or
        observe what you like.
        """
        async with self._alone():
            request = await self._answering()
            called = self._whole(
                await self._loop.call(
                    request, self._session, request.calls if calls is None else calls
                )
            )
            self._tool_stops |= called.stops
            return called.messages

    async def observe(self, messages: str | Sequence[Mapping[str, Any]]) -> None:
        """Tell the model, in place of a user or a tool; once per turn. A str is a user message.

        What does not fit is cut and ends the request. Raises ConfigError for a message that is
        none, RolloutError when the turn was answered already.
        """
        async with self._alone():
            checked = checked_messages(messages)
            request = await self._answering()
            last = request.sample.turns[-1] if request.sample.turns else None
            if last is not None and last.kind == "observation":
                raise RolloutError(
                    f"{self._where()}: the turn was answered already; pass all messages in one "
                    "`ctx.observe([...])`"
                )
            self._whole(await self._loop.observe(request, checked) or None)
            if self._tool_stops:
                self._loop.machine.settle(Event.COMPLETE, request, StopReason.TOOL_STOP)
                self._alive()

    async def rewrite(self, messages: str | Sequence[Mapping[str, Any]]) -> None:
        """Go on from another history: a summary, or the same without its thinking.

        Opens a new row of the request, whose prompt are these messages; see `Request.fork`. What
        was sampled stays in the row before and is trained there. Raises InvariantError R3.5.prompt
        when they are longer than max_context: shorten them, or let it pass, and it is the end.
        """
        async with self._alone():
            checked = checked_messages(messages)
            request = await self._answering()
            seq = request.seq
            ids = await self._loop.codec.prompt_async(checked)
            self._whole(ids if request.seq == seq else None)
            request.fork(ids, prompt=checked)

    async def spawn(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        agent: Agent | None = None,
        tools: Sequence[ToolSpec] | None = None,
        limits: Limits | None = None,
        label: Any = None,
        tools_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Let a sub-agent answer another prompt; wait for it and look at how it ended.

        `agent`: its loop, default the built-in one. `tools`: what it may call, default the same:
        some of them by name, or others as classes or functions; `tools_kwargs`: theirs, default
        none. It has the same engine and budgets (default: like the parent's) of its own, and is
        retried like any request. Its rows are trained with those of this one and share its reward,
        unless its tools gave one or you set `child.reward`. One that is ABORTED is not trained.
        Several run at once in an `asyncio.gather`; those that still run when the agent returns, or
        when you cancel this call, are aborted as cancelled. Raises ConfigError for a prompt, tools
        or kwargs that do not fit.
        """
        async with self._called() as request:
            checked_messages(prompt)
            toolset, codec, kwargs = await self._tools_of(tools, tools_kwargs or {})
            child = self._alive().spawn(
                prompt,
                limits=limits or request.limits,
                label=request.label if label is None else label,
                tools_kwargs=kwargs,
            )
            inner = replace(
                self._loop,
                codec=codec,
                tools=toolset,
                agent=None if agent is None else player(agent),
                reward=None,
            )
            flight = self._children[child] = Flight(
                lambda: inner.play_and_retry(child),
                in_thread=False,
                where=f"request {child.name}",
                what="the sub-agent",
                on_abandon=lambda: None,
            )
            try:
                await flight.settle(child.limits.request_timeout_s * child.limits.max_attempts)
            finally:
                await self._part_with(child)
            self._alive()
            error = flight.task.result()[1] if flight.is_done else None
            if error is not None and not child.is_done:
                raise error
            return child

    async def _tools_of(
        self, tools: Sequence[ToolSpec] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Toolset, Codec, Mapping[str, Any]]:
        """The tools of a sub-agent, a codec that tells it of them, and what they are given."""
        ours, codec = self._loop.tools, self._loop.codec
        if tools is None:
            toolset = ours
        else:
            try:
                toolset = ours.chosen(tools)
                codec = await codec.with_tools_async(toolset.schemas)
            except ConfigError as why:
                raise type(why)(f"spawn: tools: {why}") from why
            if isinstance(kwargs, Mapping):  # those of the row may name tools that it has not
                kwargs = {n: k for n, k in kwargs.items() if n in toolset or n not in ours}
        try:
            toolset.check_row(kwargs)
        except ConfigError as why:
            raise ConfigError(
                f"spawn: {why}; the parent's are `tools_kwargs=ctx.request.tools_kwargs`"
            ) from why
        return toolset, codec, kwargs

    # -- for the driver ----------------------------------------------------------------------------

    async def close(self) -> None:
        """The agent is over: what it left running ends, and nothing of it reaches the record."""
        self._is_over, tasks = True, set(self._tasks)
        ends = [self._part_with(child) for child, f in self._children.items() if not f.is_done]
        await join([asyncio.create_task(end) for end in ends], pass_cancel=False)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=GRACE_S) if tasks else (tasks, None)
        for task in done:  # that Ended was raised in it is no news to anybody
            _ = task.cancelled() or task.exception()

    async def _part_with(self, child: Request) -> None:
        """A sub-agent has ended, or is stopped; one that does not stop is aborted all the same."""
        flight = self._children[child]
        try:
            await flight.stop()
        finally:
            if not flight.is_done:
                self._loop.abort(child, StopReason.CANCELLED, "its parent went on without it")

    def _alive(self) -> Request:
        request = self.request
        is_over = self._is_over or request.is_done or request.attempt != self._attempt
        if is_over or self.was_moved:
            self._was_told = True
            raise Ended(f"{self._where()} has ended: {request.stop_reason or 'started anew'}")
        return request

    @asynccontextmanager
    async def _called(self) -> AsyncIterator[Request]:
        """The request, for one call. Whatever is raised, others have had their turn meanwhile:
        an agent that catches it and calls again, without end, must not stop the event loop."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._was_told:
                self.on_swallowed()
                await asyncio.sleep(GRACE_S)  # in which it is stopped
            yield self._alive()
        except Exception:
            await asyncio.sleep(0)
            raise
        finally:
            self._tasks.discard(task)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Request]:
        """The same, while no other call of this context runs."""
        async with self._called() as request:
            if self._is_busy:
                raise RolloutError(
                    f"{self._where()}: another call of this context still runs; await it first, or "
                    "cancel it and await that"
                )
            self._is_busy = True
            try:
                yield request
            finally:
                self._is_busy = False

    def _whole(self, value: T | None) -> T:
        """What a hop gave. None: the request has ended meanwhile, or was aborted and resumed."""
        self._alive()
        assert value is not None
        return value

    async def _answering(self) -> Request:
        """The request, TOOL_CALLING."""
        request = self._alive()
        if request.status is Status.PENDING:
            raise RolloutError(f"{self._where()}: there is no turn yet; `await ctx.generate()`")
        if request.status is Status.GENERATING:
            if not _is_finished(request):
                raise RolloutError(f"{self._where()}: there is no turn to answer; wait for it")
            if _is_unread(request):
                self._whole(await self._loop.read(request))
            self._loop.machine.settle(Event.OBSERVE, request)
        return self._alive()

    def _where(self) -> str:
        return f"agent, request {self.request.name}, turn {self.request.num_turns}"


Agent: TypeAlias = Callable[[Context], Awaitable[object]]
"""what it returns is not looked at: the reward is the tools' or the reward function's"""


def player(agent: Agent) -> Player:
    """What `Loop.agent` calls. The agent runs in a task of its own: one that hangs or swallows its
    cancellation holds no request, and one that raises aborts its request as agent_error."""

    if not callable(agent):
        raise ConfigError(f"agent is {agent!r}; give an `async def agent(ctx)`")
    if why := why_not_one_argument(agent):
        raise ConfigError(f"agent {agent!r} {why}; give an `async def agent(ctx)`")

    async def play(loop: Loop, request: Request, session: ToolSession) -> None:
        request.has_agent = True
        context = Context(loop, request, session)
        flight = Flight(
            lambda: agent(context),
            in_thread=False,
            where=f"request {request.name}",
            what="the agent",
            on_abandon=lambda: None,
        )
        context.on_swallowed = flight.wake
        try:
            await flight.settle(2 * request.limits.request_timeout_s)  # the loop's clock is first
        finally:
            try:
                await flight.stop()
            finally:  # cancelled once more, perhaps
                await context.close()
        if request.is_done or request.attempt != context._attempt or context.was_moved:
            return
        error = flight.task.result()[1]
        if error is None:
            if not _is_unread(request) or await loop.read(request) is not None:
                _complete(loop, request)
            return
        if isinstance(error, InvariantError) and error.code == "R3.5.prompt":
            loop.machine.settle(Event.TRUNCATE, request, StopReason.MAX_CONTEXT)
            return  # a history that outgrew the context is what the policy did
        how = f"raised {describe(error)}"
        log_failure(logger, f"request {request.name}", "the agent", how, error)
        request.final = isinstance(error, RolloutError)  # the agent's own fault: it would again
        loop.abort(request, StopReason.AGENT_ERROR, f"the agent {how}")

    return play


def _complete(loop: Loop, request: Request) -> None:
    """The agent returned: what stands last in the record says why."""
    turns = request.sample.turns
    is_pending = request.status is Status.PENDING
    if not is_pending and _is_finished(request):
        loop.machine.settle(Event.COMPLETE, request, StopReason.STOP)
    elif not is_pending and (turns[-1].kind == "observation" if turns else request.samples[1:]):
        loop.machine.settle(Event.COMPLETE, request, StopReason.ENV_DONE)
    else:  # or it cancelled a turn, which may come in time when it is played again
        request.final = is_pending
        why = "the agent returned without a finished turn"
        if is_pending:
            why += ": it must be `async def` and `await ctx.generate()`"
        loop.abort(request, StopReason.AGENT_ERROR, why)


def _is_finished(request: Request) -> bool:
    """The last thing in the record is a whole model turn."""
    turns = request.sample.turns
    return bool(turns) and turns[-1].kind == "model" and not turns[-1].is_open


def _is_unread(request: Request) -> bool:
    """It is whole, but the agent cancelled `generate` before it was parsed."""
    turns = request.sample.turns
    return request.status is Status.GENERATING and bool(turns) and is_unread(turns[-1])

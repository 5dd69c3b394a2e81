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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from fsm_rollout.codec.messages import Message, checked_messages
from fsm_rollout.errors import ConfigError, InvariantError, RolloutError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.loop import Loop, Player
from fsm_rollout.request import Request
from fsm_rollout.states.table import Event
from fsm_rollout.tools.session import ToolSession
from fsm_rollout.tools.signature import why_not_one_argument
from fsm_rollout.tools.supervisor import Flight, join
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
        self._is_over = False
        self._is_busy = False
        self.was_moved = False
        """somebody else aborted and resumed the request: it wants a fresh start of its agent"""
        self._children: list[Flight] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the prompt first."""
        view = self.request.sample.messages
        return [{k: v for k, v in message.items() if k != "span"} for message in view]

    async def generate(self) -> Turn:
        """Let the policy take a turn. What it says is in `messages`, its calls in `turn.calls`.

        In a request that was resumed, the first call gives the turn that nobody answered yet.
        Raises RolloutError when the turn before has no answer: observe something, or return.
        """
        with self._alone() as request:
            loop = self._loop
            if request.status is Status.PENDING:
                await loop.start(request)
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

        Malformed and unknown ones are answered too. Nothing is recorded before `observe`.
        """
        with self._alone():
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
        checked = checked_messages(messages)
        with self._alone():
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
        checked = checked_messages(messages)
        with self._alone():
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
        limits: Limits | None = None,
        label: Any = None,
        tools_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Let a sub-agent answer another prompt; wait for it and look at how it ended.

        `agent`: its loop, default the built-in one. It has the same engine and tools, kwargs for
        them (default: none) and budgets (default: like the parent's) of its own, and is retried
        like any request. Its rows are trained with those of this one and share its reward, unless
        its tools gave one or you set `child.reward`. One that is ABORTED is not trained. Several
        run at once in an `asyncio.gather`; those that still run when the agent returns are
        cancelled.
        """
        request, loop = self._alive(), self._loop
        try:
            loop.tools.check_row(tools_kwargs or {})
        except ConfigError as why:
            raise ConfigError(
                f"spawn: {why}; the parent's are `tools_kwargs=ctx.request.tools_kwargs`"
            ) from why
        child = request.spawn(
            prompt,
            limits=limits or request.limits,
            label=request.label if label is None else label,
            tools_kwargs=tools_kwargs or {},
        )
        inner = replace(loop, agent=None if agent is None else player(agent), reward=None)
        flight = Flight(
            lambda: inner.play_and_retry(child),
            in_thread=False,
            label=f"sub-agent, request {child.name}",
            on_abandon=lambda: None,
        )
        self._children.append(flight)
        try:
            await flight.settle(child.limits.request_timeout_s * child.limits.max_attempts)
        finally:
            await flight.stop()
        self._alive()
        error = flight.task.result()[1] if flight.is_done else None
        if error is not None and not child.is_done:
            raise error
        return child

    # -- for the driver ----------------------------------------------------------------------------

    async def close(self) -> None:
        """The agent is over: what it left running ends, and nothing of it reaches the record."""
        self._is_over = True
        stops = [flight.stop() for flight in self._children if not flight.is_done]
        await join([asyncio.create_task(stop) for stop in stops], pass_cancel=False)

    def _alive(self) -> Request:
        request = self.request
        if self._is_over or request.is_done or request.attempt != self._attempt:
            raise Ended(f"{self._where()} has ended: {request.stop_reason or 'retried'}")
        return request

    @contextmanager
    def _alone(self) -> Iterator[Request]:
        """The request, while no other call of this context runs."""
        request = self._alive()
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
        if value is None:
            self._is_over = self.was_moved = True
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
            label=context._where(),
            on_abandon=lambda: None,
        )
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
        logger.error("%s raised", context._where(), exc_info=error)
        request.final = isinstance(error, RolloutError)  # the agent's own fault: it would again
        loop.abort(request, StopReason.AGENT_ERROR, f"the agent raised {error!r}")

    return play


def _complete(loop: Loop, request: Request) -> None:
    """The agent returned: what it did last says why."""
    if request.status is Status.TOOL_CALLING:
        loop.machine.settle(Event.COMPLETE, request, StopReason.ENV_DONE)
    elif request.status is Status.GENERATING and _is_finished(request):
        loop.machine.settle(Event.COMPLETE, request, StopReason.STOP)
    else:
        request.final = True
        why = "the agent returned without a finished turn"
        if request.status is Status.PENDING:
            why += ": it must be `async def` and `await ctx.generate()`"
        loop.abort(request, StopReason.AGENT_ERROR, why)


def _is_finished(request: Request) -> bool:
    """The last thing in the record is a whole model turn."""
    turns = request.sample.turns
    return bool(turns) and turns[-1].kind == "model" and not turns[-1].is_open


def _is_unread(request: Request) -> bool:
    """It is whole, but the agent cancelled `generate` before it was parsed."""
    is_generating = request.status is Status.GENERATING
    return is_generating and _is_finished(request) and not request.sample.turns[-1].messages

"""Loop: plays one request from PENDING to a terminal status. Read this first.

A turn is six hops and never goes back: encode, generate, append, parse and run tools, append, fire.
I/O happens between `machine.fire` calls; progress and metrics listen to the transitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from fsm_rollout.errors import IllegalEvent
from fsm_rollout.hops import Hops
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardError, RewardFunction, RewardPart, Rewards
from fsm_rollout.states.guards import attempts_left, retryable
from fsm_rollout.states.table import Event
from fsm_rollout.tools.session import ToolSession

_NOT_RETRIED = frozenset(
    {StopReason.CANCELLED, StopReason.PAUSED, StopReason.STALE, StopReason.REWARD_ERROR}
)
"""aborts that somebody asked for, or that another rollout would not mend: the caller retries"""


@dataclass(slots=True, kw_only=True)
class Loop(Hops):
    """The hops in the order of a chat with tools, or in that of an agent; tools and reward around.

    Shared by all requests of a run; it holds no state of any of them.
    """

    reward: RewardFunction | RewardPart | Rewards | None = None
    agent: Player | None = None
    """plays a request in place of the turns below; see `fsm_rollout.agent`"""
    rewards: Rewards = field(init=False)

    def __post_init__(self) -> None:
        Hops.__post_init__(self)
        self.rewards = Rewards.of(self.reward, self.tools)

    async def run(self, request: Request) -> Request:
        """Play `request` to its end, with retries from scratch, and seal it.

        Never raises for what an engine, a tool or a reward does; a cancel from outside aborts the
        request, releases its tools and is passed on. Raises IllegalEvent when it is sealed already.
        A usable request whose group has rewards of its own is left to `Rollout.generate` to seal.
        """
        if request.is_sealed:
            raise IllegalEvent(f"request {request.index} is sealed: its outcome was recorded")
        try:
            await self.play_and_retry(request)
        finally:
            waits_for_group = self.rewards.by_group and request.status is not Status.ABORTED
            if request.is_done and not waits_for_group:
                request.seal()
        return request

    async def play_and_retry(self, request: Request) -> None:
        """Play `request` to its end, with retries from scratch, and release its tools."""
        try:
            while True:
                await self.play(request)
                may_retry = self._may_retry(request)
                if request.is_done:
                    await self.release(request)
                if not request.is_done:  # retried from outside meanwhile
                    continue
                if not may_retry:
                    return
                self.machine.fire(Event.RETRY, request)
        except asyncio.CancelledError:
            try:
                await self.release(request)
            finally:
                if not request.is_done:  # retried from outside meanwhile
                    self.abort(request, StopReason.CANCELLED, "cancelled from outside")
            raise
        except BaseException:
            await self.release(request)
            raise

    async def play(self, request: Request) -> None:
        """One attempt, fresh or resumed: from PENDING to a terminal status, reward included.

        The tools stay alive for a `resume`; `release` ends them.
        """
        session: ToolSession | None = None
        clock = asyncio.timeout(request.limits.request_timeout_s)
        try:
            try:
                async with clock:
                    while not request.is_done:
                        session = await self._session(request, session)
                        await self._act(request, session)
            except TimeoutError:
                if not clock.expired():
                    raise
                if not request.is_done:
                    self.machine.settle(Event.TRUNCATE, request, StopReason.TIMEOUT)
            await self._finish(request)
        except asyncio.CancelledError:
            self.abort(request, StopReason.CANCELLED, "cancelled from outside")
            raise
        finally:
            if session is not None and session is not request.session:
                await session.close()

    async def release(self, request: Request) -> None:
        """Release the request's tools, once; nothing to do when it has none."""
        if isinstance(session := request.session, ToolSession):
            try:
                await session.close()
            finally:
                request.metrics |= {name: n for name, n in session.metrics.items() if n}
                request.metrics |= {f"tool/{name}": n for name, n in session.by_tool.items()}

    # -- one status --------------------------------------------------------------------------------

    async def _act(self, request: Request, session: ToolSession) -> None:
        match request.status:
            case status if self.agent and not status.is_terminal:
                await self.agent(self, request, session)
            case Status.PENDING:
                await self.start(request)
            case Status.GENERATING:
                await self._generate(request)
            case Status.TOOL_CALLING:
                await self._observe(request, session)

    async def _generate(self, request: Request) -> None:
        turn = await self.turn(request)
        if turn is not None and turn.calls:
            self.machine.settle(Event.OBSERVE, request)
        elif turn is not None:
            self.machine.settle(Event.COMPLETE, request, StopReason.STOP)

    async def _observe(self, request: Request, session: ToolSession) -> None:
        called = await self.call(request, session, request.calls)
        if called is None or not await self.observe(request, called.messages):
            return
        if called.stops:
            self.machine.settle(Event.COMPLETE, request, StopReason.TOOL_STOP)
        else:
            self.machine.settle(Event.GENERATE, request)

    async def _finish(self, request: Request) -> None:
        seq = request.seq
        try:
            await self._decode(request)
            if request.seq != seq or request.status is Status.ABORTED:
                return
            earned = await self.rewards.score(request)
        except RewardError as error:
            if request.seq == seq:
                self.abort(request, StopReason.REWARD_ERROR, str(error))
        else:
            if request.seq == seq:  # else it is late: aborted, or retried, meanwhile
                earned.record(request)

    # -- parts -------------------------------------------------------------------------------------

    async def _session(self, request: Request, held: ToolSession | None) -> ToolSession:
        """The request's tools, opened once per attempt; those of an attempt that is over end."""
        if held is not None and held is not request.session:  # retried from outside
            await held.close()
        while not isinstance(request.session, ToolSession):
            await self._open(request)
        return request.session

    async def _open(self, request: Request) -> None:
        session = request.session = ToolSession(
            self.tools,
            kwargs=request.tools_kwargs,
            limits=request.limits,
            label=f"request {request.name}, attempt {request.attempt}",
        )
        try:
            await session.open()
        finally:
            if request.session is not session:  # retried from outside meanwhile
                await session.close()
        if session.failed_required and request.session is session:
            why = "; ".join(
                f"{name}: {session.unavailable[name]}" for name in session.failed_required
            )
            self.abort(
                request, StopReason.TOOL_UNAVAILABLE, f"required tools failed to open: {why}"
            )

    async def _decode(self, request: Request) -> None:
        """Say in text what was sampled and observed."""
        seq = request.seq
        try:
            async with asyncio.timeout(request.limits.turn_timeout_s):
                for sample in request.samples:
                    text = await self.codec.decode_async(sample.columns.response_tokens())
                    if request.seq != seq:
                        return
                    sample.response = text
        except Exception as error:
            self._codec_failed(request, error, seq)

    def _may_retry(self, request: Request) -> bool:
        return (
            request.status is Status.ABORTED
            and request.stop_reason not in _NOT_RETRIED
            and retryable(request)
            and attempts_left(request)
        )


Player: TypeAlias = Callable[[Loop, Request, ToolSession], Awaitable[None]]
"""plays a request from where it stands to its end"""

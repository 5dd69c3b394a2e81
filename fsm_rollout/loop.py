"""Loop: plays one request from PENDING to a terminal status. Read this first.

A turn is six hops and never goes back: encode, generate, append, parse and run tools, append, fire.
I/O happens between `machine.fire` calls; progress and metrics listen to the transitions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import int32
from fsm_rollout.ask import ask
from fsm_rollout.codec import Codec
from fsm_rollout.engines.base import Engine, Generation, SamplingParams
from fsm_rollout.errors import EngineError, IllegalEvent, InvariantError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardError, RewardFunction, score
from fsm_rollout.states.guards import attempts_left, has_room, needs_observation, retryable
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import CallResult, ToolSession

logger = logging.getLogger(__name__)

_NOT_RETRIED = frozenset(
    {StopReason.CANCELLED, StopReason.PAUSED, StopReason.STALE, StopReason.REWARD_ERROR}
)
"""aborts that somebody asked for, or that another rollout would not mend: the caller retries"""


@dataclass(slots=True, kw_only=True)
class Loop:
    """What one request needs to be played: an engine, a codec, tools, the machine.

    Shared by all requests of a run; it holds no state of any of them.
    """

    engine: Engine
    codec: Codec
    tools: Toolset
    machine: Machine
    params: SamplingParams
    reward: RewardFunction | None = None
    seed: int = 0
    run_id: str = field(default_factory=lambda: uuid4().hex[:12])
    """begins every session and request id: an engine may serve many runs"""

    def __post_init__(self) -> None:
        stop = self.codec.stop_ids.union(self.params.stop_token_ids)
        self.params = msgspec.structs.replace(self.params, stop_token_ids=tuple(sorted(stop)))

    async def run(self, request: Request) -> Request:
        """Play `request` to its end, with retries from scratch, and seal it.

        Never raises for what an engine, a tool or a reward does; a cancel from outside aborts the
        request, releases its tools and is passed on. Raises IllegalEvent when it is sealed already.
        """
        if request.is_sealed:
            raise IllegalEvent(f"request {request.index} is sealed: its outcome was recorded")
        try:
            await self.play(request)
            while self._may_retry(request):
                await self.release(request)
                self.machine.fire(Event.RETRY, request)
                await self.play(request)
        finally:
            try:
                await self.release(request)
            finally:
                if request.is_done:
                    request.seal()
        return request

    async def play(self, request: Request) -> None:
        """One attempt, fresh or resumed: from PENDING to a terminal status, reward included.

        The tools stay alive for a `resume`; `release` ends them.
        """
        session: ToolSession | None = None
        clock = asyncio.timeout(request.limits.request_timeout_s)
        try:
            async with clock:
                while not request.is_done:
                    session = await self._session(request, session)
                    match request.status:
                        case Status.PENDING:
                            await self._start(request)
                        case Status.GENERATING:
                            await self._generate(request)
                        case Status.TOOL_CALLING:
                            await self._observe(request, session)
        except TimeoutError:
            if not clock.expired():
                raise
            if not request.is_done:
                self.machine.settle(Event.TRUNCATE, request, StopReason.TIMEOUT)
        except asyncio.CancelledError:
            self._abort(request, StopReason.CANCELLED, "cancelled from outside")
            raise
        finally:
            if session is not None and session is not request.session:
                await session.close()
        await self._finish(request)

    async def release(self, request: Request) -> None:
        """Release the request's tools, once; nothing to do when it has none."""
        if isinstance(session := request.session, ToolSession):
            try:
                await session.close()
            finally:
                request.metrics |= {name: n for name, n in session.metrics.items() if n}

    # -- one status --------------------------------------------------------------------------------

    async def _start(self, request: Request) -> None:
        request.error, seq = "", request.seq
        if not request.sample.columns.length:
            ids = request.prompt_ids
            if ids is None:
                ids = await self._encoded(request, self.codec.prompt_async(request.prompt))
            if ids is None or request.seq != seq:
                return
            if not len(ids):
                return self._abort(request, StopReason.PROMPT_OVERFLOW, "the prompt has no tokens")
            try:
                request.set_prompt(ids)
            except InvariantError as error:
                return self._abort(request, StopReason.PROMPT_OVERFLOW, str(error))
        if needs_observation(request):  # resumed while its tools ran
            self.machine.settle(Event.OBSERVE, request)
        else:
            self.machine.settle(Event.GENERATE, request)

    async def _generate(self, request: Request) -> None:
        seq, started = request.seq, time.monotonic()
        try:
            generation = await self._ask(request)
        except EngineError as error:
            if request.seq == seq:
                self._end(request, error.reason, str(error), final=error.final)
            return
        if request.seq != seq:  # ended meanwhile: the reply is late
            return
        ids, finish = generation.token_ids, str(generation.finish)
        if finish == "abort" and len(ids) and ids[-1] in self.codec.stop_ids:
            finish = "stop"  # the turn was over when the abort came
        try:
            self._append(request, generation, finish)
        except InvariantError as error:
            missing = error.code == StopReason.MISSING_LOG_PROBS
            reason = StopReason.MISSING_LOG_PROBS if missing else StopReason.BAD_REPLY
            return self._abort(request, reason, str(error))
        _add(request, {f"engine/{name}": n for name, n in generation.counters.items()})
        turn = request.sample.turns[-1]
        turn.seconds += time.monotonic() - started
        if finish == "abort":
            if has_room(request):
                return self._abort(request, StopReason.ENGINE_ABORT, "the engine aborted the turn")
            turn.finish = finish = "length"  # and there was no token left to sample
        await self._read(request)
        if request.seq != seq:  # ended meanwhile, or the codec failed
            return
        if finish == "length":
            self.machine.settle(Event.TRUNCATE, request, StopReason.LENGTH)
        elif finish == "repetition":
            self.machine.settle(Event.TRUNCATE, request, StopReason.REPETITION)
        elif turn.calls:
            self.machine.settle(Event.OBSERVE, request)
        else:
            self.machine.settle(Event.COMPLETE, request, StopReason.STOP)

    async def _observe(self, request: Request, session: ToolSession) -> None:
        seq, started, sample = request.seq, time.monotonic(), request.sample
        turn = sample.turns[-1]
        allowed = request.limits.max_tool_calls - request.num_tool_calls
        results = await session.execute(turn.calls, allowed=allowed)
        if request.seq != seq:  # ended meanwhile: the results are late
            return
        sample.non_generation_time += time.monotonic() - started
        self._count_calls(request, results)
        if request.num_invalid_calls > request.limits.max_invalid_calls:
            self.machine.settle(Event.COMPLETE, request, StopReason.INVALID_CALLS)
            return
        messages: list[dict[str, Any]] = []
        delta = await self._encoded(request, self._delta(request, session, results, messages))
        if delta is None or request.seq != seq:
            return
        room = sample.room
        sample.append_response_tokens(delta[:room], trainable=False)
        if room:
            sample.turns[-1].messages += tuple(messages)
        if len(delta) > room:
            self.machine.settle(Event.TRUNCATE, request, StopReason.OBSERVATION_OVERFLOW)
        elif any(result.response.stop for result in results):
            self.machine.settle(Event.COMPLETE, request, StopReason.TOOL_STOP)
        else:
            self.machine.settle(Event.GENERATE, request)

    async def _finish(self, request: Request) -> None:
        seq, timeout_s = request.seq, request.limits.tool_timeout_s
        try:
            await self._decode(request)
            if request.seq != seq or request.status is Status.ABORTED:
                return
            rewards = await self._tool_rewards(request.session)
            reward, parts = await score(request, rewards, self.reward, timeout_s=timeout_s)
        except RewardError as error:
            if request.seq == seq:
                self._abort(request, StopReason.REWARD_ERROR, str(error))
        except asyncio.CancelledError:
            self._abort(request, StopReason.CANCELLED, "cancelled before the reward was there")
            raise
        else:
            if request.seq == seq:  # else it is late: aborted, or retried, meanwhile
                request.reward, request.reward_parts = reward, parts

    async def _tool_rewards(self, session: object) -> Mapping[str, float]:
        if not isinstance(session, ToolSession):
            return {}
        rewards = await session.calc_rewards()
        if failed := session.reward_errors:
            raise RewardError("; ".join(f"tool {name!r}: {why}" for name, why in failed.items()))
        return rewards

    # -- parts -------------------------------------------------------------------------------------

    async def _session(self, request: Request, held: ToolSession | None) -> ToolSession:
        """The request's tools, opened once per attempt; those of an attempt that is over end."""
        if held is not None and held is not request.session:  # retried from outside
            await held.close()
        if isinstance(request.session, ToolSession):
            return request.session
        session = request.session = ToolSession(
            self.tools,
            kwargs=request.tools_kwargs,
            limits=request.limits,
            label=f"request {request.index}, attempt {request.attempt}",
        )
        await session.open()
        if session.failed_required and request.session is session:
            why = "; ".join(
                f"{name}: {session.unavailable[name]}" for name in session.failed_required
            )
            self._abort(
                request, StopReason.TOOL_UNAVAILABLE, f"required tools failed to open: {why}"
            )
        return session

    async def _ask(self, request: Request) -> Generation:
        sample = request.sample
        session_id = f"{self.run_id}-{sample.session_id}"
        return await ask(
            self.engine,
            sample.columns,
            request.max_new_tokens,
            self._params(request),
            request_id=f"{session_id}.{request.attempt:04}.{request.seq:08}",
            session_id=session_id,
            media=sample.media,
            timeout_s=request.limits.turn_timeout_s,
            vocab_size=self.codec.vocab_size,
        )

    def _params(self, request: Request) -> SamplingParams:
        """The run's parameters with a seed of this turn's own."""
        turn = f"{self.seed}/{request.index}/{request.attempt}/{request.num_turns}"
        seed = int.from_bytes(blake2b(turn.encode(), digest_size=4).digest()) >> 1
        return msgspec.structs.replace(self.params, seed=seed)

    def _append(self, request: Request, generation: Generation, finish: str) -> None:
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "weight_versions": generation.weight_versions,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "log_prob_kind": generation.log_prob_kind,
        }
        if generation.top_p is not None:
            meta["sampling_mask"] = generation.top_p
        if generation.routed_experts is not None:
            meta["routed_experts"] = generation.routed_experts
        log_probs = generation.log_probs if request.log_probs else None
        request.sample.append_response_tokens(generation.token_ids, log_probs, meta_info=meta)

    async def _read(self, request: Request) -> None:
        """Parse the finished turn once, all of it: what it says and which tools it calls."""
        sample, seq = request.sample, request.seq
        turn = sample.turns[-1]
        try:
            parsed = await self.codec.parse_async(
                sample.columns.response_tokens(turn.start, turn.stop),
                finish=turn.finish or "",
                call_id=f"call_{sample.num_turns}",
            )
            has_tools = bool(self.tools.schemas)
            message, calls = parsed.message(has_tools=has_tools), parsed.calls
        except Exception as error:  # a parser of the user's own
            return self._codec_failed(request, error, seq)
        if request.seq == seq:  # else it ended meanwhile
            turn.messages, turn.calls = (message,), calls if has_tools else ()

    def _count_calls(self, request: Request, results: Sequence[CallResult]) -> None:
        request.num_tool_calls += sum(result.executed for result in results)
        request.num_invalid_calls += sum(result.is_invalid for result in results)
        for result in results:
            _add(request, result.response.metrics)
        rewards = [r.response.reward for r in results if r.response.reward is not None]
        request.sample.turns[-1].reward = sum(rewards) if rewards else None

    async def _delta(
        self,
        request: Request,
        session: ToolSession,
        results: Sequence[CallResult],
        messages: list[dict[str, Any]],
    ) -> list[int]:
        """The ids of the results; fills `messages` with what they say."""
        messages += [await self._tool_message(result, session) for result in results]
        sample = request.sample
        return await self.codec.delta_async(sample.columns.last_id, messages, room=sample.room)

    async def _encoded(
        self, request: Request, ids: Coroutine[Any, Any, list[int]]
    ) -> npt.NDArray[np.int32] | None:
        """What the codec makes; None, and the request is aborted for good, when it fails."""
        seq = request.seq
        try:
            return int32(await ids)
        except Exception as error:
            self._codec_failed(request, error, seq)
            return None

    async def _decode(self, request: Request) -> None:
        """Say in text what was sampled and observed."""
        sample, seq = request.sample, request.seq
        try:
            async with asyncio.timeout(request.limits.tool_timeout_s):
                text = await self.codec.decode_async(sample.columns.response_tokens())
        except Exception as error:
            self._codec_failed(request, error, seq)
        else:
            if request.seq == seq:
                sample.response = text

    def _codec_failed(self, request: Request, error: Exception, seq: int) -> None:
        logger.error("request %d: the codec failed", request.index, exc_info=error)
        if request.seq == seq:  # else it is late
            request.final = True
            self._abort(request, StopReason.INVARIANT, f"the codec failed: {error!r}")

    async def _tool_message(self, result: CallResult, session: ToolSession) -> dict[str, Any]:
        text, call = result.response.text, result.call
        if result.response.images:  # text and images are shown together or not at all
            logger.warning("tool %s returned images, which no codec can encode yet", call.name)
            text = "the tool returned images, which cannot be shown here"
        cap = session.token_cap(call.name)
        if cap is not None:
            text = await self.codec.fit_async(text, cap, side=session.truncate_side(call.name))
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    def _may_retry(self, request: Request) -> bool:
        return (
            request.status is Status.ABORTED
            and request.stop_reason not in _NOT_RETRIED
            and retryable(request)
            and attempts_left(request)
        )

    def _end(self, request: Request, reason: StopReason, why: str, *, final: bool) -> None:
        if request.is_done:
            return
        if reason.status is Status.TRUNCATED:  # the engine met a limit that we did not know
            self.machine.settle(Event.TRUNCATE, request, reason)
        else:
            request.final = final
            self._abort(request, reason, why)

    def _abort(self, request: Request, reason: StopReason, why: str) -> None:
        if request.status is not Status.ABORTED:
            request.error = why
            self.machine.fire(Event.ABORT, request, reason)


def _add(request: Request, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        request.metrics[name] = request.metrics.get(name, 0) + value

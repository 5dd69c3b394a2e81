"""Hops: what happens between two `fire` calls, one request at a time.

encode → generate → append → parse and run tools → append. The loop puts them in order, and so may
an agent of the user's. Each fires only what it finds out itself (a budget used up, an engine that
failed) and says whether the request goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import int32
from fsm_rollout.ask import ask
from fsm_rollout.codec import Codec
from fsm_rollout.engines.base import Engine, Generation, SamplingParams
from fsm_rollout.errors import ConfigError, EngineError, InvariantError
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.guards import has_room, needs_observation
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import CallResult, ToolSession
from fsm_rollout.turn import ToolCall, Turn

logger = logging.getLogger(__name__)


class Called(NamedTuple):
    """What came of a turn's calls."""

    messages: list[dict[str, Any]]
    """one for each call, in order: what to tell the model"""
    stops: bool
    """a tool asked to end the request once they are recorded"""


@dataclass(slots=True, kw_only=True)
class Hops:
    """What the hops of a request need: an engine, a codec, tools, the machine.

    Shared by all requests of a run; it holds no state of any of them.
    """

    engine: Engine
    codec: Codec
    tools: Toolset
    machine: Machine
    params: SamplingParams
    seed: int = 0
    run_id: str = field(default_factory=lambda: uuid4().hex[:12])
    """begins every session and request id: an engine may serve many runs. Empty: the sessions of
    the requests are given, and unique already"""

    def __post_init__(self) -> None:
        stop = self.codec.stop_ids.union(self.params.stop_token_ids)
        if wrong := sorted(i for i in stop if i >= self.codec.vocab_size):
            raise ConfigError(
                f"stop_token_ids {wrong} lie outside the vocabulary [0, {self.codec.vocab_size})"
            )
        self.params = msgspec.structs.replace(self.params, stop_token_ids=tuple(sorted(stop)))

    async def start(self, request: Request) -> None:
        """PENDING: give it its prompt, and ask for the first turn or go on where it stopped."""
        request.error, seq = "", request.seq
        if not request.sample.columns.length:
            ids = request.prompt_ids
            if ids is None:
                ids = await self._encoded(request, self.codec.prompt_async(request.prompt))
            if ids is None or request.seq != seq:
                return
            if not len(ids):
                return self.abort(request, StopReason.PROMPT_OVERFLOW, "the prompt has no tokens")
            try:
                request.set_prompt(ids)
            except InvariantError as error:
                return self.abort(request, StopReason.PROMPT_OVERFLOW, str(error))
        turns = request.sample.turns
        if needs_observation(request) and is_unread(turns[-1]):  # it was aborted before that
            seq = request.seq
            await self._read(request)
            if request.seq != seq:
                return
        if needs_observation(request):  # resumed while its tools ran: they run again
            turns[-1].reward = None
            if request.calls_before is not None:
                request.num_tool_calls, request.num_invalid_calls = request.calls_before
            self.machine.settle(Event.OBSERVE, request)
        else:
            self.machine.settle(Event.GENERATE, request)

    async def turn(self, request: Request) -> Turn | None:
        """GENERATING: ask for a model turn, record it and read it. None: it was the end."""
        seq, started = request.seq, time.monotonic()
        try:
            generation = await self._ask(request)
        except EngineError as error:
            if request.seq == seq:
                self._end(request, error.reason, str(error), final=error.final)
            return None
        if request.seq != seq:  # ended meanwhile: the reply is late
            return None
        ids, finish = generation.token_ids, str(generation.finish)
        if finish == "abort" and len(ids) and ids[-1] in self.codec.stop_ids:
            finish = "stop"  # the turn was over when the abort came
        try:
            self._append(request, generation, finish)
        except InvariantError as error:
            missing = error.code == StopReason.MISSING_LOG_PROBS
            reason = StopReason.MISSING_LOG_PROBS if missing else StopReason.BAD_REPLY
            self.abort(request, reason, str(error))
            return None
        _add(request, {f"engine/{name}": n for name, n in generation.counters.items()})
        turn = request.sample.turns[-1]
        turn.seconds += time.monotonic() - started
        if finish == "abort":
            if has_room(request):
                self.abort(request, StopReason.ENGINE_ABORT, "the engine aborted the turn")
                return None
            turn.finish = "length"  # and there was no token left to sample
        return await self.read(request)

    async def read(self, request: Request) -> Turn | None:
        """GENERATING, behind a whole turn that nobody read yet: parse it. None: it was the end."""
        seq, turn = request.seq, request.sample.turns[-1]
        await self._read(request)
        if request.seq != seq:  # ended meanwhile, or the codec failed
            return None
        if turn.finish != "stop":
            is_loop = turn.finish == "repetition"
            reason = StopReason.REPETITION if is_loop else StopReason.LENGTH
            self.machine.settle(Event.TRUNCATE, request, reason)
            return None
        return turn

    async def call(
        self, request: Request, session: ToolSession, calls: Sequence[ToolCall]
    ) -> Called | None:
        """TOOL_CALLING: run these calls, in order. None: it was the end.

        A call counts against max_tool_calls from its start, whatever becomes of it. What the calls
        said, and earned, is there as a whole or, behind a cancel, not at all.
        """
        seq, started = request.seq, time.monotonic()

        def count() -> None:
            if request.seq == seq:  # else it starts late, and what it says will be dropped
                request.num_tool_calls += 1

        allowed = request.limits.max_tool_calls - request.num_tool_calls
        try:
            results = await session.execute(calls, allowed=allowed, on_start=count)
        finally:
            if request.seq == seq:
                request.sample.non_generation_time += time.monotonic() - started
        if request.seq != seq:  # ended meanwhile: the results are late
            return None
        messages = [await self._tool_message(request, result, session) for result in results]
        if request.seq != seq:  # ended meanwhile, or the codec failed
            return None
        self._take(request, results)
        if request.num_invalid_calls > request.limits.max_invalid_calls:
            self.machine.settle(Event.COMPLETE, request, StopReason.INVALID_CALLS)
            return None
        return Called(messages, any(result.response.stop for result in results))

    async def observe(self, request: Request, messages: Sequence[dict[str, Any]]) -> bool:
        """TOOL_CALLING: record what the messages say, as far as it fits. False: it was the end."""
        seq, sample = request.seq, request.sample
        room = sample.room
        delta = self.codec.delta_async(sample.columns.last_id, messages, room=room)
        ids = await self._encoded(request, delta)
        if ids is None or request.seq != seq:
            return False
        sample.append_response_tokens(ids[:room], trainable=False)
        if room:
            sample.turns[-1].messages += tuple(messages)
        if len(ids) > room:
            self.machine.settle(Event.TRUNCATE, request, StopReason.OBSERVATION_OVERFLOW)
        return len(ids) <= room

    # -- parts -------------------------------------------------------------------------------------

    async def _ask(self, request: Request) -> Generation:
        sample = request.sample
        request.num_asked += 1
        session_id = f"{self.run_id}-{sample.session_id}".removeprefix("-")
        return await ask(
            self.engine,
            sample.columns,
            request.max_new_tokens,
            self._params(request),
            request_id=f"{session_id}.{request.attempt:04}.{request.num_asked:08}",
            session_id=session_id,
            media=sample.media,
            timeout_s=request.limits.turn_timeout_s,
            vocab_size=self.codec.vocab_size,
        )

    def _params(self, request: Request) -> SamplingParams:
        """The run's parameters with a seed of this turn's own."""
        turn = f"{self.seed}/{request.name}/{request.attempt}/{request.num_turns}"
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
            request.calls_before = request.num_tool_calls, request.num_invalid_calls

    def _take(self, request: Request, results: Sequence[CallResult]) -> None:
        request.num_invalid_calls += sum(result.is_invalid for result in results)
        for result in results:
            _add(request, result.response.metrics)
        rewards = [r.response.reward for r in results if r.response.reward is not None]
        if rewards:  # an agent may run the calls of a turn one by one, and rewrite in between
            turns = (t for s in reversed(request.samples) for t in reversed(s.turns))
            turn = next(turn for turn in turns if turn.kind == "model")
            turn.reward = sum(rewards) + (turn.reward or 0.0)

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

    def _codec_failed(self, request: Request, error: Exception, seq: int) -> None:
        how = f"failed: {describe(error)}"
        log_failure(logger, f"request {request.name}", "the codec", how, error)
        if request.seq == seq:  # else it is late
            request.final = True
            self.abort(request, StopReason.INVARIANT, f"the codec failed: {shown(error)}")

    async def _tool_message(
        self, request: Request, result: CallResult, session: ToolSession
    ) -> dict[str, Any]:
        text, call, seq = result.response.text, result.call, request.seq
        if result.response.images:  # text and images are shown together or not at all
            where, how = f"request {request.name}", "returned images, which no codec can encode yet"
            log_failure(logger, where, f"tool {call.name}", how, level=logging.WARNING)
            text = "the tool returned images, which cannot be shown here"
        cap = session.token_cap(call.name)
        if cap is not None:
            side = session.truncate_side(call.name)
            try:
                text = await self.codec.fit_async(text, cap, side=side)
            except Exception as error:
                self._codec_failed(request, error, seq)
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    def _end(self, request: Request, reason: StopReason, why: str, *, final: bool) -> None:
        if request.is_done:
            return
        if reason.status is Status.TRUNCATED:  # the engine met a limit that we did not know
            self.machine.settle(Event.TRUNCATE, request, reason)
        else:
            request.final = final
            self.abort(request, reason, why)

    def abort(self, request: Request, reason: StopReason, why: str) -> None:
        """End it as ABORTED for `reason`, if it is not so already."""
        if request.status is not Status.ABORTED:
            request.error = why
            self.machine.fire(Event.ABORT, request, reason)


def is_unread(turn: Turn) -> bool:
    """A whole model turn that nobody parsed: a cancel or an abort came between."""
    return turn.kind == "model" and not (turn.is_open or turn.messages or turn.calls)


def _add(request: Request, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        request.metrics[name] = request.metrics.get(name, 0) + value

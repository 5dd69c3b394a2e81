"""Ask: one engine call under a deadline; what comes of it is a Generation or an EngineError.

The loop calls it. The engine runs in a task of its own, so that one that hangs, swallows its
cancellation, raises CancelledError by itself or returns nonsense costs one attempt and no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import numpy as np

from fsm_rollout.arrays import int32
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Engine, Generation, SamplingParams
from fsm_rollout.engines.probe import fits
from fsm_rollout.errors import EngineError, InvariantError
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.tools.supervisor import Flight
from fsm_rollout.turn import FINISHES, Media

logger = logging.getLogger(__name__)

_NUMBERS = (int, float, np.integer, np.floating)


async def ask(
    engine: Engine,
    columns: Columns,
    max_new_tokens: int,
    params: SamplingParams,
    *,
    request_id: str,
    session_id: str,
    timeout_s: float,
    vocab_size: int,
    media: Sequence[Media] = (),
) -> Generation:
    """The engine's answer. Raises EngineError for every fault, CancelledError for our own cancel.

    An engine that does not end when it is cancelled is told to abort the request and left alone.
    """
    flight = Flight(
        lambda: engine.generate(
            columns,
            max_new_tokens,
            params,
            request_id=request_id,
            session_id=session_id,
            media=media or None,
        ),
        in_thread=False,
        where=f"request {request_id}",
        what="the engine",
        on_abandon=lambda: _tell_to_abort(engine, request_id),
    )
    try:
        is_done = await flight.settle(timeout_s)
    finally:
        await flight.stop()
    if not is_done:
        raise EngineError(
            f"no reply within turn_timeout_s ({timeout_s:g} s)", reason=StopReason.DEADLINE
        )
    reply, error = flight.task.result()
    if isinstance(error, asyncio.CancelledError):
        raise _failed("the engine raised CancelledError by itself")
    if error is not None:
        raise _engine_error(error, request_id) from error
    return _fitting(reply, max_new_tokens, params, vocab_size)


def _fitting(
    reply: object, max_new_tokens: int, params: SamplingParams, vocab_size: int
) -> Generation:
    """The reply, if it answers what was asked; `engines.base.checked` looked at the rest."""
    if not isinstance(reply, Generation):
        raise _failed(
            f"the engine returned {type(reply).__name__}, not a Generation: "
            "build it with fsm_rollout.engines.base.checked",
            final=True,
        )
    if not isinstance(reply.finish, str) or reply.finish not in FINISHES:
        raise _bad(f"the engine returned the unknown finish reason {shown(reply.finish)}")
    if not _are_numbers(reply.counters):
        raise _bad(
            f"the engine's counters must be finite numbers by name, got {shown(reply.counters)}"
        )
    try:
        ids = int32(reply.token_ids)
    except InvariantError as error:
        raise _bad(f"the engine returned no token ids: {error.message}") from error
    count = len(ids)
    if count > max_new_tokens:
        raise _bad(f"the engine returned {count} tokens, asked for at most {max_new_tokens}")
    if count and (largest := np.maximum.reduce(ids)) >= vocab_size:
        raise _bad(
            f"the engine returned token id {largest}; the tokenizer has {vocab_size} "
            "ids, the rest of the model's embedding is padding"
        )
    if reply.log_probs is not None and reply.log_prob_kind != "scaled":
        if not fits(reply.log_prob_kind, params):
            raise _failed(
                f"the engine's log-probs are {reply.log_prob_kind} ones, which are not "
                f"log_softmax(logits / temperature) at temperature {params.temperature}, top_p "
                f"{params.top_p}, top_k {params.top_k}; change the engine's log-prob mode or the "
                "sampling",
                final=True,
            )
        return msgspec.structs.replace(reply, log_prob_kind="scaled")  # here they are the same
    return reply


def _are_numbers(counters: object) -> bool:
    return isinstance(counters, Mapping) and all(
        isinstance(n, _NUMBERS) and -inf < n < inf for n in counters.values()
    )


def _engine_error(error: BaseException, request_id: str) -> EngineError:
    if isinstance(error, EngineError):
        reason = error.reason
        if isinstance(reason, StopReason) and reason.status is not Status.COMPLETED:
            return error
        return _failed(f"{error} (with {shown(reason)}, which is no reason of an engine)")
    how = f"raised {describe(error)}"
    log_failure(logger, f"request {request_id}", "the engine", how, error)
    return _failed(f"the engine raised {shown(error)}")


def _tell_to_abort(engine: Engine, request_id: str) -> None:
    Flight(
        lambda: engine.abort(request_id),
        in_thread=False,
        where=f"request {request_id}",
        what="an abort of the engine",
        on_abandon=lambda: None,
    )


def _failed(message: str, *, final: bool = False) -> EngineError:
    return EngineError(message, reason=StopReason.ENGINE_ERROR, final=final)


def _bad(message: str) -> EngineError:
    return EngineError(message, reason=StopReason.BAD_REPLY)

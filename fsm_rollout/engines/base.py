"""Engine: the protocol that the loop drives, and Generation, an answer that passed every check.

Three methods, so that a trainer's own client wraps in a few lines. An engine turns whatever goes
wrong into an EngineError that carries a StopReason; a bad reply never becomes data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import Floats, Ints, float32, int32
from fsm_rollout.columns import Columns
from fsm_rollout.errors import ConfigError, EngineError, InvariantError
from fsm_rollout.limits import StopReason
from fsm_rollout.replay import RoutedExperts, TopP, WeightVersion

Finish = Literal["stop", "length", "abort", "repetition"]
LogProbKind = Literal["scaled", "raw", "processed"]
_COLDEST = 0.01
"""vLLM raises what is lower to this, SGLang takes 1e-6 and less for greedy"""
_FINISHES = frozenset(get_args(Finish))


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the policy samples: one frozen value per run, budgets are computed beside it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off"""
    stop_token_ids: tuple[int, ...] = ()
    """ids that end a turn, and stay in it when sampled. Empty: the engine's own"""
    seed: int | None = None
    """derived by the loop from (run seed, index, attempt, turn); None: unseeded"""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "top_k"):
            value, kinds = getattr(self, name), int if name == "top_k" else int | float
            if not isinstance(value, kinds) or isinstance(value, bool):
                kind = "whole number" if name == "top_k" else "number"
                raise ConfigError(f"{name} must be a {kind}, got {value!r}")
        stops = self.stop_token_ids
        if not isinstance(stops, tuple) or not all(isinstance(i, int) and i >= 0 for i in stops):
            raise ConfigError(f"stop_token_ids must be a tuple of ids, got {stops!r}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be >= 0, got {self.temperature}")
        if 0 < self.temperature < _COLDEST:
            raise ConfigError(
                f"temperature {self.temperature} is below {_COLDEST}: servers sample with another "
                "one and don't say so; 0 is greedy"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be >= 0 (0: off), got {self.top_k}")


class Generation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An engine's checked answer: N new tokens. Build it with `checked`."""

    token_ids: npt.NDArray[np.int32]  # [N], stop token included
    log_probs: npt.NDArray[np.float32] | None  # [N], log_softmax(logits / temperature)
    finish: Finish
    matched: int | str | None = None
    """the stop token id or string"""
    weight_versions: tuple[tuple[WeightVersion, int], ...] = ()
    """runs (version, token count) that tile token_ids; empty: one run of unknown version"""
    prompt_tokens: int = 0
    log_prob_kind: LogProbKind = "scaled"
    engine_id: str = ""
    top_p: TopP | None = None
    """what top-p and top-k kept, for trainers that replay it"""
    routed_experts: RoutedExperts | None = None
    counters: Mapping[str, int | float] = {}
    """what else the engine counted, added up in the request's metrics: cached_tokens …"""


def checked(
    token_ids: Ints,
    log_probs: Floats | None,
    finish: str,
    *,
    max_new_tokens: int,
    vocab_size: int | None = None,
    log_probs_required: bool = True,
    matched: int | str | None = None,
    weight_versions: Sequence[tuple[WeightVersion, int]] = (),
    prompt_tokens: int = 0,
    log_prob_kind: LogProbKind = "scaled",
    engine_id: str = "",
    top_p: TopP | None = None,
    routed_experts: RoutedExperts | None = None,
    counters: Mapping[str, int | float] | None = None,
) -> Generation:
    """A Generation, or EngineError (missing_log_probs, bad_reply) when the reply fails a check.

    Checked: ids are int32 and in the vocabulary, at most `max_new_tokens` of them, one finite
    log-prob <= 0 for each, a known finish reason, version runs that tile the ids.
    """
    source = f"engine {engine_id or 'unnamed'}"
    try:
        ids = int32(token_ids)
        values = None if log_probs is None else float32(log_probs)
    except InvariantError as error:
        raise _bad(f"{source}: {error.message}") from error
    if log_probs_required and values is None:
        raise EngineError(
            f"{source} returned {len(ids)} tokens without log-probs; switch them on in the engine",
            reason=StopReason.MISSING_LOG_PROBS,
        )
    if values is not None and len(values) != len(ids):
        raise _bad(f"{source} returned {len(values)} log-probs for {len(ids)} tokens")
    if len(ids) > max_new_tokens:
        raise _bad(f"{source} returned {len(ids)} tokens, asked for at most {max_new_tokens}")
    if vocab_size is not None and len(ids) and np.maximum.reduce(ids) >= vocab_size:
        raise _bad(f"{source} returned token id {ids.max()}, the vocabulary has {vocab_size}")
    if finish not in _FINISHES:
        raise _bad(f"{source} returned the unknown finish reason {finish!r}")
    runs = tuple([(version, count) for version, count in weight_versions])
    counts = [count for _, count in runs]
    if runs and (sum(counts) != len(ids) or min(counts) < 0):
        raise _bad(f"{source} returned weight-version runs {runs} for {len(ids)} tokens")
    return Generation(
        token_ids=ids,
        log_probs=values,
        finish=finish,  # type: ignore[arg-type]
        matched=matched,
        weight_versions=runs,
        prompt_tokens=prompt_tokens,
        log_prob_kind=log_prob_kind,
        engine_id=engine_id,
        top_p=top_p,
        routed_experts=routed_experts,
        counters=counters or {},
    )


def _bad(message: str) -> EngineError:
    return EngineError(message, reason=StopReason.BAD_REPLY)


class Engine(Protocol):
    """What the loop needs from an inference engine.

    `generate` continues the ids in `columns` by at most `max_new_tokens` tokens and returns a
    Generation, or raises EngineError; cancelling it frees the engine's work. `abort(request_id)`
    makes a running `generate` return what it has, with finish "abort"; unknown ids are ignored.
    An engine that knows its model's end-of-turn ids may have them as `stop_token_ids`; one that can
    say whether it was closed, as `is_closed`: then no run starts with it.
    """

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation: ...

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...

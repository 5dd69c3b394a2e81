"""Probe: finds out by asking which log-prob an engine reports, before a run starts.

Behind one prompt the likeliest token is sampled cold and hot. Its log-prob changes with the
temperature: scaled. It stays what it is: raw. It is 0 both times, though the model hesitates: what
top-p left was renormalised, processed. Works through `Engine.generate` alone, so for any engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import msgspec
import numpy as np

from fsm_rollout.arrays import Ints, int32
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Engine, LogProbKind, SamplingParams
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason

_COLD, _HOT = 0.5, 2.0
_ONLY_THE_LIKELIEST = 1e-6
"""as top_p; SGLang takes top_k=1 for greedy and then ignores the temperature"""
_SAME = 0.1
"""nats within which two log-probs are one: in bfloat16 they differ by 0.05 from batch to batch"""
_APART = 0.3
"""nats beyond which they are two; in between nothing is said"""
_ZERO = 1e-3
"""nats within which one is 0; renormalised over a single token it is exactly that"""
_TIED = math.log(0.5)
"""what two tokens of equal logits share at every temperature, where no third is near"""
_PROMPTS, _LONGEST = 16, 256
"""prefixes tried at most, and tokens of the longest one"""
_ENOUGH, _LEAST = 3, 2
"""sights that tell the same: no more are looked for; with fewer in the end nothing is said"""

_BAD = (StopReason.BAD_REPLY, StopReason.MISSING_LOG_PROBS)
_TOO_MANY = 3
"""bad replies, after which the engine is not asked again"""


class Sight(msgspec.Struct, frozen=True):
    """Three tokens sampled behind the same prompt, each with its log-prob."""

    engine_id: str
    prompt_length: int
    cold: tuple[int, float]  # the likeliest token at temperature 0.5
    hot: tuple[int, float]  # the likeliest token at temperature 2
    free: tuple[int, float]  # any token at temperature 1

    @property
    def kind(self) -> LogProbKind | None:
        """What the three tell; None: nothing, because the model is certain or knows nothing."""
        (likeliest, cold), (again, hot), (drawn, free) = self.cold, self.hot, self.free
        if likeliest != again:  # two that are as likely as each other
            return None
        if cold - hot > _APART:
            return "scaled"
        if abs(cold - hot) > _SAME:
            return None
        if cold >= -_ZERO:
            return "processed" if free < -_APART else None
        if cold >= -_SAME or abs(cold - _TIED) < _SAME:
            return None
        return "raw" if drawn == likeliest or free < cold - _APART else None

    def __str__(self) -> str:
        (token, cold), (again, hot), (drawn, free) = self.cold, self.hot, self.free
        return (
            f"after {self.prompt_length} tokens: likeliest token {token} {cold:.3f} at temperature "
            f"{_COLD:g}, {again} {hot:.3f} at {_HOT:g}; drawn {drawn} {free:.3f} at 1: "
            f"{self.kind or 'cannot tell'}"
        )


class Finding(msgspec.Struct, frozen=True):
    """What kind of log-prob an engine reports, and the numbers that say so."""

    kind: LogProbKind | None
    """None: it could not be told"""
    sights: tuple[Sight, ...]

    def require(self, params: SamplingParams) -> LogProbKind:
        """The kind, if its log-probs are log_softmax(logits / temperature) under `params`.

        ConfigError otherwise, with the numbers and the remedy.
        """
        if self.kind and fits(self.kind, params):
            return self.kind
        named = next((sight.engine_id for sight in self.sights), "")
        engine = f"engine {named}" if named else "the engine"
        numbers = "".join(f"\n  {sight}" for sight in self.sights)
        if self.kind is None:
            raise ConfigError(
                f"it could not be told whether the log-probs of {engine} are scaled, raw or "
                f"processed ones. If you know, say it with log_prob_kind{numbers}"
            )
        raise ConfigError(
            f"{engine} reports {self.kind} log-probs: {_MEANING[self.kind]}. At temperature "
            f"{params.temperature:g}, top_p {params.top_p:g}, top_k {params.top_k} they are not "
            "log_softmax(logits / temperature), which trainers recompute. "
            f"{_REMEDY[self.kind]}{numbers}"
        )


_MEANING = {
    "raw": "log_softmax(logits), whatever the temperature",
    "processed": "renormalised over the tokens that top-p and top-k keep",
}
_REMEDY = {
    "raw": "Sample at temperature 1, or start vLLM with `--logprobs-mode processed_logprobs` and "
    "sample with top_p 1 and top_k 0, or SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
    "processed": "Sample with top_p 1 and top_k 0",
}


def fits(kind: LogProbKind, params: SamplingParams) -> bool:
    """Log-probs of this kind are scaled ones, log_softmax(logits / temperature), under `params`.

    At temperature 0 that is log_softmax(logits), for logits / 0 has none.
    """
    match kind:
        case "scaled":
            return True
        case "raw":
            return params.temperature in (0, 1)
        case "processed":
            return params.top_p == 1 and params.top_k == 0


async def probe(
    engine: Engine, ids: Ints, *, session_id: str = "probe", timeout_s: float = 300.0
) -> Finding:
    """What kind of log-prob `engine` reports, found behind prefixes of the prompt `ids`.

    9 to 48 calls of one token each, one after another, within `timeout_s`. Give the ids of real
    text: a model that is certain of each next token tells nothing. `session_id` picks the endpoint
    where an engine has several.

    Raises EngineError as the engine does, but of bad replies the third, and when it is not done in
    time; ConfigError when it gives no log-probs, or there are no ids.
    """
    sights: list[Sight] = []
    told: list[LogProbKind] = []
    num_bad = 0
    try:
        async with asyncio.timeout(timeout_s):
            for prompt in _prefixes(ids):
                try:
                    sight = await _look(engine, prompt, session_id)
                except EngineError as error:  # the loop, too, tries again after such a reply
                    num_bad += 1
                    if error.final or error.reason not in _BAD or num_bad == _TOO_MANY:
                        raise
                    continue
                if sight:
                    sights.append(sight)
                    if kind := sight.kind:
                        told.append(kind)
                if len(told) == _ENOUGH:
                    break
    except TimeoutError as error:
        raise EngineError(
            f"the engine was not probed within {timeout_s:g} s: it answered {len(sights)} prompts",
            reason=StopReason.DEADLINE,
        ) from error
    is_told = len(told) >= _LEAST and len(set(told)) == 1
    return Finding(told[0] if is_told else None, tuple(sights))


def _prefixes(ids: Ints) -> Iterator[Columns]:
    """Prefixes of the prompt, the longest first: behind a whole prompt a model is least certain."""
    prompt = int32(ids)[:_LONGEST]
    if not len(prompt):
        raise ConfigError("the probe needs the ids of a prompt, got none")
    prompt = np.resize(prompt, max(len(prompt), _PROMPTS))  # a short one is repeated
    for length in np.linspace(len(prompt), 1, _PROMPTS).astype(int):
        yield Columns(prompt[:length])


async def _look(engine: Engine, prompt: Columns, session_id: str) -> Sight | None:
    """None when the engine leaves the sampled token out, an end of turn perhaps."""
    seen: list[tuple[int, float]] = []
    for temperature, top_p in ((_COLD, _ONLY_THE_LIKELIEST), (_HOT, _ONLY_THE_LIKELIEST), (1, 1)):
        generation = await engine.generate(
            prompt,
            1,
            SamplingParams(temperature=temperature, top_p=top_p, seed=prompt.length),
            request_id=f"{session_id}.{prompt.length}.{len(seen)}",
            session_id=session_id,
        )
        if generation.log_probs is None:
            raise ConfigError("the engine gives no log-probs: switch them on in the engine")
        if not len(generation.token_ids):
            return None
        seen.append((int(generation.token_ids[0]), float(generation.log_probs[0])))
    cold, hot, free = seen
    return Sight(generation.engine_id, prompt.length, cold, hot, free)

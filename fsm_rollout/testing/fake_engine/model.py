"""FakeModel: a language model small enough to be exact; the fake engine's tokens come from it.

A Markov chain: the last id of the context chooses one of 64 distributions, with 64 candidates each;
all other ids of the vocabulary share one low logit. So temperature, top-p, top-k and min-p do what
they do in a server, every id has a log-prob, and anyone can recompute it. Log-probs come in the
three kinds that servers report. Sampling leaves out the little mass that lies on no candidate.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.engines.base import LogProbKind
from fsm_rollout.errors import ConfigError

NUM_STATES = 64
NUM_CANDIDATES = 64
Floats: TypeAlias = npt.NDArray[np.float64]
REST_MASS = 1e-4  # of all other ids together at temperature 1, relative to the candidates
FORCED_LEAD = 1.0  # of the logit of an id that a script wants: it is the likeliest
SEED_BITS = 8  # seeds are folded, so that a load test pays once for each run of ids


class Sampling(msgspec.Struct, frozen=True):
    """How one request samples; top_k 0 or below: off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


class Distribution(msgspec.Struct, frozen=True):
    """The next token in one state under one Sampling, as plain lists: this is the hot path."""

    ids: list[int]  # [C], the likeliest first
    log_probs: list[float]  # [C], of the model's kind
    kept: int
    """the filters keep the first so many candidates; sampling draws from them"""
    cumulative: list[float]  # [kept - 1], of the kept candidates' probabilities
    rest: float
    """the log-prob of each id that is no candidate"""
    ranks: dict[int, int]
    """position of each of `ids`"""

    def log_prob(self, token_id: int) -> float:
        """The log-prob of any id of the vocabulary."""
        at = self.ranks.get(token_id)
        return self.rest if at is None else self.log_probs[at]

    def top(self, count: int) -> list[tuple[int, float]]:
        """The likeliest ids that the filters keep."""
        return list(zip(self.ids[: min(count, self.kept)], self.log_probs, strict=False))


class Run:
    """What the model says from one state with one seed, sampled as far as anyone asked."""

    __slots__ = ("ids", "log_probs", "rng", "state")

    def __init__(self, state: int, rng: random.Random) -> None:
        self.state, self.rng = state, rng
        self.ids: list[int] = []
        self.log_probs: list[float] = []


class FakeModel:
    """Distributions, sampled ids and scores: functions of (last id, sampling, seed), nothing else.

    `ids` are those that it may sample (None: the whole vocabulary). An id of `stop_ids` is never
    sampled, since replies.py plans how long an answer gets.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        ids: Sequence[int] | None = None,
        stop_ids: Sequence[int] = (),
        log_prob_kind: LogProbKind = "scaled",
        seed: int = 0,
    ) -> None:
        pool = np.setdiff1d(np.arange(vocab_size) if ids is None else np.asarray(ids), stop_ids)
        if len(pool) < 2 or pool[0] < 0 or pool[-1] >= vocab_size:
            raise ConfigError(
                f"a fake model samples from 2 ids or more, all below vocab_size {vocab_size}; "
                f"it has {len(pool)} of them"
            )
        self.vocab_size = vocab_size
        self.log_prob_kind: LogProbKind = log_prob_kind
        self._seed = seed
        rng = np.random.default_rng(seed)
        count = min(NUM_CANDIDATES, len(pool))
        self._ids = [rng.choice(pool, count, replace=False).tolist() for _ in range(NUM_STATES)]
        self._logits = -np.sort(-rng.normal(0.0, 2.0, (NUM_STATES, count)))  # the largest first
        self.distribution = lru_cache(4096)(self._distribution)
        self._forced = lru_cache(65536)(self._forced_log_prob)
        self._run = lru_cache(4096)(self._new_run)

    def logits(self, state: int, forced: int | None = None) -> tuple[list[int], list[float], float]:
        """Candidates, their logits (the largest first), and the logit of each other id.

        `forced` is the likeliest of them, whatever it is without.
        """
        ids, values = self._ids[state], self._logits[state].tolist()
        others = max(self.vocab_size - len(ids), 1)
        rest = math.log(REST_MASS * math.fsum(map(math.exp, values)) / others)
        if forced is not None:
            rivals = [(i, value) for i, value in zip(ids, values, strict=True) if i != forced]
            ids = [forced, *(i for i, _ in rivals)]
            values = [values[0] + FORCED_LEAD, *(value for _, value in rivals)]
        return ids, values, rest

    def sample(
        self, last: int, count: int, sampling: Sampling, *, seed: int
    ) -> tuple[list[int], list[float]]:
        """`count` ids and their log-probs, after a context that ends with `last`."""
        mixed = (seed * 0x9E3779B1 & 0xFFFFFFFF) >> (32 - SEED_BITS)
        run = self._run(last % NUM_STATES, sampling, mixed)
        if len(run.ids) < count:
            self._extend(run, count, sampling)
        return run.ids[:count], run.log_probs[:count]

    def score(self, last: int, ids: Sequence[int], sampling: Sampling) -> list[float]:
        """The log-prob of each of `ids`, chosen by a script, after a context ending in `last`."""
        return [
            self._forced(before % NUM_STATES, token_id, sampling)
            for before, token_id in zip([last, *ids], ids, strict=False)
        ]

    def prefill(self, ids: Sequence[int]) -> list[float]:
        """What servers say of a prompt's ids from the second on: log_softmax(z), T left out."""
        return [
            self.distribution(before % NUM_STATES, Sampling(), "raw").log_prob(token_id)
            for before, token_id in pairwise(ids)
        ]

    def _distribution(
        self, state: int, sampling: Sampling, kind: LogProbKind | None = None
    ) -> Distribution:
        return distribution(
            *self.logits(state), self.vocab_size, sampling, kind or self.log_prob_kind
        )

    def _forced_log_prob(self, state: int, token_id: int, sampling: Sampling) -> float:
        found = distribution(
            *self.logits(state, token_id), self.vocab_size, sampling, self.log_prob_kind
        )
        value = found.log_prob(token_id)
        # A server reports what it sampled, so its filters kept it.
        return value if value > -math.inf else found.log_probs[found.kept - 1]

    def _new_run(self, state: int, sampling: Sampling, seed: int) -> Run:
        return Run(state, random.Random(f"{self._seed} {state} {seed}"))

    def _extend(self, run: Run, count: int, sampling: Sampling) -> None:
        state, draw = run.state, run.rng.random
        for _ in range(count - len(run.ids)):
            found = self.distribution(state, sampling)
            i = 0 if sampling.is_greedy else bisect(found.cumulative, draw())
            run.ids.append(found.ids[i])
            run.log_probs.append(found.log_probs[i])
            state = found.ids[i] % NUM_STATES
        run.state = state


def distribution(
    ids: list[int],
    logits: list[float],
    rest_logit: float,
    vocab_size: int,
    sampling: Sampling,
    kind: LogProbKind,
) -> Distribution:
    """Temperature, then min-p, top-k and top-p, on exact logits. Greedy leaves the temperature out,
    as servers do.
    """
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    others = vocab_size - len(ids)
    z = np.array([*logits, rest_logit])
    weight = np.array([1.0] * len(ids) + [float(others)])
    scaled = _log_softmax(z / temperature, weight)
    p = np.exp(scaled) * weight
    kept, rest_kept = _kept(p, others, sampling)
    mass = p[:kept].sum() + (p[-1] if rest_kept else 0.0)
    match kind:
        case "scaled":
            log_probs = scaled
        case "raw":
            log_probs = _log_softmax(z, weight)
        case "processed":
            log_probs = scaled - math.log(mass)
            log_probs[kept:-1] = -math.inf
            log_probs[-1] = log_probs[-1] if rest_kept else -math.inf
    cumulative = np.cumsum(p[:kept] / p[:kept].sum())
    return Distribution(
        ids=ids,
        log_probs=log_probs[:-1].tolist(),
        kept=kept,
        cumulative=cumulative[:-1].tolist(),
        rest=float(log_probs[-1]),
        ranks={token_id: i for i, token_id in enumerate(ids)},
    )


def _kept(p: Floats, others: int, sampling: Sampling) -> tuple[int, bool]:
    """How many candidates the filters keep, and whether they keep all other ids too."""
    if sampling.is_greedy:
        return len(p) - 1, True
    kept = int((p[:-1] >= sampling.min_p * p[0]).sum())
    rest_kept = others > 0 and p[-1] / others >= sampling.min_p * p[0]
    if sampling.top_k > 0:
        kept, rest_kept = min(kept, sampling.top_k), rest_kept and sampling.top_k >= len(p)
    if sampling.top_p < 1:
        mass = p[:kept].sum() + (p[-1] if rest_kept else 0.0)
        reached = np.cumsum(p[:kept]) / mass >= sampling.top_p - 1e-12
        if reached.any():
            kept, rest_kept = int(reached.argmax()) + 1, False
    return kept, rest_kept


def _log_softmax(z: Floats, weight: Floats) -> Floats:
    """Over a vocabulary in which the last entry stands for `weight[-1]` ids."""
    shifted = z - z.max()
    total: float = (np.exp(shifted) * weight).sum()
    return np.asarray(shifted - math.log(total))

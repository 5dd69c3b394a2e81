"""The fake engine's model: a true distribution, with log-probs of three kinds; and its prompts."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.base import LogProbKind
from fsm_rollout.testing.fake_engine.model import NUM_STATES, FakeModel, Sampling
from fsm_rollout.testing.fake_engine.prompt import Prompt

SIZE = 300
KINDS: list[LogProbKind] = ["scaled", "raw", "processed"]
MODELS = {
    kind: FakeModel(SIZE, stop_ids=[299], log_prob_kind=kind, seed=3)
    for kind in ("scaled", "raw", "processed")
}
states = st.integers(0, NUM_STATES - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, 64, 1000]),
    min_p=st.sampled_from([0.0, 0.05]),
)


def vocabulary(kind: LogProbKind, state: int, sampling: Sampling) -> list[float]:
    """The log-prob of every id."""
    found = MODELS[kind].distribution(state, sampling)
    return [found.log_prob(token_id) for token_id in range(SIZE)]


def recomputed(state: int, temperature: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """log_softmax(z / T) in the plainest way."""
    ids, logits, rest = MODELS["scaled"].logits(state)
    z = np.full(SIZE, rest)
    z[ids] = logits
    p = np.exp(z / temperature)
    return np.asarray(np.log(p / p.sum()))


@pytest.mark.parametrize("kind", KINDS)
@given(state=states, sampling=samplings)
def test_probabilities_sum_to_one(kind: LogProbKind, state: int, sampling: Sampling) -> None:
    values = vocabulary(kind, state, sampling)
    assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-9)


@given(state=states, sampling=samplings)
def test_scaled_knows_the_temperature_only_and_raw_not_even_that(
    state: int, sampling: Sampling
) -> None:
    scaled = vocabulary("scaled", state, sampling)
    assert scaled == pytest.approx(recomputed(state, sampling.temperature))
    assert vocabulary("raw", state, sampling) == pytest.approx(recomputed(state, 1.0))


@given(state=states, sampling=samplings)
def test_processed_is_scaled_over_what_the_filters_kept(state: int, sampling: Sampling) -> None:
    processed = np.array(vocabulary("processed", state, sampling))
    scaled = recomputed(state, sampling.temperature)
    is_kept = processed > -math.inf
    assert is_kept.any()
    mass = np.exp(scaled[is_kept]).sum()
    assert processed[is_kept] == pytest.approx(scaled[is_kept] - math.log(mass))
    assert scaled[is_kept].min() >= scaled[~is_kept].max(initial=-math.inf) - 1e-12
    if sampling.top_k > 0:
        assert is_kept.sum() <= sampling.top_k
    elif sampling.top_p < 1 and not sampling.min_p:
        assert mass >= sampling.top_p - 1e-9
        last = np.isclose(scaled, scaled[is_kept].min()) & is_kept  # equals are kept together
        assert mass - np.exp(scaled[last]).sum() < sampling.top_p, "not one id too many"
    elif not sampling.min_p:
        assert is_kept.all()


def test_kinds_agree_at_temperature_one_without_filters() -> None:
    scaled, raw, processed = (vocabulary(kind, 5, Sampling()) for kind in KINDS)
    assert scaled == pytest.approx(raw)
    assert scaled == pytest.approx(processed)


@given(last=st.integers(0, SIZE - 1), sampling=samplings, seed=st.integers(0, 99))
def test_what_is_sampled_was_kept_and_has_the_log_prob_of_its_context(
    last: int, sampling: Sampling, seed: int
) -> None:
    model = MODELS["scaled"]
    ids, log_probs = model.sample(last, 20, sampling, seed=seed)
    assert 299 not in ids
    for before, token_id, value in zip([last, *ids], ids, log_probs, strict=False):
        found = model.distribution(before % NUM_STATES, sampling)
        assert value == found.log_prob(token_id)
        assert token_id in found.ids[: found.kept]
    forced = model.score(last, ids, sampling)
    assert np.all(np.array(forced) >= np.array(log_probs)), "a script's ids are the likeliest"
    shorter, _ = model.sample(last, 7, sampling, seed=seed)
    assert shorter == ids[:7]


def test_samples_are_as_frequent_as_their_probabilities_say() -> None:
    model, sampling = MODELS["scaled"], Sampling(temperature=0.8, top_p=0.9)
    ids, _ = model.sample(7, 60_000, sampling, seed=0)
    after = Counter(b for a, b in pairwise(ids) if a % NUM_STATES == 11)
    total = after.total()
    assert total > 200
    found = model.distribution(11, sampling)
    kept = found.ids[: found.kept]
    mass = math.fsum(math.exp(found.log_prob(token_id)) for token_id in kept)
    for token_id in kept:
        p = math.exp(found.log_prob(token_id)) / mass
        assert abs(after[token_id] / total - p) < 5 * math.sqrt(p * (1 - p) / total) + 1e-3
    assert set(after) <= set(kept)


def test_greedy_takes_the_likeliest_and_leaves_the_temperature_out() -> None:
    for model in MODELS.values():
        ids, log_probs = model.sample(4, 5, Sampling(temperature=0.0), seed=1)
        best = model.logits(4)[0][0]
        assert ids[0] == best
        assert log_probs[0] == pytest.approx(recomputed(4, 1.0)[best])
        assert model.sample(4, 5, Sampling(temperature=0.0), seed=2)[0] == ids


@pytest.mark.parametrize("kind", KINDS)
@given(token_id=st.integers(0, SIZE - 1), last=st.integers(0, SIZE - 1), sampling=samplings)
def test_whatever_a_script_says_has_a_log_prob(
    kind: LogProbKind, token_id: int, last: int, sampling: Sampling
) -> None:
    [value] = MODELS[kind].score(last, [token_id], sampling)
    assert -60 < value <= 1e-9
    if kind != "processed":
        plain = Sampling(sampling.temperature)
        assert [value] == MODELS[kind].score(last, [token_id], plain), "filters don't matter"


@given(ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=40), gap=st.sampled_from(["", " "]))
def test_a_prompt_knows_its_ids_without_decoding_them(ids: list[int], gap: str) -> None:
    text = "[" + f",{gap}".join(map(str, ids)) + "]"
    prompt = Prompt(msgspec.Raw(text.encode()))
    assert (prompt.ids, prompt.num_ids) == (ids, len(ids))
    assert prompt.last(3) == ids[-3:]
    assert prompt.occurrences(ids[:1]) == (
        sum(1 for _ in ids if _ == ids[0]),
        ids[::-1].index(ids[0]),
    ) or any(a == b == ids[0] for a, b in pairwise(ids))
    assert prompt.occurrences([2**21]) == (0, len(ids))

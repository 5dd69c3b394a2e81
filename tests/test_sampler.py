"""The sampler: which tokens it may take, how often, and the log-prob it reports."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.sampler import sample

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 400, 10_000]),
)


def logits_of(seed: int, rows: int, vocabulary: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


def kept(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Top-k, then the fewest likeliest tokens that hold top-p of what it left: by a plain loop.

    A token that float32 sums may place on either side of the edge is in.
    """
    probs = (logits.double() / (params.temperature or 1)).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = order[: params.top_k or None] if params.temperature else order[:1]
    share, total, nucleus = 0.0, sum(probs[token] for token in order), set()
    for token in order:
        if share >= params.top_p * total + 1e-6:
            break
        nucleus.add(token)
        share += probs[token]
    return nucleus


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.sampled_from([2, 50, 700]),
    rows=st.lists(st.tuples(PARAMS, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=5),
)
def test_a_row_draws_from_its_own_nucleus_whatever_the_other_rows_ask_for(
    seed: int, vocabulary: int, rows: list[tuple[SamplingParams, float]]
) -> None:
    logits = logits_of(seed, len(rows), vocabulary, scale=0.5 if seed % 2 else 4.0)
    params, draws = [row[0] for row in rows], [row[1] for row in rows]
    tokens, log_probs = sample(logits, params, draws)
    for at, token in enumerate(tokens):
        assert token in kept(logits[at], params[at])
        expected = (logits[at] / (params[at].temperature or 1)).log_softmax(-1)[token]
        assert log_probs[at] == pytest.approx(float(expected), abs=1e-5)
        alone = sample(logits[at : at + 1], [params[at]], [draws[at]])
        assert alone[0] == [token]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.95),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.8),
    ],
)
def test_tokens_come_as_often_as_their_renormalised_probability(params: SamplingParams) -> None:
    logits = logits_of(3, 1, 40)
    draws = ((np.arange(20_000) + 0.5) / 20_000).tolist()  # evenly spread: no luck involved
    tokens, _ = sample(logits.expand(len(draws), -1), [params] * len(draws), draws)
    probs = (logits[0].double() / params.temperature).softmax(-1)
    nucleus = sorted(kept(logits[0], params))
    expected = torch.zeros_like(probs)
    expected[nucleus] = probs[nucleus] / probs[nucleus].sum()
    found = np.bincount(tokens, minlength=40) / len(draws)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


def test_temperature_zero_takes_the_likeliest_token_and_reports_it_at_temperature_one() -> None:
    logits = logits_of(5, 3, 600)
    tokens, log_probs = sample(logits, [SamplingParams(temperature=0)] * 3, [0.0, 0.5, 0.999])
    assert tokens == logits.argmax(-1).tolist()
    assert log_probs == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)


def test_a_nucleus_wider_than_the_first_guess_is_still_exact() -> None:
    logits = torch.zeros(1, 5_000)  # flat: top-p 0.9 keeps 4,500 tokens
    params = SamplingParams(top_p=0.9)
    last = sample(logits, [params], [1 - 1e-9])[0][0]
    taken = {sample(logits, [params], [draw / 100])[0][0] for draw in range(100)}
    assert len(taken) == 100
    assert last not in taken


def test_logits_that_are_not_numbers_give_a_log_prob_that_the_checks_refuse() -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0)]
    tokens, log_probs = sample(torch.full((3, 300), torch.nan), params, [0.5] * 3)
    assert all(0 <= token < 300 for token in tokens)
    assert np.isnan(log_probs).all()

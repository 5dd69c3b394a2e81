"""Sampler: one token per row, and its log-prob by the house's definition. The batcher calls it.

The log-prob is log_softmax(logits / temperature) over the full vocabulary in float32, taken before
top-k and top-p narrow the choice. At temperature 0 the most likely token is taken and its log-prob
is that of temperature 1, since logits / 0 has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsm_rollout.engines.base import SamplingParams

_NUCLEUS = 256  # candidates that hold almost every nucleus; sorting a whole vocabulary is slow


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Token ids and log-probs, [rows] each, from logits [rows, vocabulary] and draws in [0, 1).

    A row's token is a function of its own logits, params and draw alone. Top-k comes before top-p;
    top-p keeps the fewest likeliest tokens that hold at least that share of what top-k left.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
    log_probs = (logits.float() / temperature[:, None]).log_softmax(-1)
    draws = torch.tensor(uniform, dtype=torch.float64, device=device)[:, None]
    tokens = torch.empty_like(draws, dtype=torch.int64)
    narrow = [p.temperature == 0 or p.top_k > 0 or p.top_p < 1 for p in params]
    wide_rows = [row for row, is_narrow in enumerate(narrow) if not is_narrow]
    if wide_rows:
        tokens[wide_rows] = _draw(log_probs[wide_rows].exp(), draws[wide_rows])
    narrow_rows = [row for row, is_narrow in enumerate(narrow) if is_narrow]
    if narrow_rows:
        weights, ids = _nucleus(log_probs[narrow_rows].exp(), [params[row] for row in narrow_rows])
        tokens[narrow_rows] = ids.gather(1, _draw(weights, draws[narrow_rows]))
    chosen = log_probs.gather(1, tokens)
    return tokens[:, 0].tolist(), chosen[:, 0].tolist()


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Index of the first weight at which the running sum passes draw * total: [rows, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return index.clamp_(max=weights.shape[1] - 1)  # NaN sorts last; `checked` refuses its log-prob


def _nucleus(
    probs: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, likeliest first, what top-k and top-p drop set to 0; and their token ids."""
    device, vocabulary = probs.device, probs.shape[1]
    limits = [1 if p.temperature == 0 else p.top_k for p in params]
    top_k = torch.tensor([limit or vocabulary for limit in limits], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    size = min(max(_NUCLEUS, *limits), vocabulary)
    while True:
        weights, ids = probs.topk(size)
        weights = weights.masked_fill(torch.arange(size, device=device) >= top_k, 0)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        held = cumulative[:, -1:]
        share = top_p * torch.where(top_k < vocabulary, held, held.clamp(min=1))
        if size == vocabulary or bool((held >= share).all()):
            return weights.masked_fill(cumulative - weights >= share, 0), ids
        size = min(size * 16, vocabulary)

"""log_prob_gap: how far the trainer's log-probs are from those that were sampled with.

A loss that corrects for the difference trusts both. A gap that grows with the position is numerics,
one of a single turn is a template or a temperature, one of old versions is staleness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import HandOverError
from fsm_rollout.sample import Sample

_NUM_TURNS = 8
"""later turns count as this one"""
_POSITIONS = (0, 256, 1_024, 4_096, 16_384, 65_536)
"""where the buckets of response positions begin"""


def log_prob_gap(
    samples: Sequence[Sample], trainer_log_probs: Sequence[npt.ArrayLike]
) -> dict[str, float]:
    """How far the trainer's log-probs are from those that were sampled with, over trained tokens.

    `trainer_log_probs`: for each sample [R], of its response tokens; what stands on untrained ones
    is not looked at, nor are samples with `remove_sample` or without a trained token. With
    d = trainer - rollout: mean and max of |d|, kl_k1 = mean(-d) and kl_k3 = mean(exp(d) - 1 - d),
    two estimates of KL(rollout || trainer) (http://joschu.net/blog/kl-approx.html), and the
    importance ratio exp(d). Mean and max also by weight version, by model turn and by position in
    the response. Raises HandOverError, naming the sample, when a row does not fit it.
    """
    if len(samples) != len(trainer_log_probs):
        raise HandOverError(
            f"{len(trainer_log_probs)} rows of log-probs for {len(samples)} samples; give one each"
        )
    gaps: list[npt.NDArray[np.float64]] = []
    slices: dict[str, list[npt.NDArray[np.float64]]] = {}
    for sample, given in zip(samples, trainer_log_probs, strict=True):
        theirs, ours = _row(sample, given), sample.rollout_log_probs
        if ours is None:
            raise HandOverError(f"sample {sample.sample_id} has no log-probs to compare with")
        at = np.flatnonzero(sample.loss_mask)
        if sample.remove_sample or not len(at):
            continue
        gap = theirs[at] - ours[at].astype(np.float64)
        if not np.isfinite(gap).all():
            where = at[np.flatnonzero(~np.isfinite(gap))[0]]
            raise HandOverError(
                f"sample {sample.sample_id}: the trainer's log-prob of response token {where} is "
                f"{theirs[where]}"
            )
        gaps.append(gap)
        for name, labels in _labels(sample).items():
            for label in set(labels[at].tolist()):
                slices.setdefault(f"{name}/{label}", []).append(gap[labels[at] == label])
    if not gaps:
        return {}
    gap = np.concatenate(gaps)
    ratio = np.exp(gap)
    metrics: dict[str, float] = {
        "log_prob_gap/tokens": len(gap),
        "log_prob_gap/kl_k1": float(-gap.mean()),
        "log_prob_gap/kl_k3": float((ratio - 1 - gap).mean()),
        "log_prob_gap/ratio/mean": float(ratio.mean()),
        "log_prob_gap/ratio/min": float(ratio.min()),
        "log_prob_gap/ratio/max": float(ratio.max()),
    }
    for name, found in ({"": gaps} | slices).items():
        size = np.abs(np.concatenate(found))
        prefix = f"log_prob_gap/{name}/" if name else "log_prob_gap/"
        metrics |= {f"{prefix}mean": float(size.mean()), f"{prefix}max": float(size.max())}
    return metrics


def _row(sample: Sample, given: Any) -> npt.NDArray[np.float64]:
    if hasattr(given, "detach"):  # a torch tensor, of any dtype and device
        given = given.detach().float().cpu()
    row = np.asarray(given, np.float64)
    if row.shape != (sample.response_length,):
        raise HandOverError(
            f"sample {sample.sample_id}: log-probs of shape {row.shape}, it has "
            f"{sample.response_length} response tokens; give one value for each, without padding "
            "and prompt"
        )
    return row


def _labels(sample: Sample) -> dict[str, npt.NDArray[Any]]:
    """What each response token belongs to, [R], by kind of slice."""
    count = sample.response_length
    versions = np.full(count, "unknown", object)
    runs = [["unknown" if v is None else str(v)] * n for v, n in sample.weight_versions]
    versions[sample.sampled.astype(bool)] = [v for run in runs for v in run]
    turns = np.zeros(count, int)
    model = [turn for turn in sample.turns if turn.kind == "model"]
    for number, turn in enumerate(model, 1):
        turns[turn.start : turn.stop] = min(number, _NUM_TURNS)
    starts = np.asarray(_POSITIONS)
    positions = starts[np.searchsorted(starts, np.arange(count), side="right") - 1]
    return {"version": versions, "turn": turns, "position": positions}

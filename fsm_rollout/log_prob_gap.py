"""log_prob_gap: how far the trainer's log-probs are from those that were sampled with.

A loss that corrects for the difference trusts both. A gap that grows with the position is numerics,
one of a single turn is a template or a temperature, one of old versions is staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    versions: dict[str, int] = {}
    parts: list[Sequence[npt.NDArray[Any]]] = []
    for sample, given in zip(samples, trainer_log_probs, strict=True):
        gap, at = _gap(sample, given)
        if len(gap):
            parts.append((gap, *(label[at] for label in _labels(sample, versions))))
    if not parts:
        return {}
    gap, version, turn, position = map(np.concatenate, zip(*parts, strict=True))
    size, ratio = np.abs(gap), np.exp(gap)
    metrics: dict[str, float] = {
        "log_prob_gap/tokens": len(gap),
        "log_prob_gap/mean": float(size.mean()),
        "log_prob_gap/max": float(size.max()),
        "log_prob_gap/kl_k1": float(-gap.mean()),
        "log_prob_gap/kl_k3": float((ratio - 1 - gap).mean()),
        "log_prob_gap/ratio/mean": float(ratio.mean()),
        "log_prob_gap/ratio/min": float(ratio.min()),
        "log_prob_gap/ratio/max": float(ratio.max()),
    }
    for kind, labels, names in (
        ("version", version, list(versions)),
        ("turn", turn, range(_NUM_TURNS + 1)),
        ("position", position, _POSITIONS),
    ):
        counts, sums = np.bincount(labels), np.bincount(labels, weights=size)
        most = np.zeros(len(counts))
        np.maximum.at(most, labels, size)
        for label in np.flatnonzero(counts):
            name = f"log_prob_gap/{kind}/{names[label]}"
            metrics[f"{name}/mean"] = float(sums[label] / counts[label])
            metrics[f"{name}/max"] = float(most[label])
    return metrics


def _gap(sample: Sample, given: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    """trainer - rollout of the trained tokens, and where in the response they stand."""
    theirs, ours = _row(sample, given), sample.rollout_log_probs
    if ours is None:
        raise HandOverError(f"sample {sample.sample_id} has no log-probs to compare with")
    at = np.flatnonzero(sample.loss_mask) if not sample.remove_sample else np.zeros(0, np.intp)
    gap = theirs[at] - ours[at].astype(np.float64)
    if (wrong := np.flatnonzero(~np.isfinite(gap))).size:
        where = at[wrong[0]]
        raise HandOverError(
            f"sample {sample.sample_id}: the trainer's log-prob of response token {where} is "
            f"{theirs[where]}"
        )
    return gap, at


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


def _labels(sample: Sample, versions: dict[str, int]) -> Iterator[npt.NDArray[np.intp]]:
    """What each response token belongs to, [R]: a version of `versions`, a turn, a bucket."""
    count, runs = sample.response_length, sample.weight_versions
    codes = [
        versions.setdefault("unknown" if version is None else str(version), len(versions))
        for version, _ in runs
    ]
    version = np.zeros(count, np.intp)
    version[sample.sampled.astype(bool)] = np.repeat(codes, [n for _, n in runs])
    yield version
    number = np.zeros(count, np.intp)
    for n, turn in enumerate([turn for turn in sample.turns if turn.kind == "model"], 1):
        number[turn.start : turn.stop] = min(n, _NUM_TURNS)
    yield number
    yield np.searchsorted(_POSITIONS, np.arange(count), side="right") - 1

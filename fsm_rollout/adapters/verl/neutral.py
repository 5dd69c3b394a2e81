"""Neutral: what a row that does not count is said to have earned: its group must not notice.

verl's V0 compares a row with the others of its group, stand-ins and rows of which nothing is
trained included, and averages the columns of `reward_extra_info` over an evaluation. What does not
count gets the mean of what does.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def fill_neutral(
    batch: Mapping[str, torch.Tensor],
    columns: MutableMapping[str, npt.NDArray[Any]],
    groups: Sequence[Any] | npt.NDArray[Any],
    *,
    trains: bool = False,
) -> list[str]:
    """Give the rows that are `is_stand_in` rewards which shift no mean; the names of extra keys.

    Rewards: the mean of the group (of the batch, where the whole group has none). The group's
    standard deviation still counts one row too many. `reward_extra_info` becomes columns.
    `trains`: the same for rows of which nothing is trained; in an evaluation they count.
    """
    is_stand_in = columns["is_stand_in"].astype(bool)
    if trains:
        is_stand_in |= ~batch["response_mask"].bool().any(-1).numpy()
    scores = batch["rm_scores"].sum(-1).tolist() if "rm_scores" in batch else None
    infos = [info or {} for info in columns.get("reward_extra_info", [None] * len(is_stand_in))]
    keys = list(dict.fromkeys(key for info in infos for key in info))
    for key in keys:
        columns[key] = _filled([info.get(key) for info in infos], is_stand_in, groups)
    if scores is not None and is_stand_in.any():
        neutral = _filled(scores, is_stand_in, groups)
        for row in np.flatnonzero(is_stand_in).tolist():
            # where its reward stood, if it had one
            batch["rm_scores"][row, batch["rm_scores"][row].abs().argmax()] = float(neutral[row])
    return keys


def _filled(
    values: Sequence[Any],
    is_stand_in: npt.NDArray[np.bool_],
    groups: Sequence[Any] | npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """The values, with means of numbers where there is no outcome; None where there is no mean."""
    real = [value for value, skip in zip(values, is_stand_in, strict=True) if not skip]
    if not all(isinstance(value, Real | np.bool_) for value in real):
        array = np.empty(len(values), dtype=object)
        array[:] = [None if skip else v for v, skip in zip(values, is_stand_in, strict=True)]
        return array
    filled = np.array([0.0 if skip else v for v, skip in zip(values, is_stand_in, strict=True)])
    mean_of_all = float(np.mean(np.array(real, float))) if real else 0.0
    ids = np.unique(np.asarray(groups).astype(str), return_inverse=True)[1]
    for row in np.flatnonzero(is_stand_in):
        peers = filled[(ids == ids[row]) & ~is_stand_in]
        filled[row] = peers.mean() if len(peers) else mean_of_all
    return filled

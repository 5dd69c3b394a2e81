"""Advantages: what a trainer of your own needs beside the tensors, per rollout and never per row.

A rollout is a request: its samples share `rollout_id`, its group `group_index`. Prompts are never
compared, since two groups may have equal ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fsm_rollout.adapters.handover import require
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    import torch

EPSILON = 1e-6
"""beside the standard deviation, as in verl and slime: noise in equal rewards stays small"""


def group_advantages(samples: Iterable[Sample], *, scale: bool = True) -> list[float]:
    """GRPO's advantage of each sample: its reward less the mean of its group.

    The mean is over rollouts, whatever number of samples each has and in whatever order: the reward
    of a rollout is the request's own. Rollouts of which nothing is trained, and samples taken out
    by `remove_sample`, are in no mean and get 0.0; so does a rollout that is alone in its group.
    `scale` divides by the group's standard deviation (of n - 1, plus 1e-6), in which the reward
    that a sub-agent has of its own counts too; equal rewards give exactly 0.0.

    Raises HandOverError that names each sample that must not be trained on, or has no reward.
    """
    rows = require(samples, log_probs=False)
    usable = {sample.rollout_id for sample in rows if not sample.remove_sample}
    groups: dict[int, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in sorted(rows, key=lambda row: row.is_child):  # a request's own come first
        if sample.rollout_id in usable:
            groups[sample.group_index][sample.rollout_id].append(sample)
    baselines = {group: _baseline(list(rollouts.values())) for group, rollouts in groups.items()}
    advantages = []
    for sample in rows:
        mean, deviation = baselines.get(sample.group_index, (0.0, 0.0))
        away = 0.0 if sample.remove_sample else float(sample.reward or 0.0) - mean
        advantages.append(away / (deviation + EPSILON) if scale else away)
    return advantages


def baseline(rewards: list[float], others: Sequence[float] = ()) -> tuple[float, float]:
    """Mean of the rewards of a group and its standard deviation (of n - 1); of equal ones (r, 0.0).

    others: further rewards that will be compared with the mean. They are in the deviation alone:
    without them, one that differs in a group of equals would be divided by nothing but EPSILON.
    """
    mean, deviation = _moments(rewards)
    return mean, _moments([*rewards, *others])[1] if others else deviation


def _baseline(rollouts: list[list[Sample]]) -> tuple[float, float]:
    """Of a group. A rollout of which only sub-agents are here is compared, and in no mean."""
    only_children = all(samples[0].is_child for samples in rollouts)
    rewards: list[float] = []
    others: list[float] = []
    for first, *more in rollouts:
        known = first.reward or 0.0
        (others if first.is_child and not only_children else rewards).append(known)
        own = [sample.reward or 0.0 for sample in more if not sample.remove_sample]
        others += [reward for reward in own if reward != known]
    return baseline(rewards, others)


def _moments(rewards: list[float]) -> tuple[float, float]:
    if min(rewards) == max(rewards):  # a mean of equal floats may miss them by a rounding
        return rewards[0], 0.0
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def rollout_mask_sums(samples: Iterable[Sample]) -> list[int]:
    """For each sample: the trained tokens of all samples here with its `rollout_id`.

    The denominator of slime's loss: a rollout counts once, however many samples it has.
    """
    rows = list(samples)
    sums: dict[int, int] = defaultdict(int)
    for sample in rows:
        sums[sample.rollout_id] += 0 if sample.remove_sample else sample.columns.num_trained
    return [sums[sample.rollout_id] for sample in rows]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of `values` where `mask`, which may be broadcast, is 1; 0.0 when it is nowhere.

    What stands elsewhere has no part in it, nor a gradient, even when it is NaN.
    """
    used = (mask == 1).expand_as(values)
    return values.masked_fill(~used, 0.0).sum() / used.sum().clamp(min=1)


def importance_ratios(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """exp(log_probs - rollout_log_probs) where `mask` is 1, and exactly 1.0 elsewhere."""
    return (log_probs - rollout_log_probs).masked_fill(mask != 1, 0.0).exp()

"""Rewards in slime's flow: what a rollout has scored itself, and GRPO's baseline per group.

slime's own normalisation reshapes the rewards by a fixed group size, and takes all samples for one
group when a rollout has become several; here the group is `group_index`, the member a rollout.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fsm_rollout.adapters.advantages import baseline, scaled
from fsm_rollout.adapters.slime.config import KEY
from fsm_rollout.adapters.slime.record import fail, fault_of, is_status, reward_value
from fsm_rollout.errors import HandOverError

logger = logging.getLogger(__name__)

_BY_GROUP = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})


async def reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """The reward that the rollout gave to a sample, or to each of several: --custom-rm-path.

    Raises HandOverError for a finished sample that has none: None is not 0.
    """
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    if sample.reward is None and not is_status(sample, "aborted"):
        raise HandOverError(
            f"sample {sample.index} has no reward: give the rollout one (`reward` of fsm.yaml, or "
            "a tool's calc_reward), or slime a reward model of yours (--custom-rm-path, --rm-type)"
        )
    return sample.reward


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """(raw, normalised) rewards, one per sample: --custom-reward-post-process-path.

    Mean and, if slime's flags want it, deviation are over the rollouts of a group, whatever number
    of samples each has; a rollout's reward is the mean of its samples'. Samples that must not be
    trained on are told in the log, taken out of the step (`remove_sample`) and of every mean;
    their normalised reward is 0.0. Raises HandOverError when none is left.
    """
    used = [_is_used(args, sample) for sample in samples]
    if samples and not any(used):
        raise HandOverError(
            f"none of {len(samples)} samples can be trained on; the first one, sample "
            f"{samples[0].index}: {_why(samples[0])}"
        )
    raw = [reward_value(sample, args) or 0.0 for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _BY_GROUP or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    groups: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, (sample, value) in enumerate(zip(samples, raw, strict=True)):
        if used[number]:
            alone = ("alone", number)  # without a rollout_id a sample is a rollout
            rollout = alone if sample.rollout_id is None else sample.rollout_id
            groups[sample.group_index][rollout].append(value)
    baselines = {
        group: baseline([math.fsum(values) / len(values) for values in rollouts.values()])
        for group, rollouts in groups.items()
    }
    scale = estimator != "reinforce_plus_plus_baseline"
    scale = scale and getattr(args, "grpo_std_normalization", True)
    normalised = []
    for sample, value, is_used in zip(samples, raw, used, strict=True):
        mean, deviation = baselines.get(sample.group_index, (0.0, 0.0))
        away = value - mean if is_used else 0.0
        size = len(groups.get(sample.group_index, ()))
        normalised.append(scaled(away, deviation, size) if scale else away)
    return raw, normalised


def _is_used(args: Any, sample: Any) -> bool:
    """Whether it is trained; one that must not be is made one that harms nothing."""
    if sample.remove_sample:
        return False
    why = fault_of(sample)
    if not why and reward_value(sample, args) is None:
        why = f"its reward is {sample.reward!r}, which is no finite number"
    if why:
        logger.warning("sample %s is not trained: %s", sample.index, why)
        fail(sample, why, args)
    return not why


def _why(sample: Any) -> str:
    told = (sample.metadata or {}).get(KEY, {})
    return told.get("error") or "it was removed, and nothing says why"

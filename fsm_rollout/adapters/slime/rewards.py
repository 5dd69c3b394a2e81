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

from fsm_rollout.adapters.advantages import EPSILON, baseline
from fsm_rollout.adapters.handover import log_left_out
from fsm_rollout.adapters.slime.config import KEY, config_of
from fsm_rollout.adapters.slime.record import fail, fault_of, is_status, reward_value
from fsm_rollout.errors import HandOverError
from fsm_rollout.tools.registry import Toolset

logger = logging.getLogger(__name__)

NO_REWARD = "its tools gave no reward, which is not 0"
_BY_GROUP = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})


async def reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """The reward that the rollout gave to a sample, or to each of several: --custom-rm-path.

    None is not 0: a finished sample that has none is FAILED. Raises HandOverError when no sample of
    the run could have one.
    """
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    if sample.reward is None and not is_status(sample, "aborted"):
        if not can_score(args):
            raise HandOverError(
                f"sample {sample.index} has no reward: give the rollout one (`reward` of fsm.yaml, "
                "or a tool's calc_reward), or slime a reward model of yours (--custom-rm-path, "
                "--rm-type)"
            )
        _take_out(args, sample, NO_REWARD)
    return sample.reward


def can_score(args: Any) -> bool:
    """The rollouts of this run can have rewards of their own."""
    config = config_of(args)
    tools = Toolset(config.tools)
    return config.reward is not None or any("calc_reward" in tools[t].own_hooks for t in tools)


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """(raw, normalised) rewards, one per sample: --custom-reward-post-process-path.

    Mean and, if slime's flags want it, deviation are over the rollouts of a group, whatever number
    of samples each has; a rollout's reward is the mean of its samples'. Samples that must not be
    trained on are told in the log, taken out of the step (`remove_sample`) and of every mean;
    their normalised reward is 0.0. Raises HandOverError when none is left.
    """
    estimator = getattr(args, "advantage_estimator", None)
    by_group = estimator in _BY_GROUP and getattr(args, "rewards_normalization", True)
    used = [_is_used(args, sample, by_group=by_group) for sample in samples]
    used = _alike(args, samples, used)
    if samples and not any(used):
        raise HandOverError(
            f"none of {len(samples)} samples can be trained on; the first one, sample "
            f"{samples[0].index}: {_why(samples[0])}"
        )
    raw = [reward_value(sample, args) or 0.0 for sample in samples]
    if not by_group:
        return raw, list(raw)
    groups: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, (sample, value) in enumerate(zip(samples, raw, strict=True)):
        if used[number]:
            alone = ("alone", number)  # without a rollout_id a sample is a rollout
            rollout = alone if sample.rollout_id is None else sample.rollout_id
            groups[sample.group_index][rollout].append(value)
    baselines = {group: _baseline(list(rollouts.values())) for group, rollouts in groups.items()}
    scale = estimator != "reinforce_plus_plus_baseline"
    scale = scale and getattr(args, "grpo_std_normalization", True)
    normalised = []
    for sample, value, is_used in zip(samples, raw, used, strict=True):
        mean, deviation = baselines.get(sample.group_index, (0.0, 0.0))
        away = value - mean if is_used else 0.0
        normalised.append(away / (deviation + EPSILON) if scale else away)
    return raw, normalised


def take_out_unscored(args: Any, samples: Sequence[Any]) -> None:
    """Samples without a reward, before slime's metrics round it; those of PPO look at none.

    What is no number is left alone: a distillation keeps the teacher's answer there.
    """
    rounds = getattr(args, "advantage_estimator", None) != "ppo"
    for sample in samples:
        if is_status(sample, "aborted", "pending"):
            _take_out(args, sample, fault_of(sample, args))
        elif rounds and sample.reward is None:
            _take_out(args, sample, "it has no reward, which is not 0")


def _baseline(rollouts: list[list[float]]) -> tuple[float, float]:
    """Of a group with these rewards of each rollout's samples."""
    uneven = [values for values in rollouts if min(values) != max(values)]
    means = [math.fsum(v) / len(v) if v in uneven else v[0] for v in rollouts]
    return baseline(means, [value for values in uneven for value in values])


def _is_used(args: Any, sample: Any, *, by_group: bool) -> bool:
    """Whether it is trained; one that must not be is made one that harms nothing."""
    why = fault_of(sample, args)
    if not why and sample.loss_mask is not None and not any(sample.loss_mask):
        return False  # nothing is trained, so nothing is compared
    if not why and not sample.remove_sample:
        if reward_value(sample, args) is None:
            why = f"its reward is {sample.reward!r}, which is no finite number"
        elif by_group and sample.group_index is None:
            why = "it has no group_index, and its reward is compared with those of its group"
    if why:
        _take_out(args, sample, why)
    return not why and not sample.remove_sample


def _alike(args: Any, samples: Sequence[Any], used: Sequence[bool]) -> list[bool]:
    """`used` without samples that lack a column of others: slime goes by the first sample alone."""
    used = list(used)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        has = [getattr(sample, name, None) is not None for sample in samples]
        wanted = any(h and u for h, u in zip(has, used, strict=True))
        for number, sample in enumerate(samples):
            if wanted and not has[number]:
                if used[number]:
                    _take_out(args, sample, f"it has no {name}, and others in the batch have")
                    used[number] = False
                setattr(sample, name, [0.0] * sample.response_length)
            elif has[number] and not wanted:
                setattr(sample, name, None)
    return used


def _take_out(args: Any, sample: Any, why: str) -> None:
    log_left_out(logger, sample.index, "is not trained", why)
    fail(sample, why, args)


def _why(sample: Any) -> str:
    told = (sample.metadata or {}).get(KEY, {})
    return told.get("error") or "it was removed, and nothing says why"

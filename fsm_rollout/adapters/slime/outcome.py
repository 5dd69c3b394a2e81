"""What a played request becomes: the trainer's sample or samples, and how they stand.

player.py asks when a request is over, and nothing changes afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.slime import record
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample

logger = logging.getLogger(__name__)

REWARD = "fsm_rollout.adapters.slime.reward"
ASKED_FOR = frozenset(
    {StopReason.ENGINE_ABORT, StopReason.PAUSED, StopReason.CANCELLED, StopReason.STALE}
)
"""aborts after which slime plays the sample again; all others are a failure of this sample"""


def outcome(args: Any, sample: Any, request: Request, *, has_reward: bool, evaluation: bool) -> Any:
    """The trainer's `sample` with what came of `request`; a list when it has several rows.

    `has_reward`: the YAML names a reward function, so there must be one. Otherwise what the tools
    say counts, unless slime has a reward model; where they say nothing, slime is left to.
    An evaluation is never played again, so its ABORTED is FAILED.
    """
    is_aborted = request.status is Status.ABORTED
    if is_aborted and (evaluation or request.stop_reason not in ASKED_FOR):
        return failed(sample, f"{request.stop_reason}: {request.error}", args, request)
    rows, scores = [request.sample], False
    if not is_aborted:
        rows, refused = sift(request.rows, rewards=has_reward)
        if not rows:
            return failed(sample, str(refused[0]), args, request)
        for no in refused:
            logger.warning("sample %s: one of its samples is left out: %s", sample.index, no)
        scores = has_reward or _scores_itself(args, sample)
        if sample.rollout_id is None:
            sample.rollout_id = request.index
    written = [sample, *(record.sibling_of(sample) for _ in rows[1:])]
    try:
        for one, row in zip(written, rows, strict=True):
            reward = _reward(args, row, evaluation=evaluation) if scores else None
            record.write(one, row, request, args, reward=reward)
    except ValueError as error:  # the trainer's Sample does not take it
        return failed(sample, f"{type(sample).__name__} refused it: {error}", args, request)
    return sample if len(written) == 1 else written


def failed(sample: Any, why: str, args: Any, request: Request | None = None) -> Any:
    """The sample, FAILED and told in the log."""
    logger.warning("sample %s FAILED: %s", sample.index, why)
    record.fail(sample, why, args, request)
    return sample


def _scores_itself(args: Any, sample: Any) -> bool:
    """The tools score: neither the sample nor slime's flags name a reward model but ours."""
    path = getattr(sample, "custom_rm_path", None) or getattr(args, "custom_rm_path", None)
    if path is not None:
        return bool(path == REWARD)
    named = getattr(sample, "reward_spec", None), getattr(args, "rm_type", None)
    return not any(named) and not (sample.metadata or {}).get("rm_type")


def _reward(args: Any, row: Sample, *, evaluation: bool) -> Any:
    """The number, or with --reward-key the mapping that slime looks it up in."""
    key = getattr(args, "reward_key", None)
    if evaluation:
        key = getattr(args, "eval_reward_key", None) or key
    return {**row.reward_parts, key: row.reward} if key and row.reward is not None else row.reward

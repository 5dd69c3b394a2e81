"""What a played request becomes: the trainer's sample or samples, and how they stand.

player.py asks when a request is over, and nothing changes afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

from fsm_rollout.adapters.handover import log_left_out, sift
from fsm_rollout.adapters.slime import record
from fsm_rollout.adapters.slime.rewards import NO_REWARD, can_score
from fsm_rollout.failures import shown
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
        why = f"{request.stop_reason}: {request.error}"
        return failed(sample, why, args, request, evaluation=evaluation)
    rows, scores = [request.sample], False
    if not is_aborted:
        rows, refused = sift(request.rows, rewards=has_reward)
        if not rows:
            return failed(sample, str(refused[0]), args, request, evaluation=evaluation)
        for no in refused:
            log_left_out(logger, sample.index, "has one more that is left out", no.why)
        scores = has_reward or _scores_itself(args, sample)
        if evaluation and scores and can_score(args) and any(row.reward is None for row in rows):
            return failed(sample, NO_REWARD, args, request, evaluation=True)  # slime sums them up
        if sample.rollout_id is None:
            sample.rollout_id = request.index
    written = [sample, *(record.sibling_of(sample) for _ in rows[1:])]
    try:
        for one, row in zip(written, rows, strict=True):
            reward = _reward(args, row, evaluation=evaluation) if scores else None
            record.write(one, row, request, args, reward=reward)
    except Exception as error:  # the trainer's Sample does not take it
        why = f"{type(sample).__name__} refused it: {shown(error)}"
        return failed(sample, why, args, request, evaluation=evaluation)
    return sample if len(written) == 1 else written


def failed(
    sample: Any, why: str, args: Any, request: Request | None = None, *, evaluation: bool
) -> Any:
    """The sample, FAILED and told in the log."""
    log_left_out(logger, sample.index, "FAILED", why)
    record.fail(sample, why, args, request, evaluation=evaluation)
    return sample


def _scores_itself(args: Any, sample: Any) -> bool:
    """The tools score: neither the sample nor slime's flags name a reward model but ours."""
    path = getattr(sample, "custom_rm_path", None) or getattr(args, "custom_rm_path", None)
    if path is not None:
        return bool(path == REWARD)
    named = getattr(sample, "reward_spec", None), getattr(args, "rm_type", None)
    return not any(named) and not (sample.metadata or {}).get("rm_type")


def _reward(args: Any, row: Sample, *, evaluation: bool) -> Any:
    if row.reward is None:
        return None
    return record.keyed(args, row.reward, row.reward_parts, evaluation=evaluation)

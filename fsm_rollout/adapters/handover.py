"""Hand-over: which samples may leave for a trainer, and why the others may not.

Every adapter asks here, because trainers accept silently what would train on the wrong tokens. A
bad sample costs itself: `sift` sets it aside. `require` is for callers that need them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import ConfigError, HandOverError
from fsm_rollout.failures import log_failure
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Status
from fsm_rollout.sample import Sample


class Refused(NamedTuple):
    """A sample that must not be trained on."""

    sample: Sample
    why: str

    def __str__(self) -> str:
        return f"sample {self.sample.sample_id or self.sample.index}: {self.why}"


def log_left_out(
    logger: logging.Logger,
    sample: object,
    how: str,
    why: str,
    error: Exception | None = None,
    *,
    level: int = logging.WARNING,
) -> None:
    """Say that a trainer does not get `sample`, its name. Reasons that begin alike are one."""
    place = "" if error is not None else why.partition(":")[0]
    how = f"{how}: {why}"
    log_failure(logger, f"sample {sample}", "the sample", how, error, level=level, place=place)


def sift(
    samples: Iterable[Sample], *, rewards: bool = True, log_probs: bool = True
) -> tuple[list[Sample], list[Refused]]:
    """The samples that a trainer may have, in order, and those that it may not.

    Refused are samples that are ABORTED or have not ended, that break an invariant, that came
    before (by `sample_id`), and, unless `rewards` or `log_probs` is False, that have none. Raises
    ConfigError for what holds no samples: groups or requests.
    """
    if not isinstance(samples, Iterable):
        raise _no_sample(samples)
    good: list[Sample] = []
    refused: list[Refused] = []
    seen: set[str | int] = set()
    for sample in samples:
        if not isinstance(sample, Sample):
            raise _no_sample(sample)
        why = _why_not(sample, rewards=rewards, log_probs=log_probs)
        key = sample.sample_id or id(sample)
        if not why and key in seen:
            why = "its sample_id came before: a sample is trained once"
        if why:
            refused.append(Refused(sample, why))
        else:
            seen.add(key)
            good.append(sample)
    return good, refused


def require(
    samples: Iterable[Sample], *, rewards: bool = True, log_probs: bool = True
) -> list[Sample]:
    """All samples. Raises HandOverError that names each one that `sift` refuses."""
    good, refused = sift(samples, rewards=rewards, log_probs=log_probs)
    if refused:
        shown = "; ".join(map(str, refused[:3]))
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise HandOverError(
            f"{len(refused)} of {len(good) + len(refused)} samples must not be trained on: "
            f"{shown}{more}. Set them aside with fsm_rollout.adapters.handover.sift"
        )
    return good


def trained(sample: Sample) -> npt.NDArray[np.uint8]:
    """uint8 [R]: the loss mask as a trainer must have it, all 0 when `remove_sample` says so."""
    mask = sample.loss_mask
    return np.zeros_like(mask) if sample.remove_sample else mask


def _no_sample(given: object) -> ConfigError:
    return ConfigError(
        f"samples must be a list of Sample, got {type(given).__name__}; "
        "fsm_rollout.request.samples_of(groups) gives those of the groups of `generate`"
    )


def _why_not(sample: Sample, *, rewards: bool, log_probs: bool) -> str:
    """Empty: it may go."""
    if sample.status is Status.ABORTED or not sample.status.is_terminal:
        return f"it is {sample.status} ({sample.stop_reason or 'no outcome'})"
    if not sample.is_sealed:
        return "it is not sealed: its reward may still change"
    if found := violations(sample, at_rest=True):
        return str(found[0])
    if log_probs and sample.rollout_log_probs is None:
        return "it has no log-probs: the run was sampled without (log_probs=False)"
    if rewards and sample.reward is None:
        return (
            "its reward is None, which is not 0: give the rollout a reward, or a tool calc_reward"
        )
    return ""

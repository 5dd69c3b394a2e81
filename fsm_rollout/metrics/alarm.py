"""Alarm: says when too large a part of a batch was aborted for one reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from fsm_rollout.errors import ConfigError, RolloutError, hint
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.metrics.batch import metrics_of
from fsm_rollout.metrics.facts import Facts
from fsm_rollout.request import Group, Request

logger = logging.getLogger(__name__)


class AlarmError(RolloutError):
    """More requests were aborted for one reason than an `Alarm(..., raises=True)` allows."""


class Alarm:
    """Says loudly when too large a part of a batch was aborted for one reason.

        alarm = Alarm({"engine_error": 0.05}, default=0.2)
        metrics = alarm.watch(requests)  # metrics_of(requests), and the alarm

    Adds `rollout/abort/alarm`, the number of reasons whose rate is above its threshold, and logs an
    error; `raises`: an AlarmError too. Raises ConfigError for what is no reason of an abort.
    """

    def __init__(
        self, thresholds: Mapping[str, float] | None = None, *, default: float, raises: bool = False
    ) -> None:
        known = [str(reason) for reason in StopReason if reason.status is Status.ABORTED]
        for reason in thresholds or {}:
            if reason not in known:
                raise ConfigError(f"no request is aborted for {reason!r}; {hint(reason, known)}")
        self._thresholds = dict.fromkeys(known, default) | dict(thresholds or {})
        for reason, most in self._thresholds.items():
            if not 0 <= most <= 1:
                raise ConfigError(f"the abort rate of {reason!r} must be within [0, 1], got {most}")
        self._raises = raises

    def __call__(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric to add to those of `metrics_of`, for callers that have these already."""
        said = []
        for reason, most in self._thresholds.items():
            rate = metrics.get(f"rollout/abort_rate/{reason}", 0.0)
            if rate > most:
                count = metrics.get(f"rollout/abort/{reason}", 0.0)
                said.append(
                    f"{rate:.1%} of {metrics.get('rollout/requests', 0.0):.0f} requests "
                    f"({count:.0f}) were aborted for {reason}, allowed are {most:.1%}"
                )
        if said:
            text = f"abort rate alarm: {'; '.join(said)}. `Request.error` says what went wrong"
            logger.error("%s", text)
            if self._raises:
                raise AlarmError(text)
        return {"rollout/abort/alarm": len(said)}

    def watch(
        self, played: Iterable[Request | Group | Facts], *, seconds: float | None = None
    ) -> dict[str, float]:
        """What `metrics_of` says of a batch, and the alarm; what adapters report of theirs."""
        metrics = metrics_of(played, seconds=seconds)
        return metrics | self(metrics) if metrics else {}

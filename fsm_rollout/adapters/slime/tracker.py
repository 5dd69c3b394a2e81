"""What the rollouts of a step were like, in the trainer's tracker, whatever function played them.

    --custom-rollout-log-function-path       fsm_rollout.adapters.slime.log_rollout_data
    --custom-eval-rollout-log-function-path  fsm_rollout.adapters.slime.log_eval_rollout_data

player.py tells of each request that ended, and its facts are kept until slime calls these two,
before it logs what it finds in the samples. `generate_rollout` reports its own requests itself, so
there is nothing left to add.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from fsm_rollout.adapters.slime.config import config_of
from fsm_rollout.adapters.slime.rewards import take_out_unscored
from fsm_rollout.adapters.slime.trainer import part_of
from fsm_rollout.metrics import Alarm, Facts, facts_of
from fsm_rollout.request import Request

PLAYED: ContextVar[list[Facts] | None] = ContextVar("PLAYED", default=None)
"""where the facts of requests that ended are put, by who makes metrics of them itself"""
_HOOKS = {
    False: ("custom_rollout_log_function_path", "fsm_rollout.adapters.slime.log_rollout_data"),
    True: (
        "custom_eval_rollout_log_function_path",
        "fsm_rollout.adapters.slime.log_eval_rollout_data",
    ),
}
_WAITING: dict[bool, deque[Facts]] = {False: deque(), True: deque()}
"""requests that no hook has reported yet, by whether they were of an evaluation"""


def tell(args: Any, request: Request, *, evaluation: bool) -> None:
    """A request ended. It is kept only where a hook will ask for it."""
    flag, hook = _HOOKS[evaluation]
    if (played := PLAYED.get()) is not None:
        played.append(facts_of(request))
    elif getattr(args, flag, None) == hook:
        _WAITING[evaluation].append(facts_of(request))


def alarm_of(args: Any) -> Alarm:
    """The alarm that the YAML asks for."""
    return Alarm(default=config_of(args).max_abort_rate)


def of_evaluation(args: Any, played: Iterable[Facts]) -> dict[str, float]:
    """The metrics of an evaluation, under names of slime's evaluations."""
    return {f"eval/{name}": value for name, value in alarm_of(args).watch(played).items()}


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """All that ended since the last step, what filters dropped too. False: slime logs its own.

    Samples without a reward are taken out here already: None would end the step in slime's metrics.
    """
    take_out_unscored(args, samples)
    found = alarm_of(args).watch(_taken(evaluation=False), seconds=rollout_time)
    _log(rollout_id, args, found, rollout_extra_metrics, "rollout/step")
    return False


def log_eval_rollout_data(
    rollout_id: int, args: Any, data: Any, extra_metrics: dict[str, Any] | None
) -> bool:
    """All that ended since the last evaluation, of every data set. False: slime logs its own."""
    found = of_evaluation(args, _taken(evaluation=True))
    _log(rollout_id, args, found, extra_metrics, "eval/step")
    return False


def _taken(*, evaluation: bool) -> list[Facts]:
    waiting, taken = _WAITING[evaluation], []
    while waiting:  # another thread may still add to it
        taken.append(waiting.popleft())
    return taken


def _log(
    rollout_id: int,
    args: Any,
    found: dict[str, float],
    extra: dict[str, Any] | None,
    step_key: str,
) -> None:
    if extra is not None:
        extra.update(found)  # they are logged with slime's own
    elif found:
        step_of = part_of(
            "compute_rollout_step", "observability.metric_utils", "utils.metric_utils"
        )
        log = part_of(
            "log",
            "observability.logging_utils",
            "utils.logging_utils",  # of slime before August 2026
            "utils.tracking_utils.tracking",  # of miles
        )
        log(args, {**found, step_key: step_of(args, rollout_id)}, step_key=step_key)

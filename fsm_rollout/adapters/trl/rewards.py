"""Reward functions for TRL: what a rollout earned, and a decorator for functions of your own.

A sample that must not be trained on reaches TRL as an empty row (see `rollouts`). It stays out of
its group's baseline only if every reward function says None for it, so all of them have to know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Rewards: TypeAlias = list[float | None]

_KNOWS = "_leaves_out_refused"


def reward(
    env_reward: Sequence[float | None],
    rollout_metrics: Sequence[Mapping[str, float]] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> Rewards:
    """The reward of each rollout as it is: `GRPOTrainer(reward_funcs=reward)`. None stays None.

    Logs what `RolloutFunc(metrics=...)` says of the batch.
    """
    if log_metric is not None:
        for name, value in next(iter(rollout_metrics), {}).items():
            log_metric(name, value)
    return list(env_reward)


def usable_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL, sync or async, that says None for samples that were refused."""

    def kept(rewards: Sequence[float | None], refused: Sequence[str]) -> Rewards:
        return [None if why else value for value, why in zip(rewards, refused, strict=True)]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def score_async(*, refused: Sequence[str], **columns: Any) -> Rewards:
            return kept(await function(refused=refused, **columns), refused)

        wrapped: Callable[..., Any] = score_async
    else:

        @functools.wraps(function)
        def score(*, refused: Sequence[str], **columns: Any) -> Rewards:
            return kept(function(refused=refused, **columns), refused)

        wrapped = score
    setattr(wrapped, _KNOWS, True)
    return wrapped


def leaves_out_refused(function: object) -> bool:
    """It is `reward`, or `usable_only` made it."""
    return function is reward or bool(getattr(function, _KNOWS, False))

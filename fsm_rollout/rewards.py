"""Rewards: what a finished request earned, in named parts.

A reward function's value if there is one, else the sum of what the tools say. None is never 0.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from fsm_rollout.errors import RolloutError
from fsm_rollout.request import Request
from fsm_rollout.tools.base import finite
from fsm_rollout.tools.supervisor import Flight

Score: TypeAlias = float | Mapping[str, float] | None
"""a number; or named parts, whose sum is the reward; or None: no reward"""
RewardFunction: TypeAlias = Callable[[Request], Score | Awaitable[Score]]

logger = logging.getLogger(__name__)


class RewardError(RolloutError):
    """The reward could not be computed; the loop aborts the request as reward_error."""


async def score(
    request: Request,
    tool_rewards: Mapping[str, float],
    function: RewardFunction | None,
    *,
    timeout_s: float,
) -> tuple[float | None, dict[str, float]]:
    """The reward and its parts of a COMPLETED or TRUNCATED request.

    A sync function runs in a thread. Raises RewardError when the function raises, outlives
    `timeout_s` or returns what is no finite number.
    """
    parts = {f"tool/{name}": value for name, value in tool_rewards.items()}
    if function is None:
        named: Mapping[Any, object] = tool_rewards
    else:
        value = await _call(function, request, timeout_s)
        named = value if isinstance(value, Mapping) else {} if value is None else {"reward": value}
        parts |= {str(name): _finite(name, part) for name, part in named.items()}
    total = sum(_finite(name, part) for name, part in named.items())
    return _finite("the sum", total) if named else None, parts


async def _call(function: RewardFunction, request: Request, timeout_s: float) -> object:
    flight = Flight(
        lambda: function(request),
        in_thread=not inspect.iscoroutinefunction(function),
        label=f"reward function, request {request.index}",
        on_abandon=lambda: None,
    )
    try:
        done = await flight.settle(timeout_s)
    finally:
        if not flight.is_done:
            await flight.stop()
    if not done:
        raise RewardError(f"the reward function gave no value within {timeout_s} s")
    value, error = flight.task.result()
    if error is not None:
        logger.error("request %d: the reward function raised", request.index, exc_info=error)
        raise RewardError(f"the reward function raised {error!r}") from error
    return value


def _finite(name: object, value: object) -> float:
    try:
        return finite(value, what=f"reward {name!r}")
    except (TypeError, ValueError) as error:
        raise RewardError(f"{error}; return a finite number, named parts, or None") from error

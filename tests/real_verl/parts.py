"""Parts of a rollout that a YAML entry names."""

from __future__ import annotations

from collections.abc import Sequence

from fsm_rollout.agent import Context
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardPart


def length(request: Request) -> float:
    """The tokens of the response."""
    return float(request.samples[-1].response_length)


def long_enough(request: Request) -> float | None:
    """1.0, or nothing for a short response."""
    return 1.0 if length(request) > 5 else None


def _relative(requests: Sequence[Request]) -> list[float]:
    return [length(request) - length(requests[0]) for request in requests]


RELATIVE = RewardPart(_relative, group=True)


async def summarises(ctx: Context) -> None:
    """Two turns, the second behind a shorter history: two samples."""
    await ctx.generate()
    await ctx.rewrite("In short: what is 6 * 7?")
    await ctx.generate()


async def set_aside(ctx: Context) -> None:
    """One turn; a response of more than six tokens is not to be trained."""
    await ctx.generate()
    ctx.request.sample.remove_sample = ctx.request.sample.response_length > 6

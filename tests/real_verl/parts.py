"""Parts of a rollout that a YAML entry names."""

from __future__ import annotations

from fsm_rollout.agent import Context
from fsm_rollout.request import Request


def length(request: Request) -> float:
    """The tokens of the response."""
    return float(request.samples[-1].response_length)


async def summarises(ctx: Context) -> None:
    """Two turns, the second behind a shorter history: two samples."""
    await ctx.generate()
    await ctx.rewrite("In short: what is 6 * 7?")
    await ctx.generate()


async def set_aside(ctx: Context) -> None:
    """One turn; a response of more than six tokens is not to be trained."""
    await ctx.generate()
    ctx.request.sample.remove_sample = ctx.request.sample.response_length > 6

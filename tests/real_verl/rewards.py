"""A reward function that a YAML entry names."""

from __future__ import annotations

from fsm_rollout.request import Request


def length(request: Request) -> float:
    """The tokens of the response."""
    return float(request.samples[-1].response_length)

"""The machine as data: every event, from where to where, and under which guards.

Declared once; the compiled `Machine`, the stock `transitions.Machine`, the Hypothesis machine and
the diagram in the docs are all made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from fsm_rollout.limits import Status
from fsm_rollout.request import Request
from fsm_rollout.states import guards


class Event(StrEnum):
    """What may happen to a request."""

    GENERATE = "generate"
    """ask the policy for a turn"""
    OBSERVE = "observe"
    """answer the turn's calls"""
    COMPLETE = "complete"
    TRUNCATE = "truncate"
    ABORT = "abort"
    RESUME = "resume"
    """go on with the tokens so far; costs no attempt"""
    RETRY = "retry"
    """start again from scratch; costs an attempt"""


class Edge(NamedTuple):
    """`event` leads from each of `sources` to `dest` when every guard agrees, in order."""

    event: Event
    sources: tuple[Status, ...]
    dest: Status
    guards: tuple[Callable[[Request], bool], ...]


P, G, T = Status.PENDING, Status.GENERATING, Status.TOOL_CALLING
C, U, A = Status.COMPLETED, Status.TRUNCATED, Status.ABORTED

EDGES: tuple[Edge, ...] = (
    Edge(Event.GENERATE, (P, T), G, (guards.aligned, guards.has_room, guards.turns_left)),
    Edge(Event.OBSERVE, (G, P), T, (guards.aligned, guards.needs_observation, guards.calls_left)),
    Edge(Event.COMPLETE, (G, T), C, (guards.aligned, guards.sound)),
    Edge(Event.TRUNCATE, (P, G, T), U, (guards.aligned, guards.sound)),
    Edge(Event.ABORT, (P, G, T), A, ()),
    Edge(Event.ABORT, (C, U), A, (guards.not_sealed,)),
    Edge(
        Event.RESUME,
        (A,),
        P,
        (guards.not_sealed, guards.aligned, guards.resumable, guards.tools_alive),
    ),
    # no `aligned`: a request that was aborted for breaking it is emptied, and starts sound
    Edge(Event.RETRY, (A,), P, (guards.not_sealed, guards.retryable, guards.attempts_left)),
)

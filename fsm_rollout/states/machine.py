"""Machine: `fire(event, request)`, the only way to change a status.

Compiled once from a `transitions.Machine` that is built from the table: the same edges and guards,
at a tenth of the cost. Synchronous and atomic; side effects happen between two `fire` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import msgspec
from transitions import Machine as StockMachine

from fsm_rollout.errors import ConfigError, GuardRefused, IllegalEvent
from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.guards import REFUSALS, Guard
from fsm_rollout.states.table import EDGES, Event


class Transition(msgspec.Struct, frozen=True, gc=False):
    """What happened, for listeners: one per `fire`. They add the time."""

    request: Request
    seq: int
    attempt: int
    turn: int
    event: Event
    source: Status
    dest: Status
    reason: StopReason | None
    num_tokens: int
    num_sampled: int


Listener: TypeAlias = Callable[[Transition], None]
_Fire: TypeAlias = Callable[[Request, StopReason | None], Status]
_Rows: TypeAlias = dict[Status, tuple[Status, tuple[Guard, ...]]]


def stock_machine() -> StockMachine:
    """The table as a plain `transitions.Machine` without a model: the oracle of our tests."""
    return StockMachine(
        model=None,
        states=list(Status),
        initial=Status.PENDING,
        auto_transitions=False,
        model_attribute="_status",
        transitions=[
            {
                "trigger": edge.event.value,
                "source": list(edge.sources),
                "dest": edge.dest,
                "conditions": list(edge.guards),
            }
            for edge in EDGES
        ],
    )


class Machine:
    """One per rollout: the table, compiled, and who listens to it.

    `guards` are further guards of an event, on each of its edges behind the table's own; each is
    declared with `states.guards.guard`. A listener is called once the request has moved: it must
    not change it, and what it raises reaches whoever fired. Raises ConfigError for an undeclared
    guard.
    """

    def __init__(
        self,
        listeners: Iterable[Listener] = (),
        *,
        guards: Mapping[Event, Iterable[Guard]] | None = None,
    ) -> None:
        self.listeners = tuple(listeners)
        self._guards = {event: tuple(more) for event, more in (guards or {}).items()}
        for guard in chain.from_iterable(self._guards.values()):
            if guard not in REFUSALS:
                raise ConfigError(
                    f"guard {guard.__name__} is not declared: put "
                    "`@fsm_rollout.states.guards.guard(says=..., means=...)` above it"
                )
        self._fires = {
            Event(name): self._compile(Event(name), event)
            for name, event in stock_machine().events.items()
        }

    def fire(self, event: Event, request: Request, reason: StopReason | None = None) -> Status:
        """Move `request` along `event`; returns its new status.

        complete, truncate and abort carry a reason whose status is the destination, others none.
        Raises IllegalEvent (no such edge, a reason that does not fit) or GuardRefused; then nothing
        has changed.
        """
        return self._fires[event](request, reason)

    def settle(self, event: Event, request: Request, reason: StopReason | None = None) -> Status:
        """`fire`, or end the request with what the refusing guard means.

        Raises GuardRefused when the refusal blames the caller: a bug, not an outcome.
        """
        try:
            return self.fire(event, request, reason)
        except GuardRefused as refused:
            means = refused.means
            if means is None or request.is_done:  # what has ended cannot end again
                raise
            if means.status is Status.TRUNCATED and event is not Event.TRUNCATE:
                return self.settle(Event.TRUNCATE, request, means)
            request.error = refused.message
            is_abort = means.status is Status.ABORTED
            return self.fire(Event.ABORT, request, means if is_abort else StopReason.INVARIANT)

    def _compile(self, event: Event, stock: Any) -> _Fire:
        rows: _Rows = {}
        for source, transitions in stock.transitions.items():
            (edge,) = transitions
            guards = tuple(condition.func for condition in edge.conditions)
            guards += self._guards.get(event, ())
            rows[Status[source]] = (Status[edge.dest], guards)
        ends = all(dest in TERMINAL for dest, _ in rows.values())
        starts_over = event is Event.RETRY
        row_of, listeners = rows.get, self.listeners

        def fire(request: Request, reason: StopReason | None) -> Status:
            source = request._status
            row = row_of(source)
            if row is None:
                raise IllegalEvent(f"{event} is not allowed in {source}: {_where(request)}")
            dest, guards = row
            if ends if reason is None else reason.status is not dest:
                raise IllegalEvent(
                    f"{event} to {dest} cannot carry reason {reason}: {_where(request)}"
                )
            for guard in guards:
                if not guard(request):
                    raise _refused(event, guard, request)
            if starts_over:
                request.reset()
            elif ends and source in TERMINAL:
                request.was_over = True
            request._status = dest
            request.stop_reason = reason
            request.seq += 1
            if listeners:
                sample = request.samples[-1]
                record = Transition(
                    request,
                    request.seq,
                    request.attempt,
                    request._earlier_turns + sample.num_turns,
                    event,
                    source,
                    dest,
                    reason,
                    len(sample.columns._ids),
                    sample.columns.num_sampled,
                )
                for listener in listeners:
                    listener(record)
            return dest

        return fire


def _refused(event: Event, guard: Guard, request: Request) -> GuardRefused:
    name, refusal = guard.__name__, REFUSALS[guard]
    message = f"{event}: guard {name} refused, {refusal.says(request)}: {_where(request)}"
    return GuardRefused(name, message, refusal.means(request))


def _where(request: Request) -> str:
    return (
        f"request {request.name}, attempt {request.attempt}, turn {request.num_turns}, "
        f"{request.status}"
    )

"""Twin: a request beside its reference. Each event is fired at both, and they must agree.

What is refused must leave every byte as it was; what moves must be what the table, stock
`transitions` and the reference say. `operations` adds what is done to the tokens, `machines` lets
Hypothesis choose. Whatever had nothing to do is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from transitions import MachineError

from fsm_rollout.errors import GuardRefused, IllegalEvent, InvariantError
from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Listener, Machine, Transition, stock_machine
from fsm_rollout.states.table import EDGES, Event
from fsm_rollout.testing.faults import Setup
from fsm_rollout.testing.reference import PROMISES, Reference, assert_agree
from fsm_rollout.testing.snapshot import snapshot
from fsm_rollout.turn import Media

EDGE_OF = {(edge.event, source): edge for edge in EDGES for source in edge.sources}
STOCK = stock_machine()


@dataclass(slots=True)
class Tools:
    """A session, as far as guards know it."""

    is_alive: bool = True


@dataclass(slots=True)
class _Shadow:
    """What stock `transitions` moves in the request's place."""

    _status: Status


def edge_name(event: Event, source: Status) -> str:
    """The edge as `Twin.coverage` counts it."""
    return f"{event} {source.name} -> {EDGE_OF[event, source].dest.name}"


def is_unfit(event: Event, source: Status, reason: StopReason | None) -> bool:
    """No edge leaves `source` on `event`, or it cannot carry `reason`."""
    edge = EDGE_OF.get((event, source))
    if edge is None:
        return True
    if edge.dest in TERMINAL:
        return reason is None or reason.status is not edge.dest
    return reason is not None


def stock_verdict(event: Event, request: Request) -> str:
    """moved, refused or illegal: what stock `transitions` makes of the event."""
    try:
        moved = STOCK.events[event.value].trigger(_Shadow(request.status), request)
    except MachineError:
        return "illegal"
    return "moved" if moved else "refused"


class Twin:
    """One request after another, each with its reference, under one machine.

    `coverage[edge or operation, fault]` counts what was tried, `steps` all that was not a no-op.
    """

    setup: Setup
    request: Request
    reference: Reference

    def __init__(self, listeners: Iterable[Listener], coverage: Counter[tuple[str, str]]) -> None:
        self.heard: list[Transition] = []
        self.machine = Machine([self.heard.append, *listeners])
        self.coverage = coverage
        self.steps = 0
        self._faults: set[str] = set()

    # -- one request -------------------------------------------------------------------------------

    def start(self, setup: Setup) -> None:
        """A new request."""
        limits, prompt = setup.limits, list(range(1000, 1000 + setup.prompt))
        self.setup = setup
        self.request = Request(limits=limits, log_probs=setup.log_probs, declared=setup.declared)
        self.reference = Reference(limits, prompt)
        self._faults.clear()
        self.request.set_prompt(prompt)
        if setup.image and setup.prompt >= 3:
            self.request.sample.media.append(Media(1, 2, "image"))
            self.reference.media.append((1, 2))

    def check(self) -> None:
        """Both agree."""
        assert_agree(self.request, self.reference)

    def attempt(
        self,
        action: Callable[[], object],
        codes: Collection[str],
        operation: str,
        fault: str = "none",
    ) -> bool:
        """Do it, or see it refused with one of `codes` (none: it succeeds) and changed nothing."""
        before = snapshot(self.request)
        try:
            action()
        except InvariantError as error:
            refused: str | None = error.code
        else:
            refused = None
        if codes:
            assert refused in codes, f"{operation}, {fault}: {refused}, expected {codes}"
            assert snapshot(self.request) == before, f"{operation} refused, yet it changed"
            fault = str(refused) if fault == "none" else fault
            self._faults.add(fault)
        else:
            assert refused is None, f"{operation} refused: {refused}"
        if codes or snapshot(self.request) != before:
            self.count(f"{operation} in {self.request.status.name}", fault)
        return not codes

    def count(self, operation: str, fault: str) -> None:
        """One effective step."""
        self.coverage[operation, fault] += 1
        self.steps += 1

    # -- events ------------------------------------------------------------------------------------

    def fire(self, event: Event, reason: StopReason | None) -> None:
        """Any event, from any status, with any reason."""
        source, before = self.request.status, snapshot(self.request)
        expected, stock = self._verdict(event, reason), stock_verdict(event, self.request)
        assert snapshot(self.request) == before, "a guard changed the request"
        try:
            self.machine.fire(event, self.request, reason)
        except IllegalEvent:
            got = "illegal"
        except GuardRefused as refused:
            got = refused.guard
        else:
            got = "moved"
        assert got == expected, f"{event} in {source}: {got}, expected {expected}"
        if not is_unfit(event, source, reason):
            assert stock == ("moved" if got == "moved" else "refused")
        if got != "moved":
            assert snapshot(self.request) == before
            self.count(f"fire {event} in {source.name}", got)
        self._follow()

    def settle(self, event: Event, reason: StopReason | None) -> None:
        """The same through `settle`: it moves, or ends the request with what the refusal means."""
        request, reference, source = self.request, self.reference, self.request.status
        before, verdict = snapshot(request), self._verdict(event, reason)
        meaning = reference.meaning_of(verdict)
        expected: Any = verdict if meaning is None else (meaning.status, meaning)
        if verdict == "moved":
            expected = (EDGE_OF[event, source].dest, reason)
        try:
            self.machine.settle(event, request, reason)
        except IllegalEvent:
            got: Any = "illegal"
        except GuardRefused as refused:
            got = refused.guard
        else:
            got = (request.status, request.stop_reason)
        assert got == expected, f"settle {event} in {source}: {got}, expected {expected}"
        if isinstance(got, str):
            assert snapshot(request) == before
        if verdict != "moved":
            self.count(f"settle {event} in {source.name}", verdict)
        self._follow()

    def _verdict(self, event: Event, reason: StopReason | None) -> str:
        """What must come of `fire`: moved, illegal, or the name of the guard that refuses."""
        if is_unfit(event, self.request.status, reason):
            return "illegal"
        for guard in EDGE_OF[event, self.request.status].guards:
            if not self.reference.allows(guard.__name__):
                return guard.__name__
        return "moved"

    def _follow(self) -> None:
        """Apply to the reference what the machine told its listeners, and judge it."""
        reference = self.reference
        for record in self.heard:
            edge = EDGE_OF[record.event, reference.status]
            assert (record.source, record.dest) == (reference.status, edge.dest)
            for guard in PROMISES[record.event]:
                assert reference.allows(guard), f"{record.event} in spite of {guard}"
            reference.move(record.event, edge.dest, record.reason)
            assert record.request is self.request
            assert (record.seq, record.attempt) == (reference.moves, reference.attempt)
            assert (record.num_tokens, record.turn) == (reference.length, reference.num_turns)
            for fault in self._faults or {"none"}:
                self.coverage[edge_name(record.event, record.source), fault] += 1
            self.steps += 1
            self._faults.clear()
            if record.event is Event.RETRY:
                fresh = self.fresh()
                fresh.attempt, fresh.seq = record.attempt, record.seq
                assert snapshot(self.request) == snapshot(fresh), "something outlived the retry"
        self.heard.clear()

    def fresh(self) -> Request:
        """The request as it was before anything was generated."""
        setup = self.setup
        request = Request(limits=setup.limits, log_probs=setup.log_probs, declared=setup.declared)
        first = self.reference.closed[0] if self.reference.closed else self.reference
        request.set_prompt(first.prompt)
        request.sample.media = [
            Media(start, n, "image") for start, n in first.media if start < len(first.prompt)
        ]
        return request

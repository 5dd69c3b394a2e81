"""A directed walk: every edge of the table is taken once, and each of its guards refuses it once.

Random runs leave edges out now and then; this one cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from fsm_rollout.errors import GuardRefused, IllegalEvent
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Listener, Machine, Transition
from fsm_rollout.states.table import EDGES, Event
from fsm_rollout.testing.faults import CALLS
from fsm_rollout.testing.snapshot import snapshot
from fsm_rollout.testing.tampering import TAMPERINGS
from fsm_rollout.testing.twin import Tools, edge_name, is_unfit


def walk_every_edge(*listeners: Listener) -> Counter[tuple[str, str]]:
    """Fire every event in every status, once for each outcome; `[edge, outcome]` counts them.

    Outcomes: moved, the name of the guard that refused, illegal. What does not move must raise,
    change nothing and be told to no listener. Raises AssertionError where the machine disagrees.
    """
    heard: list[Transition] = []
    machine, taken = Machine([heard.append, *listeners]), Counter[tuple[str, str]]()
    for edge in EDGES:
        for source in edge.sources:
            name, reason = edge_name(edge.event, source), _reason_for(edge.dest)
            request = request_in(source, machine)
            heard.clear()
            assert machine.fire(edge.event, request, reason) is request.status is edge.dest
            assert [(t.source, t.dest, t.seq) for t in heard] == [(source, edge.dest, request.seq)]
            taken[name, "moved"] += 1
            for guard in (guard.__name__ for guard in edge.guards):
                request = request_in(source, machine)
                _PROVOKE[guard](request)
                heard.clear()
                assert _refusal(machine, edge.event, request, reason) == guard
                assert not heard
                taken[name, guard] += 1
    for event in Event:
        for source in Status:
            for unfit in (None, *StopReason):
                if is_unfit(event, source, unfit):
                    request = request_in(source, machine)
                    assert _refusal(machine, event, request, unfit) == "illegal"
                    taken[f"{event} in {source.name}", "illegal"] += 1
    return taken


def request_in(status: Status, machine: Machine) -> Request:
    """A request in `status` whose last model turn has a call that nobody answered yet."""
    request = Request(limits=Limits(max_context=64))
    request.set_prompt([1, 2, 3])
    machine.fire(Event.GENERATE, request)
    request.append_response_tokens(
        [4, 5, 6, 7], [-1.0] * 4, meta_info={"finish_reason": "stop", "weight_version": "v1"}
    )
    request.sample.turns[-1].calls = CALLS[1]
    match status:
        case Status.PENDING:
            machine.fire(Event.ABORT, request, StopReason.ENGINE_ABORT)
            machine.fire(Event.RESUME, request)
        case Status.TOOL_CALLING:
            machine.fire(Event.OBSERVE, request)
        case Status.COMPLETED:
            machine.fire(Event.COMPLETE, request, StopReason.STOP)
        case Status.TRUNCATED:
            machine.fire(Event.TRUNCATE, request, StopReason.LENGTH)
        case Status.ABORTED:
            machine.fire(Event.ABORT, request, StopReason.ENGINE_ABORT)
    return request


def _reason_for(dest: Status) -> StopReason | None:
    return next((reason for reason in StopReason if reason.status is dest), None)


def _refusal(machine: Machine, event: Event, request: Request, reason: StopReason | None) -> str:
    before = snapshot(request)
    try:
        machine.fire(event, request, reason)
    except IllegalEvent:
        refusal = "illegal"
    except GuardRefused as refused:
        refusal = refused.guard
    else:
        refusal = "none"
    assert refusal == "none" or snapshot(request) == before
    return refusal


def _limit(**limits: Any) -> Callable[[Request], None]:
    def narrow(request: Request) -> None:
        request.limits = replace(request.limits, **limits)

    return narrow


def _forget_calls(request: Request) -> None:
    request.sample.turns[-1].calls = ()


def _give_up(request: Request) -> None:
    request.final = True


def _release(request: Request) -> None:
    request.session = Tools(is_alive=False)


_PROVOKE: dict[str, Callable[[Request], object]] = {
    "aligned": lambda request: TAMPERINGS["a mask entry too many"].breaks(request.sample),
    "sound": lambda request: TAMPERINGS["a log-prob NaN"].breaks(request.sample),
    "has_room": _limit(max_context=7),
    "turns_left": _limit(max_turns=1),
    "needs_observation": _forget_calls,
    "calls_left": _limit(max_tool_calls=0),
    "not_sealed": Request.seal,
    "resumable": _give_up,
    "tools_alive": _release,
    "retryable": _give_up,
    "attempts_left": _limit(max_attempts=1),
}
"""What makes each guard refuse a request of `request_in`."""

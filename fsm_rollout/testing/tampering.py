"""Tampering: invariants broken by force, past the writers, and the guards that must see it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import NamedTuple

from fsm_rollout.errors import GuardRefused
from fsm_rollout.limits import TERMINAL, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.testing.snapshot import sample_snapshot
from fsm_rollout.testing.twin import EDGE_OF, stock_verdict
from fsm_rollout.turn import Media


class Tampering(NamedTuple):
    """How an invariant is broken by force, and which guard must see it."""

    guard: str
    breaks: Callable[[Sample], bool]
    """False when the sample has nothing to break"""


TAMPERINGS: dict[str, Tampering] = {}


def _tampering(
    name: str, guard: str
) -> Callable[[Callable[[Sample], bool]], Callable[[Sample], bool]]:
    def register(breaks: Callable[[Sample], bool]) -> Callable[[Sample], bool]:
        TAMPERINGS[name] = Tampering(guard, breaks)
        return breaks

    return register


@_tampering("a mask entry too many", "aligned")
def _mask_longer(sample: Sample) -> bool:
    sample.columns._mask.append(0)
    return True


@_tampering("a token lost", "aligned")
def _token_lost(sample: Sample) -> bool:
    if sample.response_length:
        sample.columns._ids.pop()
    return len(sample.loss_mask) > sample.response_length


@_tampering("a log-prob lost", "aligned")
def _log_prob_lost(sample: Sample) -> bool:
    log_probs = sample.columns._log_probs
    if log_probs:
        log_probs.pop()
    return log_probs is not None and len(log_probs) < sample.response_length


@_tampering("a turn too long", "aligned")
def _turn_longer(sample: Sample) -> bool:
    for turn in sample.turns[-1:]:
        turn.stop += 1
    return bool(sample.turns)


@_tampering("a version run lost", "aligned")
def _run_lost(sample: Sample) -> bool:
    sample.num_versioned -= 1
    return True


@_tampering("a log-prob NaN", "sound")
def _log_prob_nan(sample: Sample) -> bool:
    log_probs = sample.columns._log_probs
    if log_probs:
        log_probs[0] = float("nan")
    return bool(log_probs)


@_tampering("an observation trained", "sound")
def _observation_trained(sample: Sample) -> bool:
    spans = [turn for turn in sample.turns if turn.kind == "observation" and turn.stop > turn.start]
    for turn in spans:
        sample.columns._mask[turn.start] = 1
    return bool(spans)


@_tampering("a top-p offset lost", "aligned")
def _offset_lost(sample: Sample) -> bool:
    replay = sample.columns.replay
    if replay is None or replay.offsets is None:
        return False
    replay.offsets.pop()
    return True


@_tampering("a top-p id lost", "aligned")
def _kept_id_lost(sample: Sample) -> bool:
    replay = sample.columns.replay
    if replay is None or not replay.ids:
        return False
    replay.ids.pop()
    return True


@_tampering("a row of experts for the last token", "aligned")
def _row_too_many(sample: Sample) -> bool:
    replay = sample.columns.replay
    if replay is None or replay.row is None:
        return False
    while replay.num_rows < max(1, sample.columns.length):
        replay.rows += bytes(replay.row.itemsize)
    return True


@_tampering("a token that top-p did not keep", "sound")
def _token_not_kept(sample: Sample) -> bool:
    replay = sample.columns.replay
    if replay is None or not replay.ids:
        return False
    replay.ids[:] = array("i", bytes(4 * len(replay.ids)))
    return bool((sample.columns.response_tokens() * sample.sampled).any())


@_tampering("the experts of a sampled token's past lost", "sound")
def _rows_lost(sample: Sample) -> bool:
    replay = sample.columns.replay
    if replay is None or not replay.rows or not sample.sampled.any():
        return False
    replay.rows.clear()
    return sample.prompt_length + int(sample.sampled.nonzero()[0][-1]) > 0


@_tampering("media outside of the tokens", "sound")
def _media_outside(sample: Sample) -> bool:
    sample.media.append(Media(sample.columns.length, 1, "image"))
    return True


_QUIET = Machine()
_GUARDED = {
    "aligned": (Event.GENERATE, Event.OBSERVE, Event.COMPLETE, Event.TRUNCATE, Event.RESUME),
    "sound": (Event.COMPLETE, Event.TRUNCATE),
}


def refused_events(kind: str, request: Request, fresh: Sample) -> Iterator[Event]:
    """Tamper with a copy of `request`: the events that it must refuse now, each of them tried.

    Then `settle` must abort it as broken, and a retry must leave a `fresh` sample.
    """
    request, source = deepcopy(request), request.status
    guard, breaks = TAMPERINGS[kind]
    if request.is_sealed or not breaks(request.sample):
        return
    for event in _GUARDED[guard]:
        if (event, source) in EDGE_OF:
            assert stock_verdict(event, request) == "refused"
            assert _refusing_guard(event, request) == guard
            yield event
    if source not in TERMINAL:
        _QUIET.settle(Event.TRUNCATE, request, StopReason.LENGTH)
        assert request.stop_reason is StopReason.INVARIANT
        assert guard in request.error
        if request.attempt < request.limits.max_attempts and not request.final:
            _QUIET.fire(Event.RETRY, request)
            assert sample_snapshot(request.sample) == sample_snapshot(fresh)


def _refusing_guard(event: Event, request: Request) -> str:
    dest = EDGE_OF[event, request.status].dest
    try:
        _QUIET.fire(event, request, next((r for r in StopReason if r.status is dest), None))
    except GuardRefused as refused:
        return refused.guard
    return "none"

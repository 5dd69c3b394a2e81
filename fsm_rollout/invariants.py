"""The invariants R3.1 to R3.7 of a sample, each a function with its code. Full checks, O(T).

The guards compare lengths on every transition; these run once before COMPLETED or TRUNCATED
(`states.guards.sound`), again at export, and in `fsm-rollout verify`. What only a sample with an
outcome can hold stands in AT_REST.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import FLOAT32_MAX, LOG_PROB_CEILING, LOG_PROB_FLOOR
from fsm_rollout.errors import InvariantError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.replay import TopP, not_kept
from fsm_rollout.replay_columns import ReplayColumns
from fsm_rollout.sample import Sample
from fsm_rollout.turn import FINISHES, LOG_PROB_KINDS


class Look:
    """What the checks of one sample look at; its arrays are not copied, so let go of it soon."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.loss_mask, self.log_probs = sample.columns.live()

    @cached_property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool [R]: the policy's engine returned the token."""
        return self.sample.sampled.view(np.bool_)


Check = Callable[[Look], Iterator[str]]
INVARIANTS: dict[str, Check] = {}
"""what holds at any time"""
AT_REST: dict[str, Check] = {}
"""what else holds for a sample that was delivered"""

_ECHOES = frozenset({StopReason.STOP, StopReason.LENGTH, StopReason.REPETITION})
"""stop reasons that say how the last model turn finished; others come from elsewhere"""
_FINISHES, _KINDS = frozenset({None, *FINISHES}), frozenset({None, *LOG_PROB_KINDS})


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant: its code and what is wrong, with the numbers."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def violations(sample: Sample, *, at_rest: bool = False) -> list[Violation]:
    """All that is wrong with `sample`; when lengths disagree, only that.

    `at_rest`: as a sample that was delivered, which must have an outcome that fits its turns.
    """
    found: list[Violation] = []
    look = Look(sample)
    for checks in (INVARIANTS, AT_REST) if at_rest else (INVARIANTS,):
        for code, check in checks.items():
            found += [Violation(code, message) for message in check(look)]
            if found and code == "R3.1":
                return found
    return found


def check(sample: Sample) -> None:
    """Raise InvariantError with the first violation of a sample at rest, naming it."""
    for violation in violations(sample, at_rest=True):
        raise InvariantError(violation.code, f"sample {sample.sample_id}: {violation.message}")


def _invariant(code: str, checks: dict[str, Check] = INVARIANTS) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        checks[code] = function
        return function

    return register


@_invariant("R3.1")
def lengths_agree(look: Look) -> Iterator[str]:
    """tokens = prompt + response; every response column has R entries; the turns tile them."""
    columns = look.sample.columns
    if not columns.is_aligned:
        yield columns.lengths
    at = 0
    for number, turn in enumerate(look.sample.turns):
        if turn.start != at or turn.stop < turn.start:
            yield f"turn {number} spans [{turn.start}, {turn.stop}), but {at} tokens precede it"
        at = turn.stop
    if at != columns.response_length:
        yield f"turns cover {at} of {columns.response_length} response tokens"


@_invariant("R3.2")
def only_sampled_tokens_are_trained(look: Look) -> Iterator[str]:
    """loss_mask is 0 or 1, and 1 only on tokens that the policy sampled."""
    mask, sampled = look.loss_mask, look.sampled
    if not (wrong := (mask > sampled.view(np.uint8)).nonzero()[0]).size:
        return
    if (most := int(mask.max())) > 1:
        yield f"loss_mask holds {most}; it must hold 0 and 1"
    if (strange := wrong[~sampled[wrong]]).size:
        yield f"{strange.size} trained tokens were not sampled, the first at {strange[0]} of R"


@_invariant("R3.3")
def log_probs_belong_to_sampled_tokens(look: Look) -> Iterator[str]:
    """Finite, <= 1e-6 and above the floor on sampled tokens, exactly 0.0 on all others.

    What a turn records of them is known: their kind, a finite temperature.
    """
    for number, turn in enumerate(look.sample.turns):
        if turn.log_prob_kind not in _KINDS:
            yield f"turn {number}: log_prob_kind {turn.log_prob_kind!r} is not {LOG_PROB_KINDS}"
        if not _is_temperature(turn.temperature):
            yield f"turn {number}: temperature is {turn.temperature!r}"
    log_probs, sampled = look.log_probs, look.sampled
    if log_probs is None:
        return
    good = (log_probs >= LOG_PROB_FLOOR) & (log_probs <= LOG_PROB_CEILING)  # NaN is not good
    if (bad := (sampled > good).nonzero()[0]).size:
        yield f"{bad.size} log-probs out of range, {log_probs[bad[0]]} at {bad[0]} of R"
    if (extra := ((log_probs != 0) > sampled).nonzero()[0]).size:
        yield f"{extra.size} tokens that were not sampled have a log-prob, the first at {extra[0]}"


@_invariant("R3.4")
def runs_and_replay_cover_the_sampled_tokens(look: Look) -> Iterator[str]:
    """A turn's runs (version, count) sum up to its sampled tokens, replay data covers just these.

    Forced spans lie in the turn, in order and disjoint. An observation has none of all this.
    """
    for number, turn in enumerate(look.sample.turns):
        covered, least = 0, 1
        for _, count in turn.weight_versions:
            covered += count
            least = min(least, count)
        if covered != turn.num_sampled or least < 1:
            yield (
                f"turn {number}: version runs {turn.weight_versions} for {turn.num_sampled} "
                "sampled tokens"
            )
        if not turn.forced:
            continue
        at = turn.start
        for start, stop in turn.forced:
            if not at <= start < stop <= turn.stop:
                yield f"turn {number}: forced {turn.forced} do not fit [{turn.start}, {turn.stop})"
                break
            at = stop
        if turn.kind != "model":
            yield f"turn {number}: forced {turn.forced} in an observation"
    if (replay := look.sample.columns.replay) is not None:
        yield from _replay_covers_the_sampled_tokens(look, replay)


def _replay_covers_the_sampled_tokens(look: Look, replay: ReplayColumns) -> Iterator[str]:
    columns, sampled = look.sample.columns, look.sampled
    ids, offsets = replay.top_p_ids, replay.top_p_offsets
    if ids is not None and offsets is not None:
        sizes = np.diff(offsets)
        if offsets[0] != 0 or (sizes < 0).any():
            yield f"top-p offsets start at {offsets[0]} and must not fall: {sizes.min(initial=0)}"
        else:
            lacks = not_kept(TopP(ids, offsets), columns.response_tokens())
            strange = np.flatnonzero(np.where(sampled, lacks, sizes))
            if strange.size:
                yield (
                    f"{strange.size} tokens are not among their own top-p ids, or were not sampled "
                    f"and have some, the first at {strange[0]} of R"
                )
    if replay.row is not None and sampled.any():
        forwarded = columns.prompt_length + int(np.flatnonzero(sampled)[-1])
        if replay.num_rows < forwarded:
            yield f"{replay.num_rows} expert rows, the engine forwarded at least {forwarded} tokens"


@_invariant("R3.5")
def budgets_hold(look: Look) -> Iterator[str]:
    """len(tokens) <= max_context, response <= max_response (known in flight)."""
    request, columns = look.sample.request, look.sample.columns
    if request is None:
        return
    limits = request.limits
    if columns.length > limits.max_context:
        yield f"{columns.length} tokens > max_context {limits.max_context}"
    if limits.max_response is not None and request.response_length > limits.max_response:
        yield f"{request.response_length} response tokens > max_response {limits.max_response}"


@_invariant("R3.6")
def the_outcome_agrees(look: Look) -> Iterator[str]:
    """Status, stop reason, finishes, reward fit; a sample with nothing to train says so."""
    sample = look.sample
    reason = sample.stop_reason
    if reason is not None and reason.status is not sample.status:
        yield f"stop reason {reason} belongs to {reason.status}, the status is {sample.status}"
    if sample.status.is_terminal and reason is None:
        yield f"status {sample.status} without a stop reason"
    is_delivered = sample.is_sealed and sample.status.is_terminal
    if is_delivered and not sample.columns.num_trained and not sample.remove_sample:
        yield "no token to train on, but remove_sample is False"
    for name, value in (("reward", sample.reward), *sample.reward_parts.items()):
        if value is not None and not _is_finite(value):
            yield f"{name} is {value!r}, no finite float32"
    for number, turn in enumerate(sample.turns):
        if turn.finish not in _FINISHES:
            yield f"turn {number}: finish {turn.finish!r} is not one of {sorted(FINISHES)}"
        if turn.reward is not None and not _is_finite(turn.reward):
            yield f"turn {number}: reward is {turn.reward!r}, no finite float32"


def _is_temperature(value: Any) -> bool:
    return value is None or (_is_finite(value) and value >= 0)


def _is_finite(value: object) -> bool:
    """A number that stays finite as a trainer's float32; a text that reads as one is none."""
    try:
        return not isinstance(value, str) and bool(abs(float(value)) <= FLOAT32_MAX)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


@_invariant("R3.7")
def media_spans_lie_inside(look: Look) -> Iterator[str]:
    """Spans are in order, disjoint, inside the tokens, and cover none that was sampled."""
    sample = look.sample
    if not sample.media:
        return
    at, prompt, sampled = 0, sample.prompt_length, look.sampled
    for number, span in enumerate(sample.media):
        stop = span.start + span.length
        if span.start < at or span.length < 1 or stop > sample.columns.length:
            yield f"media {number} spans [{span.start}, {stop}) of {sample.columns.length} tokens"
        elif sampled[max(0, span.start - prompt) : max(0, stop - prompt)].any():
            yield f"media {number} spans [{span.start}, {stop}), sampled tokens among them"
        at = stop


@_invariant("R3.4", AT_REST)
def calls_lie_in_their_turn(look: Look) -> Iterator[str]:
    """A call's tokens are tokens of the turn that made it."""
    for number, turn in enumerate(look.sample.turns):
        for call in turn.calls:
            size = turn.stop - turn.start
            if call.span is not None and not 0 <= call.span[0] <= call.span[1] <= size:
                yield f"turn {number}: call {call.id!r} spans {call.span} of {size} tokens"


@_invariant("R3.6", AT_REST)
def the_turns_agree_with_the_outcome(look: Look) -> Iterator[str]:
    """The request has ended, and as its last model turn says; a COMPLETED one closed that turn."""
    sample = look.sample
    if not sample.status.is_terminal:
        yield f"status {sample.status}: it has not ended"
    reason = sample.stop_reason
    numbers = [number for number, turn in enumerate(sample.turns) if turn.kind == "model"]
    if not numbers:
        return
    number, turn = numbers[-1], sample.turns[numbers[-1]]
    if turn.is_open and sample.status is Status.COMPLETED:
        yield f"turn {number} is open (finish {turn.finish}), the status is {sample.status}"
    is_last = not sample.continued_by
    if is_last and not turn.is_open and reason in _ECHOES and turn.finish != reason:
        yield f"turn {number} finished with {turn.finish}, the stop reason is {reason}"

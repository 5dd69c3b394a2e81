"""Reference: what a request must look like, kept in plain lists, one entry per token.

Slow and simple on purpose: it shares no code with the record, the guards or the machine. `twin`
does to it what it does to the request; `assert_agree` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.replay import WeightVersion
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.table import Event
from fsm_rollout.turn import ToolCall

Origin: TypeAlias = Literal["sampled", "forced", "observed"]

PROMISES: dict[Event, tuple[str, ...]] = {
    Event.GENERATE: ("has_room", "turns_left", "not_sealed"),
    Event.OBSERVE: ("needs_observation", "calls_left", "not_sealed"),
    Event.COMPLETE: ("not_sealed",),
    Event.TRUNCATE: ("not_sealed",),
    Event.ABORT: ("not_sealed",),
    Event.RESUME: ("resumable", "tools_alive", "not_sealed"),
    Event.RETRY: ("retryable", "attempts_left", "not_sealed"),
}
"""What must be true when an event has moved a request, whatever guards the table gives its edge."""


@dataclass(slots=True)
class Token:
    """A response token and all that is recorded of it."""

    id: int
    origin: Origin
    log_prob: float
    version: WeightVersion
    extra: dict[str, float]
    trained: bool
    kept: tuple[int, ...] = ()
    """what top-p kept, where the engine says so"""


@dataclass(slots=True)
class Span:
    """A turn; it ends where the next one starts."""

    kind: str
    start: int
    finish: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.finish in (None, "abort")


class Closed(NamedTuple):
    """A sample that a fork goes on from."""

    prompt: list[int]
    media: list[tuple[int, int]]
    num_tokens: int
    num_turns: int


@dataclass(slots=True)
class Reference:
    """A request in plain lists."""

    limits: Limits
    prompt: list[int]
    tokens: list[Token] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)
    media: list[tuple[int, int]] = field(default_factory=list)
    rows: list[int] | None = None
    """the experts of each token that was forwarded, as one number; None: not reported"""
    response: str | None = None
    status: Status = Status.PENDING
    reason: StopReason | None = None
    attempt: int = 1
    moves: int = 0
    num_tool_calls: int = 0
    num_invalid_calls: int = 0
    final: bool = False
    was_over: bool = False
    """it was aborted after its end"""
    alive: bool | None = None
    """of the tools; None: there are none"""
    is_sealed: bool = False
    closed: list[Closed] = field(default_factory=list)
    """the samples before the open one"""

    # -- what follows from the lists ---------------------------------------------------------------

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def response_length(self) -> int:
        return len(self.tokens) + sum(row.num_tokens for row in self.closed)

    @property
    def room(self) -> int:
        rooms = [self.limits.max_context - self.length]
        if self.limits.max_response is not None:
            rooms.append(self.limits.max_response - self.response_length)
        return min(rooms)

    @property
    def max_new_tokens(self) -> int:
        used = len(self.tokens) - self.turns[-1].start if self.has_open_turn else 0
        return min(self.limits.max_new_tokens - used, self.room)

    @property
    def num_turns(self) -> int:
        return self.num_open_turns + sum(row.num_turns for row in self.closed)

    @property
    def num_open_turns(self) -> int:
        return [turn.kind for turn in self.turns].count("model")

    @property
    def has_open_turn(self) -> bool:
        return bool(self.turns) and self.turns[-1].kind == "model" and self.turns[-1].is_open

    def stop_of(self, number: int) -> int:
        """Where turn `number` ends."""
        return [*(turn.start for turn in self.turns), len(self.tokens)][number + 1]

    def runs_of(self, number: int) -> list[tuple[WeightVersion, int]]:
        """The weight versions of a turn's sampled tokens, run by run."""
        tokens = self.tokens[self.turns[number].start : self.stop_of(number)]
        versions = [token.version for token in tokens if token.origin == "sampled"]
        return [(version, len(list(run))) for version, run in groupby(versions)]

    def forced_of(self, number: int) -> list[tuple[int, int]]:
        """The spans of a turn that were put in by us."""
        turn = range(self.turns[number].start, self.stop_of(number))
        forced = [at for at in turn if self.tokens[at].origin == "forced"]
        starts = [at for at in forced if at - 1 not in forced]
        return list(zip(starts, (at + 1 for at in forced if at + 1 not in forced), strict=True))

    def allows(self, guard: str) -> bool:
        """What the guard must say."""
        match guard:
            case "aligned" | "sound":
                return True
            case "has_room":
                return self.max_new_tokens >= 1
            case "turns_left":
                return self.has_open_turn or self.num_turns < self.limits.max_turns
            case "needs_observation":
                last = self.turns[-1] if self.turns else None
                return last is not None and bool(last.calls) and last.finish == "stop"
            case "calls_left":
                waits = bool(self.turns) and bool(self.turns[-1].calls)
                return self.num_tool_calls < self.limits.max_tool_calls or not waits
            case "not_sealed":
                return not self.is_sealed
            case "resumable":
                if self.reason is None or self.final or self.was_over:
                    return False
                last = self.turns[-1] if self.turns else None
                is_over = last is not None and last.kind == "model" and not last.is_open
                goes_on = not is_over or self.allows("needs_observation")
                return self.reason.resumable and goes_on
            case "tools_alive":
                return self.alive is not False
            case "retryable":
                return self.reason is not None and self.reason.retryable and not self.final
            case "attempts_left":
                return self.attempt < self.limits.max_attempts
        raise NotImplementedError(f"the reference does not know the guard {guard}")

    def meaning_of(self, guard: str) -> StopReason | None:
        """How a request must end that `guard` refuses; None: it must not, the caller is wrong."""
        match guard:
            case "has_room" if self.length >= self.limits.max_context:
                return StopReason.MAX_CONTEXT
            case "has_room" if self.room < 1:
                return StopReason.MAX_RESPONSE
            case "has_room":
                return StopReason.LENGTH
            case "turns_left":
                return StopReason.MAX_TURNS
            case "calls_left":
                return StopReason.MAX_TOOL_CALLS
        return None

    # -- what is done to the request ---------------------------------------------------------------

    def append(
        self,
        tokens: Sequence[Token],
        finish: str | None,
        text: str | None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Tokens of one origin, at least one of them, or a finish alone.

        `rows`: the experts of every token before the last one, as this call saw them.
        """
        if rows is not None:
            held = self.rows or []
            self.rows = [*held, *rows[len(held) :]]
        known = self.response if self.tokens else self.response or ""
        if tokens or text is not None:
            self.response = None if text is None or known is None else known + text
        if not tokens and finish is None:
            return
        kind = "observation" if tokens and tokens[0].origin == "observed" else "model"
        last = self.turns[-1] if self.turns else None
        if last is None or last.kind != kind or not last.is_open:
            last = Span(kind, len(self.tokens))
            self.turns.append(last)
        last.finish = finish
        self.tokens += tokens

    def truncate(self, keep: int) -> int:
        """Cut to `keep` response tokens, or to the start of the media span that this would cut."""
        for start, length in self.media:
            if start < len(self.prompt) + keep < start + length:
                keep = start - len(self.prompt)
        for number in reversed(range(len(self.turns))):
            turn, stop = self.turns[number], self.stop_of(number)
            if stop > keep:
                turn.finish = None
                turn.calls = tuple(
                    call
                    for call in turn.calls
                    if call.span is None or turn.start + call.span[1] <= keep
                )
            if turn.start > keep or (turn.start == keep < stop):
                del self.turns[number]
                del self.tokens[turn.start :]
        del self.tokens[keep:]
        self.media = [(start, n) for start, n in self.media if start + n <= self.length]
        if self.rows is not None:
            del self.rows[max(self.length - 1, 0) :]
        self.response = None
        return keep

    def reset(self) -> None:
        """Nothing was generated."""
        self.tokens, self.turns, self.response, self.rows = [], [], None, None
        self.media = [(start, n) for start, n in self.media if start < len(self.prompt)]

    def fork(self, prompt: list[int]) -> None:
        """What was there is closed; the next row begins behind `prompt`, a part of this one."""
        row = Closed(self.prompt, self.media, len(self.tokens), self.num_open_turns)
        self.closed.append(row)
        self.prompt = prompt
        self.media = [(start, n) for start, n in row.media if start + n <= len(prompt)]
        self.reset()

    def move(self, event: Event, dest: Status, reason: StopReason | None) -> None:
        """The event fired."""
        if event is Event.RETRY:
            if self.closed:
                self.prompt, self.media, *_ = self.closed[0]
                self.closed.clear()
            self.reset()
            self.attempt += 1
            self.num_tool_calls = self.num_invalid_calls = 0
            self.alive = None
            self.was_over = False
        elif self.status in (Status.COMPLETED, Status.TRUNCATED):
            self.was_over = True
        self.status, self.reason = dest, reason
        self.moves += 1


def assert_agree(request: Request, reference: Reference) -> None:
    """The request is what its reference says, and every invariant holds."""
    sample, tokens = request.samples[-1], reference.tokens
    columns, sampled = sample.columns, [token.origin == "sampled" for token in tokens]
    assert columns.is_aligned
    assert violations(sample) == []
    assert sample.tokens.tolist() == [*reference.prompt, *(token.id for token in tokens)]
    assert sample.response_length == len(tokens)
    assert sample.loss_mask.tolist() == [token.trained for token in tokens]
    assert sample.sampled.tolist() == sampled
    assert columns.num_sampled == sample.num_versioned == sum(sampled)
    assert columns.num_trained == sum(token.trained for token in tokens)
    log_probs = sample.rollout_log_probs
    assert (log_probs is not None) is request.log_probs
    assert log_probs is None or log_probs.tolist() == [token.log_prob for token in tokens]
    for column in request.declared:
        prompt = [column.fill] * len(reference.prompt) if column.per == "T" else []
        response = [token.extra[column.name] for token in tokens]
        assert columns.extra(column.name).tolist() == prompt + response
    assert_replay_agrees(sample, reference)
    assert len(sample.turns) == len(reference.turns)
    for number, (turn, span) in enumerate(zip(sample.turns, reference.turns, strict=True)):
        assert (turn.kind, turn.start, turn.finish) == (span.kind, span.start, span.finish)
        assert (turn.stop, turn.calls) == (reference.stop_of(number), span.calls)
        assert turn.weight_versions == reference.runs_of(number)
        assert turn.forced == reference.forced_of(number)
    assert [(span.start, span.length) for span in sample.media] == reference.media
    assert sample.response == reference.response
    assert request.status is sample.status is reference.status
    assert request.stop_reason is sample.stop_reason is reference.reason
    assert (request.seq, request.attempt) == (reference.moves, reference.attempt)
    assert request.num_turns == reference.num_turns
    assert sample.num_turns == reference.num_open_turns
    assert len(request.samples) == 1 + len(reference.closed)
    for number, row in enumerate(reference.closed):
        closed = request.samples[number]
        assert (closed.prompt_length, closed.response_length) == (len(row.prompt), row.num_tokens)
        assert closed.num_turns == row.num_turns
        assert closed.continued_by == request.samples[number + 1].sample_id
        assert violations(closed) == []
    assert request.num_tool_calls == reference.num_tool_calls
    assert request.num_invalid_calls == reference.num_invalid_calls
    assert request.is_sealed is sample.is_sealed is reference.is_sealed
    assert request.room == reference.room >= 0
    assert request.max_new_tokens == reference.max_new_tokens
    assert request.attempt <= request.limits.max_attempts


def assert_replay_agrees(sample: Sample, reference: Reference) -> None:
    """What the sample holds of replay data is what the reference says."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    experts = sample.rollout_routed_experts
    if reference.rows is None:
        assert ids is offsets is experts is None
        return
    assert ids is not None
    assert offsets is not None
    assert experts is not None
    kept = [token.kept for token in reference.tokens]
    assert ids.tolist() == [id for span in kept for id in span]
    assert offsets.tolist() == [sum(map(len, kept[:at])) for at in range(len(kept) + 1)]
    assert experts.tolist() == [[[row], [row + 1]] for row in reference.rows]

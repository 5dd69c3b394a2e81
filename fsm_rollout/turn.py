"""Turn, ToolCall, Media: what the tokens of a sample are, as spans and counts, never copies.

Plain values: Sample writes them with the columns, the loop adds calls, messages and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import NoneType
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import InvariantError
from fsm_rollout.replay import REPLAY_NAMES, WeightVersion, tiles, weight_runs_of

FINISHES = frozenset({"stop", "length", "abort", "repetition"})
LOG_PROB_KINDS = ("scaled", "raw", "processed")
Run: TypeAlias = tuple[WeightVersion, int]
"""a run of tokens that one weight version sampled"""


class ToolCall(msgspec.Struct, frozen=True):
    """One attempt of the model to call a tool, well-formed (`error` is None) or not."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str | None = None
    """why the attempt is malformed: invalid_json, not_an_object, args_not_object, missing_name,
    bad_name, empty, unterminated, malformed, bad_header, non_finite, too_deep, invalid_unicode,
    call_in_open_reasoning"""
    raw: str = ""
    """a malformed attempt as it was sampled"""
    span: tuple[int, int] | None = None
    """its tokens, [start, stop) relative to the turn's first token"""


class Media(msgspec.Struct, frozen=True):
    """A placeholder span of the training stream that stands for one image, audio clip or video."""

    start: int
    """position in tokens [T]"""
    length: int
    """placeholder ids"""
    item: Any
    """what the engine is given in its place"""


def engine_ids(tokens: npt.NDArray[np.int32], media: Sequence[Media]) -> npt.NDArray[np.int32]:
    """int32: what an engine is sent, one placeholder id in place of each media span."""
    if not media:
        return tokens
    keep = np.ones(len(tokens), bool)
    for span in media:
        keep[span.start + 1 : span.start + span.length] = False
    return tokens[keep]


def chat_view(prompt: Any, prompt_length: int, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The prompt's messages, then each turn's with its `span` in tokens [T]."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    view = [{**message, "span": None} for message in prompt or []]
    for turn in turns:
        span = (prompt_length + turn.start, prompt_length + turn.stop)
        view += [{**message, "span": span} for message in turn.messages]
    return view


@dataclass(slots=True)
class Turn:
    """A span of response tokens with one origin. Spans and counts, never copies."""

    kind: Literal["model", "observation"]
    start: int  # response-relative, [start, stop)
    stop: int
    finish: str | None = (
        None  # stop | length | abort | repetition; None while open, and on observations
    )
    calls: tuple[ToolCall, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()  # what the span says, as chat messages
    reward: float | None = None  # of this step: what its tools said
    seconds: float = 0.0
    temperature: float | None = None
    top_p: float | None = None
    log_prob_kind: str | None = None
    weight_versions: list[Run] = field(default_factory=list)  # runs that tile the sampled tokens
    forced: list[tuple[int, int]] = field(default_factory=list)  # spans put in by us, like start
    streamed: int = 0  # sampled tokens of a reply that goes on: its end may say more about them

    @property
    def is_open(self) -> bool:
        """The next append of its kind extends it: an interrupted turn that goes on is one turn."""
        return self.finish is None or self.finish == "abort"

    @property
    def num_sampled(self) -> int:
        """Tokens of this turn that the policy sampled."""
        if self.kind != "model":
            return 0
        count = self.stop - self.start
        for start, stop in self.forced:
            count -= stop - start
        return count

    def put_in(self, count: int) -> None:
        """Note that the next `count` tokens are forced; spans that touch are one."""
        start = self.stop
        if self.forced and self.forced[-1][1] == start:
            start = self.forced.pop()[0]
        self.forced.append((start, self.stop + count))

    def take(self, meta: Meta) -> None:
        """Note what the engine said about the tokens that were just appended."""
        if meta.earlier:
            told = sum([count for _, count in meta.runs])
            self.weight_versions = _first(self.weight_versions, self.num_sampled - told)
        extend_runs(self.weight_versions, meta.runs)
        if meta.temperature is not None:
            self.temperature = meta.temperature
        if meta.top_p is not None:
            self.top_p = meta.top_p
        if meta.log_prob_kind is not None:
            self.log_prob_kind = meta.log_prob_kind

    def cut(self, stop: int) -> Turn:
        """This turn up to response position `stop`; a turn that lost its end is open again."""
        forced = [(a, min(b, stop)) for a, b in self.forced if a < stop]
        calls = tuple(c for c in self.calls if c.span is None or self.start + c.span[1] <= stop)
        turn = Turn(
            self.kind, self.start, stop, None, calls, self.messages, self.reward, self.seconds
        )
        turn.temperature, turn.top_p = self.temperature, self.top_p
        turn.log_prob_kind, turn.forced = self.log_prob_kind, forced
        turn.weight_versions = _first(self.weight_versions, turn.num_sampled)
        return turn


class Meta(msgspec.Struct, frozen=True):
    """What an engine said about the tokens of one append, checked."""

    finish: str | None = None
    runs: Sequence[Run] = ()
    earlier: int = 0
    """tokens of the same reply, appended before, that the runs cover too"""
    temperature: float | None = None
    top_p: float | None = None
    log_prob_kind: str | None = None
    replay: Mapping[str, Any] | None = None
    """all of it, still encoded, where something in it is replay data"""


def checked_meta(
    meta: Mapping[str, Any] | None,
    count: int,
    *,
    trainable: bool,
    turn: Turn | None = None,
    ends: bool = True,
) -> Meta:
    """The parts of `meta_info` that the record keeps. InvariantError names the one that is bad.

    `turn` is the open one, if there is one; `ends`: this is all of a reply, or its last part.
    """
    try:
        given = dict(meta or {})
    except (TypeError, ValueError) as error:
        raise InvariantError("R3.6.meta", f"meta_info must be a mapping: {error}") from error
    finish = _finish(given.get("finish_reason"))
    if not trainable:
        return Meta(finish)
    kind = given.get("log_prob_kind")
    if kind is not None and kind not in LOG_PROB_KINDS:
        raise InvariantError("R3.6.meta", f"log_prob_kind {kind!r} is not one of {LOG_PROB_KINDS}")
    runs, earlier = _runs(given, count, turn, ends=ends)
    return Meta(
        finish,
        runs,
        earlier,
        _positive(given, "temperature"),
        _positive(given, "top_p"),
        kind,
        None if REPLAY_NAMES.isdisjoint(given) else given,
    )


def _runs(
    meta: Mapping[str, Any], count: int, turn: Turn | None, *, ends: bool
) -> tuple[Sequence[Run], int]:
    """Runs, and how many tokens they cover before the `count` new ones.

    A server's spans count from the start of the reply; one that names the version at the end only
    means all of the reply.
    """
    streamed = 0 if turn is None else turn.streamed
    if turn is not None and streamed:
        whole = streamed + count
        if tiles(meta, whole):
            return weight_runs_of(meta, whole), streamed
        version, last = meta.get("weight_version"), turn.weight_versions[-1]
        is_unknown = last[0] is None and last[1] >= streamed
        if ends and is_unknown and version is not None and meta.get("weight_versions") is None:
            return weight_runs_of({"weight_version": version}, whole), streamed
    return weight_runs_of(meta, count), 0


def _positive(meta: Mapping[str, Any], name: str) -> float | None:
    value = meta.get(name)
    if value is None:
        return None
    # float comes first because a look at the type finds it
    is_number = isinstance(value, (float, Real)) and not isinstance(value, bool)
    number = float(value) if is_number else -1.0
    if not 0 <= number < math.inf:
        raise InvariantError("R3.6.meta", f"{name} must be a finite number >= 0, got {value!r}")
    return number


def _finish(finish: Any) -> str | None:
    if not isinstance(finish, (str, NoneType)) and isinstance(finish, Mapping):
        finish = finish.get("type")
    if finish is not None and not (isinstance(finish, str) and finish in FINISHES):
        raise InvariantError(
            "R3.6.finish", f"finish reason {finish!r} is not one of {', '.join(sorted(FINISHES))}"
        )
    return finish


def sampled_of(turns: Sequence[Turn]) -> npt.NDArray[np.uint8]:
    """uint8 [R]: 1 where the policy's engine returned the token, of turns that tile them."""
    spans = [(b"\1" if t.kind == "model" else b"\0") * (t.stop - t.start) for t in turns]
    sampled = np.frombuffer(bytearray().join(spans), np.uint8)
    for turn in turns:
        for start, stop in turn.forced:
            sampled[start:stop] = 0
    return sampled


def runs_of(turns: Sequence[Turn]) -> list[Run]:
    """The weight-version runs of all turns, one behind the other."""
    runs: list[Run] = []
    for turn in turns:
        extend_runs(runs, turn.weight_versions)
    return runs


def extend_runs(runs: list[Run], more: Sequence[Run]) -> None:
    for version, count in more:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))


def _first(runs: Sequence[Run], count: int) -> list[Run]:
    kept: list[Run] = []
    for version, n in runs:
        if count > 0:
            kept.append((version, min(n, count)))
            count -= n
    return kept

"""Sample: one training row of a request, and the only writer of its token columns.

Written by `append_response_tokens`, `truncate`, `mask_out` and `reset` alone. Each is synchronous
and atomic: everything changes or nothing does. In flight a sample reads status and budgets from its
request; once sealed it stands alone. Field names are slime's where slime has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import Floats, Ints, int32
from fsm_rollout.columns import Columns, Prompt
from fsm_rollout.errors import InvariantError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.replay_columns import reported
from fsm_rollout.row import ColumnRow, Row, row_from
from fsm_rollout.turn import (
    Media,
    Run,
    ToolCall,
    Turn,
    chat_view,
    checked_meta,
    engine_ids,
    runs_of,
    sampled_of,
)

if TYPE_CHECKING:
    from fsm_rollout.request import Request

__all__ = ["Media", "Run", "Sample", "ToolCall", "Turn"]


@dataclass(slots=True, eq=False)
class Sample:
    """One training row. T = prompt + response tokens, R = response tokens."""

    index: int = 0
    group_index: int = 0
    rollout_id: int = 0
    """shared by all samples of a request"""
    sample_id: str = ""
    session_id: str = ""
    row_id: str = ""
    """the dataset's own id of the row"""
    is_child: bool = False
    """a sub-agent's: its reward may be its own, and is in no group's mean"""
    prompt: Any = None
    """the messages that were rendered; frozen input, as label and metadata are"""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    train_metadata: Mapping[str, Any] | None = None
    is_fork: bool = False
    """its prompt goes on from another row, see `Request.fork`"""
    continued_by: str = ""
    """sample_id of the row that goes on from here; empty: the last one"""
    columns: Columns = field(default_factory=Columns)
    turns: list[Turn] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    response: str | None = None
    """the response tokens decoded once, at the end; a write clears it"""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    remove_sample: bool = False
    """nothing in it to train on, or a policy took it out"""
    non_generation_time: float = 0.0
    """seconds outside the engine"""
    extra: dict[str, Any] = field(default_factory=dict)
    """where tools and environments write; `reset` clears it"""
    num_turns: int = 0
    """model turns, an open one included"""
    num_versioned: int = 0
    """sampled tokens that the weight-version runs cover"""
    request: Request | None = None
    """whose row it is; None once sealed"""
    _status: Status = Status.PENDING
    _stop_reason: StopReason | None = None

    # -- read --------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """The request's status."""
        return self._status if self.request is None else self.request.status

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the request ended."""
        return self._stop_reason if self.request is None else self.request.stop_reason

    @property
    def is_sealed(self) -> bool:
        """The reward is recorded, nothing changes any more, the arrays are zero-copy views."""
        return self.columns.is_sealed

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [T]."""
        return self.columns.tokens

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [R], 1 where the policy is trained."""
        return self.columns.loss_mask

    @property
    def rollout_log_probs(self) -> npt.NDArray[np.float32] | None:
        """float32 [R]: log_softmax(logits / temperature) of sampled tokens, 0.0 elsewhere."""
        return self.columns.rollout_log_probs

    @property
    def rollout_top_p_token_ids(self) -> npt.NDArray[np.int32] | None:
        """int32 [K]: the ids that top-p kept for each response token; None: never reported."""
        replay = self.columns.replay
        return None if replay is None else replay.top_p_ids

    @property
    def rollout_top_p_token_offsets(self) -> npt.NDArray[np.int32] | None:
        """int32 [R + 1]: where each token's ids start; tokens not sampled have none."""
        replay = self.columns.replay
        return None if replay is None else replay.top_p_offsets

    @property
    def rollout_routed_experts(self) -> npt.NDArray[Any] | None:
        """[n <= T - 1, layers, k] in the engine's dtype: rows of tokens that were forwarded."""
        replay = self.columns.replay
        return None if replay is None else replay.routed_experts

    @property
    def prompt_length(self) -> int:
        """Prompt tokens."""
        return self.columns.prompt_length

    @property
    def response_length(self) -> int:
        """R."""
        return self.columns.response_length

    @property
    def sampled(self) -> npt.NDArray[np.uint8]:
        """uint8 [R]: 1 where the policy's engine returned the token, whatever is trained."""
        return sampled_of(self.turns)

    @property
    def weight_versions(self) -> list[Run]:
        """Runs (version, count) that tile the sampled tokens."""
        return runs_of(self.turns)

    @property
    def open_turn(self) -> Turn | None:
        """The model turn that a resumed generation would go on with."""
        turn = self.turns[-1] if self.turns else None
        return turn if turn is not None and turn.kind == "model" and turn.is_open else None

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return 2**31 - 1 - self.columns.length if self.request is None else self.request.room

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat view: the prompt's messages, then each turn's with its `span` in tokens [T].

        The content of a turn that was cut is the whole one; its span is what stayed.
        """
        return chat_view(self.prompt, self.prompt_length, self.turns)

    def engine_ids(self) -> npt.NDArray[np.int32]:
        """int32: what an engine is sent, one placeholder id in place of each media span."""
        return engine_ids(self.tokens, self.media)

    # -- write -------------------------------------------------------------------------------------

    def set_prompt(self, ids: Ints | Prompt) -> None:
        """Set the prompt tokens, once, before anything was generated.

        Raises InvariantError: R3.5.prompt when they do not fit the limits, R3.closed too late.
        """
        if self.is_sealed or self.status is not Status.PENDING or self.columns.length:
            raise InvariantError(
                "R3.closed", f"the prompt of {self._where()} is set once, while pending"
            )
        columns = self.columns
        fresh = Columns(
            ids, log_probs=columns.has_log_probs, declared=tuple(columns.declared.values())
        )
        if self.request is not None:
            self.request.check_prompt(fresh.length)
        fresh.replay = columns.replay  # an empty reply may have reported that there will be some
        self.columns = fresh

    def append_response_tokens(
        self,
        tokens: Ints,
        log_probs: Floats | None = None,
        *,
        trainable: bool = True,
        forced: bool = False,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        extra: Mapping[str, Any] | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append N response tokens, or raise InvariantError and change nothing.

        tokens: int32 [N].
        log_probs: float32 [N]; required for sampled tokens, refused for others.
        trainable: sampled by the policy (mask 1), or an observation (mask 0).
        forced: untrained tokens inside a model turn (a prefill, a budget-forced `</think>`).
        meta_info: `finish_reason` (a string or `{"type": ...}`), `weight_version` or
        `weight_versions` (runs), `temperature`, `top_p`, `log_prob_kind`, and replay data as
        `replay.top_p_of` and `replay.routed_experts_of` read it, flat experts beside their
        `routed_experts_shape` (layers, k); the rest is ignored.
        text: what the tokens say, kept in `response`.
        extra: values [N] of declared columns.
        update_terminal_info: False for all but the last chunk of a stream: the turn stays open.
        """
        if self.is_sealed or self.status.is_terminal or self.continued_by:
            state = f"continued by {self.continued_by}" if self.continued_by else self.status
            raise InvariantError(
                "R3.closed", f"{self._where()} is {state}: nothing can be appended"
            )
        if trainable and forced:
            raise InvariantError("R3.2.forced", "forced tokens are not sampled: trainable=False")
        ids = int32(tokens)
        count = len(ids)
        sampled = self.columns.checked_log_probs(log_probs, count, trainable, self._where)
        if count > self.room:
            raise InvariantError(
                "R3.5.room", f"{count} tokens for {self._where()}, which has room for {self.room}"
            )
        turn = self.open_turn
        ends = update_terminal_info
        meta = checked_meta(meta_info, count, trainable=trainable, turn=turn, ends=ends)
        finish = meta.finish if ends and (trainable or forced) else None
        rows = self.columns.checked_extra(extra, count)
        new = None
        if self.columns.replay is not None or meta.replay is not None:
            new = reported(
                meta.replay,
                ids,
                self.columns.replay,
                length=self.columns.length,
                num_sampled=self.columns.num_sampled,
                num_streamed=0 if turn is None else turn.streamed,
                sampled=trainable,
                ends=ends,
            )
        if text is not None and not isinstance(text, str):
            raise InvariantError("R3.6.text", f"text must be a string, got {type(text).__name__}")

        known = self.response if self.response_length else self.response or ""
        self.columns.append(ids, sampled, rows, sampled=trainable, reported=new)
        if count or text is not None:
            self.response = None if text is None or known is None else known + text
        if count or finish is not None or (trainable and turn is not None and turn.streamed):
            turn = self._turn("model" if trainable or forced else "observation")
            if forced and count:
                turn.put_in(count)
            turn.stop += count
            turn.finish = finish
            turn.take(meta)
            if trainable:
                turn.streamed = 0 if ends else turn.streamed + count
            self.num_versioned += sum([n for _, n in meta.runs]) - meta.earlier

    def truncate(self, response: int) -> int:
        """Keep the first `response` response tokens of every column, turn and span.

        A cut inside a media span moves to its start. Returns how many response tokens stayed.
        Raises InvariantError when `response` is out of range.
        """
        if self.is_sealed:
            raise InvariantError("R3.closed", f"{self._where()} is sealed")
        response = index(response)
        if not 0 <= response <= self.response_length:
            raise InvariantError(
                "R3.1.truncate", f"cannot keep {response} of {self.response_length} response tokens"
            )
        for span in self.media:
            if span.start < self.prompt_length + response < span.start + span.length:
                response = span.start - self.prompt_length
        kept = [
            turn if turn.stop <= response else turn.cut(response)
            for turn in self.turns
            if turn.start < response or turn.stop <= response
        ]
        sampled = sum(turn.num_sampled for turn in kept)
        self.columns.truncate(response, sampled)
        self.turns, self.response = kept, None
        self.media = [m for m in self.media if m.start + m.length <= self.columns.length]
        self.num_turns = sum(turn.kind == "model" for turn in kept)
        self.num_versioned = sum(count for turn in kept for _, count in turn.weight_versions)
        return response

    def mask_out(self, start: int = 0, stop: int | None = None) -> None:
        """Take response tokens [start, stop) out of training; they stay as they were sampled."""
        stop = self.response_length if stop is None else stop
        if self.is_sealed:
            raise InvariantError("R3.closed", f"{self._where()} is sealed")
        if not 0 <= start <= stop <= self.response_length:
            raise InvariantError(
                "R3.1.mask_out",
                f"[{start}, {stop}) is outside of {self.response_length} response tokens",
            )
        self.columns.mask_out(start, stop)

    def reset(self) -> None:
        """Forget everything that was generated; identity and prompt stay."""
        if self.is_sealed:
            raise InvariantError("R3.closed", f"{self._where()} is sealed")
        self.columns.replay = None
        self.columns.truncate(0, 0)
        self.turns, self.extra, self.reward_parts = [], {}, {}
        self.media = [m for m in self.media if m.start < self.prompt_length]
        self.response = self.reward = None
        self.remove_sample = False
        self.non_generation_time = 0.0
        self.num_turns = self.num_versioned = 0

    # -- at rest -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values, with a schema version; `from_dict` brings it back equal.

        Raises TypeError when metadata, label or extra hold what JSON cannot.
        """
        columns, log_probs = self.columns, self.columns.rollout_log_probs
        row = Row(
            **{name: getattr(self, name) for name in _SAME},
            metadata=dict(self.metadata),
            train_metadata=None if self.train_metadata is None else dict(self.train_metadata),
            status=self.status,
            stop_reason=self.stop_reason,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            tokens=columns.tokens.tolist(),
            loss_mask=columns.loss_mask.tolist(),
            rollout_log_probs=None if log_probs is None else log_probs.tolist(),
            columns=[
                ColumnRow(column, columns.extra(name).tolist())
                for name, column in columns.declared.items()
            ],
            **({} if columns.replay is None else columns.replay.to_dict()),
        )
        plain: dict[str, Any] = msgspec.to_builtins(row)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """A sealed sample from `to_dict`'s row. Not judged: `invariants.violations` does that.

        Raises ConfigError that names the field of another schema or of a wrong type.
        """
        row = row_from(values)
        sample = cls(
            **{name: getattr(row, name) for name in _SAME},
            metadata=row.metadata,
            train_metadata=row.train_metadata,
            columns=row.restored(),
            num_turns=sum(turn.kind == "model" for turn in row.turns),
            num_versioned=sum(n for turn in row.turns for _, n in turn.weight_versions),
            _status=row.status,
            _stop_reason=row.stop_reason,
        )
        sample.columns.seal()
        return sample

    # -- parts of the writers ----------------------------------------------------------------------

    def _turn(self, kind: Literal["model", "observation"]) -> Turn:
        last = self.turns[-1] if self.turns else None
        if last is not None and last.kind == kind and last.is_open:
            return last
        start = last.stop if last is not None else 0
        turn = Turn(kind, start, start)
        self.turns.append(turn)
        self.num_turns += kind == "model"
        return turn

    def _where(self) -> str:
        attempt = "" if self.request is None else f", attempt {self.request.attempt}"
        return f"sample {self.sample_id or self.index}{attempt}, turn {self.num_turns}"


# fields that a sample and its row share by name
_SAME = {f.name for f in fields(Sample)} & set(Row.__struct_fields__) - {
    "columns",
    "metadata",
    "train_metadata",
}

"""Row: a sample at rest, one line of samples.jsonl. Plain JSON values with a schema version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from fsm_rollout.columns import Column, Columns
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.replay_columns import ReplayColumns
from fsm_rollout.turn import Media, Turn

SCHEMA_VERSION = 1

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Byte = Annotated[int, msgspec.Meta(ge=0, lt=256)]


class ColumnRow(msgspec.Struct):
    """A declared column with its values."""

    column: Column
    values: list[int | float]


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `Sample.to_dict` writes: T token ids, R response values, the turns and the outcome."""

    schema: int = SCHEMA_VERSION
    index: int
    group_index: int
    rollout_id: int
    sample_id: str
    session_id: str
    row_id: str = ""
    is_child: bool = False
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    train_metadata: dict[str, Any] | None
    is_fork: bool = False
    continued_by: str = ""
    status: Status
    stop_reason: StopReason | None
    prompt_length: Count
    response_length: Count
    tokens: list[Int32]
    loss_mask: list[Byte]
    rollout_log_probs: list[float] | None
    rollout_top_p_token_ids: list[Int32] | None = None
    rollout_top_p_token_offsets: list[Int32] | None = None
    rollout_routed_experts: str | None = None
    """base64 of .npy"""
    columns: list[ColumnRow]
    turns: list[Turn]
    media: list[Media]
    response: str | None
    reward: float | None
    reward_parts: dict[str, float]
    remove_sample: bool
    non_generation_time: float
    extra: dict[str, Any]

    def restored(self) -> Columns:
        """The columns as they were written. ConfigError where one cannot be read."""
        try:
            return Columns.restore(
                self.tokens,
                self.prompt_length,
                self.loss_mask,
                self.rollout_log_probs,
                num_sampled=sum(turn.num_sampled for turn in self.turns),
                declared=[entry.column for entry in self.columns],
                extra={entry.column.name: entry.values for entry in self.columns},
                replay=ReplayColumns.restore(
                    self.rollout_top_p_token_ids,
                    self.rollout_top_p_token_offsets,
                    self.rollout_routed_experts,
                ),
            )
        except InvariantError as error:
            raise ConfigError(f"sample row {self.sample_id!r}: {error}") from error


def row_from(values: Mapping[str, Any]) -> Row:
    """The typed row. ConfigError names the field that is missing, unknown or of a wrong type."""
    schema = values.get("schema") if isinstance(values, Mapping) else None
    if schema != SCHEMA_VERSION:
        raise ConfigError(
            f"sample row has schema {schema!r}, this version reads {SCHEMA_VERSION}: "
            "is the line a sample that `Sample.to_dict` wrote?"
        )
    try:
        row = msgspec.convert(values, Row)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sample row {values.get('sample_id')!r}: {error}") from error
    if row.prompt_length + row.response_length != len(row.tokens):
        raise ConfigError(
            f"sample row {row.sample_id!r}: prompt_length {row.prompt_length} + response_length "
            f"{row.response_length} != {len(row.tokens)} tokens"
        )
    return row

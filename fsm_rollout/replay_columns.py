"""ReplayColumns: what a sample holds of replay data, ragged kept ids and rows of experts.

Columns writes it with the tokens, after `reported` has checked what an engine said about new ones.
A sample of whose sampling nothing was reported has none.
"""

from __future__ import annotations

import base64
import io
from array import array
from collections.abc import Mapping
from operator import index
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import view
from fsm_rollout.errors import InvariantError
from fsm_rollout.replay import (
    INT32,
    RoutedExperts,
    TopP,
    expert_rows,
    not_kept,
    routed_experts_of,
    top_p_of,
)


class ReplayColumns:
    """What a sample holds: kept ids [K] with offsets [R + 1], and rows of experts [n <= T - 1].

    Columns writes it with the tokens. A token that was not sampled kept nothing. A row belongs to
    the call that first produced it: the last token of a call gets its row from the next one.
    """

    __slots__ = ("ids", "is_sealed", "offsets", "row", "rows")

    def __init__(self) -> None:
        self.ids = array("i")
        self.offsets: array[int] | None = None  # None: not reported
        self.rows = bytearray()
        self.row: np.dtype[Any] | None = None  # of (layers, k) experts; None: not reported
        self.is_sealed = False

    @property
    def top_p_ids(self) -> npt.NDArray[np.int32] | None:
        """int32 [K]; None when they were not reported."""
        return None if self.offsets is None else self._view(self.ids, np.int32)

    @property
    def top_p_offsets(self) -> npt.NDArray[np.int32] | None:
        """int32 [R + 1]; None when they were not reported."""
        return None if self.offsets is None else self._view(self.offsets, np.int32)

    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """[n, layers, k] in the engine's dtype; None when they were not reported."""
        return None if self.row is None else self._view(self.rows, self.row)

    @property
    def num_rows(self) -> int:
        """Tokens whose experts are held."""
        return 0 if self.row is None else len(self.rows) // self.row.itemsize

    def is_aligned(self, total: int, response: int) -> bool:
        """The lengths fit a sample of `total` tokens."""
        ids, offsets = self.ids, self.offsets
        if offsets is None:
            fits = not ids
        else:
            fits = len(offsets) == response + 1 and offsets[-1] == len(ids)
        return fits and self.num_rows <= max(total - 1, 0)

    @property
    def lengths(self) -> str:
        """All of them, for a message."""
        offsets = "no" if self.offsets is None else len(self.offsets)
        return f"{len(self.ids)} top-p ids, {offsets} offsets, {self.num_rows} expert rows"

    def extend(self, response: int, count: int, new: Reported) -> None:
        """Go on for `count` tokens after the first `response` response tokens."""
        held = len(self.ids)
        if (top_p := new.top_p) is not None:
            if self.offsets is None:
                self.offsets = array("i", bytes(4 * (response + 1)))
            self.ids.frombytes(top_p.ids.tobytes())
            self.offsets.frombytes((top_p.offsets[1:] + held).tobytes())
        elif self.offsets is not None:
            self.offsets.extend(array("i", [held]) * count)
        if (routed := new.routed_experts) is not None:
            self._add(routed.rows)  # last: rows of a failed append could not be told from others

    def cut(self, total: int, response: int) -> None:
        """Keep what belongs to the first `total` tokens, `response` of them response tokens."""
        if self.offsets is not None:
            del self.ids[self.offsets[response] :]
            del self.offsets[response + 1 :]
        if self.row is not None:
            del self.rows[max(total - 1, 0) * self.row.itemsize :]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under slime's names; `restore` brings them back."""
        ids, offsets, routed = self.top_p_ids, self.top_p_offsets, self.routed_experts
        return {
            "rollout_top_p_token_ids": None if ids is None else ids.tolist(),
            "rollout_top_p_token_offsets": None if offsets is None else offsets.tolist(),
            "rollout_routed_experts": None if routed is None else _npy(routed),
        }

    @classmethod
    def restore(
        cls, ids: list[int] | None, offsets: list[int] | None, routed_experts: str | None
    ) -> ReplayColumns | None:
        """What `to_dict` wrote; `invariants.violations` judges it. InvariantError: unreadable."""
        if ids is None and offsets is None and routed_experts is None:
            return None
        replay = cls()
        if ids is not None:
            replay.ids = array("i", ids)
        if offsets is not None:
            replay.offsets = array("i", offsets)
        if routed_experts is not None:
            replay._add(expert_rows(routed_experts))
        return replay

    def _view(self, buffer: Any, dtype: Any) -> npt.NDArray[Any]:
        return view(buffer, dtype, copied=not self.is_sealed)

    def _add(self, rows: npt.NDArray[Any]) -> None:
        self.rows += rows.tobytes()
        self.row = np.dtype((rows.dtype, rows.shape[1:]))


class Reported(msgspec.Struct, frozen=True, gc=False):
    """What one append adds to the record, checked."""

    replay: ReplayColumns
    top_p: TopP | None = None
    routed_experts: RoutedExperts | None = None
    """only rows that are not held yet"""


def reported(
    meta: Mapping[str, Any] | None,
    tokens: npt.NDArray[np.int32],
    held: ReplayColumns | None,
    *,
    length: int,
    num_sampled: int,
    num_streamed: int,
    sampled: bool,
    ends: bool,
) -> Reported | None:
    """What `meta` says about `tokens` [N] that are to be appended; None: nothing was ever reported.

    held, length, num_sampled: replay data, tokens and sampled tokens of the sample so far.
    num_streamed: those of them that belong to the reply that goes on.
    sampled: not an observation, not forced; of those nothing is reported.
    ends: this is the end of a reply; rows of experts may come with it for all of a stream.
    Raises InvariantError, also where sampled tokens lack what others have.
    """
    count = len(tokens)
    if not sampled or meta is None:
        top_p = routed = None
    else:
        top_p, routed = top_p_of(meta, count), _new_rows(meta, length + count, held)
    if held is None and top_p is None and routed is None:
        return None
    held = held or ReplayColumns()
    if top_p is not None:
        if held.offsets is None and num_sampled:
            raise _partly("top_p", f"{num_sampled} earlier tokens lack it")
        _check_kept(top_p, tokens, len(held.ids))
    elif sampled and count and held.offsets is not None:
        raise _partly("top_p", f"{count} new tokens lack it")
    if routed is not None:
        if held.row is None and num_sampled > num_streamed:
            raise _partly("routed_experts", f"{num_sampled - num_streamed} earlier tokens lack it")
    elif sampled and count and ends and held.row is not None:
        raise _partly("routed_experts", f"{count} new tokens lack it")
    return Reported(held, top_p, routed)


def _partly(what: str, why: str) -> InvariantError:
    return InvariantError(
        f"{what}_incomplete", f"a run reports {what} for all of its sampled tokens or none: {why}"
    )


def _check_kept(top_p: TopP, tokens: npt.NDArray[np.int32], held: int) -> None:
    if held + len(top_p.ids) > INT32.max:
        raise InvariantError(
            "top_p_offsets",
            f"{held} kept ids and {len(top_p.ids)} more: their offsets do not fit into int32",
        )
    lacks = not_kept(top_p, tokens)
    if lacks.any():
        at = int(lacks.argmax())
        raise InvariantError(
            "top_p_sampled", f"token {tokens[at]}, new token {at}, is not among its own kept ids"
        )


def _new_rows(
    meta: Mapping[str, Any], total: int, held: ReplayColumns | None
) -> RoutedExperts | None:
    value = meta.get("routed_experts")
    if value is None:
        return None
    row, num_rows = (None, 0) if held is None else (held.row, held.num_rows)
    start = meta.get("routed_experts_start_len") or 0
    if isinstance(value, RoutedExperts):
        start = value.start
    if not isinstance(start, (int, np.integer)) or not 0 <= start <= num_rows:
        raise InvariantError(
            "routed_experts_start",
            f"the expert rows start at {start!r}: {num_rows} are held, none may be missed",
        )
    shape = _shape(meta.get("routed_experts_shape")) if row is None else row.shape
    routed = routed_experts_of(meta, total, start=int(start), shape=shape)
    if routed is None or row is None:
        return routed
    if routed.rows.dtype != row.base:
        raise InvariantError(
            "routed_experts_shape", f"experts are {routed.rows.dtype}, earlier ones {row.base}"
        )
    return RoutedExperts(routed.rows[num_rows - start :], num_rows)


def _shape(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    try:
        layers, k = (index(n) for n in value)
    except (TypeError, ValueError) as error:
        raise InvariantError(
            "routed_experts_shape", f"routed_experts_shape is (layers, k), got {value!r}"
        ) from error
    return layers, k


def _npy(values: npt.NDArray[Any]) -> str:
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()

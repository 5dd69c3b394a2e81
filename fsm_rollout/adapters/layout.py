"""Layout: where the tokens of each sample stand in a batch, padded or packed.

`tensors` and `optional_columns` write every column through it, so that all of a batch agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import HandOverError
from fsm_rollout.sample import Sample

Per = Literal["T", "R"]
"""a column over prompt and response tokens, or over response tokens only"""


class Layout:
    """B samples in columns of one shape per T and one per R; `starts` count in a flat column."""

    def __init__(self, rows: list[Sample]) -> None:
        self.rows = rows
        self.counts: dict[Per, list[int]] = {
            "T": [sample.columns.length for sample in rows],
            "R": [sample.response_length for sample in rows],
        }
        self.shape: dict[Per, tuple[int, ...]] = {}
        self.starts: dict[Per, list[int]] = {}

    def column(
        self,
        per: Per,
        values: Iterable[npt.NDArray[Any] | float | None],
        dtype: npt.DTypeLike,
        fill: float = 0,
        *,
        tail: Sequence[int] = (),
    ) -> npt.NDArray[Any]:
        """The values of each sample in their places, `fill` in all others; None: it has none.

        The shape is that of `per`, and `tail` behind it. Each element is written once.
        """
        shape = self.shape[per]
        flat, at = np.empty((prod(shape), *tail), dtype), 0
        for start, count, value in zip(self.starts[per], self.counts[per], values, strict=True):
            flat[at:start] = fill
            at = start + count
            flat[start:at] = fill if value is None else value
        flat[at:] = fill
        return flat.reshape(*shape, *tail)

    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each token in its sample, 0 elsewhere."""
        count = np.arange(max(self.counts["T"], default=0))
        return self.column("T", [count[:n] for n in self.counts["T"]], np.int64)


class Padded(Layout):
    """[B, P + R] and [B, R]: prompts end at column P, responses start there.

    The prompt of a fork may be longer than a fixed P: it is context that the policy wrote, so what
    P does not hold stands at the start of the response, where nothing is trained.
    """

    def __init__(
        self,
        rows: list[Sample],
        *,
        prompt_length: int | None,
        response_length: int | None,
        multiple_of: int,
    ) -> None:
        super().__init__(rows)
        over = [0] * len(rows)
        if prompt_length is not None:
            over = [max(s.prompt_length - prompt_length, 0) * s.is_fork for s in rows]
        inside = [s.prompt_length - more for s, more in zip(rows, over, strict=True)]
        responses = [more + count for more, count in zip(over, self.counts["R"], strict=True)]
        P = self._width("prompt_length", inside, prompt_length, multiple_of)
        R = self._width("response_length", responses, response_length, multiple_of)
        self.prompt_length = P
        self.shape = {"T": (len(rows), P + R), "R": (len(rows), R)}
        self.starts = {
            "T": [row * (P + R) + P - length for row, length in enumerate(inside)],
            "R": [row * R + more for row, more in enumerate(over)],
        }

    def positions(self) -> npt.NDArray[np.int64]:
        """The same, but that padding on the right repeats the last position."""
        positions = super().positions()
        flat, (rows, width) = positions.reshape(-1), self.shape["T"]
        for row, start, count in zip(range(rows), self.starts["T"], self.counts["T"], strict=True):
            flat[start + count : (row + 1) * width] = max(count - 1, 0)
        return positions

    def _width(self, name: str, lengths: list[int], fixed: int | None, multiple_of: int) -> int:
        if fixed is None:
            return -(-max(lengths, default=0) // multiple_of) * multiple_of
        long = [
            f"sample {sample.sample_id or sample.index} has {length}"
            for sample, length in zip(self.rows, lengths, strict=True)
            if length > fixed
        ]
        if long:
            more = f" and {len(long) - 3} more" if len(long) > 3 else ""
            raise HandOverError(
                f"{name}={fixed} is too short: {', '.join(long[:3])}{more}. "
                "Widen it, or narrow the limits of the rollout"
            )
        return fixed


class Packed(Layout):
    """[N]: the tokens of all samples one behind the other, for T and R alike."""

    def __init__(self, rows: list[Sample]) -> None:
        super().__init__(rows)
        self.ends = np.cumsum([0, *self.counts["T"]], dtype=np.int64)
        """int64 [B + 1]"""
        total = int(self.ends[-1])
        if total > np.iinfo(np.int32).max:
            raise HandOverError(f"{total} tokens in one row, cu_seqlens is int32: pack fewer")
        self.shape = {"T": (total,), "R": (total,)}
        starts = self.ends[:-1].tolist()
        self.starts = {
            "T": starts,
            "R": [n + sample.prompt_length for n, sample in zip(starts, rows, strict=True)],
        }

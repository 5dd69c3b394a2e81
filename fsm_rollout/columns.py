"""Columns: the parallel token arrays of one sample.

T = prompt + response tokens, R = response tokens. Only Sample writes here. A write validates
everything, then commits everything: a refused one leaves every byte as it was. 9 bytes per token,
about 6 more while an engine over HTTP is sent them; O(new tokens) per append.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import Floats, Ints, fits, float32, int32, view
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.replay_columns import ReplayColumns, Reported


class Column(msgspec.Struct, frozen=True):
    """One more parallel array: teacher_log_probs, entropy, a per-token reward …"""

    name: str
    dtype: Literal["float32", "float64", "int32", "int64", "uint8"] = "float32"
    per: Literal["T", "R"] = "R"
    """T: one value for each token; R: one for each response token"""
    fill: int | float = 0
    """the value of tokens that are appended without one"""

    def __post_init__(self) -> None:
        if self.dtype not in _TYPECODE or self.per not in ("T", "R"):
            raise ConfigError(
                f"column {self.name!r}: dtype {self.dtype!r} per {self.per!r}; "
                f"known: {', '.join(_TYPECODE)} per T or R"
            )
        try:
            self.cast([self.fill])
        except InvariantError as error:
            raise ConfigError(f"fill of {error.message}") from error

    def cast(self, values: Any) -> array[Any]:
        """`values` [N] in the column's dtype. InvariantError R3.1.columns when one does not fit."""
        try:
            raw = np.asarray(values)
            whole = not self.dtype.startswith("float")
            if raw.ndim != 1 or (raw.size and raw.dtype.kind not in ("iub" if whole else "iubf")):
                raise TypeError(f"got shape {raw.shape} of {raw.dtype}")
            if whole and not fits(raw, self.dtype):
                raise OverflowError(f"{raw.min()} to {raw.max()} do not fit")
            return array(_TYPECODE[self.dtype], raw.astype(self.dtype).tobytes())
        except (TypeError, ValueError, OverflowError) as error:
            raise InvariantError(
                "R3.1.columns", f"column {self.name!r} is {self.dtype}, one-dimensional: {error}"
            ) from error


_TYPECODE = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "uint8": "B"}


class Prompt:
    """The ids of a prompt, checked once and shared by the requests of a group. Never changed."""

    __slots__ = ("_json", "ids")

    def __init__(self, ids: Ints) -> None:
        self.ids = array("i", int32(ids).tobytes())
        self._json = b""

    def __len__(self) -> int:
        return len(self.ids)

    def encoded(self) -> bytes:
        """The ids as JSON array items, encoded once for all."""
        if not self._json and self.ids:
            self._json = msgspec.json.encode(self.ids.tolist())[1:-1]
        return self._json


class Columns:
    """int32 ids [T], uint8 loss mask [R], float32 log-probs [R], and the declared further columns.

    With `log_probs=False` the whole run has none (distillation, evaluation): the column is absent,
    never zeros in place of unknowns.
    """

    __slots__ = (
        "_extra",
        "_ids",
        "_json",
        "_log_probs",
        "_mask",
        "_num_in_json",
        "_prompt",
        "declared",
        "is_sealed",
        "num_sampled",
        "num_trained",
        "prompt_length",
        "replay",
    )

    def __init__(
        self, prompt: Ints | Prompt = (), *, log_probs: bool = True, declared: Iterable[Column] = ()
    ) -> None:
        self._prompt = prompt if isinstance(prompt, Prompt) else None
        self._ids = (
            prompt.ids[:] if isinstance(prompt, Prompt) else array("i", int32(prompt).tobytes())
        )
        self.prompt_length = len(self._ids)
        self.num_sampled = 0
        self.num_trained = 0
        self.is_sealed = False
        self._mask = bytearray()
        self._log_probs = array("f") if log_probs else None
        self._json, self._num_in_json = bytearray(), 0
        self.replay: ReplayColumns | None = None
        self.declared = {column.name: column for column in declared}
        self._extra = {
            name: column.cast([column.fill]) * (self.prompt_length if column.per == "T" else 0)
            for name, column in self.declared.items()
        }

    # -- read --------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """T: prompt and response tokens."""
        return len(self._ids)

    @property
    def response_length(self) -> int:
        """R: response tokens."""
        return len(self._ids) - self.prompt_length

    @property
    def has_log_probs(self) -> bool:
        """False in a run that is sampled without log-probs."""
        return self._log_probs is not None

    @property
    def is_aligned(self) -> bool:
        """The arrays, each with its own length, agree."""
        response = len(self._ids) - self.prompt_length
        log_probs = self._log_probs
        return (
            len(self._mask) == response
            and (log_probs is None or len(log_probs) == response)
            and (not self._extra or all(len(a) == self._rows(n) for n, a in self._extra.items()))
            and (self.replay is None or self.replay.is_aligned(len(self._ids), response))
        )

    @property
    def lengths(self) -> str:
        """All of them, for a message."""
        log_probs, held = self._log_probs, len(self._mask)
        return (
            f"{self.length} tokens, prompt_length {self.prompt_length}, response_length "
            f"{self.response_length}, {held} loss_mask, "
            f"{held if log_probs is None else len(log_probs)} rollout_log_probs"
            + "".join(f", {len(values)} {name}" for name, values in self._extra.items())
            + ("" if self.replay is None else f", {self.replay.lengths}")
        )

    @property
    def last_id(self) -> int | None:
        """The last token id; None when there is no token at all."""
        return self._ids[-1] if self._ids else None

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [T]: a copy in flight, a read-only view once sealed."""
        return self._view(self._ids, np.int32)

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [R]: 1 where the policy is trained."""
        return self._view(self._mask, np.uint8)

    @property
    def rollout_log_probs(self) -> npt.NDArray[np.float32] | None:
        """float32 [R]: 0.0 on tokens that were not sampled; None in a run without log-probs."""
        return None if self._log_probs is None else self._view(self._log_probs, np.float32)

    def extra(self, name: str) -> npt.NDArray[Any]:
        """A declared column, [T] or [R]."""
        return self._view(self._extra[name], np.dtype(self.declared[name].dtype))

    def live(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Loss mask and log-probs as views: nothing can be written before both are let go."""
        log_probs = self._log_probs
        return (
            view(self._mask, np.uint8),
            None if log_probs is None else view(log_probs, np.float32),
        )

    def response_tokens(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
        """int32: a read-only copy of response tokens [start, stop), O(stop - start)."""
        stop = self.response_length if stop is None else stop
        return view(self._ids[self.prompt_length + start : self.prompt_length + stop], np.int32)

    def response_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The same as a list."""
        ids: list[int] = self.response_tokens(start, stop).tolist()
        return ids

    def encoded(self) -> bytearray:
        """The ids as JSON array items, `1,2,3`; read only, until the next write.

        Kept between the turns: each id is encoded once.
        """
        if self._prompt is not None and not self._json:
            self._json += self._prompt.encoded()
            self._num_in_json = len(self._prompt)
        if self._num_in_json < len(self._ids):
            new = msgspec.json.encode(self._ids[self._num_in_json :].tolist())
            if self._json:
                self._json += b","
            self._json += memoryview(new)[1:-1]
            self._num_in_json = len(self._ids)
        return self._json

    def seal(self) -> None:
        """Nothing changes any more; reading becomes zero-copy."""
        self.is_sealed = True
        if self.replay is not None:
            self.replay.is_sealed = True
        self._json, self._num_in_json = bytearray(), 0

    def _view(self, buffer: Any, dtype: Any) -> npt.NDArray[Any]:
        return view(buffer, dtype, copied=not self.is_sealed)

    def _rows(self, name: str) -> int:
        return self.length if self.declared[name].per == "T" else self.response_length

    # -- write (Sample only) -----------------------------------------------------------------------

    def checked_log_probs(
        self, log_probs: Floats | None, count: int, trainable: bool, where: Callable[[], str]
    ) -> npt.NDArray[np.float32] | None:
        """float32 [count] for sampled tokens, None for all others, or InvariantError."""
        if not trainable or self._log_probs is None:
            if log_probs is not None and len(log_probs):
                why = "this run is declared to have" if trainable else "tokens not sampled have"
                raise InvariantError(
                    "R3.3.log_probs", f"{len(log_probs)} log-probs for {where()}, but {why} none"
                )
            return None
        if log_probs is None:
            raise InvariantError(
                "missing_log_probs",
                f"{count} sampled tokens of {where()} came without log-probs; "
                "ask the engine to return them",
            )
        values = float32(log_probs)
        if len(values) != count:
            raise InvariantError(
                "R3.1.lengths", f"{len(values)} log-probs for {count} tokens of {where()}"
            )
        return values

    def checked_extra(self, extra: Mapping[str, Any] | None, count: int) -> dict[str, array[Any]]:
        """The values of every declared column for `count` new tokens, or InvariantError."""
        if not extra and not self.declared:
            return {}
        given = dict(extra or {})
        rows = {}
        for name, column in self.declared.items():
            if name not in given:
                rows[name] = array(_TYPECODE[column.dtype], [column.fill]) * count
                continue
            rows[name] = column.cast(given.pop(name))
            if len(rows[name]) != count:
                raise InvariantError(
                    "R3.1.lengths", f"column {name!r} has {len(rows[name])} for {count} tokens"
                )
        if given:
            raise InvariantError(
                "R3.1.columns",
                f"column {next(iter(given))!r} was not declared; "
                f"declared: {', '.join(self.declared) or 'none'}",
            )
        return rows

    def append(
        self,
        ids: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32] | None,
        extra: Mapping[str, array[Any]],
        *,
        sampled: bool,
        reported: Reported | None = None,
    ) -> None:
        """Add tokens that were already checked; not sampled: mask 0 and log-prob 0.0."""
        count, before = len(ids), (len(self._ids), len(self._mask))
        try:
            self._ids.frombytes(ids.tobytes())
            self._mask.extend(b"\1" * count if sampled else bytes(count))
            if self._log_probs is not None:
                self._log_probs.frombytes(
                    bytes(4 * count) if log_probs is None else log_probs.tobytes()
                )
            for name, values in extra.items():
                self._extra[name].extend(values)
            if reported is not None:
                reported.replay.extend(before[1], count, reported)
                self.replay = reported.replay
        except BaseException:  # out of memory half-way: take everything back
            self._cut(*before)
            raise
        if sampled:
            self.num_sampled += count
            self.num_trained += count

    def truncate(self, response: int, sampled: int) -> None:
        """Keep the first `response` response tokens, of which `sampled` were sampled."""
        self._cut(self.prompt_length + response, response)
        self.num_sampled = sampled
        self.num_trained = self._mask.count(1)

    def mask_out(self, start: int, stop: int) -> None:
        """Take response tokens [start, stop) out of training; their log-probs stay."""
        self.num_trained -= self._mask.count(1, start, stop)
        self._mask[start:stop] = bytes(stop - start)

    def _cut(self, total: int, response: int) -> None:
        del self._ids[total:]
        if self._num_in_json > total:
            self._json, self._num_in_json = bytearray(), 0
        del self._mask[response:]
        if self._log_probs is not None:
            del self._log_probs[response:]
        for name, values in self._extra.items():
            del values[total if self.declared[name].per == "T" else response :]
        if self.replay is not None:
            self.replay.cut(total, response)

    @classmethod
    def restore(
        cls,
        tokens: Ints,
        prompt_length: int,
        loss_mask: Sequence[int],
        log_probs: Sequence[float] | None,
        *,
        num_sampled: int,
        declared: Iterable[Column] = (),
        extra: Mapping[str, Sequence[Any]] | None = None,
        replay: ReplayColumns | None = None,
    ) -> Columns:
        """Columns as they were written down, unchecked: `invariants.violations` judges them."""
        columns = cls(tokens, log_probs=log_probs is not None, declared=declared)
        columns.prompt_length = prompt_length
        columns._mask = bytearray(loss_mask)
        if log_probs is not None:
            columns._log_probs = array("f", log_probs)
        for name, values in (extra or {}).items():
            columns._extra[name] = columns.declared[name].cast(values)
        columns.replay = replay
        columns.num_sampled = num_sampled
        columns.num_trained = columns._mask.count(1)
        return columns

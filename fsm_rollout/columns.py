"""Columns: the parallel token arrays of one sample.

T = prompt + response tokens, R = response tokens. Only Sample writes here. A write validates
everything, then commits everything: a refused one leaves every byte as it was. 9 bytes per token,
O(new tokens) per append.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import ConfigError, InvariantError

Ints: TypeAlias = Sequence[int] | npt.NDArray[Any] | bytes | bytearray | memoryview | str
"""token ids: list, array, numpy array, torch tensor, raw int32 bytes, or base64 of them (SGLang)"""
Floats: TypeAlias = Sequence[float] | npt.NDArray[Any] | bytes | bytearray | memoryview | str
"""log-probs: the same with float32"""
WeightVersion: TypeAlias = str | int | None
"""which weights sampled a token; None: the engine did not say"""

LOG_PROB_CEILING = 1e-6
"""float32 rounding may lift log(1) above 0 by this much"""
LOG_PROB_FLOOR = -100.0
"""below it stands no probability but a clamp, like vLLM's -9999"""


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
            if whole and not _fits(raw, self.dtype):
                raise OverflowError(f"{raw.min()} to {raw.max()} do not fit")
            return array(_TYPECODE[self.dtype], raw.astype(self.dtype).tobytes())
        except (TypeError, ValueError, OverflowError) as error:
            raise InvariantError(
                "R3.1.columns", f"column {self.name!r} is {self.dtype}, one-dimensional: {error}"
            ) from error


_TYPECODE = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "uint8": "B"}


def int32(values: Ints) -> npt.NDArray[np.int32]:
    """`values` as int32 [N]. InvariantError R3.1.ids unless 1-D, whole, >= 0 and below 2**31."""
    ids = _numbers(values, "i", np.int32, "R3.1.ids", "token ids")
    if ids.size and int(ids.min()) < 0:
        raise InvariantError("R3.1.ids", f"token id {int(ids.min())} is negative")
    return ids


def float32(values: Floats) -> npt.NDArray[np.float32]:
    """`values` as float32 [N]. InvariantError R3.3 for a NaN, infinity, positive one or clamp."""
    log_probs = _numbers(values, "f", np.float32, "R3.3.log_probs", "log-probs")
    if log_probs.size:
        low, high = float(log_probs.min()), float(log_probs.max())  # NaN poisons both
        if not (low >= LOG_PROB_FLOOR and high <= LOG_PROB_CEILING):
            good = (log_probs >= LOG_PROB_FLOOR) & (log_probs <= LOG_PROB_CEILING)
            at = int(np.argmin(good))
            raise InvariantError(
                "R3.3.log_probs",
                f"log-prob {log_probs[at]} at position {at} of {log_probs.size}: "
                f"it must be finite, <= 0 and >= {LOG_PROB_FLOOR}",
            )
    return log_probs


def _numbers(values: Any, typecode: str, dtype: Any, code: str, what: str) -> npt.NDArray[Any]:
    try:
        if isinstance(values, (list, tuple)):
            return np.frombuffer(array(typecode, values), dtype) if values else np.empty(0, dtype)
        if isinstance(values, str):
            values = base64.b64decode(values, validate=True)
        if isinstance(values, memoryview) and values.format == "B":
            values = bytes(values)
        if isinstance(values, (bytes, bytearray)):
            return np.frombuffer(values, dtype) if values else np.empty(0, dtype)
        if detach := getattr(values, "detach", None):  # a torch tensor, without importing torch
            tensor = detach().cpu()
            values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        raw = np.asarray(values)
        if raw.ndim != 1:
            raise InvariantError(code, f"{what} must be one-dimensional, got shape {raw.shape}")
        if raw.size and raw.dtype.kind not in ("iu" if dtype is np.int32 else "iuf"):
            raise InvariantError(code, f"{what} must be {np.dtype(dtype)}, got {raw.dtype}")
        if dtype is np.int32 and not _fits(raw, dtype):
            raise InvariantError(code, f"{what} do not fit into int32: up to {raw.max()}")
        with np.errstate(over="ignore"):  # what overflows becomes an infinity, which is refused
            return np.ascontiguousarray(raw, dtype)
    except (TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise InvariantError(code, f"{what} must be {np.dtype(dtype)} numbers: {error}") from error


def _fits(values: npt.NDArray[Any], dtype: Any) -> bool:
    span = np.iinfo(dtype)
    return not values.size or span.min <= int(values.min()) <= int(values.max()) <= span.max


class Columns:
    """int32 ids [T], uint8 loss mask [R], float32 log-probs [R], and the declared further columns.

    With `log_probs=False` the whole run has none (distillation, evaluation): the column is absent,
    never zeros in place of unknowns.
    """

    __slots__ = (
        "_extra",
        "_ids",
        "_log_probs",
        "_mask",
        "declared",
        "is_sealed",
        "num_sampled",
        "num_trained",
        "prompt_length",
    )

    def __init__(
        self, prompt: Ints = (), *, log_probs: bool = True, declared: Iterable[Column] = ()
    ) -> None:
        ids = int32(prompt)
        self.prompt_length = len(ids)
        self.num_sampled = 0
        self.num_trained = 0
        self.is_sealed = False
        self._ids = array("i", ids.tobytes())
        self._mask = bytearray()
        self._log_probs = array("f") if log_probs else None
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

    def response_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Response tokens [start, stop) as a list, O(stop - start)."""
        stop = self.response_length if stop is None else stop
        return self._ids[self.prompt_length + start : self.prompt_length + stop].tolist()

    def _view(self, buffer: Any, dtype: Any) -> npt.NDArray[Any]:
        if (
            not self.is_sealed
        ):  # a live view would pin the buffer: the next append could not grow it
            return np.array(memoryview(buffer), dtype) if len(buffer) else np.empty(0, dtype)
        view = np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
        view.flags.writeable = False
        return view

    def _rows(self, name: str) -> int:
        return self.length if self.declared[name].per == "T" else self.response_length

    # -- write (Sample only) -----------------------------------------------------------------------

    def checked_log_probs(
        self, log_probs: Floats | None, count: int, trainable: bool, where: str
    ) -> npt.NDArray[np.float32] | None:
        """float32 [count] for sampled tokens, None for all others, or InvariantError."""
        if not trainable or self._log_probs is None:
            if log_probs is not None and len(log_probs):
                why = "this run is declared to have" if trainable else "tokens not sampled have"
                raise InvariantError(
                    "R3.3.log_probs", f"{len(log_probs)} log-probs for {where}, but {why} none"
                )
            return None
        if log_probs is None:
            raise InvariantError(
                "missing_log_probs",
                f"{count} sampled tokens of {where} came without log-probs; "
                "ask the engine to return them",
            )
        values = float32(log_probs)
        if len(values) != count:
            raise InvariantError(
                "R3.1.lengths", f"{len(values)} log-probs for {count} tokens of {where}"
            )
        return values

    def checked_extra(self, extra: Mapping[str, Any] | None, count: int) -> dict[str, array[Any]]:
        """The values of every declared column for `count` new tokens, or InvariantError."""
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
        del self._mask[response:]
        if self._log_probs is not None:
            del self._log_probs[response:]
        for name, values in self._extra.items():
            del values[total if self.declared[name].per == "T" else response :]

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
    ) -> Columns:
        """Columns as they were written down, unchecked: `invariants.violations` judges them."""
        columns = cls(tokens, log_probs=log_probs is not None, declared=declared)
        columns.prompt_length = prompt_length
        columns._mask = bytearray(loss_mask)
        if log_probs is not None:
            columns._log_probs = array("f", log_probs)
        for name, values in (extra or {}).items():
            columns._extra[name] = columns.declared[name].cast(values)
        columns.num_sampled = num_sampled
        columns.num_trained = columns._mask.count(1)
        return columns

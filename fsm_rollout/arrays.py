"""Arrays: token ids and log-probs from whoever holds them, as checked numpy arrays.

Lists, arrays, numpy, torch, raw bytes and base64 are all taken; whatever is wrong with them is one
InvariantError that says what. Columns, engines and replay read numbers through it.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import InvariantError

Ints: TypeAlias = Sequence[int] | npt.NDArray[Any] | bytes | bytearray | memoryview | str
"""token ids: list, array, numpy array, torch tensor, raw int32 bytes, or base64 of them (SGLang)"""
Floats: TypeAlias = Sequence[float] | npt.NDArray[Any] | bytes | bytearray | memoryview | str
"""log-probs: the same with float32"""

LOG_PROB_CEILING = 1e-6
"""float32 rounding may lift log(1) above 0 by this much"""
LOG_PROB_FLOOR = -100.0
"""below it stands no probability but a clamp, like vLLM's -9999"""
FLOAT32_MAX = 3.4028234663852886e38
"""what is larger is infinite in a trainer's tensors"""


def int32(values: Ints) -> npt.NDArray[np.int32]:
    """`values` as int32 [N]. InvariantError R3.1.ids unless 1-D, whole, >= 0 and below 2**31."""
    ids = _numbers(values, "i", np.int32, "R3.1.ids", "token ids")
    if ids.size and np.minimum.reduce(ids) < 0:  # not .min(), which takes twice as long
        raise InvariantError("R3.1.ids", f"token id {int(ids.min())} is negative")
    return ids


def float32(values: Floats) -> npt.NDArray[np.float32]:
    """`values` as float32 [N]. InvariantError R3.3 for a NaN, infinity, positive one or clamp."""
    log_probs = _numbers(values, "f", np.float32, "R3.3.log_probs", "log-probs")
    if log_probs.size:
        low, high = np.minimum.reduce(log_probs), np.maximum.reduce(log_probs)  # NaN poisons both
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
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1:
        return values  # as `checked` made it
    try:
        if isinstance(values, (list, tuple)):
            values = struct.pack(f"{len(values)}{typecode}", *values)  # twice as fast as an array
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
        if dtype is np.int32 and not fits(raw, dtype):
            raise InvariantError(code, f"{what} do not fit into int32: up to {raw.max()}")
        with np.errstate(over="ignore"):  # what overflows becomes an infinity, which is refused
            return np.ascontiguousarray(raw, dtype)
    except (TypeError, ValueError, OverflowError, struct.error, binascii.Error) as error:
        raise InvariantError(code, f"{what} must be {np.dtype(dtype)} numbers: {error}") from error


def fits(values: npt.NDArray[Any], dtype: Any) -> bool:
    """Every whole number of `values` is one of `dtype`."""
    span = np.iinfo(dtype)
    return not values.size or span.min <= int(values.min()) <= int(values.max()) <= span.max


def view(buffer: Any, dtype: Any, *, copied: bool = False) -> npt.NDArray[Any]:
    """A buffer as a read-only array, which pins it: it can't grow before that is let go.

    copied: as an array of its own.
    """
    found = np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
    if copied:
        return found.copy()
    found.setflags(write=False)
    return found

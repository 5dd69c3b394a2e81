"""Replay: what engines report about how they sampled, for trainers that sample the same way again.

The wires and `Sample` decode it here, whatever the encoding: base64 of raw int32 (SGLang) or of
.npy (vLLM), lists, bytes, arrays, tensors. What is refused is an InvariantError, nothing else.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import index
from types import NoneType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.arrays import Ints, int32
from fsm_rollout.errors import InvariantError
from fsm_rollout.failures import log_failure

logger = logging.getLogger(__name__)

INT32 = np.iinfo(np.int32)
_NPY = b"\x93NUMPY"
_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
_MASKS = ("output_token_sampling_mask", "sampling_mask")
REPLAY_NAMES = frozenset((*_IDS, *_OFFSETS, *_MASKS, "routed_experts"))
"""what an engine calls it"""
_COUNTERS = {
    "cached_tokens": ("cached_tokens",),
    "spec_accepted_tokens": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "spec_draft_tokens": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "spec_verify_count": ("spec_verify_ct",),
}

WeightVersion: TypeAlias = str | int | None
"""which weights sampled a token; None: the engine did not say"""


class TopP(msgspec.Struct, frozen=True, gc=False):
    """The ids that top-p (top-k, min-p) kept for each of N new tokens, ragged."""

    ids: npt.NDArray[np.int32]  # [K]
    offsets: npt.NDArray[np.int32]  # [N + 1], from 0 to K


class RoutedExperts(msgspec.Struct, frozen=True, gc=False):
    """The experts that a mixture-of-experts model routed tokens to."""

    rows: npt.NDArray[Any]  # [n, layers, k], the engine's dtype
    start: int  # of the first row, in tokens


def not_kept(top_p: TopP, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[N]: True where a token is not among its own kept ids; offsets must not fall."""
    is_token = top_p.ids == np.repeat(tokens, np.diff(top_p.offsets))
    so_far = np.concatenate(([0], np.cumsum(is_token)))
    lacks: npt.NDArray[np.bool_] = so_far[top_p.offsets[1:]] == so_far[top_p.offsets[:-1]]
    return lacks


# -- decoding --------------------------------------------------------------------------------------


def decode_int32_meta_array(value: Any, *, what: str = "array") -> npt.NDArray[np.int32]:
    """`value` as int32 [N]; narrower integers are widened.

    Raises InvariantError bad_meta_array for what is no integer, too large, not one-dimensional, no
    base64, or bytes that do not divide by 4.
    """
    found = _integers(value, what)
    if found.ndim != 1:
        raise _bad_array(what, f"it must be one-dimensional, its shape is {found.shape}")
    return _int32(found, what)


def top_p_of(meta: Mapping[str, Any], count: int) -> TopP | None:
    """The kept ids of `count` new tokens, from any of the names and encodings; None: not reported.

    Read are `top_p_token_ids` with `top_p_token_offsets` (slime; `top_p_kept_…` too), and
    `output_token_sampling_mask` (SGLang) or `sampling_mask` (vLLM): a list of ids per token, or a
    TopP. Raises InvariantError top_p_incomplete, top_p_offsets, bad_meta_array.
    """
    ids, offsets, mask = (_first(meta, names) for names in (_IDS, _OFFSETS, _MASKS))
    if (ids is None) is not (offsets is None):
        missing = (_IDS if ids is None else _OFFSETS)[0]
        raise InvariantError("top_p_incomplete", f"{missing} is missing beside its counterpart")
    if ids is None:
        if mask is None:
            return None
        ids, offsets = (mask.ids, mask.offsets) if isinstance(mask, TopP) else _flat(mask)
    kept = TopP(
        decode_int32_meta_array(ids, what=_IDS[0]),
        decode_int32_meta_array(offsets, what=_OFFSETS[0]),
    )
    total = len(kept.ids)
    if len(kept.offsets) != count + 1 or kept.offsets[0] != 0 or kept.offsets[-1] != total:
        ends = f"from {kept.offsets[0]} to {kept.offsets[-1]}" if len(kept.offsets) else "none"
        raise InvariantError(
            "top_p_offsets",
            f"{len(kept.offsets)} top-p offsets, {ends}, for {count} tokens and {total} kept ids: "
            f"there must be {count + 1}, from 0 to {total}",
        )
    falls = kept.offsets[1:] < kept.offsets[:-1]
    if falls.any():
        raise InvariantError("top_p_offsets", f"the top-p offsets fall at token {falls.argmax()}")
    if total and int(kept.ids.min()) < 0:
        raise _bad_array(_IDS[0], f"id {int(kept.ids.min())} is negative")
    return kept


def routed_experts_of(
    meta: Mapping[str, Any], total: int, *, start: int = 0, shape: tuple[int, int] | None = None
) -> RoutedExperts | None:
    """Rows `start` to `total - 1` of a reply after which the sample has `total` tokens.

    The last token was not forwarded: it has no row. `routed_experts` may be flat (raw int32), then
    `shape` says (layers, k); [n, layers, k] in .npy, lists or an array; or RoutedExperts. uint8 and
    uint16 stay as they are. `routed_experts_start_len`, where a server repeats it, must be `start`;
    rows of all tokens are taken from `start` on.
    None: not reported. Raises InvariantError routed_experts_length, _start, _shape, bad_meta_array.
    """
    value = meta.get("routed_experts")
    if value is None:
        return None
    told = meta.get("routed_experts_start_len")
    if isinstance(value, RoutedExperts):
        told, value = value.start, value.rows
    rows, expected = expert_rows(value, shape), max(total - 1 - start, 0)
    if told in (None, 0) and len(rows) == total - 1:  # of all tokens, whatever was asked
        rows = rows[start:]
    elif told is not None and told != start:
        raise InvariantError(
            "routed_experts_start", f"the expert rows start at {told!r}, asked was {start}"
        )
    if len(rows) != expected:
        raise InvariantError(
            "routed_experts_length",
            f"{len(rows)} expert rows, {expected} expected: {total} tokens, the last not "
            f"forwarded, from {start}",
        )
    return RoutedExperts(rows, start)


def expert_rows(value: Any, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """`value` as rows [n, layers, k], flat ones by their `shape` (layers, k); else see above."""
    rows = _integers(value, "routed_experts")
    if rows.ndim == 1 and shape is not None and min(shape) > 0:
        layers, k = shape
        if rows.size % (layers * k):
            raise InvariantError(
                "routed_experts_length",
                f"{rows.size} expert ids make no whole rows of {layers} layers with {k} each",
            )
        rows = rows.reshape(-1, layers, k)
    if rows.ndim != 3 or 0 in rows.shape[1:] or (shape and rows.shape[1:] != tuple(shape)):
        raise InvariantError(
            "routed_experts_shape",
            f"routed_experts have the shape {rows.shape}: it must be (n, layers, k)"
            + (
                f", with (layers, k) = {tuple(shape)}"
                if shape
                else "; beside flat ones, say it as routed_experts_shape"
            ),
        )
    if rows.dtype not in (np.uint8, np.uint16):
        rows = _int32(rows, "routed_experts")
    if rows.size and int(rows.min()) < -1:
        raise _bad_array("routed_experts", f"expert {rows.min()} is negative")
    return np.ascontiguousarray(rows)


def weight_runs_of(meta: Mapping[str, Any], count: int) -> Sequence[tuple[WeightVersion, int]]:
    """Runs (version, count) that tile `count` new tokens.

    `weight_versions` are spans `{version, start, end}` of a server, or our own pairs (version,
    count). Where spans have a gap or overlap, all tokens get `weight_version`; a warning says so
    and `counters_of` counts it. Pairs that do not tile raise InvariantError R3.4.versions.
    """
    given = meta.get("weight_versions")
    try:
        entries = [] if given is None else list(given)
        is_spans = bool(entries) and isinstance(entries[0], dict)
        runs = _tiled(meta, count) if is_spans else [(version, index(n)) for version, n in entries]
    except (TypeError, ValueError) as error:
        raise InvariantError(
            "R3.4.versions", f"weight-version runs {given!r}: must be pairs (version, count)"
        ) from error
    if runs is None:
        how = f"do not tile {count} tokens: {given!r:.500}"
        where, what = "a reply of the engine", "weight_versions"
        log_failure(logger, where, what, how, level=logging.WARNING, place="spans")
    runs = runs or [(meta.get("weight_version"), count)]
    counts = [n for _, n in runs]
    if sum(counts) != count or min(counts) < 0:
        raise InvariantError(
            "R3.4.versions", f"weight-version runs {runs} do not tile {count} tokens"
        )
    if any(type(version) not in (str, int, NoneType) for version, _ in runs):
        raise InvariantError("R3.4.versions", f"weight versions are strings or ints, got {runs}")
    return runs


def counters_of(meta: Mapping[str, Any], count: int | None = None) -> dict[str, int]:
    """cached_tokens and what a speculation counts, under their old and new names.

    With the `count` of new tokens also version_spans_refused, 1 where `weight_runs_of` fell back.
    """
    found = {name: _first(meta, names) for name, names in _COUNTERS.items()}
    counters = {name: n for name, n in found.items() if type(n) is int and n >= 0}
    if count is not None and _tiled(meta, count) is None:
        counters["version_spans_refused"] = 1
    return counters


def _first(meta: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


def _integers(value: Any, what: str) -> npt.NDArray[Any]:
    """Whatever holds whole numbers, in its own shape and dtype; bytes are int32, or say what."""
    try:
        if isinstance(value, str):
            value = base64.b64decode(value, validate=True)
        elif isinstance(value, memoryview) and value.itemsize == 1:
            value = value.tobytes()
        if isinstance(value, (bytes, bytearray)):
            found = _npy(value) if value.startswith(_NPY) else np.frombuffer(value or b"", "<i4")
        else:
            detach = getattr(value, "detach", None)  # a torch tensor, without importing torch
            found = np.asarray(detach().cpu() if detach else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _bad_array(what, str(error)) from error
    if found.dtype.kind not in ("iu" if found.size else "iuf"):  # an empty list is of floats
        raise _bad_array(what, f"it must hold whole numbers, it is {found.dtype}")
    return found


def _npy(data: bytes | bytearray) -> npt.NDArray[Any]:
    with io.BytesIO(data) as file:
        try:
            found = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        except Exception as error:  # its header is text that numpy evaluates as a literal
            raise ValueError(f"bad .npy: {error}") from error
        if rest := file.read():
            raise ValueError(f"{len(rest)} bytes follow the .npy")
    return found


def _int32(found: npt.NDArray[Any], what: str) -> npt.NDArray[np.int32]:
    if found.size and not INT32.min <= int(found.min()) <= int(found.max()) <= INT32.max:
        raise _bad_array(what, f"{found.min()} to {found.max()} do not fit into int32")
    return found.astype(np.int32, copy=False)


def _bad_array(what: str, why: str) -> InvariantError:
    return InvariantError("bad_meta_array", f"{what} cannot be read as int32: {why}")


def _flat(mask: Any) -> tuple[Any, Any]:
    """A list of ids per token as ids and offsets; these may be too many for int32."""
    try:
        spans = list(mask)
    except TypeError as error:
        raise _bad_array(_MASKS[1], f"it must be a list of ids per token: {error}") from error
    if not all(type(span) is list for span in spans):
        spans = [decode_int32_meta_array(span, what=_MASKS[1]).tolist() for span in spans]
    return list(chain.from_iterable(spans)), [0, *accumulate(map(len, spans))]


def tiles(meta: Mapping[str, Any], count: int) -> bool:
    """The spans of `weight_versions` cover `count` tokens without a gap."""
    return bool(_tiled(meta, count))


def _tiled(meta: Mapping[str, Any], count: int) -> list[tuple[WeightVersion, int]] | None:
    """The spans of `weight_versions` as runs; []: there are none, None: they have gaps."""
    given = meta.get("weight_versions")
    if not isinstance(given, (list, tuple)) or not given or not isinstance(given[0], dict):
        return []
    runs, at = [], 0
    for span in given:
        if not isinstance(span, dict):
            return None
        start, end = span.get("start"), span.get("end")
        if type(start) is not int or type(end) is not int or not at == start <= end:
            return None
        runs.append((span.get("version"), end - start))
        at = end
    return runs if at == count else None


def reusable_rows(tokens: Ints, other: Ints) -> int:
    """How many expert rows of `other` are those of `tokens`: the length of their common prefix."""
    ours, theirs = int32(tokens), int32(other)
    shorter = min(len(ours), len(theirs))
    differs = ours[:shorter] != theirs[:shorter]
    return int(differs.argmax()) if differs.any() else shorter

"""Replay data: every encoding that servers use is read, everything else is refused by name."""

from __future__ import annotations

import base64
import io
import logging
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout import replay_columns
from fsm_rollout.columns import Columns
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.metrics.batch import kept_per_trained_token
from fsm_rollout.metrics.facts import row_facts_of
from fsm_rollout.replay import (
    RoutedExperts,
    TopP,
    counters_of,
    decode_int32_meta_array,
    reusable_rows,
    routed_experts_of,
    top_p_of,
    weight_runs_of,
)
from fsm_rollout.sample import Sample
from fsm_rollout.testing.snapshot import sample_snapshot

ROOT = Path(__file__).parents[1]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def raw(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def torch_tensor(values: list[int]) -> Any:
    return pytest.importorskip("torch").tensor(values, dtype=pytest.importorskip("torch").int64)


ENCODINGS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda values: array("i", values),
    "numpy int64": lambda values: np.array(values, np.int64),
    "numpy big-endian": lambda values: np.array(values, ">i4"),
    "raw int32": raw,
    "bytearray": lambda values: bytearray(raw(values)),
    "memoryview": lambda values: memoryview(raw(values)),
    "memoryview of int32": lambda values: memoryview(array("i", values)),
    "base64 of int32": lambda values: b64(raw(values)),
    ".npy": lambda values: npy(np.array(values, np.int32)),
    "base64 of .npy": lambda values: b64(npy(np.array(values, np.int32))),
    "base64 of .npy of int64": lambda values: b64(npy(np.array(values, np.int64))),
    "tensor": torch_tensor,
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("values", [[], [7], [5, 7, 6], [0, -1, 2**31 - 1, -(2**31)]])
def test_every_encoding_of_an_int32_array_is_read(encoding: str, values: list[int]) -> None:
    found = decode_int32_meta_array(ENCODINGS[encoding](values))
    assert found.dtype == np.int32
    assert found.tolist() == values


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u2"])
def test_narrow_numbers_are_widened_and_never_viewed(dtype: str) -> None:
    values = np.array([1, 2, 3, 200], dtype)
    for value in (values, npy(values), b64(npy(values)), [*values]):
        assert decode_int32_meta_array(value).tolist() == [1, 2, 3, 200]


UNREADABLE: dict[str, Any] = {
    "no base64": "not base64!",
    "base64 without its padding": "AAA",
    "text that is not ASCII": "é",
    "three bytes": b64(b"123"),
    "fractions": [1.5],
    "truths": [True],
    "text": ["1"],
    "a hole": [1, None],
    "nothing": None,
    "a number": 5,
    "a mapping": {"ids": [1]},
    "nested": [[1, 2]],
    "ragged": [[1], 2],
    "too large": [2**31],
    "too small": [-(2**31) - 1],
    "larger than any integer": [2**70],
    "unsigned and too large": np.array([2**63], np.uint64),
    "floats of numpy": np.array([1.0]),
    "two-dimensional": np.array([[1]]),
    ".npy of floats": npy(np.array([1.0])),
    ".npy of objects": b"\x93NUMPY\x01\x00F\x00"
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69)
    + b"\n",
    ".npy cut in its header": npy(np.arange(4))[:40],
    ".npy cut in its data": npy(np.arange(4))[:-1],
    ".npy with more behind it": npy(np.arange(4, dtype=np.int32)) + b"1234",
    ".npy that claims terabytes": npy(np.zeros(1, np.int32)).replace(
        b"(1,), }    ", b"(1099511627776,), }"
    ),
    ".npy with a header of brackets": b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16,
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_name_and_by_nothing_else(what: str) -> None:
    with pytest.raises(InvariantError, match="top_p_token_ids") as refused:
        decode_int32_meta_array(UNREADABLE[what], what="top_p_token_ids")
    assert refused.value.code == "bad_meta_array"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_whatever_json_holds_is_read_or_refused(value: Any) -> None:
    for read in (
        lambda: decode_int32_meta_array(value),
        lambda: top_p_of({"sampling_mask": value}, 2),
        lambda: top_p_of({"top_p_token_ids": value, "top_p_token_offsets": value}, 1),
        lambda: routed_experts_of({"routed_experts": value}, 3, shape=(1, 2)),
        lambda: weight_runs_of({"weight_version": value, "weight_versions": value}, 2),
        lambda: counters_of({"cached_tokens": value, "weight_versions": value}, 2),
    ):
        with suppress(InvariantError):
            read()


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_mark_of_npy_are_read_or_refused(data: bytes) -> None:
    for value in (b"\x93NUMPY" + data, b"\x93NUMPY\x01\x00" + data, npy(np.arange(2))[:60] + data):
        with suppress(InvariantError):
            decode_int32_meta_array(value)


# -- top-p -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "names",
    [
        ("top_p_token_ids", "top_p_token_offsets"),
        ("top_p_kept_token_ids", "top_p_kept_token_offsets"),
        ("top_p_kept_token_ids", "top_p_token_offsets"),
    ],
)
def test_kept_ids_come_as_ids_and_offsets(names: tuple[str, str], encoding: str) -> None:
    encode = ENCODINGS[encoding]
    top_p = top_p_of({names[0]: encode([5, 7, 6]), names[1]: encode([0, 2, 3])}, 2)
    assert top_p is not None
    assert (top_p.ids.tolist(), top_p.offsets.tolist()) == ([5, 7, 6], [0, 2, 3])


@pytest.mark.parametrize("name", ["output_token_sampling_mask", "sampling_mask"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_kept_ids_come_as_a_list_for_each_token(name: str, encoding: str) -> None:
    encode = ENCODINGS[encoding]
    masks: list[Any] = [
        [encode([5, 7]), encode([]), encode([6])],
        (encode([5, 7]), [], encode([6])),
    ]
    for mask in masks:
        top_p = top_p_of({name: mask}, 3)
        assert top_p is not None
        assert (top_p.ids.tolist(), top_p.offsets.tolist()) == ([5, 7, 6], [0, 2, 2, 3])


def test_kept_ids_that_are_not_reported_are_none() -> None:
    nothing = {"top_p_token_ids": None, "top_p_token_offsets": None, "sampling_mask": None}
    assert top_p_of(nothing, 2) is top_p_of({}, 0) is None


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"top_p_token_ids": [5]}, "top_p_incomplete"),
        ({"top_p_token_ids": [5], "top_p_token_offsets": None}, "top_p_incomplete"),
        ({"top_p_token_offsets": [0, 1, 2]}, "top_p_incomplete"),
        ({"top_p_kept_token_ids": "", "sampling_mask": [[5], [6]]}, "top_p_incomplete"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, 2]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, 1, 1, 2]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": []}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [1, 1, 2]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, 1, 1]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, 1, 3]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, 3, 2]}, "top_p_offsets"),
        ({"top_p_token_ids": [5, 6], "top_p_token_offsets": [0, -1, 2]}, "top_p_offsets"),
        ({"top_p_token_ids": [-1, 6], "top_p_token_offsets": [0, 1, 2]}, "bad_meta_array"),
        ({"top_p_token_ids": [[5], [6]], "top_p_token_offsets": [0, 1, 2]}, "bad_meta_array"),
        ({"sampling_mask": [[5]]}, "top_p_offsets"),
        ({"sampling_mask": [[5], [6], [7]]}, "top_p_offsets"),
        ({"sampling_mask": [[5], None]}, "bad_meta_array"),
        ({"sampling_mask": [5, 6]}, "bad_meta_array"),
        ({"sampling_mask": [[5], [[6]]]}, "bad_meta_array"),
        ({"sampling_mask": [[5], "AQAA"]}, "bad_meta_array"),
        ({"sampling_mask": [[5], [0.5]]}, "bad_meta_array"),
        ({"sampling_mask": 5}, "bad_meta_array"),
    ],
)
def test_kept_ids_that_do_not_fit_the_tokens_are_refused(meta: dict[str, Any], code: str) -> None:
    with pytest.raises(InvariantError) as refused:
        top_p_of(meta, 2)
    assert refused.value.code == code


def test_offsets_whose_differences_wrap_around_are_refused() -> None:
    low, high = -(2**31), 2**31 - 1
    offsets = np.array([0, high, low, 2], np.int32)  # low - high wraps to 1
    with pytest.raises(InvariantError, match="fall at token 1"):
        top_p_of({"top_p_token_ids": [5, 6], "top_p_token_offsets": offsets}, 3)


# -- routed experts --------------------------------------------------------------------------------

ROWS = np.arange(24).reshape(4, 3, 2)
EXPERTS: dict[str, Callable[[Any], Any]] = {
    "nested lists": lambda rows: rows.tolist(),
    "numpy": lambda rows: rows,
    "tensor": lambda rows: pytest.importorskip("torch").from_numpy(rows.astype(np.int64)),
    ".npy": npy,
    "base64 of .npy": lambda rows: b64(npy(rows)),
    ".npy in Fortran's order": lambda rows: npy(np.asfortranarray(rows)),
    "base64 of flat int32": lambda rows: b64(raw(rows)),
    "flat list": lambda rows: rows.ravel().tolist(),
    "decoded": lambda rows: RoutedExperts(rows, 0),
}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", ">u2"])
@pytest.mark.parametrize("encoding", EXPERTS)
def test_rows_of_experts_keep_their_dtype_where_it_is_the_engines(
    encoding: str, dtype: str
) -> None:
    meta = {"routed_experts": EXPERTS[encoding](ROWS.astype(dtype))}
    routed = routed_experts_of(meta, 5, shape=(3, 2))
    assert routed is not None
    assert routed.rows.tolist() == ROWS.tolist()
    keeps = "npy" in encoding or encoding in ("numpy", "decoded")
    assert routed.rows.dtype == (dtype if keeps and dtype in ("uint8", "uint16") else "int32")


def test_rows_from_a_start_are_fewer() -> None:
    meta = {"routed_experts": ROWS, "routed_experts_start_len": 3}
    routed = routed_experts_of(meta, 8, start=3)
    assert routed is not None
    assert (routed.start, len(routed.rows)) == (3, 4)
    assert routed_experts_of({}, 8) is routed_experts_of({"routed_experts": None}, 8) is None


def test_a_prompt_of_one_token_has_no_rows_and_flat_ones_know_their_shape() -> None:
    for total in (0, 1):
        routed = routed_experts_of({"routed_experts": ""}, total, shape=(3, 2))
        assert routed is not None
        assert routed.rows.shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("meta", "shape", "code"),
    [
        ({"routed_experts": ROWS[:3]}, None, "routed_experts_length"),
        ({"routed_experts": np.concatenate([ROWS, ROWS[:1]])}, None, "routed_experts_length"),
        ({"routed_experts": b64(raw(ROWS[:3]))}, (3, 2), "routed_experts_length"),
        ({"routed_experts": b64(raw(ROWS.ravel()[:-1]))}, (3, 2), "routed_experts_length"),
        ({"routed_experts": ROWS.ravel()}, None, "routed_experts_shape"),
        ({"routed_experts": ROWS}, (2, 3), "routed_experts_shape"),
        ({"routed_experts": ROWS.ravel()}, (0, 2), "routed_experts_shape"),
        ({"routed_experts": np.zeros((4, 0, 2), int)}, None, "routed_experts_shape"),
        ({"routed_experts": ROWS[0]}, None, "routed_experts_shape"),
        ({"routed_experts": [[[1], [2]], [[1]]]}, None, "bad_meta_array"),
        ({"routed_experts": ROWS / 2}, None, "bad_meta_array"),
        ({"routed_experts": ROWS - 2}, None, "bad_meta_array"),
        ({"routed_experts": ROWS + 2**31}, None, "bad_meta_array"),
        ({"routed_experts": b64(raw(ROWS))[:-2]}, (3, 2), "bad_meta_array"),
        ({"routed_experts": ROWS, "routed_experts_start_len": 1}, None, "routed_experts_start"),
        ({"routed_experts": RoutedExperts(ROWS, 2)}, None, "routed_experts_start"),
    ],
)
def test_rows_of_experts_that_do_not_fit_the_tokens_are_refused(
    meta: dict[str, Any], shape: tuple[int, int] | None, code: str
) -> None:
    with pytest.raises(InvariantError) as refused:
        routed_experts_of(meta, 5, shape=shape)
    assert refused.value.code == code


# -- weight versions and counters ------------------------------------------------------------------


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("versions", "runs"),
    [
        ([span("7", 0, 3), span("8", 3, 4)], [("7", 3), ("8", 1)]),
        ([span("7", 0, 0), span("8", 0, 4)], [("7", 0), ("8", 4)]),
        ([span(None, 0, 4)], [(None, 4)]),
        ([("7", 1), ("8", 3)], [("7", 1), ("8", 3)]),
        ([["7", 4]], [("7", 4)]),
        ([], [("8", 4)]),
        (None, [("8", 4)]),
    ],
)
def test_spans_and_runs_of_weight_versions_tile_the_tokens(versions: Any, runs: Any) -> None:
    meta = {"weight_version": "8", "weight_versions": versions}
    assert weight_runs_of(meta, 4) == runs
    assert counters_of(meta, 4) == {}


@pytest.mark.parametrize(
    "spans",
    [
        [span("7", 0, 3)],
        [span("7", 0, 5)],
        [span("7", 1, 4)],
        [span("7", 0, 2), span("8", 3, 4)],
        [span("7", 0, 3), span("8", 2, 4)],
        [span("7", 0, 3), span("8", 3, 2), span("9", 2, 4)],
        [span("7", 0, 4.0)],
        [span("7", 0, None)],
        [{"version": "7"}],
        [span("7", 0, 4), "8"],
    ],
)
def test_spans_that_do_not_tile_fall_back_to_one_version_and_are_flagged(
    spans: Any, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"weight_version": "8", "weight_versions": spans}
    with caplog.at_level(logging.WARNING):
        assert weight_runs_of(meta, 4) == [("8", 4)]
    assert "do not tile 4 tokens" in caplog.text
    assert counters_of(meta, 4) == {"version_spans_refused": 1}
    assert counters_of(meta) == {}


@pytest.mark.parametrize("runs", [[("7", 3)], [("7", 5), ("8", -1)], ["7"], [("7", 1.5)], 7])
def test_runs_of_our_own_that_do_not_tile_are_refused(runs: Any) -> None:
    with pytest.raises(InvariantError) as refused:
        weight_runs_of({"weight_version": "8", "weight_versions": runs}, 4)
    assert refused.value.code == "R3.4.versions"


@pytest.mark.parametrize("meta", [{"weight_version": 1.5}, {"weight_versions": [span({}, 0, 4)]}])
def test_a_weight_version_is_a_string_or_an_integer(meta: dict[str, Any]) -> None:
    with pytest.raises(InvariantError, match="strings or ints"):
        weight_runs_of(meta, 4)


def test_counters_are_read_under_their_old_and_their_new_names() -> None:
    old = {"cached_tokens": 7, "spec_accept_token_num": 3, "spec_draft_token_num": 4}
    new = {"cached_tokens": 7, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4}
    counted = {"cached_tokens": 7, "spec_accepted_tokens": 3, "spec_draft_tokens": 4}
    assert counters_of(old) == counters_of(new) == counted
    assert counters_of({"cached_tokens": None, "spec_verify_ct": 3}) == {"spec_verify_count": 3}
    assert counters_of({"cached_tokens": 0}) == {"cached_tokens": 0}
    for bad in (-1, 1.5, "7", True, [7]):
        assert counters_of({"cached_tokens": bad}) == {}


# -- what a sample holds ---------------------------------------------------------------------------


def a_sample(prompt: int = 3) -> Sample:
    return Sample(sample_id="7-0", columns=Columns(range(prompt)))


def rows(count: int, call: int) -> list[list[list[int]]]:
    """One layer, two experts: the token's position and the call that saw it."""
    return [[[at, call]] for at in range(count)]


def say(sample: Sample, ids: list[int], **meta: Any) -> None:
    sample.append_response_tokens(
        ids, [-1.0] * len(ids), meta_info={"finish_reason": "stop", **meta}
    )


def see(sample: Sample, count: int) -> None:
    sample.append_response_tokens([9] * count, trainable=False)


def kept_of(sample: Sample) -> list[list[int]] | None:
    """The kept ids of each response token."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or offsets is None:
        assert ids is offsets is None
        return None
    assert ids.dtype == offsets.dtype == np.int32
    assert len(offsets) == sample.response_length + 1
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def experts_of(sample: Sample) -> list[Any] | None:
    experts = sample.rollout_routed_experts
    return None if experts is None else experts.tolist()


def test_a_response_may_start_with_an_observation() -> None:
    sample = a_sample()
    see(sample, 2)
    sample.append_response_tokens([4], trainable=False, forced=True)
    say(sample, [5], sampling_mask=[[5, 7]])
    assert kept_of(sample) == [[], [], [], [5, 7]]
    assert violations(sample) == []


def test_a_row_of_experts_belongs_to_the_call_that_first_saw_its_token() -> None:
    sample = a_sample()
    say(sample, [4, 5], routed_experts=rows(4, 1))
    see(sample, 2)
    assert experts_of(sample) == rows(4, 1)
    say(sample, [6, 7], routed_experts=rows(8, 2))
    assert experts_of(sample) == rows(4, 1) + rows(8, 2)[4:]
    say(sample, [8], routed_experts=rows(9, 3)[6:], routed_experts_start_len=6)
    assert experts_of(sample) == rows(4, 1) + rows(8, 2)[4:] + rows(9, 3)[8:]
    assert violations(sample) == []


def test_what_an_empty_reply_reported_before_the_prompt_holds_for_the_sample() -> None:
    sample = Sample(sample_id="7-0")
    say(sample, [], sampling_mask=[], routed_experts=np.zeros((0, 1, 2), np.uint8))
    sample.set_prompt([1, 2])
    assert (kept_of(sample), experts_of(sample)) == ([], [])
    with pytest.raises(InvariantError, match="top_p_incomplete"):
        say(sample, [5])
    assert (sample.tokens.tolist(), kept_of(sample)) == ([1, 2], [])


def test_flat_rows_take_their_shape_from_those_that_are_held() -> None:
    sample, routed = a_sample(), routed_experts_of({"routed_experts": rows(3, 1)}, 4)
    say(sample, [4], routed_experts=routed)
    say(sample, [5], routed_experts=b64(raw(rows(4, 2))))
    assert experts_of(sample) == rows(3, 1) + rows(4, 2)[3:]


def test_truncation_cuts_kept_ids_and_rows_with_the_tokens() -> None:
    sample = a_sample()
    say(sample, [4, 5], sampling_mask=[[4, 1], [5]], routed_experts=rows(4, 1))
    see(sample, 2)
    say(sample, [6], sampling_mask=[[6]], routed_experts=rows(7, 2))
    sample.truncate(3)
    assert kept_of(sample) == [[4, 1], [5], []]
    assert experts_of(sample) == rows(4, 1) + rows(5, 2)[4:]
    sample.truncate(1)
    assert kept_of(sample) == [[4, 1]]
    assert experts_of(sample) == rows(3, 1)
    assert violations(sample) == []
    sample.reset()
    assert sample_snapshot(sample) == sample_snapshot(a_sample_with_id("7-0"))


def a_sample_with_id(sample_id: str) -> Sample:
    return Sample(sample_id=sample_id, columns=Columns(range(3)))


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ({"sampling_mask": [[4]]}, {}, "top_p_incomplete"),
        ({}, {"sampling_mask": [[4]]}, "top_p_incomplete"),
        ({"routed_experts": rows(3, 1)}, {}, "routed_experts_incomplete"),
        ({}, {"routed_experts": rows(4, 1)}, "routed_experts_incomplete"),
    ],
)
def test_a_sample_has_replay_data_for_all_of_its_replies_or_for_none(
    first: dict[str, Any], second: dict[str, Any], code: str
) -> None:
    sample = a_sample()
    say(sample, [4], **first)
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError) as refused:
        say(sample, [4], **second)
    assert refused.value.code == code
    assert sample_snapshot(sample) == before
    say(sample, [])  # an aborted reply without a token has nothing to report
    see(sample, 1)


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"sampling_mask": [[4], [6]]}, "top_p_sampled"),
        ({"sampling_mask": [[4], []]}, "top_p_sampled"),
        ({"sampling_mask": [[5], [4]]}, "top_p_sampled"),
        ({"sampling_mask": TopP(np.array([4, 5]), np.array([0, 1]))}, "top_p_offsets"),
        ({"routed_experts": rows(6, 2)[5:], "routed_experts_start_len": 5}, "routed_experts_start"),
        ({"routed_experts": RoutedExperts(np.array(rows(1, 2)), 5)}, "routed_experts_start"),
        ({"routed_experts": rows(6, 2), "routed_experts_start_len": -1}, "routed_experts_start"),
        ({"routed_experts": rows(6, 2), "routed_experts_start_len": "0"}, "routed_experts_start"),
        ({"routed_experts": np.array(rows(6, 2), np.uint8)}, "routed_experts_shape"),
        ({"routed_experts": [[[1], [2]]] * 6}, "routed_experts_shape"),
        ({"routed_experts": rows(5, 2)}, "routed_experts_length"),
    ],
)
def test_a_report_that_does_not_fit_what_is_held_changes_nothing(
    meta: dict[str, Any], code: str
) -> None:
    sample = a_sample()
    say(sample, [4, 5], sampling_mask=[[4], [5]], routed_experts=rows(4, 1))
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError) as refused:
        say(sample, [4, 5], **{"sampling_mask": [[4], [5]], "routed_experts": rows(6, 2)} | meta)
    assert refused.value.code == code
    assert sample_snapshot(sample) == before


def test_kept_ids_of_all_turns_together_must_fit_into_int32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_columns, "INT32", SimpleNamespace(max=6))
    sample = a_sample()
    say(sample, [4], sampling_mask=[[4, 5, 6]])
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError, match="3 kept ids and 4 more") as refused:
        say(sample, [4], sampling_mask=[[4, 5, 6, 7]])
    assert refused.value.code == "top_p_offsets"
    assert sample_snapshot(sample) == before
    say(sample, [4], sampling_mask=[[4, 5, 6]])


def test_the_experts_of_a_stream_may_come_with_its_last_chunk() -> None:
    for earlier in (False, True):
        one_shot, stream = a_sample(), a_sample()
        start = 0
        for sample in (one_shot, stream) if earlier else ():
            say(sample, [3], routed_experts=rows(3, 1), sampling_mask=[[3]])
            start = 1
        last = {"routed_experts": rows(5 + start, 2)}
        say(one_shot, [4, 5, 6], sampling_mask=[[4], [5, 1], [6]], **last)
        for ids, mask, meta in (([4], [[4]], {}), ([5, 6], [[5, 1], [6]], {}), ([], [], last)):
            stream.append_response_tokens(
                ids,
                [-1.0] * len(ids),
                meta_info={"finish_reason": "stop", "sampling_mask": mask, **meta},
                update_terminal_info=bool(meta),
            )
        assert stream.to_dict() == one_shot.to_dict()
        assert sample_snapshot(stream) == sample_snapshot(one_shot)
        assert violations(stream) == []


def test_a_failure_half_way_takes_kept_ids_and_rows_back() -> None:
    sample = a_sample()
    say(sample, [4], sampling_mask=[[4]], routed_experts=rows(3, 1))
    see(sample, 1)
    before = sample_snapshot(sample)

    class Full(bytearray):
        def __iadd__(self, other: object) -> Full:
            raise MemoryError

    replay = sample.columns.replay
    assert replay is not None
    replay.rows = Full(replay.rows)
    with pytest.raises(MemoryError):
        say(sample, [5], sampling_mask=[[5, 6]], routed_experts=rows(5, 2))
    replay.rows = bytearray(replay.rows)
    assert sample_snapshot(sample) == before


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["say", "see", "force", "truncate"]), st.integers(0, 4)),
        max_size=8,
    ),
    has_top_p=st.booleans(),
    has_experts=st.booleans(),
    missing=st.none() | st.integers(0, 7),
    prompt=st.integers(0, 2),
)
def test_whatever_is_appended_and_cut_a_sample_agrees_with_plain_lists(
    steps: list[tuple[str, int]],
    has_top_p: bool,
    has_experts: bool,
    missing: int | None,
    prompt: int,
) -> None:
    sample = a_sample(prompt)
    kept: list[list[int]] = []
    experts: list[Any] = []
    sampled: list[bool] = []
    is_reported = False
    for number, (step, count) in enumerate(steps):
        if step == "see":
            see(sample, count)
        elif step == "force":
            sample.append_response_tokens([8] * count, trainable=False, forced=True)
        elif step == "truncate":
            keep = len(kept) * count // 4
            sample.truncate(keep)
            del kept[keep:], sampled[keep:]
            del experts[max(prompt + keep - 1, 0) :]
        if step in ("see", "force"):
            kept += [[] for _ in range(count)]
            sampled += [False] * count
        if step != "say":
            continue
        ids = [number * 10 + n for n in range(count)]
        total, meta = prompt + len(kept) + count, dict[str, Any]()
        mask = [[id + 1, id][: 1 + id % 2] if id % 2 else [id] for id in ids]
        reports = missing != number
        if has_top_p and reports:
            meta["sampling_mask"] = mask
        if has_experts and reports:
            meta["routed_experts"] = np.array(rows(total - 1, number)).reshape(-1, 1, 2)
        is_first, is_missing = reports and not is_reported, is_reported and not reports
        before = sample_snapshot(sample)
        if (has_top_p or has_experts) and ((is_first and any(sampled)) or (is_missing and count)):
            with pytest.raises(InvariantError, match="for all of its sampled tokens or none"):
                say(sample, ids, **meta)
            assert sample_snapshot(sample) == before
            return
        say(sample, ids, **meta)
        is_reported |= reports
        kept += mask
        sampled += [True] * count
        if reports:
            experts += rows(total - 1, number)[len(experts) :]
    assert kept_of(sample) == (kept if has_top_p and is_reported else None)
    assert experts_of(sample) == (experts if has_experts and is_reported else None)
    again = Sample.from_dict(sample.to_dict())
    assert (kept_of(again), experts_of(again)) == (kept_of(sample), experts_of(sample))
    assert violations(sample) == violations(again) == []


# -- at rest ---------------------------------------------------------------------------------------


def test_a_sealed_sample_is_viewed_without_a_copy_and_one_in_flight_is_copied() -> None:
    sample = a_sample()
    say(sample, [4], sampling_mask=[[4]], routed_experts=np.array(rows(3, 1), np.uint16))
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
    for name in names:
        getattr(sample, name)[:] = 7
        assert not (getattr(sample, name) == 7).all()
    again = Sample.from_dict(sample.to_dict())
    for name in names:
        value = getattr(again, name)
        assert value.dtype == getattr(sample, name).dtype
        assert np.shares_memory(value, getattr(again, name))
        assert not value.flags.writeable


def test_a_sample_without_replay_data_has_none_and_takes_no_room_for_it() -> None:
    sample = a_sample()
    say(sample, [4], sampling_mask=None, routed_experts=None)
    assert sample.columns.replay is None
    assert kept_of(sample) is experts_of(sample) is None
    row = sample.to_dict()
    for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        assert row.pop(name) is None
    assert row.pop("rollout_routed_experts") is None
    assert Sample.from_dict(row).columns.replay is None, "a row that an earlier version wrote"


@pytest.mark.parametrize(
    "field",
    [
        {"rollout_routed_experts": "not base64!"},
        {"rollout_routed_experts": b64(npy(np.arange(4)))},
        {"rollout_routed_experts": [1]},
        {"rollout_top_p_token_ids": [2**31]},
        {"rollout_top_p_token_offsets": ["0"]},
    ],
)
def test_a_row_whose_replay_data_cannot_be_read_is_a_config_error(field: dict[str, Any]) -> None:
    sample = a_sample()
    say(sample, [4], sampling_mask=[[4]], routed_experts=rows(3, 1))
    with pytest.raises(ConfigError, match="sample row '7-0'"):
        Sample.from_dict({**sample.to_dict(), **field})


@pytest.mark.parametrize("name", ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"])
def test_a_row_with_ids_or_offsets_alone_breaks_an_invariant(name: str) -> None:
    sample = a_sample()
    say(sample, [4], sampling_mask=[[4]])
    row = {**sample.to_dict(), name: None}
    assert [violation.code for violation in violations(Sample.from_dict(row))] == ["R3.1"]


# -- over samples ----------------------------------------------------------------------------------


def test_the_kept_vocabulary_is_a_mean_over_trained_tokens() -> None:
    plain, removed, masked, whole = (a_sample() for _ in range(4))
    say(plain, [4])
    for sample in (removed, masked, whole):
        say(sample, [4, 5], sampling_mask=[[4, 1, 2, 3], [5]])
        see(sample, 3)
    removed.remove_sample = True
    masked.mask_out(0, 1)

    def kept(*samples: Sample) -> float | None:
        return kept_per_trained_token(map(row_facts_of, samples))

    assert kept(plain, removed) is kept() is None
    assert kept(plain, whole) == 2.5
    assert kept(plain, removed, masked, whole) == 2.0
    masked.mask_out()
    assert kept(masked) is None


def test_rows_of_another_sample_are_reused_up_to_the_common_prefix() -> None:
    assert reusable_rows([1, 2, 3, 4], [1, 2, 9, 9]) == 2
    assert reusable_rows([1, 2], [1, 2, 3]) == reusable_rows([1, 2, 3], [1, 2]) == 2
    assert reusable_rows([], [1]) == reusable_rows([2], [1]) == 0


def test_every_code_is_explained() -> None:
    source = "".join(
        (ROOT / f"fsm_rollout/{n}.py").read_text() for n in ("replay", "replay_columns")
    )
    codes = set(re.findall(r'InvariantError\(\s*"([\w.]+)"', source))
    codes |= {f"{what}_incomplete" for what in re.findall(r'_partly\(\s*"(\w+)"', source)}
    page = (ROOT / "docs/explanation/invariants.md").read_text()
    assert len(codes) >= 8
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_rows_of_all_tokens_are_taken_from_where_they_are_needed() -> None:
    """A server that ignores the start sends all of them, in each turn."""
    rows = np.arange(5 * 2 * 2).reshape(5, 2, 2)
    for told in ({}, {"routed_experts_start_len": 0}):
        found = routed_experts_of({"routed_experts": rows, **told}, 6, start=3)
        assert found is not None
        assert (found.start, found.rows.tolist()) == (3, rows[3:].tolist())
    with pytest.raises(InvariantError, match="routed_experts_length"):
        routed_experts_of({"routed_experts": rows[1:]}, 6, start=3)


def test_flat_rows_beside_tokens_say_their_shape() -> None:
    flat = np.arange(2 * 2 * 2, dtype=np.int32).tobytes()
    for shape in ((2, 2), [2, 2]):
        sample = Sample(columns=Columns([1, 2]))
        meta = {"routed_experts": flat, "routed_experts_shape": shape}
        sample.append_response_tokens([3], [-1.0], meta_info=meta)
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.shape == (2, 2, 2)
    for wrong in ("xy", 3, (2,), (2, 2.5), None):
        sample = Sample(columns=Columns([1, 2]))
        told: dict[str, Any] = {"routed_experts": flat, "routed_experts_shape": wrong}
        with pytest.raises(InvariantError, match="routed_experts_shape"):
            sample.append_response_tokens([3], [-1.0], meta_info=told)

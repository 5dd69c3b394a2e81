"""Columns and the values that go into them: what is taken and what is refused."""

from __future__ import annotations

import base64
import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.arrays import LOG_PROB_CEILING, LOG_PROB_FLOOR, float32, int32
from fsm_rollout.columns import Column, Columns
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.sample import Sample

CASES = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parent / "cases/numeric.jsonl").read_text().splitlines()
    )
}
ids_lists = st.lists(st.integers(0, 2**31 - 1), max_size=30)
log_prob_lists = st.lists(st.floats(LOG_PROB_FLOOR, 0, width=32), max_size=30)


def every_form(code: str, values: list[Any]) -> dict[str, Any]:
    raw = array(code, values).tobytes()
    return {
        "list": values,
        "tuple": tuple(values),
        "array": array(code, values),
        "numpy": np.array(values, {"i": np.int64, "f": np.float64}[code]),
        "numpy of another byte order": np.array(values, {"i": ">i8", "f": ">f8"}[code]),
        "bytes": raw,
        "bytearray": bytearray(raw),
        "memoryview of numbers": memoryview(array(code, values)),
        "memoryview of bytes": memoryview(raw),
        "base64": base64.b64encode(raw).decode(),
    }


@given(ids_lists)
def test_token_ids_are_the_same_in_every_form(ids: list[int]) -> None:
    for form, given_ids in every_form("i", ids).items():
        assert int32(given_ids).tolist() == ids, form


@given(log_prob_lists)
def test_log_probs_are_the_same_in_every_form(log_probs: list[float]) -> None:
    for form, given_log_probs in every_form("f", log_probs).items():
        assert float32(given_log_probs).tolist() == log_probs, form


def test_torch_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    assert int32(torch.tensor([3, 4])).tolist() == [3, 4]
    assert float32(torch.tensor([-0.5, -1.0], dtype=torch.bfloat16)).tolist() == [-0.5, -1.0]
    assert float32(torch.tensor([-0.5], requires_grad=True)).tolist() == [-0.5]
    with pytest.raises(InvariantError, match="float32"):
        int32(torch.tensor([3.0]))


def test_integers_of_another_width_are_converted_and_never_reinterpreted() -> None:
    assert int32(memoryview(array("q", [5, 6]))).tolist() == [5, 6]
    assert int32(range(3)).tolist() == [0, 1, 2]
    assert int32(np.array([], np.float64)).tolist() == []


@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [1.0],
        ["1"],
        [None],
        [2**31],
        [[1, 2]],
        None,
        7,
        "no base64!",
        b"12345",
        np.array([1.5]),
        np.array([-1]),
        np.array([2**31]),
        np.array([2**63], np.uint64),
        np.array([[1]]),
        np.array(["1"]),
        np.array([None]),
        {1: 2},
    ],
    ids=repr,
)
def test_what_is_no_row_of_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvariantError) as refused:
        int32(ids)
    assert refused.value.code == "R3.1.ids"


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -9999.0, 1e-3, 1e300, -1e300, LOG_PROB_FLOOR - 0.1]
)
@pytest.mark.parametrize("form", ["list", "numpy", "bytes", "base64"])
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_no_log_prob_is_refused_wherever_it_stands(
    value: float, form: str, at: int
) -> None:
    values = [-1.0, -1.0]
    values[at] = value
    with pytest.raises(InvariantError) as refused:
        float32(every_form("f", values)[form])
    assert refused.value.code == "R3.3.log_probs"
    assert f"at position {at} of 2" in refused.value.message


@pytest.mark.parametrize("values", [["-1"], np.array(["-1.0"]), np.array([1j]), [[-1.0]], -1.0])
def test_what_is_no_row_of_numbers_is_refused(values: Any) -> None:
    with pytest.raises(InvariantError):
        float32(values)


def test_rounding_above_zero_is_taken_up_to_the_ceiling() -> None:
    assert float32([LOG_PROB_CEILING]).size == 1
    with pytest.raises(InvariantError):
        float32([2 * LOG_PROB_CEILING])


# -- the handed numeric cases ----------------------------------------------------------------------


def test_num_001_a_nan_does_not_pass_as_the_floor_does_in_max() -> None:
    case = CASES["num-001"]
    assert case["input"]["expr"] == "max(float('nan'), -9999.0)"
    assert math.isnan(max(math.nan, -9999.0)) is case["expected"]["is_nan"]
    for value in (math.nan, -9999.0, max(math.nan, -9999.0)):
        with pytest.raises(InvariantError):
            float32([value])


def test_num_002_log_probs_survive_float32() -> None:
    case = CASES["num-002"]
    log_probs = case["input"]["log_probs"]
    sample = Sample()
    sample.append_response_tokens([1] * len(log_probs), log_probs)
    kept = sample.rollout_log_probs
    assert kept is not None
    assert bool((kept <= 0).all()) is case["expected"]["no_positive"]
    assert kept.tolist() == [float(np.float32(value)) for value in log_probs]


def test_num_006_a_value_that_does_not_fit_is_refused_and_never_wraps() -> None:
    case = CASES["num-006"]["input"]
    total = case["tokens"] * case["kept_per_token"]
    assert total > 2**31 - 1
    for values in ([total], np.array([total])):
        with pytest.raises(InvariantError):
            int32(values)
        with pytest.raises(InvariantError):
            Column("top_p_offset", "int32").cast(values)
    assert Column("top_p_offset", "int64").cast([total]).tolist() == [total]


def test_num_008_a_greedy_log_prob_of_zero_is_legal() -> None:
    case = CASES["num-008"]
    accepted = float32(case["input"]["log_probs"]).tolist() == case["input"]["log_probs"]
    assert accepted is case["expected"]["accepted"]


# -- declared columns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"per": "B"}, "'B'"),
        ({"dtype": "uint8", "fill": 300}, "300"),
        ({"dtype": "int32", "fill": 0.5}, "float64"),
        ({"dtype": "int64", "fill": math.nan}, "float64"),
    ],
)
def test_a_column_that_cannot_be_is_a_config_error_that_says_why(column: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Column("weight", **column)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("uint8", [256]),
        ("uint8", [-1]),
        ("int32", [2**31]),
        ("int64", [0.5]),
        ("float32", ["a"]),
        ("float32", [[1.0]]),
        ("float64", None),
    ],
)
def test_a_column_refuses_what_its_dtype_cannot_hold(dtype: Any, values: Any) -> None:
    with pytest.raises(InvariantError) as refused:
        Column("weight", dtype).cast(values)
    assert refused.value.code == "R3.1.columns"
    assert "'weight'" in refused.value.message


def test_columns_per_token_cover_the_prompt_and_columns_per_response_do_not() -> None:
    columns = Columns(
        [1, 2, 3], declared=[Column("weight", per="T", fill=2), Column("entropy", fill=-1)]
    )
    assert columns.extra("weight").tolist() == [2, 2, 2]
    assert columns.extra("entropy").tolist() == []
    assert columns.is_aligned


# -- views -----------------------------------------------------------------------------------------


def test_arrays_are_copies_in_flight_and_read_only_views_once_sealed() -> None:
    columns = Columns([1, 2], declared=[Column("weight", per="T")])
    columns.append(int32([3]), float32([-1.0]), columns.checked_extra(None, 1), sampled=True)
    in_flight = columns.tokens
    in_flight[0] = 99
    assert columns.tokens.tolist() == [1, 2, 3]
    columns.is_sealed = True
    log_probs = columns.rollout_log_probs
    assert log_probs is not None
    for view in (columns.tokens, columns.loss_mask, log_probs, columns.extra("weight")):
        assert not view.flags.owndata
        assert not view.flags.writeable
    assert np.shares_memory(columns.tokens, columns.tokens)
    dtypes = [view.dtype.name for view in (columns.tokens, columns.loss_mask, log_probs)]
    assert dtypes == ["int32", "uint8", "float32"]


def test_live_views_are_read_only_and_hold_off_writers_until_they_are_let_go() -> None:
    columns = Columns([1, 2])
    columns.append(int32([3]), float32([-1.0]), {}, sampled=True)
    loss_mask, log_probs = columns.live()
    assert log_probs is not None
    assert (loss_mask.tolist(), log_probs.tolist()) == ([1], [-1.0])
    assert not loss_mask.flags.writeable | log_probs.flags.writeable
    with pytest.raises(BufferError):
        columns.append(int32([4]), float32([-2.0]), {}, sampled=True)
    assert (columns.tokens.tolist(), columns.is_aligned) == ([1, 2, 3], True)
    del loss_mask, log_probs
    columns.append(int32([4]), float32([-2.0]), {}, sampled=True)
    assert columns.tokens.tolist() == [1, 2, 3, 4]


def test_a_token_takes_nine_bytes() -> None:
    columns = Columns(range(1000))
    columns.append(int32(range(1000)), float32([-1.0] * 1000), {}, sampled=True)
    assert columns.tokens[1000:].nbytes + columns.loss_mask.nbytes == 5 * 1000
    assert columns.rollout_log_probs is not None
    assert columns.rollout_log_probs.nbytes == 4 * 1000


def test_a_run_without_log_probs_has_no_column_of_them() -> None:
    columns = Columns([1], log_probs=False)
    columns.append(int32([2]), None, {}, sampled=True)
    assert columns.rollout_log_probs is None
    assert columns.is_aligned


def test_each_array_is_compared_with_its_own_length() -> None:
    for buffer in ("_ids", "_mask", "_log_probs"):
        columns = Columns([1, 2], declared=[Column("entropy")])
        columns.append(int32([3]), float32([-1.0]), {"entropy": array("f", [0])}, sampled=True)
        assert columns.is_aligned
        getattr(columns, buffer).append(0)
        assert not columns.is_aligned, buffer
    columns = Columns([1], declared=[Column("entropy")])
    columns._extra["entropy"].append(0)
    assert not columns.is_aligned


def test_the_last_id_and_response_ids_are_read_without_a_copy_of_everything() -> None:
    columns = Columns([1, 2])
    assert Columns().last_id is None
    columns.append(int32([3, 4, 5]), float32([-1.0] * 3), {}, sampled=True)
    assert columns.last_id == 5
    assert columns.response_ids() == [3, 4, 5]
    assert columns.response_ids(1, 2) == [4]
    kept = columns.response_tokens(1)
    columns.append(int32([6]), float32([-1.0]), {}, sampled=True)
    assert (kept.tolist(), kept.dtype.name) == ([4, 5], "int32")
    assert columns.response_tokens(4).tolist() == []

"""The handed cases about replay data and weight versions, driven through `Sample`."""

from __future__ import annotations

import base64
import io
import json
import logging
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsm_rollout.columns import Columns
from fsm_rollout.errors import InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.replay import counters_of, reusable_rows, routed_experts_of, top_p_of
from fsm_rollout.sample import Sample
from fsm_rollout.testing.snapshot import sample_snapshot

CASES = Path(__file__).parent / "cases"
ENGINE_REPLIES = {
    case["id"]: case
    for case in map(json.loads, (CASES / "engine-reply.jsonl").read_text().splitlines())
}
NUMERIC = {
    case["id"]: case for case in map(json.loads, (CASES / "numeric.jsonl").read_text().splitlines())
}


def handed(case_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Input and expected."""
    case = {**ENGINE_REPLIES, **NUMERIC}[case_id]
    return case["input"], case["expected"]


def append(sample: Sample, ids: list[int], **meta: Any) -> None:
    sample.append_response_tokens(
        ids, [-1.0] * len(ids), meta_info={"finish_reason": "stop", **meta}
    )


def spans_of(sample: Sample) -> list[list[int]]:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert ids is not None
    assert offsets is not None
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def versions_of(sample: Sample) -> list[Any]:
    """The weight version of each response token; None where it was not sampled."""
    versions: list[Any] = [None] * sample.response_length
    for turn in sample.turns:
        of_turn = chain.from_iterable([version] * n for version, n in turn.weight_versions)
        for at, version in zip(range(turn.start, turn.stop), of_turn, strict=False):
            versions[at] = version
    return versions


def test_rex_001_there_is_a_row_for_every_token_but_the_last() -> None:
    given, expected = handed("rex-001")
    shape, total = (given["layers"], given["topk"]), len(given["prompt_ids"] + given["output_ids"])
    meta = {"routed_experts": given["routed_experts_b64_int32"]}
    routed = routed_experts_of(meta, total, shape=shape)
    assert routed is not None
    sample = Sample(columns=Columns(given["prompt_ids"]))
    append(sample, given["output_ids"], routed_experts=routed)
    experts = sample.rollout_routed_experts
    assert experts is not None
    assert list(experts.shape) == expected["shape"]
    assert len(experts) == expected["rows"] == sample.columns.length - 1
    assert sample.columns.length == expected["aligned_to"]
    assert experts.ravel().tolist() == list(range(16))
    assert violations(sample) == []
    for other in (total - 1, total + 1):
        with pytest.raises(InvariantError) as refused:
            routed_experts_of(meta, other, shape=shape)
        assert refused.value.code == "routed_experts_length"
        assert refused.value.code in expected["must"]


@pytest.mark.parametrize("sends_all_rows", [True, False])
def test_rex_002_the_next_turn_fills_the_boundary_row(sends_all_rows: bool) -> None:
    given, expected = handed("rex-002")
    first, second = given["turn1"], given["turn2"]
    sample = Sample(columns=Columns(range(first["prompt"])))
    of_turn_1 = np.full((first["rows"], 2, 2), 1, np.uint8)
    append(sample, [5] * first["output"], routed_experts=of_turn_1)
    sample.append_response_tokens([6] * given["tool_tokens"], trainable=False)
    assert sample.columns.length == second["prompt"]
    start = 0 if sends_all_rows else first["rows"]
    of_turn_2 = np.full((second["rows"] - start, 2, 2), 2, np.uint8)
    append(
        sample,
        [7] * second["output"],
        routed_experts=of_turn_2,
        routed_experts_start_len=start,
    )
    experts = sample.rollout_routed_experts
    assert experts is not None
    assert len(experts) == expected["final_rows"] == sample.columns.length - 1
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert experts.all(), expected["must_not"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_rex_004_npy_and_raw_int32_are_told_apart(dtype: str) -> None:
    given, _ = handed("rex-004")
    assert dtype in given["encoding"]
    rows = np.arange(4 * 2 * 2, dtype=dtype).reshape(4, 2, 2)
    file = io.BytesIO()
    np.save(file, rows)
    raw = rows.astype("<i4").tobytes()
    for data, kept in ((file.getvalue(), dtype), (raw, "int32")):
        meta = {"routed_experts": base64.b64encode(data).decode()}
        routed = routed_experts_of(meta, 5, shape=(2, 2))
        assert routed is not None
        assert routed.rows.tolist() == rows.tolist()
        assert routed.rows.dtype == kept


def test_rex_006_rows_are_reused_up_to_the_common_prefix() -> None:
    given, expected = handed("rex-006")
    assert reusable_rows(given["row_a"], given["row_b_prompt"]) == expected["copy_from_index"]


@pytest.mark.parametrize("case_id", ["tpp-001", "tpp-004", "tpp-007"])
def test_tpp_kept_ids_are_read_in_every_encoding(case_id: str) -> None:
    given, expected = handed(case_id)
    assert expected["accept"]
    meta = given.get("meta_info", given)
    ids = [span[0] for span in expected["spans"]]
    assert len(ids) == given["new_tokens"]
    sample = Sample(columns=Columns([1]))
    append(sample, ids, **meta)
    assert spans_of(sample) == expected["spans"]
    top_p = top_p_of(meta, given["new_tokens"])
    assert top_p is not None
    assert [top_p.ids[a:b].tolist() for a, b in pairwise(top_p.offsets)] == expected["spans"]


def test_tpp_002_ids_without_offsets_change_nothing() -> None:
    given, expected = handed("tpp-002")
    sample = Sample(columns=Columns([1]))
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError) as refused:
        append(sample, [5, 6], top_p_token_ids=given["top_p_token_ids"])
    assert refused.value.code == expected["reason"]
    assert expected["sample_unchanged"]
    assert sample_snapshot(sample) == before


def test_tpp_005_tool_tokens_kept_nothing_and_later_offsets_go_on() -> None:
    given, expected = handed("tpp-005")
    sample = Sample(columns=Columns([1]))
    for turn, ids in ((given["turn1"], [5, 6]), (given["turn2"], [8])):
        assert len(ids) == turn["tokens"]
        append(sample, ids, top_p_token_ids=turn["ids"], top_p_token_offsets=turn["offsets"])
        if turn is given["turn1"]:
            sample.append_response_tokens([2] * given["tool_tokens"], trainable=False)
    kept, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert kept is not None
    assert offsets is not None
    assert kept.tolist() == expected["ids"]
    assert offsets.tolist() == expected["offsets"]
    assert expected["len_offsets"] == f"{sample.response_length} tokens + 1"
    assert violations(sample) == []


def test_wv_001_the_version_changes_inside_a_reply(caplog: pytest.LogCaptureFixture) -> None:
    given, expected = handed("wv-001")
    meta, ids = given["meta_info"], given["output_ids"]
    sample = Sample()
    append(sample, ids, **meta)
    assert versions_of(sample) == expected["per_token_versions"]
    with_gap = meta | {"weight_versions": meta["weight_versions"][1:]}
    with caplog.at_level(logging.WARNING):
        append(sample, ids, **with_gap)
    assert versions_of(sample)[len(ids) :] == [meta["weight_version"]] * len(ids)
    assert "do not tile" in caplog.text
    assert counters_of(with_gap, len(ids)) == {"version_spans_refused": 1}


def test_wv_003_versions_skip_tool_tokens() -> None:
    given, expected = handed("wv-003")
    sample = Sample()
    for turn in given["turns"]:
        if "tool" in turn:
            sample.append_response_tokens([2] * turn["tool"], trainable=False)
        else:
            append(sample, [5] * turn["n"], weight_version=turn["v"])
    assert versions_of(sample) == expected["per_token_versions"]
    oldest = min(str(version) for version, _ in sample.weight_versions)
    assert oldest == expected["staleness_by_min_version"]
    sample.reset()
    append(sample, [5], weight_version="6")
    assert sample.weight_versions == [("6", 1)], "a reset before it is queued again"


@pytest.mark.parametrize("form", ["list", "int64", "base64 of int64 in .npy", "wrapped to int32"])
def test_num_006_offsets_beyond_int32_are_refused_and_never_wrap(form: str) -> None:
    given, expected = handed("num-006")
    offsets = np.arange(given["tokens"] + 1, dtype=np.int64) * given["kept_per_token"]
    assert offsets[-1] > 2**31 - 1, expected["must"]
    value: Any = offsets
    if form == "list":
        value = offsets.tolist()
    elif form == "wrapped to int32":
        value = offsets.astype(np.int32)
    elif form.endswith(".npy"):
        file = io.BytesIO()
        np.save(file, offsets)
        value = base64.b64encode(file.getvalue()).decode()
    sample = Sample(columns=Columns([1]))
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError) as refused:
        append(sample, [5] * given["tokens"], top_p_token_ids=[5] * 10, top_p_token_offsets=value)
    assert refused.value.code in ("bad_meta_array", "top_p_offsets")
    assert sample_snapshot(sample) == before

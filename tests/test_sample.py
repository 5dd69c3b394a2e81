"""Sample: its writers change everything or nothing; its row comes back equal."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.columns import Column, Columns
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Media, Sample, ToolCall
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.testing.faults import FAULTS
from fsm_rollout.testing.snapshot import sample_snapshot, snapshot

DECLARED = (Column("teacher_log_probs", fill=-1), Column("weight", "float64", per="T", fill=1))


def a_sample(prompt: int = 2, declared: tuple[Column, ...] = ()) -> Sample:
    return Sample(sample_id="7-0", columns=Columns(range(prompt), declared=declared))


def say(sample: Sample, count: int, finish: str | None = "stop", **meta: Any) -> None:
    """A model turn, or a part of it."""
    sample.append_response_tokens(
        range(10, 10 + count), [-1.0] * count, meta_info={"finish_reason": finish, **meta}
    )


def see(sample: Sample, count: int) -> None:
    """An observation."""
    sample.append_response_tokens(range(20, 20 + count), trainable=False)


def log_probs_of(sample: Sample) -> list[float]:
    assert sample.rollout_log_probs is not None
    return [float(value) for value in sample.rollout_log_probs]


# -- append ----------------------------------------------------------------------------------------


def test_sampled_tokens_are_trained_and_observations_are_not() -> None:
    sample = a_sample()
    say(sample, 2, temperature=0.7, top_p=0.95, log_prob_kind="scaled")
    see(sample, 1)
    assert sample.tokens.tolist() == [0, 1, 10, 11, 20]
    assert sample.loss_mask.tolist() == sample.sampled.tolist() == [1, 1, 0]
    assert log_probs_of(sample) == [-1.0, -1.0, 0.0]
    assert [(t.kind, t.start, t.stop) for t in sample.turns] == [
        ("model", 0, 2),
        ("observation", 2, 3),
    ]
    turn = sample.turns[0]
    assert (turn.temperature, turn.top_p, turn.log_prob_kind) == (0.7, 0.95, "scaled")


def test_forced_tokens_lie_in_the_model_turn_and_are_neither_sampled_nor_trained() -> None:
    sample = a_sample()
    sample.append_response_tokens([5, 6], trainable=False, forced=True)
    say(sample, 2)
    assert [(t.kind, t.start, t.stop, t.forced) for t in sample.turns] == [
        ("model", 0, 4, [(0, 2)])
    ]
    assert sample.loss_mask.tolist() == sample.sampled.tolist() == [0, 0, 1, 1]
    assert sample.weight_versions == [(None, 2)]
    assert violations(sample) == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("log_probs", [True, False])
def test_a_rejected_append_leaves_the_sample_byte_identical(fault: str, log_probs: bool) -> None:
    sample = Sample(columns=Columns([1, 2], log_probs=log_probs, declared=DECLARED))
    good: dict[str, Any] = {
        "tokens": [3, 4],
        "extra": {"teacher_log_probs": [-1, -2]},
        "meta_info": {"finish_reason": "abort", "weight_version": "v1"},
        "text": "so far",
    }
    if log_probs:
        good["log_probs"] = [-1.0, -2.0]
    sample.append_response_tokens(good["tokens"], **{k: good[k] for k in good if k != "tokens"})
    before = sample_snapshot(sample)
    spoilt = copy.deepcopy(good)
    FAULTS[fault].spoil(spoilt)
    with pytest.raises(InvariantError) as refused:
        sample.append_response_tokens(spoilt.pop("tokens"), **spoilt)
    assert refused.value.code in FAULTS[fault].codes
    assert sample_snapshot(sample) == before


def test_a_rejected_append_names_the_sample_and_both_numbers() -> None:
    sample = a_sample()
    with pytest.raises(InvariantError, match=r"2 log-probs for 3 tokens of sample 7-0, turn 0"):
        sample.append_response_tokens([1, 2, 3], [-1.0, -1.0])
    with pytest.raises(InvariantError, match="missing_log_probs: 3 sampled tokens"):
        sample.append_response_tokens([1, 2, 3])


@given(
    count=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    kind=st.sampled_from(["sampled", "observed", "forced"]),
    finish=st.sampled_from(["stop", "length", "abort", None]),
    before=st.sampled_from(["nothing", "observation", "open turn", "closed turn", "forced"]),
)
def test_a_stream_of_chunks_gives_the_same_sample_as_one_append(
    count: int, cuts: list[int], kind: str, finish: str | None, before: str
) -> None:
    versions = ["v1"] * (count // 2) + ["v2"] * (count - count // 2)

    def append(sample: Sample, start: int, stop: int, *, last: bool) -> None:
        chunk = versions[start:stop]
        meta: dict[str, Any] = {"finish_reason": finish, "temperature": 0.5}
        meta["weight_versions"] = [(v, chunk.count(v)) for v in dict.fromkeys(chunk)]
        sample.append_response_tokens(
            range(start, stop),
            [-float(n) for n in range(start, stop)] if kind == "sampled" else None,
            trainable=kind == "sampled",
            forced=kind == "forced",
            meta_info=meta,
            text="".join(f"{n} " for n in range(start, stop)),
            extra={"teacher_log_probs": [-float(n) for n in range(start, stop)]},
            update_terminal_info=last,
        )

    one_shot, stream = a_sample(declared=DECLARED), a_sample(declared=DECLARED)
    for sample in (one_shot, stream):
        match before:
            case "observation":
                see(sample, 2)
            case "open turn":
                say(sample, 2, "abort")
            case "closed turn":
                say(sample, 2, "stop")
            case "forced":
                sample.append_response_tokens([1], trainable=False, forced=True)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    append(one_shot, 0, count, last=True)
    for start, stop in pairwise(edges):
        append(stream, start, stop, last=False)
    append(stream, count, count, last=True)
    assert sample_snapshot(stream) == sample_snapshot(one_shot)


def test_an_interrupted_turn_that_goes_on_is_one_turn() -> None:
    sample = a_sample()
    say(sample, 2, "abort", weight_version="v1")
    say(sample, 3, "stop", weight_version="v2")
    say(sample, 1, "stop", weight_version="v2")
    assert [(t.start, t.stop, t.finish) for t in sample.turns] == [(0, 5, "stop"), (5, 6, "stop")]
    assert sample.turns[0].weight_versions == [("v1", 2), ("v2", 3)]
    assert sample.weight_versions == [("v1", 2), ("v2", 4)]
    assert sample.num_turns == 2


def test_an_empty_generation_is_a_turn_without_tokens() -> None:
    sample = a_sample()
    sample.append_response_tokens([], [], meta_info={"finish_reason": {"type": "stop"}})
    assert [(t.start, t.stop, t.finish) for t in sample.turns] == [(0, 0, "stop")]
    assert (sample.num_turns, sample.response_length) == (1, 0)
    assert violations(sample) == []


def test_text_that_is_known_for_a_part_only_is_not_the_response() -> None:
    sample = a_sample()
    say(sample, 1, None)
    sample.append_response_tokens([5], [-1.0], text="end")
    assert sample.response is None
    sample = a_sample()
    sample.append_response_tokens([5], [-1.0], text="one ", update_terminal_info=False)
    sample.append_response_tokens([6], [-1.0], text="two", update_terminal_info=False)
    sample.append_response_tokens([], [], meta_info={"finish_reason": "stop"})
    assert sample.response == "one two"


def test_a_column_that_is_not_given_is_filled() -> None:
    sample = a_sample(prompt=2, declared=DECLARED)
    sample.append_response_tokens([5, 6], [-1.0] * 2, extra={"weight": [3, 4]})
    see(sample, 1)
    assert sample.columns.extra("weight").tolist() == [1, 1, 3, 4, 1]
    assert sample.columns.extra("teacher_log_probs").tolist() == [-1, -1, -1]


def test_no_token_is_taken_beyond_the_context_or_the_response() -> None:
    for limits in (Limits(max_context=6), Limits(max_response=4)):
        request = Request(prompt_ids=[1, 2], limits=limits)
        request.set_prompt([1, 2])
        say(request.sample, 3)
        before = snapshot(request)
        with pytest.raises(InvariantError, match="room for 1"):
            see(request.sample, 2)
        assert snapshot(request) == before
        see(request.sample, 1)
        assert request.room == 0


# -- truncate, mask_out, reset ---------------------------------------------------------------------


def a_conversation() -> Sample:
    """Model [0, 4) with [1, 2) forced, observation [4, 7) with an image in [5, 7), model [7, 9)."""
    sample = a_sample(declared=DECLARED)
    say(sample, 1, None, weight_version="v1")
    sample.append_response_tokens([5], trainable=False, forced=True)
    say(sample, 2, "stop", weight_version="v2", temperature=0.5)
    sample.turns[-1].calls = (ToolCall("a", span=(0, 2)), ToolCall("b", span=(2, 4)))
    see(sample, 3)
    sample.media.append(Media(2 + 5, 2, "image"))
    say(sample, 2, "stop", weight_version="v2")
    return sample


@pytest.mark.parametrize("keep", range(10))
def test_truncate_cuts_every_column_turn_and_span_alike(keep: int) -> None:
    whole, sample = a_conversation(), a_conversation()
    stayed = sample.truncate(keep)
    assert stayed == (5 if keep == 6 else keep), "a cut inside the image moves to its start"
    assert sample.tokens.tolist() == whole.tokens.tolist()[: 2 + stayed]
    assert sample.loss_mask.tolist() == whole.loss_mask.tolist()[:stayed]
    assert log_probs_of(sample) == log_probs_of(whole)[:stayed]
    assert sample.sampled.tolist() == whole.sampled.tolist()[:stayed]
    assert sample.columns.extra("weight").size == 2 + stayed
    assert sample.columns.extra("teacher_log_probs").size == stayed
    assert sum(count for _, count in sample.weight_versions) == int(sample.sampled.sum())
    assert len(sample.media) == (stayed >= 7)
    assert sample.num_turns == (stayed > 0) + (stayed > 7)
    assert violations(sample) == []


def test_a_turn_that_lost_its_end_is_open_and_keeps_the_calls_that_are_whole() -> None:
    sample = a_conversation()
    sample.truncate(3)
    (turn,) = sample.turns
    assert (turn.stop, turn.finish, turn.forced) == (3, None, [(1, 2)])
    assert turn.weight_versions == [("v1", 1), ("v2", 1)]
    assert [call.name for call in turn.calls] == ["a"]
    assert sample.open_turn is turn


def test_a_cut_at_the_end_of_a_turn_leaves_it_closed() -> None:
    sample = a_conversation()
    sample.truncate(4)
    assert (sample.turns[-1].finish, sample.open_turn) == ("stop", None)


@pytest.mark.parametrize("keep", [-1, 10])
def test_truncate_out_of_range_is_refused(keep: int) -> None:
    sample = a_conversation()
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError, match=f"cannot keep {keep} of 9"):
        sample.truncate(keep)
    assert sample_snapshot(sample) == before


def test_numbers_of_numpy_do_not_end_up_in_the_record() -> None:
    sample = a_conversation()
    sample.truncate(np.int64(3))  # type: ignore[arg-type]
    assert json.dumps(sample.to_dict())


def test_mask_out_untrains_and_leaves_what_was_sampled() -> None:
    sample = a_conversation()
    log_probs, sampled = log_probs_of(sample), sample.sampled.tolist()
    sample.mask_out(0, 3)
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert (log_probs_of(sample), sample.sampled.tolist()) == (log_probs, sampled)
    assert (sample.columns.num_trained, sample.columns.num_sampled) == (3, 5)
    sample.mask_out()
    assert not sample.loss_mask.any()


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 10)])
def test_mask_out_out_of_range_is_refused(span: tuple[int, int]) -> None:
    sample = a_conversation()
    with pytest.raises(InvariantError, match="9 response tokens"):
        sample.mask_out(*span)


def test_reset_leaves_what_a_new_sample_has() -> None:
    sample, fresh = a_conversation(), a_sample(declared=DECLARED)
    for each in (sample, fresh):
        each.media.insert(0, Media(0, 1, "in the prompt"))
    sample.extra["seen"], sample.reward, sample.reward_parts = 1, 0.5, {"tool": 0.5}
    sample.remove_sample, sample.non_generation_time, sample.response = True, 2.0, "text"
    sample.reset()
    assert sample_snapshot(sample) == sample_snapshot(fresh)


def test_engine_ids_hold_one_placeholder_for_each_media_span() -> None:
    sample = a_conversation()
    assert sample.engine_ids().tolist() == np.delete(sample.tokens, 8).tolist()
    assert a_sample(3).engine_ids().tolist() == [0, 1, 2]


# -- sealed ----------------------------------------------------------------------------------------


def a_sealed_sample() -> Sample:
    request = Request(limits=Limits(max_context=64), declared=DECLARED, prompt="2 + 2?")
    machine = Machine()
    request.set_prompt([1, 2])
    machine.fire(Event.GENERATE, request)
    say(request.sample, 3, weight_version="v1", temperature=0.5)
    see(request.sample, 2)
    request.sample.turns[0].calls = (ToolCall("a", {"x": [1]}, id="c0", span=(0, 2)),)
    request.sample.turns[0].messages = ({"role": "assistant", "content": "hm"},)
    machine.fire(Event.COMPLETE, request, StopReason.STOP)
    request.reward, request.reward_parts = 0.5, {"answer": 0.5}
    request.seal()
    return request.sample


@pytest.mark.parametrize(
    ("write", "arguments"),
    [
        ("append_response_tokens", ([1], [-1.0])),
        ("truncate", (1,)),
        ("mask_out", ()),
        ("reset", ()),
        ("set_prompt", ([1],)),
    ],
)
def test_a_sealed_sample_refuses_every_write(write: str, arguments: Any) -> None:
    sample = a_sealed_sample()
    before = sample_snapshot(sample)
    with pytest.raises(InvariantError) as refused:
        getattr(sample, write)(*arguments)
    assert refused.value.code == "R3.closed"
    assert sample_snapshot(sample) == before


def test_a_sealed_sample_stands_alone_and_can_be_copied_and_pickled() -> None:
    sample = a_sealed_sample()
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    for again in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert again.to_dict() == sample.to_dict()
        assert again.is_sealed
        assert violations(again) == []


def test_an_ended_sample_takes_no_more_tokens_but_may_still_be_masked_or_cut() -> None:
    request = Request(prompt_ids=[1])
    request.set_prompt([1])
    machine = Machine()
    machine.fire(Event.GENERATE, request)
    say(request.sample, 3)
    machine.fire(Event.TRUNCATE, request, StopReason.LENGTH)
    with pytest.raises(InvariantError, match="nothing can be appended"):
        say(request.sample, 1)
    request.sample.mask_out(0, 1)
    request.sample.truncate(2)
    assert request.sample.loss_mask.tolist() == [0, 1]


# -- at rest ---------------------------------------------------------------------------------------


def test_a_row_comes_back_equal_through_json() -> None:
    sample = a_sealed_sample()
    row = json.loads(json.dumps(sample.to_dict()))
    again = Sample.from_dict(row)
    assert again.to_dict() == sample.to_dict()
    assert again.turns == sample.turns
    assert again.tokens.tobytes() == sample.tokens.tobytes()
    assert log_probs_of(again) == log_probs_of(sample)
    assert (again.num_turns, again.num_versioned) == (sample.num_turns, sample.num_versioned)
    assert violations(again) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_declared_columns_of_every_dtype_come_back(dtype: Any) -> None:
    sample = a_sample(declared=(Column("entropy", dtype, fill=3),))
    sample.append_response_tokens([5, 6], [-1.0] * 2, extra={"entropy": [1, 2]})
    see(sample, 1)
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.columns.extra("entropy").tolist() == [1, 2, 3]
    assert again.columns.extra("entropy").dtype == dtype


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("schema", 0, "schema 0"),
        ("response_length", 99, "response_length 99"),
        ("prompt_length", -1, "prompt_length"),
        ("tokens", [1, -5], "-5"),
        ("tokens", "AAAA", "tokens"),
        ("loss_mask", [2000], "loss_mask"),
        ("status", "done", "status"),
        ("statsu", "completed", "statsu"),
        (
            "columns",
            [{"column": {"name": "flag", "dtype": "uint8"}, "values": [1.5]}],
            "'flag' is uint8",
        ),
    ],
)
def test_a_row_that_is_no_sample_is_refused_by_field(field: str, value: Any, why: str) -> None:
    row = a_sample(prompt=2).to_dict() | {field: value}
    with pytest.raises(ConfigError, match=why):
        Sample.from_dict(row)


def test_messages_show_the_prompt_and_each_turn_with_its_span() -> None:
    sample = a_sealed_sample()
    assert sample.messages == [
        {"role": "user", "content": "2 + 2?", "span": None},
        {"role": "assistant", "content": "hm", "span": (2, 5)},
    ]


def streamed(*chunks: tuple[list[int], dict[str, Any]]) -> list[tuple[Any, int]]:
    """The version runs of a reply that came in these chunks."""
    sample = a_sample()
    for number, (ids, meta) in enumerate(chunks, 1):
        sample.append_response_tokens(
            ids, [-1.0] * len(ids), meta_info=meta, update_terminal_info=number == len(chunks)
        )
    assert sample.num_versioned == sum(n for _, n in sample.weight_versions)
    assert not violations(sample)
    return sample.weight_versions


def spans(*counts: int) -> list[dict[str, Any]]:
    """A server's: versions 7, 8, ... from the start of the reply."""
    found, at = [], 0
    for version, count in enumerate(counts, 7):
        found.append({"version": str(version), "start": at, "end": at + count})
        at += count
    return found


def test_a_version_that_only_the_end_of_a_stream_names_is_that_of_the_whole_reply() -> None:
    named = {"finish_reason": {"type": "stop"}, "weight_version": "7"}
    assert streamed(([5], {}), ([6], {}), ([9], named)) == [("7", 3)]
    assert streamed(([5, 6], {}), ([], named)) == [("7", 2)]
    assert streamed(([5], {"weight_version": "6"}), ([9], named)) == [("6", 1), ("7", 1)]


def test_spans_at_the_end_of_a_stream_count_from_its_start() -> None:
    end = {"finish_reason": {"type": "stop"}, "weight_version": "8", "weight_versions": spans(2, 1)}
    for first in ({}, {"weight_version": "7"}, {"weight_versions": spans(1)}):
        assert streamed(([5], first), ([6, 9], end)) == [("7", 2), ("8", 1)]


def test_the_version_of_a_resumed_reply_is_not_put_on_the_aborted_part_before_it() -> None:
    sample = a_sample()
    sample.append_response_tokens([5], [-1.0], meta_info={"finish_reason": "abort"})
    sample.append_response_tokens([6], [-1.0], update_terminal_info=False)
    end = {"finish_reason": "stop", "weight_version": "8"}
    sample.append_response_tokens([9], [-1.0], meta_info=end)
    assert sample.weight_versions == [(None, 1), ("8", 2)]
    assert len(sample.turns) == 1

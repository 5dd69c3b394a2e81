"""The handed `stream` cases on both wires; and streams as a property: cut anyhow, one reply."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsm_rollout.codec import Codec
from fsm_rollout.engines.http.sse import Events
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.parsers import get_parser
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.canned import REASONS, ended, play
from tests.dialects import (
    BY_NAME,
    DONE,
    STREAMS,
    Answer,
    Dialect,
    Said,
    ask,
    dumped,
    sglang,
    sse,
)

FOLDER = Path(__file__).parent / "cases"


def cases(kind: str) -> dict[str, Any]:
    lines = (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").split("\n")
    return {case["id"]: case for case in map(json.loads, filter(None, lines))}


CASES = cases("stream")
HERMES = [case for case in cases("parser").values() if case["input"]["format"] == "hermes"]

each_stream = pytest.mark.parametrize("dialect", STREAMS, ids=[d.name for d in STREAMS])


def events_of(dialect: Dialect, said: Said, cuts: list[int]) -> list[bytes]:
    assert dialect.events is not None
    return dialect.events(said, cuts)


def streamed(dialect: Dialect, pieces: list[bytes], asked: Ask) -> Reply:
    """What the wire makes of a body that comes in these pieces."""
    events, stream = Events(), dialect.wire().stream(asked)
    for piece in pieces:
        for event in events.feed(piece):
            stream.feed(event)
    for event in events.flush():
        stream.feed(event)
    return stream.reply()


def read_or_refused(dialect: Dialect, pieces: list[bytes], asked: Ask) -> Reply | EngineError:
    try:
        return streamed(dialect, pieces, asked)
    except EngineError as error:
        return error


# -- the cases -------------------------------------------------------------------------------------


@each_stream
@pytest.mark.parametrize("end", [[], [DONE]], ids=["EOF", "DONE"])
def test_a_stream_without_a_finish_reason_is_cut(dialect: Dialect, end: list[bytes]) -> None:
    expected = CASES["str-001"]["expected"]
    first = events_of(dialect, Said(ids=[5, 6], log_probs=[-0.5, -0.25]), [1])[0]
    request, _ = play(dialect, Answer(sse([first, *end]), is_stream=True))
    assert request.status.name == expected["status"]
    assert request.stop_reason is REASONS[expected["reason"]]
    assert ended(request)[0] == []  # partial ids of a broken stream are not kept


@each_stream
@pytest.mark.parametrize("end", [[], [DONE]], ids=["EOF", "DONE"])
def test_an_error_event_is_an_error(dialect: Dialect, end: list[bytes]) -> None:
    case = CASES["str-003"]
    error = case["input"]["chunks"][1].removeprefix("data: ").strip().encode()
    first = events_of(dialect, Said(ids=[5, 6], log_probs=[-0.5, -0.25]), [1])[0]
    request, _ = play(dialect, Answer(sse([first, error, *end]), is_stream=True))
    expected = case["expected"]
    assert request.status.name == expected["status"]
    assert request.stop_reason is REASONS[expected["reason"]]
    assert REASONS[expected["reason"]].retryable is expected["retryable"]
    assert not request.final
    assert "HarmonyError" in request.error


def test_an_event_may_be_cut_inside_a_character() -> None:
    case = CASES["str-004"]
    events = Events()
    chunks = map(bytes.fromhex, case["input"]["bytes_hex_chunks"])
    found = [event for chunk in chunks for event in events.feed(chunk)]
    assert [json.loads(event) for event in found] == case["expected"]["events"]


@pytest.mark.parametrize("name", ["sglang-cumulative", "sglang-incremental"])
def test_both_modes_of_sglang_give_the_same_tokens(name: str) -> None:
    case = CASES["str-006"]
    ids = case["input"]["chunks"][-1]["output_ids"]
    cuts = [len(chunk["output_ids"]) for chunk in case["input"]["chunks"][:-1]]
    said = Said(ids=ids, log_probs=[-0.5] * 3)
    stream = BY_NAME[name].wire().stream(ask(stream=True))
    for event in events_of(BY_NAME[name], said, cuts):
        stream.feed(event)
    assert list(stream.reply().token_ids) == case["expected"]["tokens"]


@each_stream
def test_an_event_may_carry_several_tokens(dialect: Dialect) -> None:
    case = CASES["str-008"]
    chunks = case["input"]["chunks"]
    said = Said(
        ids=[token for chunk in chunks for token in chunk["ids"]],
        log_probs=[log_prob for chunk in chunks for log_prob in chunk["logprobs"]],
        finish=chunks[-1]["finish"],
    )
    body = sse(events_of(dialect, said, [len(chunks[0]["ids"])]))
    request, _ = play(dialect, Answer(body, is_stream=True))
    assert ended(request)[:2] == (case["expected"]["tokens"], case["expected"]["log_probs"])


@each_stream
def test_an_event_with_too_few_log_probs_is_refused(dialect: Dialect) -> None:
    said = Said(ids=[5, 6, 7, 9], log_probs=[-0.1, -0.2, -0.3])
    request, _ = play(dialect, Answer(sse(events_of(dialect, said, [2])), is_stream=True))
    assert request.stop_reason is StopReason.BAD_REPLY


@each_stream
def test_terminal_info_counts_once(dialect: Dialect) -> None:
    case = CASES["str-009"]
    last = case["input"]["chunks"][-1]
    said = Said(
        ids=[token for chunk in case["input"]["chunks"] for token in chunk["ids"]],
        log_probs=[-0.5, -0.25],
        versions=[{"version": last["weight_version"], "start": 0, "end": 2}],
        cached_tokens=last["cached_tokens"],
    )
    request, _ = play(dialect, Answer(sse(events_of(dialect, said, [1])), is_stream=True))
    expected = case["expected"]
    assert request.status is Status.COMPLETED
    assert [v for v, _ in request.sample.weight_versions] == expected["weight_versions"]
    assert request.metrics["engine/cached_tokens"] == expected["cached_tokens"]
    assert len(request.sample.turns) == expected["status_updates"]


def test_ids_that_a_stream_left_out_are_missed() -> None:
    case = CASES["str-016"]
    total = case["input"]["usage"]["completion_tokens"]
    for name, gap in (
        ("sglang-cumulative", b'"output_ids":[5]'),
        ("sglang-incremental", b'"output_ids":[]'),
        ("generate-stream", b'"token_ids":null'),
        ("completions-stream", b'"token_ids":null'),
    ):
        dialect, key = BY_NAME[name], gap.partition(b":")[0]
        events = events_of(dialect, Said(ids=[5, 6, 9], log_probs=None), [1, 2])
        start = events[1].index(key)
        stop = events[1].index(b"]", start) + 1
        events[1] = events[1][:start] + gap + events[1][stop:]
        events = [
            e.replace(b'completion_tokens":3', b'completion_tokens":%d' % total) for e in events
        ]
        found = read_or_refused(dialect, [sse(events)], ask(stream=True, log_probs=False))
        assert isinstance(found, EngineError)
        assert found.reason is REASONS[case["expected"]["reason"]]


@pytest.mark.parametrize("name", ["str-011", "str-014"])
def test_calls_are_read_from_the_whole_turn(name: str) -> None:
    case = CASES[name]
    parsed = get_parser(case["input"]["format"]).parse(
        "".join(case["input"]["chunks"]), finish="stop", tools=()
    )
    assert [[call.name, call.arguments] for call in parsed.calls] == case["expected"]["calls"]
    assert parsed.content.strip() == case["expected"].get("content", "")


@pytest.mark.parametrize("case", HERMES, ids=[case["id"] for case in HERMES])
def test_any_chunking_gives_the_parse_of_the_whole(case: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    assert CASES["str-012"]["expected"] == {"must_hold": True}
    text, finish = case["input"]["text"], case["input"]["finish_reason"]
    tokenizer = tiny_tokenizer()
    codec = Codec(tokenizer, parser="hermes")
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    whole = get_parser("hermes").parse(text, finish=finish, tools=())
    said = Said(ids=ids, log_probs=[-0.5] * len(ids), finish=finish)
    for size in (1, 3, 6, 12, 30, len(text)):
        if len(text) > 100 * size:
            continue
        for dialect in STREAMS:
            reply = dialect.read(said, cuts=range(size, len(ids), size))
            turn = codec.parse(
                cast(list[int], reply.token_ids), finish=str(reply.finish), call_id="c"
            )
            assert turn.content == whole.content
            assert [(c.name, c.arguments, c.error) for c in turn.calls] == [
                (c.name, c.arguments, c.error) for c in whole.calls
            ]


def test_every_case_is_driven() -> None:
    assert CASES.keys() == {f"str-{number:03}" for number in (1, 3, 4, 6, 8, 9, 11, 12, 14, 16)}


# -- properties ------------------------------------------------------------------------------------


@st.composite
def replies(draw: st.DrawFn) -> Said:
    """Replies with few different ids and log-probs: what repeats is common, as in the wild."""
    ids = draw(st.lists(st.integers(0, 3), max_size=12))
    values = st.sampled_from([0.0, -0.5, -1e-9, -99.9, -0.123456789])
    log_probs = [draw(values) for _ in ids]
    finish = draw(st.sampled_from(["stop", "length", "abort", "repetition", "stop"]))
    split = draw(st.integers(0, len(ids)))
    spans: list[dict[str, Any]] = [
        {"version": "7", "start": 0, "end": split},
        {"version": "8", "start": split, "end": len(ids)},
    ]
    return Said(
        ids=ids,
        log_probs=log_probs,
        finish=finish,
        versions=[span for span in spans if span["start"] < span["end"]],
        cached_tokens=draw(st.integers(1, 9)),
    )


def cut(data: st.DataObject, size: int, most: int = 8) -> list[int]:
    """Places in 0 … size, in order, some of them twice."""
    return sorted(data.draw(st.lists(st.integers(0, size), max_size=most)))


@given(said=replies(), log_probs=st.booleans(), data=st.data())
def test_a_reply_is_the_same_however_it_comes(
    said: Said, log_probs: bool, data: st.DataObject
) -> None:
    asked = ask(stream=True, log_probs=log_probs)
    if not log_probs:
        said = replace(said, log_probs=None)
    expected = BY_NAME["sglang"].wire().reply(sglang(said), asked)
    assert list(expected.token_ids) == said.ids
    for dialect in STREAMS:
        body = sse(events_of(dialect, said, cut(data, len(said.ids or ()))))
        places = [0, *cut(data, len(body)), len(body)]
        found = streamed(dialect, [body[a:b] for a, b in pairwise(places)], asked)
        assert msgspec.structs.replace(found, rid=expected.rid) == expected, dialect.name


@given(said=replies(), log_probs=st.booleans(), data=st.data())
def test_a_broken_stream_gives_the_reply_or_none(
    said: Said, log_probs: bool, data: st.DataObject
) -> None:
    """What is lost, comes twice or has no end never makes other data."""
    asked = ask(stream=True, log_probs=log_probs)
    for dialect in STREAMS:
        events = events_of(dialect, said, cut(data, len(said.ids or ())))
        expected = streamed(dialect, [sse(events)], asked)
        at = data.draw(st.integers(0, len(events) - 1))
        again = data.draw(st.integers(at, len(events) - 1))
        body = sse(events)
        for broken in (
            sse(events[:at] + events[at + 1 :]),
            sse([*events[: again + 1], events[at], *events[again + 1 :]]),
            body[: data.draw(st.integers(0, len(body)))],
        ):
            found = read_or_refused(dialect, [broken], asked)
            if isinstance(found, EngineError):
                assert found.reason is StopReason.BAD_REPLY
                continue
            assert (found.token_ids, found.log_probs, found.finish) == (
                expected.token_ids,
                expected.log_probs,
                expected.finish,
            )


@given(said=replies(), log_probs=st.booleans(), is_cumulative=st.booleans(), data=st.data())
@example(
    said=Said(ids=[1, 2, 2], log_probs=[-0.5, -0.5, -0.5]),
    log_probs=False,
    is_cumulative=True,
    data=None,
)
def test_an_abort_in_the_queue_keeps_every_token_once(
    said: Said, log_probs: bool, is_cumulative: bool, data: st.DataObject | None
) -> None:
    """SGLang's event of such an abort: the last id once more, all log-probs, after what waits."""
    ids, values = list(said.ids or ()), list(said.log_probs or ())
    cuts = [1] if data is None else cut(data, len(ids))
    handed_out = max(cuts, default=0)
    dialect = BY_NAME["sglang-cumulative" if is_cumulative else "sglang-incremental"]
    given = said if log_probs else replace(said, log_probs=None)
    events = events_of(dialect, given, cuts)[: len(cuts)]
    waiting = [] if is_cumulative else list(range(handed_out, len(ids)))
    meta: dict[str, Any] = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": len(ids),
    }
    if log_probs:
        told = [*waiting, *range(len(ids))]
        meta["output_token_logprobs"] = [[values[i], ids[i], None] for i in told]
    output_ids = [ids[i] for i in waiting] + ids[-1:]
    events += [dumped({"output_ids": output_ids, "meta_info": meta}), DONE]
    found = read_or_refused(dialect, [sse(events)], ask(stream=True, log_probs=log_probs))
    if isinstance(found, EngineError):
        assert not log_probs
        assert is_cumulative  # the server threw tokens away, and nothing names them
        assert len(ids) - handed_out > 1
        assert found.reason is StopReason.BAD_REPLY
        return
    assert found.token_ids == ids
    assert found.log_probs == (values if log_probs else None)
    assert found.finish == "abort"

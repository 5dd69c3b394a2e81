"""engines/http/sse.py: the bytes of a stream, cut anywhere, come out as the same events."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.http import sse
from fsm_rollout.engines.http.sse import Events
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason


def events_of(chunks: list[bytes]) -> list[bytes]:
    events = Events()
    return [event for chunk in chunks for event in events.feed(chunk)] + events.flush()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = [*sorted({place % (len(data) + 1) for place in at}), len(data)]
    return [data[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


NEWLINES = st.sampled_from([b"\n", b"\r\n"])
NOISE = st.sampled_from(
    [b": ping", b":", b"event: token", b"id: 7", b"retry: 10", b"data", b"nonsense"]
)
TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """The bytes of a stream, and its events."""
    stream, events = b"", []
    for _ in range(draw(st.integers(0, 5))):
        lines = draw(st.lists(TEXT, min_size=1, max_size=3))
        for line in lines:
            for noise in draw(st.lists(NOISE, max_size=2)):
                stream += noise + draw(NEWLINES)
            stream += b"data: " + line.encode() + draw(NEWLINES)
        stream += draw(NEWLINES) * draw(st.integers(1, 3))
        events.append("\n".join(lines).encode())
    return stream, events


@given(streams(), st.lists(st.integers(0, 10_000), max_size=12))
def test_a_stream_cut_anywhere_gives_its_events(
    stream_and_events: tuple[bytes, list[bytes]], at: list[int]
) -> None:
    stream, events = stream_and_events
    assert events_of(cut(stream, at)) == events
    assert events_of([bytes([byte]) for byte in stream]) == events


@given(streams(), st.integers(0, 10_000))
def test_a_stream_that_ends_early_loses_no_event_that_was_whole(
    stream_and_events: tuple[bytes, list[bytes]], length: int
) -> None:
    stream, events = stream_and_events
    got = events_of([stream[: length % (len(stream) + 1)]])
    assert got[:-1] == events[: len(got)][:-1]
    assert not got or events[len(got) - 1].startswith(got[-1])


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\r\n\r\ndata: c\n\r\n", [b"a", b"b", b"c"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata:\ndata: b\n\n", [b"a\n\nb"]),
        (b": only a comment\n\n\n\n", []),
        (b"data: [DONE]", [b"[DONE]"]),
        (b"data: a\n\ndata: {", [b"a", b"{"]),
        (b"", []),
    ],
    ids=repr,
)
def test_events_end_at_a_blank_line_or_with_the_stream(stream: bytes, events: list[bytes]) -> None:
    assert events_of([stream]) == events


def test_a_character_cut_in_two_stays_one() -> None:
    """str-004 of the handed cases."""
    chunks = [bytes.fromhex(part) for part in ("646174613a207b2274223a22f09f", "8ca6227d0a", "0a")]
    assert [json.loads(event) for event in events_of(chunks)] == [{"t": "🌦"}]


def test_the_cost_of_an_event_does_not_depend_on_its_chunks() -> None:
    size = 400_000
    events = Events()
    events.feed(b"data: ")
    started = time.process_time()
    for _ in range(size):
        events.feed(b"x")
    (event,) = events.feed(b"\n\n")
    assert len(event) == size
    assert time.process_time() - started < 20  # O(size ** 2) takes minutes


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    for filler in (b"x", b"data: x\n"):
        with pytest.raises(EngineError, match="more than 100 bytes") as caught:
            events_of([filler] * 101)
        assert caught.value.reason is StopReason.BAD_REPLY
    events = Events()
    for _ in range(101):  # many small ones are none
        assert events.feed(b": ping\ndata: x\n\n") == [b"x"]
    for _ in range(101):
        assert events.feed(b": ping\n") == []

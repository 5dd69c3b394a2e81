"""HttpEngine over real HTTP: what a server does wrong never becomes data (R5), each retry is
a new try and the old one was aborted before (R6)."""

from __future__ import annotations

import asyncio
import gzip
import json
from itertools import pairwise
from typing import Any

import pytest

from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.engines.http import HttpEngine, HttpSettings, call, transport
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from fsm_rollout.turn import Media
from tests.http_server import (
    BAD,
    FAST,
    GOOD,
    PATIENT,
    Server,
    Step,
    answer,
    ask,
    chunked,
    engine_for,
    events,
    head,
    raw,
    run,
    until_aborted,
)

both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
BACKOFF_S = call._BACKOFF_S
REPLY = json.dumps(BAD).encode()
FIRST = events(BAD).index(b"\n\n") + 2  # where the first event ends


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_BACKOFF_S", 0.02)


async def _drip(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head(len(REPLY)))
    for byte in REPLY * 10:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


async def _ping(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(chunked(events(BAD)[:FIRST], end=False))
    while True:
        await asyncio.sleep(0.03)
        writer.write(b"8\r\n: ping\n\n\r\n")


MAY_RUN_ON: dict[str, Step] = {
    "no answer": raw(b"", then="hang"),
    "half a head": raw(b"HTTP/1.1 200 OK\r\nContent-", then="hang"),
    "stall after the head": raw(head(len(REPLY)), then="hang"),
    "stall in the middle": raw(head(len(REPLY)) + REPLY[:20], then="hang"),
    "slow loris": _drip,
    "reset in the head": raw(b"HTTP/1.1 200 OK\r\nContent-"),
    "reset after the head": raw(head(len(REPLY))),
    "reset in the middle": raw(head(len(REPLY)) + REPLY[:20]),
    "closed in the middle": raw(head(len(REPLY)) + REPLY[:20], then="close"),
    "content-length too long": raw(head(len(REPLY) + 1) + REPLY, then="close"),
    "no HTTP": raw(b"\x16\x03\x01 garbage\r\n\r\n", then="close"),
    "bad chunks": raw(
        head(None, more="Transfer-Encoding: chunked\r\n") + b"zz\r\n{}\r\n", then="hang"
    ),
    "truncated JSON": answer(REPLY[:-10]),
    "a router's 502": answer(b"<html>bad gateway</html>", status=502),
    "nothing": answer(b""),
    "garbage": answer(bytes(range(256))),
    "an error body": answer({"error": {"message": "CUDA out of memory"}}),
    "another document": answer([]),
    "gzip": answer(gzip.compress(REPLY), more="Content-Encoding: gzip\r\n"),
    "gzip'ed garbage": answer(b"\x1f\x8b\x08" + REPLY, more="Content-Encoding: gzip\r\n"),
}
STREAM_MAY_RUN_ON: dict[str, Step] = {
    "no answer": raw(b"", then="hang"),
    "stall after the head": raw(chunked(end=False), then="hang"),
    "stall between events": raw(chunked(events(BAD)[:FIRST], end=False), then="hang"),
    "pings for ever": _ping,
    "reset between events": raw(chunked(events(BAD)[:FIRST], end=False)),
    "closed between events": raw(chunked(events(BAD)[:FIRST], end=False), then="close"),
    "ends without its end": raw(chunked(events(BAD)[:FIRST]), then="keep"),
    "no event at all": raw(chunked(), then="keep"),
    "garbage": raw(chunked(b"data: garbage\n\n"), then="keep"),
    "error event": raw(chunked(b'data: {"error": "boom"}\n\n'), then="keep"),
    "an error body": answer({"error": {"message": "CUDA out of memory"}}),
}
DECLINED: dict[str, Step] = {
    "500": answer({"error": "boom"}, status=500),
    "503": answer(b"", status=503),
    "408": answer(b"", status=408),
    "425": answer(b"", status=425),
    "429": answer(b"", status=429, more="Retry-After: 30\r\n"),
}


async def _faulty_first(step: Step, *, stream: bool = False) -> tuple[Server, HttpEngine]:
    """A request whose home fails it twice (a lost connection is taken for an old one once)."""
    good = raw(chunked(events()), then="keep") if stream else answer()
    async with Server(step, step, always=good) as one, Server(always=good) as two:
        engine = engine_for(one, two, stream=stream, settings=FAST)
        generation = await ask(engine)
        assert generation.token_ids.tolist() == GOOD["ids"]
        assert generation.log_probs is not None
        assert generation.log_probs.tolist() == GOOD["lps"]
        await engine.close()
        return one, engine


def _check_aborted(server: Server) -> None:
    """Each try that got a faulty step was aborted before the server saw another one."""
    for rid in server.generated[: 2 - len(server.plan)]:
        at = server.seen.index(("/generate", rid))
        assert server.seen[at + 1] == ("/abort", rid)


@pytest.mark.parametrize("step", MAY_RUN_ON.values(), ids=MAY_RUN_ON)
def test_a_try_that_fails_is_aborted_and_another_server_answers(step: Step) -> None:
    server, engine = run(_faulty_first(step))
    _check_aborted(server)
    assert engine.metrics["tries"] > 1


@pytest.mark.parametrize("step", STREAM_MAY_RUN_ON.values(), ids=STREAM_MAY_RUN_ON)
def test_a_stream_that_breaks_is_aborted_and_another_server_answers(step: Step) -> None:
    server, _ = run(_faulty_first(step, stream=True))
    _check_aborted(server)


@pytest.mark.parametrize("step", DECLINED.values(), ids=DECLINED)
def test_a_try_that_is_declined_goes_to_another_server_at_once(step: Step) -> None:
    server, engine = run(asyncio.wait_for(_faulty_first(step), 20))  # not after its Retry-After
    assert [path for path, _ in server.seen] == ["/generate"]
    assert engine.metrics["aborts_sent"] == 0
    assert engine.metrics["tries"] == 2


def test_a_connection_reset_before_any_byte_is_taken_for_an_old_one_once() -> None:
    async def main() -> None:
        async with Server(raw(b"")) as one, Server() as two:
            engine = engine_for(one, two)
            generation = await ask(engine)
            assert generation.engine_id == one.url
            assert engine.endpoints[0].failures == 0
            one.plan = [raw(b""), raw(b"")]
            assert (await ask(engine)).engine_id == two.url
            assert engine.endpoints[0].failures == 1
            await engine.close()

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_stalls_ends_long_before_the_whole_time_of_a_try(stream: bool) -> None:
    step = (STREAM_MAY_RUN_ON if stream else MAY_RUN_ON)["stall after the head"]
    settings = HttpSettings(timeout_s=600, idle_timeout_s=0.1, max_tries=1)
    run(_failing(step, settings=settings, stream=stream))  # a test has less than 600 s


async def _failing(step: Step, **more: Any) -> tuple[EngineError, Server, HttpEngine]:
    async with Server(always=step) as server:
        engine = engine_for(server, **more)
        with pytest.raises(EngineError) as caught:
            await ask(engine)
        await engine.close()
        return caught.value, server, engine


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lps": [-1.0]}, "1 log-probs for 2 tokens"),
    ({"lps": [-1.0, 0.5]}, "log-prob 0.5"),
    ({"lps": [-1.0, float("nan")]}, "log-prob nan"),
    ({"ids": [66, 100]}, "token id 100"),
    ({"ids": [6] * 9, "lps": [-1] * 9}, "returned 9 tokens"),
    ({"finish": "tired"}, "tired"),
    ({"finish": None}, "None"),
    ({"prompt_tokens": 4}, "drift: it counts"),
    ({"prompt_token_ids": [1, 2, 4]}, "drift: the prompt ids"),
]
"""each is the server's fault as much as a broken connection"""


@pytest.mark.parametrize(
    ("step", "reason", "message"),
    [
        (MAY_RUN_ON["no answer"], StopReason.ENGINE_ERROR, "no answer in time"),
        (MAY_RUN_ON["reset in the middle"], StopReason.ENGINE_ERROR, "Payload"),
        (MAY_RUN_ON["no HTTP"], StopReason.ENGINE_ERROR, "http://127.0.0.1"),
        (MAY_RUN_ON["truncated JSON"], StopReason.BAD_REPLY, "JSONDecodeError"),
        (MAY_RUN_ON["an error body"], StopReason.BAD_REPLY, "KeyError"),
        (DECLINED["500"], StopReason.ENGINE_ERROR, "HTTP 500"),
        *((answer(BAD | said), StopReason.BAD_REPLY, word) for said, word in CONTRADICTIONS),
    ],
)
def test_after_max_tries_the_last_fault_is_told(
    step: Step, reason: StopReason, message: str
) -> None:
    settings = FAST if message == "no answer in time" else PATIENT
    error, server, engine = run(_failing(step, settings=settings))
    assert (error.reason, error.final) == (reason, False)
    assert message in str(error)
    assert engine.metrics["tries"] == len(set(server.generated)) == settings.max_tries
    assert engine.endpoints[0].failures == settings.max_tries


TOLD: dict[str, tuple[Step, StopReason, bool]] = {
    "400": (answer({"error": "what?"}, status=400), StopReason.ENGINE_ERROR, True),
    "404": (answer(b"", status=404), StopReason.ENGINE_ERROR, True),
    "302": (answer(b"", status=302, more="Location: /x\r\n"), StopReason.ENGINE_ERROR, False),
    "overflow": (answer({"error": "too long"}, status=400), StopReason.MAX_CONTEXT, False),
    "overflow as 500": (answer({"error": "too long"}, status=500), StopReason.MAX_CONTEXT, False),
    "no log-probs": (answer(BAD | {"lps": None}), StopReason.MISSING_LOG_PROBS, False),
}


@pytest.mark.parametrize(("step", "reason", "final"), TOLD.values(), ids=TOLD)
def test_an_answer_that_another_try_would_not_better_is_told_at_once(
    step: Step, reason: StopReason, final: bool
) -> None:
    error, server, engine = run(_failing(step))
    assert (error.reason, error.final) == (reason, final)
    assert len(server.generated) == 1
    assert engine.endpoints[0].failures == 0, "it answers: it is no dead server"
    assert engine.metrics["aborts_sent"] == 0


def test_a_busy_server_is_waited_for_as_long_as_none_at_all() -> None:
    async def main(wait_s: float) -> tuple[HttpEngine, int]:
        async with Server(*[answer(b"", status=429)] * 12) as server:
            engine = engine_for(server, settings=HttpSettings(engine_wait_s=wait_s, max_tries=2))
            try:
                await ask(engine)
            finally:
                await engine.close()
            return engine, len(server.generated)

    engine, tries = run(main(60))
    assert tries == 13, "more than max_tries"
    assert engine.endpoints[0].failures == 0
    with pytest.raises(EngineError, match="HTTP 429") as caught:
        run(main(0.05))
    assert (caught.value.reason, caught.value.final) == (StopReason.ENGINE_ERROR, False)


def test_the_reply_to_another_request_is_not_taken() -> None:
    """One that comes twice, or late, lies in the kept connection when the next request uses it."""

    async def twice(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        reply = json.dumps(GOOD | {"rid": body["rid"], "ids": [7, 8]}).encode()
        writer.write(head(len(reply)) + reply)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(head(len(reply)) + reply)
        await writer.drain()

    async def main() -> None:
        async with Server(twice) as server:
            engine = engine_for(server)
            first = await ask(engine, "one")
            await asyncio.sleep(0.1)
            second = await ask(engine, "two")
            assert first.token_ids.tolist() == [7, 8]
            assert second.token_ids.tolist() == GOOD["ids"]
            await engine.close()

    run(main())


def test_the_same_server_is_tried_again_after_a_pause_that_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "_BACKOFF_S", BACKOFF_S)

    async def main() -> list[float]:
        times: list[float] = []
        clock = asyncio.get_running_loop().time

        async def decline(server: Server, writer: asyncio.StreamWriter, body: Any) -> None:
            times.append(clock())
            await answer(b"", status=500)(server, writer, body)

        async with Server(decline, decline, decline) as server:
            engine = engine_for(server, settings=HttpSettings(max_tries=5))
            await ask(engine)
            times.append(clock())
            await engine.close()
        return [b - a for a, b in pairwise(times)]

    pauses = run(main())
    for pause, base in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert 0.5 * base <= pause <= 1.5 * base + 0.2


def test_retry_after_is_kept_to_when_there_is_no_other_server() -> None:
    async def main() -> float:
        busy = answer(b"", status=429, more="Retry-After: 0.5\r\n")
        async with Server(busy) as server:
            engine = engine_for(server)
            clock = asyncio.get_running_loop().time
            started = clock()
            await ask(engine)
            took = clock() - started
            await engine.close()
            assert engine.endpoints[0].failures == 0
            return took

    assert 0.5 <= run(main()) < 1.0


@both_loops
def test_each_try_has_an_id_of_its_own_and_the_old_one_is_aborted_before_the_next(
    loop: str,
) -> None:
    async def main() -> None:
        bad = MAY_RUN_ON["truncated JSON"]
        async with Server(bad, bad) as server:
            engine = engine_for(server)
            await ask(engine)
            first, second, third = server.generated
            assert server.seen == [
                ("/generate", first),
                ("/abort", first),
                ("/generate", second),
                ("/abort", second),
                ("/generate", third),
            ]
            assert all(len(rid) == 32 for rid in {first, second, third})
            await ask(engine, "another request")
            assert len(set(server.generated)) == 4
            await engine.close()

    run(main(), loop)


def test_a_reply_that_comes_late_is_not_taken() -> None:
    async def main() -> None:
        late = answer(BAD, delay_s=0.4)
        async with Server(late, always=answer(delay_s=0.18)) as server:
            engine = engine_for(server, settings=FAST)
            generation = await ask(engine)
            assert generation.token_ids.tolist() == GOOD["ids"]
            await engine.close()

    run(main())


@both_loops
@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_makes_generate_return_what_it_has(loop: str, stream: bool) -> None:
    async def main() -> None:
        partial = GOOD | {"finish": "abort"}
        async with Server(always=until_aborted(partial)) as one, Server() as two:
            engine = engine_for(one, two, stream=stream)
            await engine.abort("nobody")
            generating = asyncio.create_task(ask(engine, "r1"))
            other = asyncio.create_task(ask(engine, "r2"))
            await one.until(lambda: len(one.generated) == 2)
            await engine.abort("r1")
            generation = await generating
            assert generation.finish == "abort"
            assert generation.token_ids.tolist() == GOOD["ids"]
            assert not other.done()
            assert two.seen == []
            await engine.abort("r2")
            await other
            await engine.close()

    run(main(), loop)


def test_an_abort_ends_a_request_that_waits_to_try_again() -> None:
    async def main() -> None:
        async with Server(always=answer(b"", status=429, more="Retry-After: 30\r\n")) as server:
            engine = engine_for(server)
            generating = asyncio.create_task(ask(engine, "r1"))
            while not engine.metrics["faults.busy"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            async with asyncio.timeout(20):
                await engine.abort("r1")
                with pytest.raises(EngineError) as caught:
                    await generating
            assert caught.value.reason is StopReason.ENGINE_ABORT
            assert len(server.generated) == 1
            await engine.close()

    run(main())


def test_a_try_that_fails_after_its_abort_is_not_tried_again() -> None:
    async def main() -> None:
        async with Server(always=MAY_RUN_ON["no answer"]) as server:
            engine = engine_for(server, settings=FAST)
            generating = asyncio.create_task(ask(engine, "r1"))
            await server.until(lambda: bool(server.generated))
            await engine.abort("r1")
            with pytest.raises(EngineError) as caught:
                await generating
            assert caught.value.reason is StopReason.ENGINE_ABORT
            assert len(server.generated) == 1
            await engine.close()

    run(main())


def test_a_try_that_its_server_does_not_know_ends_soon_after_its_abort() -> None:
    async def main() -> None:
        async with Server(always=MAY_RUN_ON["no answer"]) as server:
            engine = engine_for(server, settings=HttpSettings(abort_timeout_s=1, max_tries=1))
            generating = asyncio.create_task(ask(engine, "r1"))
            await server.until(lambda: bool(server.generated))
            await engine.abort("r1")
            with pytest.raises(EngineError) as caught:
                await generating
            assert caught.value.reason is StopReason.ENGINE_ABORT
            assert engine.endpoints[0].failures == 0
            await engine.close()

    run(main())


def test_streamed_and_one_shot_replies_are_equal() -> None:
    async def one(stream: bool) -> Generation:
        step = raw(chunked(events()), then="keep") if stream else answer()
        async with Server(step) as server:
            engine = engine_for(server, stream=stream)
            generation = await ask(engine)
            await engine.close()
            return generation

    streamed, whole = run(one(True)), run(one(False))
    assert streamed.token_ids.tolist() == whole.token_ids.tolist()
    assert streamed.log_probs is not None
    assert whole.log_probs is not None
    assert streamed.log_probs.tolist() == whole.log_probs.tolist()
    assert streamed.finish == whole.finish


async def _late_end(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(chunked(events(), end=False))
    await asyncio.sleep(0.05)
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("then", ["hang", "cut", "close", "keep", "late"])
def test_a_stream_is_over_with_its_done_whatever_comes_behind(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_LINGER_S", 0.2)

    async def main() -> None:
        step = (
            _late_end if then == "late" else raw(chunked(events(), end=then == "keep"), then=then)
        )
        async with Server(always=step) as server:
            engine = engine_for(server, stream=True)
            for number in range(2):
                assert (await ask(engine, str(number))).token_ids.tolist() == GOOD["ids"]
            assert len(server.generated) == 2
            assert server.opened == (1 if then in ("keep", "late") else 2)
            await engine.close()

    run(main())


def test_a_server_that_does_not_stream_is_understood() -> None:
    async def main() -> None:
        async with Server(always=answer()) as server:
            engine = engine_for(server, stream=True)
            assert (await ask(engine)).token_ids.tolist() == GOOD["ids"]
            await engine.close()

    run(main())


def test_a_stream_that_is_given_up_for_its_content_is_aborted() -> None:
    async def main() -> None:
        overlong = BAD | {"ids": None}
        step = raw(
            chunked(b"data: " + json.dumps(overlong).encode() + b"\n\n", end=False), then="hang"
        )
        async with Server(always=step) as server:
            engine = engine_for(server, stream=True)
            with pytest.raises(EngineError) as caught:
                await ask(engine)
            assert caught.value.reason is StopReason.MISSING_LOG_PROBS
            (rid,) = server.generated
            await server.until(lambda: ("/abort", rid) in server.seen and server.cuts == 1)
            await engine.close()

    run(main())


def test_a_try_carries_its_session_and_the_headers_of_the_engine() -> None:
    async def main() -> None:
        async with Server() as server:
            engine = engine_for(server, headers={"Authorization": "Bearer key"})
            await ask(engine, session="run-1")
            await engine.close()
            assert server.headers["X-Session"] == "run-1"
            assert server.headers["Authorization"] == "Bearer key"
            assert server.headers["Content-Type"] == "application/json"
            assert server.headers["Accept-Encoding"] == "identity", "packed replies cost more"

    run(main())


def test_media_stand_where_their_placeholders_were() -> None:
    async def main() -> None:
        sent: list[Any] = []

        async def see(server: Server, writer: asyncio.StreamWriter, body: Any) -> None:
            sent.append(body["ids"])
            await answer(GOOD | {"prompt_tokens": 6})(server, writer, body)

        async with Server(see) as server:
            engine = engine_for(server)
            await engine.generate(
                Columns([1, 9, 9, 9, 2, 3]),
                8,
                SamplingParams(),
                request_id="r",
                session_id="s",
                media=[Media(1, 3, "image")],
            )
            await engine.close()
        assert sent == [[1, 9, 2, 3]]

    run(main())


def test_control_calls_answer_for_each_server() -> None:
    async def main() -> None:
        async with Server() as one, Server() as two:
            engine = engine_for(one, two)
            said = {"path": "/pause", "body": {"mode": "abort"}}
            assert await engine.call("/pause", {"mode": "abort"}) == {one.url: said, two.url: said}
            only = await engine.call("/health", method="GET", to=[two.url])
            assert only == {two.url: {"path": "/health", "body": {}}}
            one.abort_step = answer(b"it is busy", status=400)
            with pytest.raises(EngineError, match=rf"POST {one.url}/abort: HTTP 400: it is busy"):
                await engine.call("/abort", {})
            two.abort_step = answer(b"done")
            assert await engine.call("/abort", {}, to=[two.url]) == {two.url: "done"}
            with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/abort") as caught:
                await engine.call("/abort", {}, to=["http://127.0.0.1:9"])
            assert caught.value.reason is StopReason.NO_ENGINE
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await engine.call("/abort", {})

    run(main())


def test_behind_a_router_aborts_go_to_its_workers() -> None:
    async def main() -> None:
        async with Server(MAY_RUN_ON["nothing"]) as router, Server() as one, Server() as two:
            engine = engine_for(router)
            engine.control_urls = [one.url, two.url]
            await ask(engine)
            rid = router.generated[0]
            assert one.seen == two.seen == [("/abort", rid)]
            assert ("/abort", rid) not in router.seen
            assert await engine.call("/x", to=None) == {
                url: {"path": "/x", "body": {}} for url in (one.url, two.url)
            }
            await engine.close()

    run(main())


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": 0}, {"max_tries": 0}, {"max_tries": 1.5}, {"engine_wait_s": float("inf")},
     {"idle_timeout_s": True}, {"idle_timeout_s": float("nan")}],
    ids=repr,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HttpSettings(**wrong)


@pytest.mark.parametrize(
    "headers",
    [{"a b": "c"}, {"": "c"}, {"a": "b\nc"}, {"a": 5}, {"a": None}, [("a", "b")], "a: b"],
    ids=repr,
)
def test_headers_that_cannot_be_sent_are_refused(headers: Any) -> None:
    with pytest.raises(ConfigError, match="header"):
        engine_for("http://a", headers=headers)


def test_settings_are_no_plain_dict() -> None:
    with pytest.raises(ConfigError, match="settings must be HttpSettings"):
        engine_for("http://a", settings={"timeout_s": 5})  # type: ignore[arg-type]

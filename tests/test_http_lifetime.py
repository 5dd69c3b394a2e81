"""HttpEngine over real HTTP: nothing leaks (R6, R14) and nothing waits for ever (R11)."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from fsm_rollout.engines.http import HttpSettings
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason
from tests.http_server import (
    FAST,
    Server,
    answer,
    ask,
    at_home,
    chunked,
    elsewhere,
    engine_for,
    events,
    raw,
    run,
)

both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
TWICE = msgspec.structs.replace(FAST, max_tries=2)
NEVER = raw(b"", then="hang")
SOON_S = 40
"""far more than any deadline here: what takes longer hangs"""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# -- cancel (R6) -----------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("stream", [False, True])
def test_a_cancel_cuts_the_connection_and_aborts_the_try(loop: str, stream: bool) -> None:
    async def main() -> None:
        step = raw(chunked(events()[:60], end=False), then="hang") if stream else NEVER
        async with Server(always=step) as server:
            engine = engine_for(server, stream=stream)
            generating = asyncio.create_task(ask(engine))
            await server.until(lambda: bool(server.generated))
            await asyncio.sleep(0.05)  # most often its stream has begun by then
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
            (rid,) = server.generated
            await server.until(lambda: server.cuts == 1 and ("/abort", rid) in server.seen)
            await engine.close()

    run(main(), loop)


def test_what_is_asked_again_after_a_cancel_is_another_request_to_the_server() -> None:
    async def main() -> None:
        async with Server(always=NEVER) as server:
            engine = engine_for(server)

            async def ask_and_cancel(number: int) -> None:
                generating = asyncio.create_task(ask(engine))
                await server.until(lambda: len(server.generated) == number)
                generating.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await generating

            await ask_and_cancel(1)
            await ask_and_cancel(2)
            assert len(set(server.generated)) == 2
            await engine.close()

    asyncio.run(main())


@both_loops
def test_200_cancels_leave_no_connection_no_task_and_no_file(loop: str) -> None:
    async def main() -> None:
        async with Server(always=NEVER) as server:
            engine = engine_for(server)
            files, tasks = open_files(), len(asyncio.all_tasks())
            generating = [asyncio.create_task(ask(engine, str(n))) for n in range(200)]
            await server.until(lambda: len(server.generated) == 200)
            for task in generating:
                task.cancel()
            await asyncio.gather(*generating, return_exceptions=True)
            await server.until(lambda: server.cuts == 200 and len(server.seen) == 400)
            await engine.close()
            await server.until(lambda: server.connections == 0)
            await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files + 2)

    run(main(), loop)


def test_a_cancel_before_anything_was_sent_aborts_nothing() -> None:
    async def main() -> None:
        async with Server() as server:
            engine = engine_for("http://127.0.0.1:9")
            generating = asyncio.create_task(ask(engine))
            await until(lambda: engine.metrics["tries"] > 0)
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
            await engine.close()
            assert engine.metrics["aborts_sent"] == 0
            assert server.seen == []

    run(main())


# -- deadlines (R11) -------------------------------------------------------------------------------


@both_loops
def test_a_server_that_never_reads_costs_its_deadlines_and_no_file(loop: str) -> None:
    async def main(port: int) -> None:
        engine = engine_for(f"http://127.0.0.1:{port}", settings=TWICE)
        prompt = tuple(range(100_000_000, 101_000_000))  # 10 MB: more than the kernel takes
        files = open_files()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(EngineError, match="no answer in time"):
                await ask(engine, prompt=prompt)
            await engine.close()
        await until(lambda: open_files() <= files + 2)

    with socket.socket() as deaf:  # the kernel accepts for it
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        run(main(deaf.getsockname()[1]), loop)


def test_a_server_that_accepts_and_never_answers_costs_its_deadlines() -> None:
    async def main() -> None:
        async with Server(always=NEVER) as server:
            server.abort_step = NEVER
            engine = engine_for(server, settings=TWICE)
            async with asyncio.timeout(SOON_S):
                with pytest.raises(EngineError) as caught:
                    await ask(engine)
                assert caught.value.reason is StopReason.ENGINE_ERROR
                await engine.abort("r")
                await engine.close()
            assert engine.metrics["aborts_failed"] == 2

    run(main())


def test_a_name_that_cannot_be_looked_up_is_no_engine() -> None:
    async def main() -> None:
        engine = engine_for("http://no-such-host.invalid:1", settings=FAST)
        with pytest.raises(EngineError, match=r"no-such-host\.invalid.*start one") as caught:
            async with asyncio.timeout(SOON_S):
                await ask(engine)
        assert caught.value.reason is StopReason.NO_ENGINE
        await engine.close()

    run(main())


def test_a_handshake_that_hangs_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with Server() as server:
            engine = engine_for(
                "http://127.0.0.1:9",
                server,
                settings=HttpSettings(connect_timeout_s=0.2, engine_wait_s=0.5),
            )
            monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", never)
            with pytest.raises(EngineError) as caught:
                async with asyncio.timeout(SOON_S):
                    await ask(engine)
            assert caught.value.reason is StopReason.NO_ENGINE
            assert engine.metrics["faults.connect"] >= 1
            await engine.close()

    run(main())


@both_loops
def test_close_ends_everything_while_everything_hangs(loop: str) -> None:
    async def main() -> None:
        async with Server(always=NEVER) as server:
            server.abort_step = NEVER
            settings = HttpSettings(timeout_s=600, abort_timeout_s=0.4)
            engine = engine_for(server, "http://127.0.0.1:9", settings=settings)
            kinds = [at_home(engine, 0), at_home(engine, 1)]
            generating = [
                asyncio.create_task(ask(engine, str(n), session=kinds[n % 2])) for n in range(40)
            ]
            await server.until(lambda: len(server.generated) >= 20)
            control = engine.call("/abort", {}, to=[server.url], timeout_s=600)
            running: list[asyncio.Future[Any]] = [*generating, asyncio.ensure_future(control)]
            await server.until(lambda: ("/abort", "") in server.seen)
            async with asyncio.timeout(SOON_S):
                await engine.close()
                outcomes = await asyncio.gather(*running, return_exceptions=True)
            for outcome in outcomes[:-1]:
                assert isinstance(outcome, EngineError)
                assert (outcome.reason, outcome.final) == (StopReason.NO_ENGINE, True)
            assert isinstance(outcomes[-1], EngineError)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await ask(engine)
            await server.until(lambda: server.connections == 0)

    run(main(), loop)


@both_loops
def test_close_aborts_every_try_that_runs(loop: str) -> None:
    async def main() -> None:
        async with Server(always=NEVER) as server:
            engine = engine_for(server)
            generating = [asyncio.create_task(ask(engine, str(n))) for n in range(100)]
            await server.until(lambda: len(server.generated) == 100)
            async with asyncio.timeout(SOON_S):
                await engine.close()
                await asyncio.gather(*generating, return_exceptions=True)
            assert {rid for path, rid in server.seen if path == "/abort"} == set(server.generated)
            assert engine.metrics["aborts_failed"] == 0

    run(main(), loop)


# -- shutdown (R14) --------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left to asyncio.run"])
def test_shutdown_during_traffic_is_clean(
    loop: str, is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(url: str) -> None:
        engine = engine_for(url)

        is_busy = asyncio.Event()

        async def traffic(number: int) -> str:
            while True:
                if engine.metrics["tries"] > 100:
                    is_busy.set()
                try:
                    await ask(engine, str(number))
                except EngineError as error:
                    return str(error)

        tasks = [asyncio.create_task(traffic(n)) for n in range(30)]
        await is_busy.wait()
        if is_closed:
            await engine.close()
            assert set(await asyncio.gather(*tasks)) == {"the engine was closed"}

    with elsewhere(Server(always=answer(delay_s=0.02))) as server:
        run(main(server.url), loop)
        gc.collect()
        while server.connections:  # if one is left open: the test's timeout
            time.sleep(0.01)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@both_loops
def test_an_engine_is_used_in_one_event_loop_after_the_other(loop: str) -> None:
    with elsewhere(Server()) as server:
        engine = engine_for(server)
        for number in range(3):
            assert run(ask(engine, str(number)), loop).finish == "stop"
            gc.collect()
        assert server.opened == 3

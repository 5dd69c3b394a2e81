"""HttpEngine over real HTTP: dead servers among the living are not noticed (R13), connections
are kept, ramped up, and provided for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import aiohttp
import pytest

from fsm_rollout.engines.http import HttpSettings, call, endpoints
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason
from tests.http_server import FAST, GOOD, Server, answer, ask, at_home, engine_for, raw, run

both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@both_loops
def test_with_some_servers_dead_the_others_serve_all(loop: str) -> None:
    async def main() -> None:
        async with Server() as one, Server() as two:
            dead = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
            engine = engine_for(dead[0], one, dead[1], two)
            sessions = [f"s{n}" for n in range(100)]
            lost = sum(engine.endpoints.home(session).url in dead for session in sessions)
            served = Counter[str]()
            for turn in range(4):
                replies = await asyncio.gather(
                    *(ask(engine, f"{turn}-{s}", session=s) for s in sessions)
                )
                served.update(reply.engine_id for reply in replies)
            assert set(served) == {one.url, two.url}
            assert min(served.values()) > 100, "both take their share of what the dead leave"
            metrics = engine.metrics
            assert metrics["breaker_opened"] == 2
            assert metrics["reroutes"] == 4 * lost + metrics["faults.connect"] - lost
            assert metrics["faults.connect"] <= lost + 10, "once each, then they are left alone"
            await engine.close()

    run(main(), loop)


def test_with_all_servers_dead_requests_wait_without_a_busy_loop_then_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Counter[str]()
    pick = endpoints.Endpoints.pick

    def counted(self: endpoints.Endpoints, session_id: str, *tried: Any) -> Any:
        looked[session_id] += 1
        return pick(self, session_id, *tried)

    monkeypatch.setattr(endpoints.Endpoints, "pick", counted)

    async def main() -> None:
        engine = engine_for("http://127.0.0.1:9", "http://127.0.0.1:10", settings=FAST)
        clock = asyncio.get_running_loop().time
        started = clock()
        outcomes = await asyncio.gather(
            *(ask(engine, str(n), session=f"s{n}") for n in range(50)), return_exceptions=True
        )
        took = clock() - started
        for outcome in outcomes:
            assert isinstance(outcome, EngineError)
            assert (outcome.reason, outcome.final) == (StopReason.NO_ENGINE, False)
            assert "http://127.0.0.1:9 (" in str(outcome)
            assert "Connect" in str(outcome)
        assert FAST.engine_wait_s <= took
        assert engine.metrics["tries"] <= 50 * 3
        assert engine.metrics["knocks"] <= 4
        assert max(looked.values()) < 20
        await engine.close()

    run(main())


@both_loops
def test_a_server_that_comes_back_is_used_again(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "COOLDOWN_S", 0.1)

    async def main() -> None:
        async with Server() as one, Server() as two:
            engine = engine_for(one, two)
            home = at_home(engine, 0)
            await one.__aexit__()
            for n in range(5):
                assert (await ask(engine, str(n), session=home)).engine_id == two.url
            assert engine.endpoints[0].is_open
            async with Server(port=one.port) as back:
                await asyncio.sleep(0.3)  # its cool-down, twice
                assert (await ask(engine, session=home)).engine_id == back.url
                assert back.seen[0][0] == "/abort", "it is knocked at before a try is sent"
                assert engine.endpoints[0].failures == 0
                await engine.close()

    run(main(), loop)


def test_requests_that_wait_go_on_once_a_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "COOLDOWN_S", 0.1)
    monkeypatch.setattr(call, "_BACKOFF_S", 0.02)

    async def main() -> None:
        async with Server() as server:
            pass
        engine = engine_for(server, settings=HttpSettings(engine_wait_s=50))
        generating = [asyncio.create_task(ask(engine, str(n))) for n in range(50)]
        while not engine.metrics["knocks"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert engine.metrics["breaker_opened"] == 1
        async with Server(port=server.port) as server:
            replies = await asyncio.gather(*generating)
            assert len(replies) == 50
            await engine.close()

    run(main())


def test_a_server_that_answers_knocks_gets_one_try_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "COOLDOWN_S", 0.05)
    monkeypatch.setattr(call, "_BACKOFF_S", 0.01)

    async def main() -> None:
        async with Server(always=answer(b"", status=500)) as server:
            engine = engine_for(server, settings=HttpSettings(max_tries=8))
            with pytest.raises(EngineError, match="500"):
                await ask(engine)
            assert engine.metrics["knocks"] == len(server.generated) - 5 == 3
            await engine.close()

    run(main())


def test_the_wait_for_a_server_starts_again_once_one_has_answered() -> None:
    async def main() -> None:
        async with Server() as server:
            pass
        engine = engine_for(server, settings=HttpSettings(engine_wait_s=1.5))
        generating = asyncio.create_task(ask(engine))
        while not engine.metrics["faults.connect"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        busy = answer(b"", status=429, more="Retry-After: 1.6\r\n")
        async with Server(busy, port=server.port):
            assert (await generating).finish == "stop"
            await engine.close()

    run(main())


def test_a_server_that_answers_no_knock_stays_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "COOLDOWN_S", 0.1)
    monkeypatch.setattr(call, "_BACKOFF_S", 0.02)

    async def main() -> None:
        async with Server(always=answer(b"", status=503)) as server:
            server.abort_step = answer(b"", status=503)
            engine = engine_for(server, settings=HttpSettings(engine_wait_s=0.8, max_tries=20))
            with pytest.raises(EngineError, match="503") as caught:
                await ask(engine)
            assert caught.value.reason is StopReason.NO_ENGINE
            assert len(server.generated) == 5
            assert 2 <= engine.metrics["knocks"] <= 8
            await engine.close()

    run(main())


@both_loops
def test_connections_are_kept_and_used_again(loop: str) -> None:
    async def main() -> None:
        async with Server() as server:
            engine = engine_for(server)
            for turn in range(5):
                await asyncio.gather(*(ask(engine, f"{turn}-{n}") for n in range(20)))
            assert len(server.generated) == 100
            assert server.opened <= 20
            await engine.close()

    run(main(), loop)


@both_loops
def test_a_server_that_closes_idle_connections_costs_no_try(loop: str) -> None:
    async def main() -> None:
        async with Server(always=raw(answer_bytes(), then="close")) as server:
            engine = engine_for(server)
            for turn in range(10):
                await ask(engine, str(turn))
                await asyncio.sleep(0.01)
            assert engine.metrics["tries"] == 10
            assert engine.endpoints[0].failures == 0
            await engine.close()

    run(main(), loop)


def answer_bytes() -> bytes:
    data = json.dumps(GOOD).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def test_connections_are_ramped_up(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, most = 0, 0
    connect = aiohttp.TCPConnector._create_connection

    async def slow(*args: Any, **more: Any) -> Any:
        nonlocal connecting, most
        connecting += 1
        most = max(most, connecting)
        await asyncio.sleep(0.02)
        try:
            return await connect(*args, **more)
        finally:
            connecting -= 1

    async def main() -> None:
        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", slow)
        async with Server(always=answer(delay_s=0.2)) as server:
            engine = engine_for(server, settings=HttpSettings(max_connecting=10))
            await asyncio.gather(*(ask(engine, str(n)) for n in range(60)))
            assert server.opened == 60
            assert most == 10
            await engine.close()

    run(main())


@both_loops
def test_a_prompt_of_megabytes_is_sent_without_a_warning(loop: str) -> None:
    async def main() -> None:
        async with Server() as server:
            engine = engine_for(server)
            prompt = tuple(range(200_000))
            assert len(json.dumps(prompt)) > 2**20
            assert (await ask(engine, prompt=prompt)).finish == "stop"
            await engine.close()

    run(main(), loop)


LIMITED = """
import asyncio, resource, sys
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.errors import ConfigError
from tests.http_server import engine_for
soft, hard, need = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
start = engine_for("http://a").start(
    max_concurrent=need, params=SamplingParams(), log_probs=True, prompt=[1]
)
try:
    asyncio.run(start)
except ConfigError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "need", "said"),
    [
        (256, 2_000, 1_000, "1256"),
        (2_000, 2_000, 1_000, "2000"),
        (256, 1_000, 5_000, "5000 requests in flight need 5256 open files, this process may have "
         "1000: raise the limit (`ulimit -n 5256`"),
    ],
    ids=["raised", "enough", "refused"],
)  # fmt: skip
def test_open_files_are_seen_to_before_a_run(soft: int, hard: int, need: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard), str(need)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.stdout.startswith(said), done.stderr

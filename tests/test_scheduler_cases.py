"""The handed `scheduler` cases, as far as engines, the loop and `generate` can hold them.

A time bound here only tells an end from a hang, which would last an hour.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsm_rollout.engines.http import call
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.guards import guard
from fsm_rollout.states.machine import Listener, Transition
from fsm_rollout.states.table import Event
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool
from tests.canned import played, request_for, serve
from tests.dialects import DIALECTS, Answer, Dialect, Said
from tests.http_server import GOOD, Server, ask, engine_for, raw, until_aborted

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parent / "cases" / "scheduler.jsonl").read_text().splitlines()
    )
}
WAITS_FOR_A_SCHEDULER = {
    "sch-002": "there is no data source to run dry: `generate` plays the rows that it is given",
    "sch-010": "nothing re-queues: an aborted group is handed back, and its reason says retryable",
}
POLICY = {
    "sch-001": "the second stands for the hang of an hour: a busy machine may stop for longer",
    "sch-006": "max_retries is what the settings allow: max_tries and max_attempts",
}
"""where we meet a case by other means"""
BOUND_S = 60
HOUR_S = 3_600
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOKENIZER = tiny_tokenizer()


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its input and what is expected."""
    return CASES[name]["input"], CASES[name]["expected"]


class Held:
    """Who hangs, and until when."""

    def __init__(self) -> None:
        self.count = 0
        self.released = 0
        self.thread = threading.Event()

    async def hang(self) -> None:
        self.count += 1
        await asyncio.sleep(HOUR_S)

    async def swallow(self) -> None:
        self.count += 1
        try:
            await asyncio.sleep(HOUR_S)
        except asyncio.CancelledError:
            await asyncio.sleep(HOUR_S)

    def block(self) -> None:
        self.count += 1
        self.thread.wait(HOUR_S)

    def tool(self, hook: str, body: Callable[[Held], Any]) -> type[Tool]:
        """`f`, which hangs in one of its hooks; its releases are counted."""
        held = self

        def execute(self: Tool) -> str:
            return "x"

        async def release(self: Tool) -> None:
            held.released += 1

        hooks: dict[str, Any] = {"execute": execute, "release": release}
        if asyncio.iscoroutinefunction(body):

            async def wait(self: Tool) -> None:
                await body(held)

            hooks[hook] = wait
        else:

            def stand(self: Tool) -> None:
                body(held)

            hooks[hook] = stand
        return type("F", (Tool,), {"name": "f", **hooks})

    def model(self, asked: Asked) -> Reply:
        self.count += 1
        return Reply([1], delay_s=HOUR_S)

    async def seen(self, count: int) -> None:
        for _ in range(BOUND_S * 500):
            if self.count >= count:
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"{self.count} of {count} came so far")


def rollout_of(*, script: Any = (CALL, "done"), **options: Any) -> Rollout:
    limits = Limits(release_timeout_s=1)
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    return Rollout(engine, TOKENIZER, limits=limits, **options)


def noting(seen: dict[int, Request]) -> Listener:
    """Notes the requests that were played."""

    def listen(transition: Transition) -> None:
        seen[transition.request.index] = transition.request

    return listen


# -- everything is aborted -------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[Held], dict[str, Any]]] = {
    "the engine": lambda held: {"script": held.model},
    "create": lambda held: {"tools": [held.tool("create", Held.hang)]},
    "execute": lambda held: {"tools": [held.tool("execute", Held.hang)]},
    "a deaf tool": lambda held: {"tools": [held.tool("execute", Held.swallow)]},
    "a tool's thread": lambda held: {"tools": [held.tool("execute", Held.block)]},
    "a tool's reward": lambda held: {"tools": [held.tool("calc_reward", Held.hang)]},
    "release": lambda held: {"tools": [held.tool("release", Held.hang)]},
    "the judge": lambda held: {"reward": lambda _: held.hang()},
    "a deaf judge": lambda held: {"reward": lambda _: held.swallow()},
    "the judge's thread": lambda held: {"reward": lambda _: held.block()},
    "an agent": lambda held: {"agent": lambda _: held.hang()},
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_sch_001_all_in_flight_are_aborted(holder: str) -> None:
    given, expected = case("sch-001")
    assert given["event"] == "abort_all"
    assert expected["returns_within_s"] < BOUND_S < HOUR_S
    held = Held()
    seen: dict[int, Request] = {}

    async def main() -> None:
        rollout = rollout_of(listeners=[noting(seen)], **HOLDERS[holder](held))
        groups, in_flight = given["target_groups"], given["in_flight"]
        playing = asyncio.create_task(
            rollout.generate(["x"] * groups, num_samples=in_flight // groups)
        )
        await held.seen(in_flight)
        playing.cancel()
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(asyncio.CancelledError):  # nothing is collected
                await playing
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(pending) == expected["pending"]

    try:
        asyncio.run(main())
    finally:
        held.thread.set()
    assert expected["collected"] == 0
    assert len(seen) == given["in_flight"]
    over = holder == "release"  # then all was said, and no abort takes it back
    for request in seen.values():
        assert request.is_sealed
        assert request.stop_reason is (StopReason.STOP if over else StopReason.CANCELLED)


# -- tries, and tries again ------------------------------------------------------------------------


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_BACKOFF_S", 0.01)


@pytest.mark.usefixtures("_short_pauses")
def test_sch_004_a_try_is_aborted_before_the_next_one_has_an_id_of_its_own() -> None:
    given, expected = case("sch-004")
    assert given["events"] == ["POST /generate rid=r1", "connection reset after 1 s"]
    reset = raw(b"HTTP/1.1 200 OK\r\nContent-")  # when the server was at work

    async def main() -> None:
        async with Server(reset) as server:
            engine = engine_for(server)
            generation = await ask(engine)
            assert generation.token_ids.tolist() == GOOD["ids"]
            (first, one), (second, aborted), (third, other) = server.seen
            assert [first, second, third] == ["/generate", "/abort", "/generate"]
            assert (aborted, other != one) == (one, True)
            assert "count duplicates" in expected["must"]
            assert (engine.metrics["tries"], engine.metrics["retries"]) == (2, 1)
            await engine.close()

    assert not expected["retry_without_abort"]
    asyncio.run(main())


FINAL = (201, 204, 302, 307, 400, 401, 403, 404, 405, 409, 413, 418, 422, 499)
PASSING = (408, 425, 429, 500, 502, 503, 504)


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("status", FINAL)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_sch_006_what_will_not_pass_is_asked_once(dialect: Dialect, status: int) -> None:
    given, expected = case("sch-006")
    assert given["status"] in FINAL

    async def main() -> None:
        async with serve(Answer(b"", status=status)) as server:
            settings = HttpSettings(max_tries=given["max_retries"])
            stream = dialect.events is not None
            engine = dialect.engine(server.url, stream=stream, settings=settings)
            request = await played(engine, request_for([1], max_attempts=given["max_retries"]))
        assert (len(server.asked), request.attempt) == (expected["attempts"], 1)
        assert request.status.name == expected["status"]
        assert request.final is not expected["retryable"]
        assert f"HTTP {status}" in request.error

    asyncio.run(main())


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("status", PASSING)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_sch_006_what_may_pass_is_asked_again(dialect: Dialect, status: int) -> None:
    said = Said(ids=[5, 9], log_probs=[-1.0, -2.0], matched=9, prompt=[1], prompt_tokens=1)

    async def main() -> None:
        async with serve(Answer(b"", status=status), dialect.answer(said)) as server:
            engine = dialect.engine(server.url, stream=dialect.events is not None)
            request = await played(engine, request_for([1]))
        assert len(server.asked) == 2
        assert (request.status, request.attempt) == (Status.COMPLETED, 1)

    asyncio.run(main())


# -- one of several --------------------------------------------------------------------------------


def test_sch_007_one_is_aborted_by_its_id() -> None:
    given, expected = case("sch-007")
    half = {"ids": [7], "lps": [-0.5], "finish": "abort"}

    async def main() -> None:
        async with Server(always=until_aborted(half)) as server:
            engine = engine_for(server)
            running = {name: asyncio.create_task(ask(engine, name)) for name in given["in_flight"]}
            await server.until(lambda: len(server.generated) == len(running))
            for name in given["abort"]:
                await engine.abort(name)
                assert (await running.pop(name)).finish == "abort"
            assert expected["b_unaffected"]
            assert [path for path, _ in server.seen].count("/abort") == len(given["abort"])
            for name, task in running.items():
                assert not task.done()
                await engine.abort(name)
                await task
            await engine.close()

    asyncio.run(main())


def test_sch_007_a_cancelled_request_takes_no_other_along() -> None:
    held = Held()

    async def main() -> None:
        rollout = rollout_of(tools=[held.tool("execute", Held.hang)])
        plain = rollout_of(script=["done"])
        hanging = asyncio.create_task(rollout.run(rollout.request("x")))
        await held.seen(1)
        other = asyncio.create_task(plain.run(plain.request("x")))
        hanging.cancel()
        await asyncio.wait([hanging, other], timeout=BOUND_S)
        assert (await other).status is Status.COMPLETED

    asyncio.run(main())


@pytest.mark.parametrize("max_concurrent", [256, 2])
def test_sch_009_one_slow_tool_blocks_nobody(max_concurrent: int) -> None:
    given, expected = case("sch-009")
    calls = Counter[str]()
    others_are_done = asyncio.Event()

    class F(Tool):
        async def create(self, slow: bool) -> None:
            self.slow = slow

        async def execute(self) -> str:
            calls["slow" if self.slow else "quick"] += 1
            if self.slow:
                await others_are_done.wait()
            return "x"

    F.name = "f"
    done: list[Request] = []

    def listen(transition: Transition) -> None:
        if transition.dest is Status.COMPLETED:
            done.append(transition.request)
            if len(done) == expected["others_complete"]:
                others_are_done.set()

    async def main() -> None:
        rollout = rollout_of(tools=[F], listeners=[listen], max_concurrent=max_concurrent)
        rows = [
            {"prompt": "x", "tools_kwargs": {"f": {"create_kwargs": {"slow": n == 0}}}}
            for n in range(given["samples"])
        ]
        async with asyncio.timeout(BOUND_S):  # it would wait for ever
            await rollout.generate(rows)

    asyncio.run(main())
    assert calls["slow"] == given["slow_tool"]
    assert expected["while_slow_running"]
    assert [request.index for request in done][-1] == 0  # the slow one, when all others were done


# -- bugs ------------------------------------------------------------------------------------------


@guard(says=lambda _: "a bug")
def broken(request: Request) -> bool:
    if request.index == 0:
        raise ZeroDivisionError(CASES["sch-012"]["input"]["task_error"])
    return True


def _broken(transition: Transition) -> None:
    if transition.request.index == 0 and transition.event is Event.OBSERVE:
        raise ZeroDivisionError(CASES["sch-012"]["input"]["task_error"])


BUGS: dict[str, dict[str, Any]] = {
    "a listener": {"listeners": [_broken]},
    "a guard": {"guards": {Event.OBSERVE: [broken]}},
}


@pytest.mark.parametrize("bug", BUGS)
def test_sch_012_an_exception_reaches_the_caller_and_the_others_are_released(bug: str) -> None:
    given, expected = case("sch-012")
    assert expected["raises"]
    assert expected["others_released"]
    held = Held()
    created: list[int] = []
    seen: dict[int, Request] = {}

    class F(held.tool("execute", Held.hang)):  # type: ignore[misc]
        async def create(self) -> None:
            created.append(1)

    async def main() -> None:
        options = {"guards": BUGS[bug].get("guards")}
        listeners = [noting(seen), *BUGS[bug].get("listeners", ())]
        rollout = rollout_of(tools=[F], listeners=listeners, **options)
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(ZeroDivisionError, match=given["task_error"]):
                await rollout.generate(["x"] * 4)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert held.released == len(created) > 0
    assert {request.status for request in seen.values() if request.index} == {Status.ABORTED}


def test_every_case_is_driven_or_has_a_reason() -> None:
    named = {name[5:12].replace("_", "-") for name in globals() if name.startswith("test_sch_")}
    assert named | WAITS_FOR_A_SCHEDULER.keys() == CASES.keys()
    assert POLICY.keys() <= named

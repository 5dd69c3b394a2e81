"""Fault plans: each fault is there for a plain client, on every wire, whole and streamed."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine import FakeEngine, FaultPlan, Rule, faults, load_faults
from tests.wires import ABORTED_AS, PATHS, WIRES, Heard, ask, body, call, client

SIZE = 1000
Check = Callable[[Heard, Heard], Any]
"""(spoiled, sound) -> whether the fault is there"""

CONTENT: dict[str, tuple[faults.AnyFault, Check]] = {
    "missing log-probs": (faults.MissingLogProbs(), lambda bad, good: bad.log_probs is None),
    "a log-prob too few": (
        faults.LogProbCount(by=-1),
        lambda bad, good: bad.log_probs == (good.log_probs or [])[:-1],
    ),
    "log-probs too many": (
        faults.LogProbCount(by=2),
        lambda bad, good: bad.log_probs == [*(good.log_probs or ()), -0.5, -0.5],
    ),
    "NaN": (
        faults.LogProbValue(value="nan", at=2),
        lambda bad, good: "NaN" in bad.text and bad.log_probs[2] != bad.log_probs[2],  # type: ignore[index]
    ),
    "-inf": (
        faults.LogProbValue(value="-inf", at=-1),
        lambda bad, good: bad.log_probs[-1] == float("-inf"),  # type: ignore[index]
    ),
    "null": (
        faults.LogProbValue(value="null"),
        lambda bad, good: bad.log_probs[0] is None,  # type: ignore[index]
    ),
    "-9999": (
        faults.LogProbValue(value=-9999.0),
        lambda bad, good: bad.log_probs[0] == -9999.0,  # type: ignore[index]
    ),
    "a positive log-prob": (
        faults.LogProbValue(value=0.5),
        lambda bad, good: bad.log_probs[0] == 0.5,  # type: ignore[index]
    ),
    "log-probs of other ids": (
        faults.LogProbIds(at=1),
        lambda bad, good: bad.ids == good.ids and bad.ids_of_log_probs != good.ids,
    ),
    "an id out of the vocabulary": (
        faults.OutOfVocabulary(at=3),
        lambda bad, good: bad.ids[3] == SIZE and bad.ids_of_log_probs[3] == SIZE,
    ),
    "a negative id": (faults.OutOfVocabulary(id=-1), lambda bad, good: bad.ids[0] == -1),
    "too many tokens": (
        faults.TooManyTokens(by=3),
        lambda bad, good: len(bad.ids) == len(bad.log_probs or ()) == 35,
    ),
    "no token": (
        faults.Empty(),
        lambda bad, good: (bad.ids, bad.log_probs or [], bad.finish) == ([], [], "stop"),
    ),
    "another prompt count": (
        faults.PromptCount(by=2),
        lambda bad, good: bad.prompt_tokens == (good.prompt_tokens or 0) + 2,
    ),
    "another count of tokens": (
        faults.CompletionCount(by=-1),
        lambda bad, good: bad.completion_tokens == len(bad.ids) - 1,
    ),
    "an unknown finish": (
        faults.FinishReason(finish="tired"),
        lambda bad, good: bad.finish == "tired",
    ),
    "no finish": (faults.FinishReason(finish=None), lambda bad, good: bad.finish is None),
    "an abort of its own": (
        faults.Abort(share=0.25),
        lambda bad, good: bad.finish == "abort" and bad.ids == good.ids[:8],
    ),
}


def spoiled(
    test: Callable[[aiohttp.ClientSession, FakeEngine], Awaitable[Any]],
    *planned: faults.AnyFault | Rule,
) -> Any:
    """What `test` finds of a server with these faults."""

    async def run() -> Any:
        async with FakeEngine(vocab_size=SIZE, faults=planned) as fake, client() as session:
            return await test(session, fake)

    return asyncio.run(run())


def heard_from(wire: str, *planned: faults.AnyFault, **content: Any) -> Heard:
    """What a plain client hears."""

    async def run(session: aiohttp.ClientSession, fake: FakeEngine) -> Heard:
        heard = await ask(session, fake.url, wire, **content)
        assert [seen.fault for seen in fake.generations()] == [planned[0] if planned else None]
        return heard

    found: Heard = spoiled(run, *planned)
    return found


def every_way(test: Callable[..., Any]) -> Any:
    streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    return pytest.mark.parametrize("wire", WIRES)(streamed(test))


@every_way
def test_what_a_reply_says_can_be_spoiled(wire: str, stream: bool) -> None:
    good = heard_from(wire, stream=stream)
    for name, (fault, is_there) in CONTENT.items():
        if wire == "completions" and stream and name == "no token":
            continue  # vLLM sends no chunk before the first token
        bad = heard_from(wire, fault, stream=stream)
        assert bad.status == 200, name
        assert is_there(bad, good), name
        assert [name for name, (_, check) in CONTENT.items() if check(good, good)] == []


@every_way
def test_weights_can_change_in_mid_reply(wire: str, stream: bool) -> None:
    bad = heard_from(wire, faults.WeightChange(version="v9", share=0.25), stream=stream)
    assert bad.versions == ([] if wire == "completions" else [("default", 8), ("v9", 24)])


@every_way
def test_an_error_in_place_of_a_reply(wire: str, stream: bool) -> None:
    async def refused(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        content = body(wire, stream=stream)
        async with session.post(fake.url + PATHS[wire], json=content) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "0.5"
            assert "error" in await response.json()
        assert fake.seen[0].outcome == "refused"

    spoiled(refused, faults.Status(status=429, retry_after_s=0.5))
    heard = heard_from(wire, faults.Status(status=500, body="oops"), stream=stream)
    assert (heard.status, heard.text) == (500, "oops")


@every_way
def test_a_delay_is_cut_short_by_an_abort_and_lateness_is_not(wire: str, stream: bool) -> None:
    async def wait(session: aiohttp.ClientSession, fake: FakeEngine) -> float:
        asked = asyncio.ensure_future(ask(session, fake.url, wire, stream=stream))
        await asyncio.sleep(0.05)
        rid = ABORTED_AS[wire].format("0" * 32)
        if wire == "sglang":
            await call(session, fake.url, "/abort_request", {"rid": rid})
        else:
            await call(session, fake.url, "/abort_requests", {"request_ids": [rid]})
        clock = asyncio.get_running_loop().time
        started = clock()
        heard = await asked
        assert heard.finish == ("length" if "Late" in str(fake.seen[0].fault) else heard.finish)
        return clock() - started

    assert spoiled(wait, faults.Delay(seconds=20)) < 10
    assert spoiled(wait, faults.Late(seconds=0.3)) > 0.1


@every_way
@pytest.mark.parametrize("after", [-1, 0, 100])
def test_a_body_can_stall(wire: str, stream: bool, after: int) -> None:
    async def read(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        content, got = body(wire, stream=stream), bytearray()
        has_head = asyncio.Event()

        async def listen() -> None:
            async with session.post(fake.url + PATHS[wire], json=content) as response:
                has_head.set()
                async for chunk in response.content.iter_any():
                    got.extend(chunk)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listen(), 0.2)
        assert has_head.is_set() == (after >= 0)
        assert len(got) == max(0, after)

    spoiled(read, faults.Stall(after_bytes=after))


@every_way
def test_a_stall_can_end(wire: str, stream: bool) -> None:
    started = time.monotonic()
    heard = heard_from(wire, faults.Stall(after_bytes=50, seconds=0.15), stream=stream)
    assert time.monotonic() - started > 0.15
    assert len(heard.ids) == 32


@every_way
def test_a_stall_for_ever_ends_when_the_client_leaves(wire: str, stream: bool) -> None:
    async def leave(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(session, fake.url, wire, stream=stream), 0.1)
        for _ in range(100):
            if fake.seen[0].outcome == "disconnected":
                break
            await asyncio.sleep(0.01)
        assert fake.seen[0].outcome == "disconnected"
        assert fake.num_running == 0

    spoiled(leave, faults.Stall(after_bytes=10))


@every_way
@pytest.mark.parametrize("politely", [False, True])
@pytest.mark.parametrize("after", [-1, 0, 100])
def test_a_connection_can_break(wire: str, stream: bool, after: int, politely: bool) -> None:
    async def read(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        got = bytearray()

        async def listen() -> None:
            content = body(wire, stream=stream)
            async with session.post(fake.url + PATHS[wire], json=content) as response:
                async for chunk in response.content.iter_any():
                    got.extend(chunk)

        with pytest.raises(aiohttp.ClientError):
            await listen()
        assert len(got) == max(0, after)

    spoiled(read, faults.Reset(after_bytes=after, politely=politely))


@every_way
@pytest.mark.parametrize("fault", [faults.Garbage(), faults.Truncated()])
def test_what_comes_may_be_no_json(wire: str, stream: bool, fault: faults.AnyFault) -> None:
    async def read(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        content = body(wire, stream=stream)
        async with session.post(fake.url + PATHS[wire], json=content) as response:
            assert response.status == 200
            text = await response.text()
        events = text.split("\n\n")[:-2] if stream else [text]
        bad = events[0 if isinstance(fault, faults.Garbage) else -1]
        with pytest.raises(json.JSONDecodeError):
            json.loads(bad.removeprefix("data: "))
        assert stream == text.endswith("data: [DONE]\n\n")

    spoiled(read, fault)


@every_way
def test_a_reply_can_come_twice(wire: str, stream: bool) -> None:
    async def read(session: aiohttp.ClientSession, fake: FakeEngine) -> bytes:
        url = fake.url.removeprefix("http://")
        host, port = url.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body(wire, stream=stream)).encode()
        head = (
            f"POST {PATHS[wire]} HTTP/1.1\r\nHost: {url}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        got = b""
        while not is_twice(got):  # on a connection that stays open
            got += await reader.read(2**20)
        writer.close()
        return got

    def is_twice(got: bytes) -> bool:
        if stream:
            return got.count(b"[DONE]") == 2
        *_, last = got.split(b"\r\n\r\n")
        return got.count(b"HTTP/1.1 200 OK") == 2 and last.endswith(b"}")

    got = spoiled(read, faults.Duplicate())
    if stream:
        assert got.count(b"[DONE]") == 2
        events = [line for line in got.splitlines() if line.startswith(b"data: {")]
        assert events[0::2] == events[1::2]
    else:
        assert got.count(b"HTTP/1.1 200 OK") == 2
        bodies = [part.split(b"HTTP/1.1")[0] for part in got.split(b"\r\n\r\n")[1:]]
        assert bodies[0] == bodies[1]
        assert json.loads(bodies[0])


@every_way
def test_an_end_can_be_missing(wire: str, stream: bool) -> None:
    bad = heard_from(wire, faults.MissingEnd(), stream=stream)
    half = heard_from(wire, faults.MissingEnd(done=True), stream=stream)
    assert bad.finish is None
    assert half.finish is None
    assert "[DONE]" not in bad.text
    assert half.text.endswith("data: [DONE]\n\n") == stream
    if stream:
        assert len(bad.ids) == 31, "the tokens of the last event are missing as well"


@every_way
def test_an_error_can_come_under_status_200(wire: str, stream: bool) -> None:
    fault = faults.ErrorEvent(after_events=2, status=503, message="cuda is sad")
    bad = heard_from(wire, fault, stream=stream)
    assert bad.status == 200
    assert "cuda is sad" in bad.text
    assert bad.finish is None
    if stream:
        assert len(bad.ids) == 2
        assert bad.events[-1]["error"]["code"] == 503


def test_sglang_blames_a_status_for_an_abort() -> None:
    fault = faults.Abort(status=503)
    whole = heard_from("sglang", fault)
    assert whole.status == 503
    streamed = heard_from("sglang", fault, stream=True)
    reason = streamed.events[-1]["meta_info"]["finish_reason"]
    assert (streamed.status, reason["type"], reason["status_code"]) == (200, "abort", 503)


def test_a_fault_that_cannot_show_says_so() -> None:
    heard = heard_from("sglang", faults.MissingLogProbs(), log_probs=False)
    assert heard.status == 400
    assert "MissingLogProbs of the fault plan cannot show" in heard.text
    heard = heard_from("generate", faults.OutOfVocabulary(at=99))
    assert "position 99 of a reply of 32 tokens" in heard.text


# Plans.


def statuses(plan: Sequence[Rule] | FaultPlan, asked: Sequence[tuple[str, str]]) -> list[int]:
    async def run() -> list[int]:
        async with FakeEngine(faults=plan) as fake, client() as session:
            return [
                (await ask(session, fake.url, wire, session_id=name)).status for wire, name in asked
            ]

    return asyncio.run(run())


def test_rules_count_what_their_path_and_session_leave() -> None:
    plan = [
        Rule(fault=faults.Status(status=500), session="a*", nth=2),
        Rule(fault=faults.Status(status=501), path="/v1/*", nth=[1, 3]),
        Rule(fault=faults.Status(status=502), nth=7),
    ]
    asked = [
        ("sglang", "a1"),
        ("sglang", "b"),
        ("completions", "b"),
        ("generate", "a2"),
        ("completions", "b"),
        ("completions", "b"),
        ("sglang", "a1"),
    ]
    assert statuses(plan, asked) == [200, 200, 501, 500, 200, 501, 502]


def test_probabilities_are_drawn_from_the_seed() -> None:
    asked = [("sglang", "")] * 60
    rules = [Rule(fault=faults.Status(status=500), probability=0.3)]
    first = statuses(FaultPlan(rules=rules, seed=1), asked)
    assert 5 < first.count(500) < 35
    assert first == statuses(FaultPlan(rules=rules, seed=1), asked)
    assert first != statuses(FaultPlan(rules=rules, seed=2), asked)


def test_a_path_lets_faults_hit_other_routes() -> None:
    async def look(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
        async with session.post(fake.url + "/abort_request", json={"rid": "a"}) as response:
            assert response.status == 500
        with pytest.raises(aiohttp.ClientError):
            await session.get(fake.url + "/health")
        assert (await ask(session, fake.url, "sglang")).status == 200

    spoiled(
        look,
        Rule(fault=faults.Status(status=500), path="/abort_request"),
        Rule(fault=faults.Reset(after_bytes=-1), path="/health"),
    )


PLAN = """
seed: 3
rules:
  - nth: [1, 3]
    fault: {type: status, status: 429, retry_after_s: 1}
  - probability: 0.5
    session: "a*"
    fault: {type: log_prob_value, value: nan}
  - fault: {type: stall, after_bytes: 10}
"""


def test_a_plan_can_be_written_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    assert load_faults(path) == FaultPlan(
        seed=3,
        rules=[
            Rule(fault=faults.Status(status=429, retry_after_s=1), nth=[1, 3]),
            Rule(fault=faults.LogProbValue(value="nan"), probability=0.5, session="a*"),
            Rule(fault=faults.Stall(after_bytes=10)),
        ],
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ruls: []", "unknown key 'ruls'; did you mean 'rules'"),
        (
            "rules: [{fualt: {type: empty}}]",
            r"unknown key 'rules\[0\].fualt'; did you mean 'fault'",
        ),
        ("rules: [{fault: {type: statis}}]", r"unknown fault 'statis' in rules\[0\]; did you mean"),
        ("rules: [{fault: {type: delay, second: 1}}]", "did you mean 'seconds'"),
        ("rules: [{fault: {type: delay}}]", "missing required field `seconds`"),
        ("rules: [{fault: {type: status, status: 200}}]", "400..599"),
        ("rules: [{nth: 0, fault: {type: empty}}]", "nth counts from 1"),
        ("rules: [{probability: 2, fault: {type: empty}}]", "probability must be in"),
        ("rules: [{path: /health, fault: {type: empty}}]", "'/health' generates nothing"),
        ("rules: 3", "Expected `array`"),
        ("3", "Expected `object`"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as raised:
        load_faults(path)
    assert str(raised.value).startswith(str(path))


def test_the_page_on_it_lists_every_fault_and_what_it_does() -> None:
    page = Path(__file__).parents[1] / "docs/how-to/test-against-a-fake-engine.md"
    listed = [line.strip("| ").split(" | ") for line in page.read_text().splitlines()]
    for fault in get_args(faults.AnyFault):
        about = " ".join((inspect.getdoc(fault) or "").split())
        name = fault.__struct_config__.tag
        options = ", ".join(
            f"`{field.name}`" if field.required else f"`{field.name}={field.default!r}`"
            for field in msgspec.structs.fields(fault)
        )
        row = [f"`{fault.__name__}`", f"`{name}`", options or "none", about]
        assert row in listed

"""The fake engine over real HTTP: shapes of both wires, determinism, aborts, pauses, versions."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine import FakeEngine, FakeRouter, Latency, LogNormal
from tests.wires import ABORTED_AS, WIRES, Heard, ask, body, call, client

SLOW = Latency(total_s=LogNormal(30.0))
all_wires = pytest.mark.parametrize("wire", WIRES)
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def with_fake(
    test: Callable[[FakeEngine, aiohttp.ClientSession], Awaitable[Any]], *args: Any, **options: Any
) -> Any:
    """What `test(fake, session)` returns."""

    async def run() -> Any:
        async with FakeEngine(*args, **options) as fake, client() as session:
            return await test(fake, session)

    return asyncio.run(run())


def heard_from(wire: str, *, options: dict[str, Any] | None = None, **asked: Any) -> Heard:
    async def once(fake: FakeEngine, session: aiohttp.ClientSession) -> Heard:
        return await ask(session, fake.url, wire, **asked)

    found: Heard = with_fake(once, **options or {})
    return found


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)


# Shapes.


def test_sglang_says_what_its_meta_info_holds() -> None:
    content = body("sglang", limit=16) | {"return_prompt_token_ids": True}

    async def once(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        return await call(session, fake.url, "/generate", content)

    said = with_fake(once, tokens=LogNormal(5))
    meta = said["meta_info"]
    assert said["prompt_token_ids"] == [1, 2, 3]
    assert len(said["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["id"] == "0" * 32
    assert meta["finish_reason"] == {"type": "stop", "matched": said["output_ids"][-1]}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (3, 2)
    assert meta["input_token_logprobs"] == []
    assert [triple[1:] for triple in meta["output_token_logprobs"]] == [
        [token_id, None] for token_id in said["output_ids"]
    ]
    assert meta["output_token_logprobs_length"] == 5
    assert {"num_retractions", "reasoning_tokens", "e2e_latency"} <= meta.keys()
    assert "text" not in said, "there is no tokenizer"


def test_vllm_generate_says_what_its_protocol_lists() -> None:
    content = body("generate", limit=4) | {"return_token_ids": True, "model": "fake"}

    async def once(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        return await call(session, fake.url, "/inference/v1/generate", content)

    said = with_fake(once)
    assert said["request_id"] == "generate-tokens-" + "0" * 32
    assert said["prompt_token_ids"] == [1, 2, 3]
    assert said["output_mode"] == "tokens"
    assert said["usage"]["total_tokens"] == 7
    [choice] = said["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    for token_id, at in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert at["token_id"] == token_id
        assert at["top_logprobs"] == [{k: at[k] for k in ("token_id", "logprob", "rank")}]


def test_vllm_completions_say_what_their_protocol_lists() -> None:
    async def once(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        return await call(session, fake.url, "/v1/completions", body("completions", limit=4))

    said = with_fake(once)
    assert said["id"] == "cmpl-" + "0" * 32
    assert said["object"] == "text_completion"
    [choice] = said["choices"]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert len(choice["token_ids"]) == 4
    log_probs = choice["logprobs"]
    assert log_probs["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert log_probs["text_offset"][1] == len(log_probs["tokens"][0])
    for token, value, top in zip(
        log_probs["tokens"], log_probs["token_logprobs"], log_probs["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) <= 2, "the sampled one and logprobs=1 more"


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_streams_cumulatively_or_in_deltas(incremental: bool) -> None:
    heard = heard_from(
        "sglang", stream=True, options={"tokens": LogNormal(3), "incremental": incremental}
    )
    lengths = [len(event["output_ids"]) for event in heard.events]
    shown = [len(event["meta_info"]["output_token_logprobs"]) for event in heard.events]
    assert lengths == shown == ([1, 1, 1] if incremental else [1, 2, 3])
    counts = [event["meta_info"]["completion_tokens"] for event in heard.events]
    assert counts == [1, 2, 3], "cumulative in both modes"
    assert [bool(event["meta_info"]["finish_reason"]) for event in heard.events] == [0, 0, 1]
    assert heard.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("wire", ["generate", "completions"])
def test_vllm_streams_deltas_and_then_the_usage(wire: str) -> None:
    options = {"tokens": LogNormal(5), "latency": Latency(chunk_tokens=2)}
    heard = heard_from(wire, stream=True, options=options)
    *chunks, usage = heard.events
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [2, 2, 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert heard.text.endswith("data: [DONE]\n\n")


@all_wires
@pytest.mark.parametrize("incremental", [False, True])
def test_a_streamed_reply_is_the_whole_one(wire: str, incremental: bool) -> None:
    options = {"incremental": incremental, "latency": Latency(chunk_tokens=5)}
    whole = heard_from(wire, options=options)
    streamed = heard_from(wire, stream=True, options=options)
    assert len(whole.ids) == 32
    assert (streamed.ids, streamed.log_probs) == (whole.ids, whole.log_probs)
    assert (streamed.finish, streamed.completion_tokens) == (whole.finish, 32)
    assert whole.ids_of_log_probs == streamed.ids_of_log_probs == whole.ids


@all_wires
def test_log_probs_come_only_when_asked_for(wire: str) -> None:
    assert heard_from(wire, log_probs=False).log_probs is None


def test_scores_of_a_prompt_do_not_know_the_temperature() -> None:
    async def score(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        asked = body("sglang", [5, 6, 7, 8], limit=0, temperature=0.5) | {"logprob_start_len": 1}
        sglang = await call(session, fake.url, "/generate", asked)
        content = body("generate", [5, 6, 7, 8], limit=1, temperature=0.5)
        content["sampling_params"]["prompt_logprobs"] = 0
        vllm = await call(session, fake.url, "/inference/v1/generate", content)
        return sglang["meta_info"]["input_token_logprobs"], vllm["prompt_logprobs"]

    triples, entries = with_fake(score, vocab_size=100)
    assert [triple[1] for triple in triples] == [6, 7, 8]
    assert entries[0] is None
    assert [entry[str(i)]["logprob"] for i, entry in zip([6, 7, 8], entries[1:], strict=True)] == [
        triple[0] for triple in triples
    ]


@all_wires
def test_a_prompt_that_is_none_is_refused(wire: str) -> None:
    for prompt in ([], [[1, 2]], [1.5], ["a"], [-1], [None]):
        heard = heard_from(wire, ids=prompt)
        assert heard.status == 400
        assert "prompt" in heard.text


@all_wires
def test_a_prompt_that_fills_the_context_is_refused(wire: str) -> None:
    heard = heard_from(wire, ids=[7] * 65, options={"max_context": 64})
    assert heard.status == 400
    assert "context length" in heard.text
    assert heard_from(wire, ids=[7] * 60, limit=4, options={"max_context": 64}).finish == "length"


# Determinism.


@all_wires
def test_an_answer_depends_on_prompt_and_seed_alone(wire: str) -> None:
    same = [heard_from(wire, seed=1, rid=rid).ids for rid in ("a" * 32, "b" * 32)]
    assert same[0] == same[1]
    seeds = {tuple(heard_from(wire, seed=seed).ids) for seed in range(8)}
    assert len(seeds) > 4
    prompts = {tuple(heard_from(wire, ids=[token_id, 2, 3]).ids) for token_id in range(8)}
    assert len(prompts) > 4, "the start of the prompt counts as well"


@all_wires
def test_a_server_that_comes_back_on_its_port_says_the_same(wire: str) -> None:
    async def restart(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        first = await ask(session, fake.url, wire)
        url = fake.url
        await fake.stop()
        await fake.stop()
        with pytest.raises(aiohttp.ClientError):
            await ask(session, url, wire)
        await fake.start()
        assert fake.url == url
        assert (await ask(session, url, wire)).ids == first.ids

    with_fake(restart)


def test_a_stop_breaks_off_what_runs() -> None:
    async def stop(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(session, fake.url, "sglang"))
        await until(lambda: fake.num_running)
        await asyncio.wait_for(fake.stop(), 20)
        with pytest.raises(aiohttp.ClientError):
            await asked

    with_fake(stop, latency=SLOW)


def test_several_servers_run_at_once() -> None:
    async def ask_all() -> None:
        async with FakeEngine() as one, FakeEngine(seed=1) as other, client() as session:
            assert one.url != other.url
            said = [await ask(session, fake.url, "sglang") for fake in (one, other)]
            assert said[0].ids != said[1].ids

    asyncio.run(ask_all())


# What was seen.


def test_it_lists_what_it_saw_in_order() -> None:
    async def several(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        await ask(session, fake.url, "sglang", [4, 5], rid="a" * 32, session_id="s1")
        await call(session, fake.url, "/abort_request", {"rid": "a" * 32})
        await ask(session, fake.url, "generate", rid="b" * 32, session_id="s2")
        assert [seen.number for seen in fake.seen] == [1, 2, 3]
        assert [seen.path for seen in fake.seen] == [
            "/generate",
            "/abort_request",
            "/inference/v1/generate",
        ]
        first, second = fake.generations()
        assert (first.session, second.session) == ("s1", "s2")
        assert (first.ids, first.num_ids, first.outcome) == ([4, 5], 2, "done")
        assert (first.rid, second.rid) == ("a" * 32, "generate-tokens-" + "b" * 32)
        assert fake.seen[1].body == b'{"rid": "%b"}' % (b"a" * 32)

    with_fake(several)


# Aborts and disconnects.


async def abort(session: aiohttp.ClientSession, url: str, wire: str, rid: str) -> None:
    if wire == "sglang":
        await call(session, url, "/abort_request", {"rid": rid})
    else:
        await call(session, url, "/inference/v1/abort_requests", {"request_ids": [rid]})


@all_wires
@both_modes
def test_an_aborted_call_returns_what_was_out(wire: str, stream: bool) -> None:
    async def cut(fake: FakeEngine, session: aiohttp.ClientSession) -> Heard:
        asked = asyncio.ensure_future(ask(session, fake.url, wire, limit=512, stream=stream))
        await asyncio.sleep(0.15)
        await abort(session, fake.url, wire, ABORTED_AS[wire].format("0" * 32))
        heard = await asked
        assert fake.generations()[0].outcome == "aborted"
        assert fake.num_running == 0
        return heard

    heard = with_fake(cut, tokens=LogNormal(400), latency=Latency(per_token_s=0.01))
    assert (heard.status, heard.finish) == (200, "abort")
    assert 1 <= len(heard.ids) <= 100  # ten milliseconds each, on a machine that may be busy
    assert heard.completion_tokens == len(heard.ids) == len(heard.log_probs or ())
    assert (
        heard.ids
        == heard_from(wire, limit=512, options={"tokens": LogNormal(400)}).ids[: len(heard.ids)]
    )


@all_wires
def test_an_abort_of_another_id_does_nothing(wire: str) -> None:
    async def miss(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(session, fake.url, wire, rid="r" * 32))
        await until(lambda: fake.num_running)
        wrong = "r" * 31 if wire == "sglang" else "r" * 32
        await abort(session, fake.url, wire, wrong)
        await asyncio.sleep(0.05)
        assert fake.num_running == 1
        await abort(session, fake.url, wire, ABORTED_AS[wire].format("r" * 32))
        assert (await asked).finish == "abort"

    with_fake(miss, latency=SLOW)


def test_sglang_aborts_every_id_that_a_known_one_is_a_prefix_of() -> None:
    async def prefix(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = [
            asyncio.ensure_future(ask(session, fake.url, "sglang", rid=rid))
            for rid in ("r1", "r10", "r2")
        ]
        await until(lambda: fake.num_running == 3)
        await abort(session, fake.url, "sglang", "r1")
        assert [(await asked[i]).finish for i in (0, 1)] == ["abort", "abort"]
        assert fake.num_running == 1
        await call(session, fake.url, "/abort_request", {"abort_all": True})
        await asked[2]

    with_fake(prefix, latency=SLOW)


def test_vllm_aborts_all_when_no_id_is_given() -> None:
    async def all_of_them(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = [
            asyncio.ensure_future(ask(session, fake.url, wire))
            for wire in ("generate", "completions")
        ]
        await until(lambda: fake.num_running == 2)
        said = await call(session, fake.url, "/abort_requests", {"request_ids": []})
        assert said == {"status": "aborted", "aborted": 2}
        assert [(await heard).finish for heard in asked] == ["abort", "abort"]

    with_fake(all_of_them, latency=SLOW)


@all_wires
@both_modes
def test_work_ends_when_the_client_goes_away(wire: str, stream: bool) -> None:
    async def leave(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(session, fake.url, wire, stream=stream))
        await until(lambda: fake.num_running)
        assert "num_requests_running{" in await call(session, fake.url, "/metrics", method="GET")
        asked.cancel()
        await until(lambda: not fake.num_running)
        metrics = await call(session, fake.url, "/metrics", method="GET")
        assert re.search(r"vllm:num_requests_running\{.*\} 0\.0", metrics)
        assert fake.generations()[0].outcome == "disconnected"

    with_fake(leave, latency=SLOW)


# Pauses and weights.


PAUSES = {
    "sglang retract": ("/pause_generation", {"mode": "retract"}, "/continue_generation"),
    "sglang in_place": ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
    "sglang sleep": ("/release_memory_occupation", {}, "/resume_memory_occupation"),
    "vllm keep": ("/pause?mode=keep", None, "/resume"),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_what_is_frozen_goes_on_afterwards(pause: str) -> None:
    stop, content, go_on = PAUSES[pause]

    async def freeze(fake: FakeEngine, session: aiohttp.ClientSession) -> Heard:
        asked = asyncio.ensure_future(ask(session, fake.url, "sglang", rid="a" * 32))
        await until(lambda: fake.num_running)
        await call(session, fake.url, stop, content)
        later = asyncio.ensure_future(ask(session, fake.url, "generate", rid="b" * 32))
        assert (await call(session, fake.url, "/is_paused", method="GET"))["is_paused"]
        await asyncio.sleep(0.3)
        assert not asked.done()
        assert not later.done()
        await call(session, fake.url, go_on, {})
        assert (await later).finish == "length"
        return await asked

    heard = with_fake(freeze, latency=Latency(total_s=LogNormal(0.1)))
    assert heard.ids == heard_from("sglang").ids


@pytest.mark.parametrize(
    ("stop", "content", "go_on"),
    [
        ("/pause_generation", {}, "/continue_generation"),
        ("/pause", None, "/resume"),
        ("/sleep?level=1", None, "/wake_up"),
    ],
)
def test_a_pause_aborts_what_runs_and_queues_what_comes(
    stop: str, content: Any, go_on: str
) -> None:
    async def pause(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(session, fake.url, "completions"))
        await until(lambda: fake.num_running)
        await call(session, fake.url, stop, content)
        assert (await asked).finish == "abort"
        later = asyncio.ensure_future(ask(session, fake.url, "completions", rid="late"))
        await until(lambda: len(fake.generations()) == 2)
        assert fake.num_running == 0
        assert (await call(session, fake.url, "/is_sleeping", method="GET"))["is_sleeping"]
        await call(session, fake.url, go_on, {})
        await until(lambda: fake.num_running)
        await abort(session, fake.url, "completions", "cmpl-late-0")
        await later

    with_fake(pause, latency=SLOW)


def test_vllm_can_wait_for_what_runs() -> None:
    async def wait(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(session, fake.url, "generate"))
        await until(lambda: fake.num_running)
        assert await call(session, fake.url, "/pause?mode=wait") == {"status": "paused"}
        assert fake.num_running == 0
        assert (await asked).finish == "length"

    with_fake(wait, latency=Latency(total_s=LogNormal(0.2)))


@both_modes
def test_an_abort_in_the_queue_has_the_shape_that_sglang_gives_it(stream: bool) -> None:
    async def queued(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        await call(session, fake.url, "/pause_generation", {"mode": "abort"})
        asked = asyncio.ensure_future(ask(session, fake.url, "sglang", stream=stream))
        await until(lambda: fake.generations())
        await abort(session, fake.url, "sglang", "0" * 32)
        return await asked

    heard = with_fake(queued)
    assert (heard.finish, heard.ids, heard.prompt_tokens) == ("abort", [], None)
    assert "Abort in waiting queue" in heard.text


def test_new_weights_in_mid_reply_make_two_runs() -> None:
    async def update(fake: FakeEngine, session: aiohttp.ClientSession) -> list[Heard]:
        asked = [
            asyncio.ensure_future(ask(session, fake.url, wire, rid=wire))
            for wire in ("sglang", "generate")
        ]
        await asyncio.sleep(0.15)
        said = await call(
            session,
            fake.url,
            "/update_weight_version",
            {"new_version": "v2", "abort_all_requests": False},
        )
        assert said["new_version"] == "v2"
        assert (await call(session, fake.url, "/weight_info", method="GET")) == {
            "weight_version": "v2"
        }
        return [await heard for heard in asked]

    for heard in with_fake(update, latency=Latency(per_token_s=0.01), weight_version="v1"):
        assert [version for version, _ in heard.versions] == ["v1", "v2"]
        assert sum(count for _, count in heard.versions) == len(heard.ids) == 32


def test_sglang_aborts_at_new_weights_unless_told_otherwise() -> None:
    async def update(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        asked = [
            asyncio.ensure_future(ask(session, fake.url, wire, rid=wire))
            for wire in ("sglang", "generate")
        ]
        await until(lambda: fake.num_running == 2)
        await call(session, fake.url, "/update_weight_version", {"new_version": "2"})
        assert (await asked[0]).finish == "abort"
        assert fake.num_running == 1
        asked[1].cancel()

    with_fake(update, latency=SLOW)


def test_the_routes_of_health_and_load_answer() -> None:
    async def look(fake: FakeEngine, session: aiohttp.ClientSession) -> None:
        async def get(path: str) -> Any:
            return await call(session, fake.url, path, method="GET")

        assert await get("/health") == await get("/health_generate") == ""
        assert (await get("/model_info"))["weight_version"] == "default"
        assert (await get("/server_info"))["version"] == "0.5.23"
        asked = asyncio.ensure_future(ask(session, fake.url, "sglang"))
        await until(lambda: fake.num_running)
        assert (await get("/v1/loads"))["loads"][0]["num_running_reqs"] == 1
        async with session.get(fake.url + "/flush_cache") as response:
            assert response.status == 400, "it is busy"
        asked.cancel()
        await until(lambda: not fake.num_running)
        assert "flushed" in await get("/flush_cache")
        assert (await get("/v1/models"))["data"][0]["id"] == "fake"

    with_fake(look, latency=SLOW)


# A router.


@both_modes
def test_a_router_sends_each_key_to_one_worker(stream: bool) -> None:
    async def route() -> None:
        async with FakeEngine() as one, FakeEngine() as other, client() as session:
            async with FakeRouter([one.url, other.url]) as router:
                keys = [f"s{i}" for i in range(12)] * 2
                for key in keys:
                    heard = await ask(session, router.url, "sglang", session_id=key, stream=stream)
                    assert len(heard.ids) == 32
                seen = [{s.session for s in fake.seen} for fake in (one, other)]
                assert seen[0] | seen[1] == set(keys)
                assert not seen[0] & seen[1]
                assert len(one.seen) + len(other.seen) == 24
                known = await call(session, router.url, "/workers", method="GET")
                assert [worker["url"] for worker in known["workers"]] == [one.url, other.url]
            async with FakeRouter([one.url], old=True) as router:
                known = await call(session, router.url, "/list_workers", method="GET")
                assert known == {"urls": [one.url]}

    asyncio.run(route())


def test_a_router_passes_on_that_the_client_left_and_that_a_worker_is_gone() -> None:
    async def leave() -> None:
        async with (
            FakeEngine(latency=SLOW) as fake,
            FakeRouter([fake.url]) as router,
            client() as session,
        ):
            asked = asyncio.ensure_future(ask(session, router.url, "sglang"))
            await until(lambda: fake.num_running)
            asked.cancel()
            await until(lambda: not fake.num_running)
            await fake.stop()
            assert (await ask(session, router.url, "sglang")).status == 503

    asyncio.run(leave())


# Refusals.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"script": ["text"]}, "need a tokenizer"),
        ({"tool_turns": 1}, "need a tokenizer"),
        ({"script": []}, "one turn or more"),
        ({"vocab_size": 2}, "2 ids or more"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FakeEngine(**options)


def test_nonsense_values_are_refused() -> None:
    for make in (
        lambda: LogNormal(-1.0),
        lambda: LogNormal(float("nan")),
        lambda: Latency(per_token_s=-1),
        lambda: Latency(chunk_tokens=0),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()


# A script and a plan of turns.


def test_a_script_of_ids_needs_no_tokenizer() -> None:
    heard = heard_from("sglang", options={"script": [[7, 8, 9]], "vocab_size": 100})
    assert heard.ids == [7, 8, 9]
    assert heard.finish == "length"
    assert all(value < 0 for value in heard.log_probs or [0])


def test_it_stops_at_the_stop_ids_that_were_asked_for() -> None:
    async def stop(fake: FakeEngine, session: aiohttp.ClientSession) -> Any:
        content = body("sglang")
        content["sampling_params"]["stop_token_ids"] = [8]
        vllm = body("generate")
        vllm["sampling_params"]["stop_token_ids"] = [8]
        return (
            await call(session, fake.url, "/generate", content),
            await call(session, fake.url, "/inference/v1/generate", vllm),
        )

    sglang, vllm = with_fake(stop, script=[[7, 8, 9]], vocab_size=100)
    assert sglang["output_ids"] == vllm["choices"][0]["token_ids"] == [7, 8]
    assert sglang["meta_info"]["finish_reason"] == {"type": "stop", "matched": 8}
    assert vllm["choices"][0]["stop_reason"] == 8


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    program = (
        "import typer\nfrom fsm_rollout.testing.command import fake_engine\ntyper.run(fake_engine)"
    )
    options = ["--seed", "0", "--log-prob-kind", "processed", "--tokens-mean", "5"]
    command = [sys.executable, "-W", "error", "-c", program, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]

        async def once() -> None:
            async with client() as session:
                assert len((await ask(session, url, "sglang")).ids) == 5

        asyncio.run(once())
        server.send_signal(signal.SIGTERM)
        assert server.wait(40) == 0

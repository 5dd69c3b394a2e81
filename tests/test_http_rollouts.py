"""Whole rollouts over real HTTP: Rollout, an engine, and a fake server that fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from fsm_rollout import Limits, Rollout, SamplingParams
from fsm_rollout.engines.http import HttpEngine
from fsm_rollout.engines.scripted import Reply, ScriptedEngine
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.engines.vllm import VLLMEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Group, Request
from fsm_rollout.sample import Sample
from fsm_rollout.testing.fake_engine import FakeEngine, Rule, faults
from tests.playing import CALL, TOKENIZER, Echo

SCRIPT = [f"Let me see. {CALL}", f"Once more. {CALL}", "It says hi."]
ROUTES = ("sglang", "generate", "completions")
MODES = [
    *((route, stream) for route in ROUTES for stream in (False, True)),
    ("sglang incremental", True),
]
QUICK = HttpSettings(connect_timeout_s=5, timeout_s=2, idle_timeout_s=0.7, max_tries=2)
LIMITS = Limits(max_context=4_000, max_new_tokens=200, turn_timeout_s=10, max_attempts=2)


def engine_for(
    route: str, urls: str | Sequence[str], *, stream: bool = False, **options: Any
) -> HttpEngine:
    options = {"settings": QUICK, **options}
    if route.startswith("sglang"):
        return SGLangEngine(urls, stream=stream, **options)
    return VLLMEngine(urls, route=route, stream=stream, **options)  # type: ignore[arg-type]


def rollout_for(engine: Any, **options: Any) -> Rollout:
    return Rollout(engine, TOKENIZER, tools=[Echo], limits=LIMITS, **options)


async def play(
    route: str,
    *rules: Rule,
    stream: bool = False,
    rows: int = 1,
    fake: FakeEngine | None = None,
    **options: Any,
) -> tuple[list[Request], FakeEngine, HttpEngine]:
    """The requests of a run against one fake server, and what was seen on both sides."""
    fake = fake or FakeEngine(
        SCRIPT, tokenizer=TOKENIZER, faults=rules, incremental="incremental" in route
    )
    async with fake:
        engine = engine_for(route, fake.url, stream=stream)
        try:
            groups = await rollout_for(engine, **options).generate(["Say hi."] * rows)
        finally:
            await engine.close()
        await settled(fake)
    return [request for group in groups for request in group.requests], fake, engine


async def settled(fake: FakeEngine) -> None:
    """Nothing of what is over keeps the server at work."""
    await until(lambda: not fake.num_running)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(5_000):
        if is_so():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come to that")


def shown(sample: Sample) -> dict[str, Any]:
    """All that a sample says, without the ids of its run."""
    plain = sample.to_dict()
    for turn in plain["turns"]:
        turn["seconds"] = 0.0
    return plain | {"session_id": "", "non_generation_time": 0.0}


def sound(requests: Sequence[Request]) -> None:
    for request in requests:
        assert request.is_done
        assert request.is_sealed
        for sample in request.samples:
            assert violations(sample, at_rest=True) == [] or request.status is Status.ABORTED


def test_every_route_streaming_or_not_and_the_scripted_engine_give_equal_samples() -> None:
    async def main() -> dict[Any, Sample]:
        found = {}
        for route, stream in MODES:
            [request], _, _ = await play(route, stream=stream)
            found[route, stream] = request.sample
        sample = found["sglang", False]
        replies = [
            Reply(
                sample.columns.response_ids(turn.start, turn.stop),
                sample.rollout_log_probs[turn.start : turn.stop],  # type: ignore[index]
                weight_version=turn.weight_versions[0][0],
            )
            for turn in sample.turns
            if turn.kind == "model"
        ]
        [group] = await rollout_for(ScriptedEngine(replies)).generate(["Say hi."])
        return {**found, ("scripted", False): group.samples[0]}

    samples = asyncio.run(main())
    first = samples["sglang", False]
    assert first.status is Status.COMPLETED
    assert [turn.kind for turn in first.turns] == ["model", "observation"] * 2 + ["model"]
    assert first.weight_versions == [("default", first.columns.num_sampled)]
    for mode, sample in samples.items():
        if mode[0] == "completions":  # says nothing about weights
            assert sample.weight_versions == [(None, first.columns.num_sampled)]
            for turn in sample.turns:
                turn.weight_versions = [("default", n) for _, n in turn.weight_versions]
        assert shown(sample) == shown(first), mode


TRANSPORT = [
    faults.Status(status=500),
    faults.Status(status=502, body="<html>"),
    faults.Status(status=429, retry_after_s=0.1),
    faults.Status(status=408),
    faults.Stall(after_bytes=-1),
    faults.Stall(after_bytes=40),
    faults.Reset(after_bytes=-1),
    faults.Reset(after_bytes=0),
    faults.Reset(after_bytes=60),
    faults.Reset(after_bytes=60, politely=True),
    faults.Garbage(),
    faults.Truncated(),
    faults.ErrorEvent(),
    faults.MissingEnd(),
    faults.MissingEnd(done=True),
]
"""the engine tries again: the loop never hears of it"""
CONTENT: dict[Any, StopReason] = {
    faults.MissingLogProbs(): StopReason.MISSING_LOG_PROBS,
    faults.LogProbCount(by=-1): StopReason.BAD_REPLY,
    faults.LogProbCount(by=2): StopReason.BAD_REPLY,
    **{
        faults.LogProbValue(value=value): StopReason.BAD_REPLY
        for value in (0.5, -9999.0, "nan", "inf", "-inf", "null")
    },
    faults.LogProbIds(): StopReason.BAD_REPLY,
    faults.OutOfVocabulary(): StopReason.BAD_REPLY,
    faults.OutOfVocabulary(id=-1): StopReason.BAD_REPLY,
    faults.OutOfVocabulary(id=2**40): StopReason.BAD_REPLY,
    faults.TooManyTokens(): StopReason.BAD_REPLY,
    faults.PromptCount(): StopReason.BAD_REPLY,
    faults.CompletionCount(): StopReason.BAD_REPLY,
    faults.CompletionCount(by=-1): StopReason.BAD_REPLY,
    faults.FinishReason(): StopReason.BAD_REPLY,
    faults.Abort(): StopReason.ENGINE_ABORT,
}
"""an answer that is no data: tried again by the engine, or by the loop, from scratch"""


@pytest.mark.parametrize(("route", "stream"), MODES)
def test_a_fault_of_one_reply_leaves_no_trace_in_the_sample(route: str, stream: bool) -> None:
    """R5, for every fault: whatever the second reply was, the sample is that of a run without."""

    async def main() -> tuple[Sample, dict[Any, tuple[Request, FakeEngine]]]:
        [plain], _, _ = await play(route, stream=stream)
        spoiled = [*TRANSPORT, *CONTENT, faults.Late(seconds=0.1), faults.Delay(seconds=0.1)]
        runs = await asyncio.gather(
            *(play(route, Rule(fault=fault, nth=2), stream=stream) for fault in spoiled)
        )
        return plain.sample, {
            fault: (requests[0], fake)
            for fault, (requests, fake, _) in zip(spoiled, runs, strict=True)
        }

    plain, runs = asyncio.run(main())
    for fault, (request, fake) in runs.items():
        assert request.status is Status.COMPLETED, (fault, request.error)
        assert request.attempt == 1 or fault in CONTENT, (fault, request.error)
        assert shown(request.sample) == shown(plain), fault
        rids = [seen.rid for seen in fake.generations()]
        assert len(set(rids)) == len(rids), fault


@pytest.mark.parametrize(("route", "stream"), MODES)
def test_a_fault_of_every_reply_ends_the_request_with_its_reason(route: str, stream: bool) -> None:
    async def main() -> dict[Any, tuple[Request, HttpEngine]]:
        runs = await asyncio.gather(
            *(play(route, Rule(fault=fault), stream=stream) for fault in CONTENT)
        )
        return {
            fault: (requests[0], engine)
            for fault, (requests, _, engine) in zip(CONTENT, runs, strict=True)
        }

    for fault, (request, _) in asyncio.run(main()).items():
        assert (request.status, request.stop_reason) == (Status.ABORTED, CONTENT[fault]), fault
        assert request.attempt == LIMITS.max_attempts, fault
        assert request.error, fault
        if CONTENT[fault] is not StopReason.ENGINE_ABORT:  # which has good tokens
            assert request.sample.response_length == 0, fault


@pytest.mark.parametrize(("route", "stream"), MODES)
def test_an_empty_reply_completes_and_a_change_of_weights_is_recorded(
    route: str, stream: bool
) -> None:
    async def main() -> list[Request]:
        found = []
        for fault in (faults.Empty(), faults.WeightChange(version="new")):
            [request], _, _ = await play(route, Rule(fault=fault, nth=1), stream=stream)
            found.append(request)
        return found

    empty, changed = asyncio.run(main())
    if (route, stream) != ("completions", True):  # where vLLM would send no chunk at all: a fault
        assert (empty.status, empty.sample.response_length) == (Status.COMPLETED, 0)
        assert empty.sample.remove_sample
    versions = [version for version, _ in changed.sample.turns[0].weight_versions]
    assert versions == ([None] if route == "completions" else ["default", "new"])


@pytest.mark.parametrize(("route", "stream"), MODES)
def test_in_a_rain_of_faults_nothing_is_lost_and_all_that_is_kept_is_sound(
    route: str, stream: bool
) -> None:
    rain = [Rule(fault=fault, probability=0.01) for fault in (*TRANSPORT, *CONTENT)]

    async def main() -> list[Request]:
        requests, _, _ = await play(route, *rain, stream=stream, rows=60)
        return requests

    requests = asyncio.run(main())
    sound(requests)
    assert len(requests) == 60
    assert sum(request.status is Status.COMPLETED for request in requests) > 45
    for request in requests:
        assert (request.status is Status.ABORTED) == bool(request.error)


def test_with_two_of_three_servers_dead_every_request_is_served() -> None:
    """R13."""

    async def main() -> tuple[list[Group], HttpEngine, FakeEngine]:
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER) as alive:
            dead = [FakeEngine(SCRIPT, tokenizer=TOKENIZER) for _ in range(2)]
            for fake in dead:  # so that it has a port where nobody listens any more
                await fake.start()
                await fake.stop()
            engine = engine_for("sglang", [dead[0].url, alive.url, dead[1].url])
            try:
                groups = await rollout_for(engine).generate(["Say hi."] * 50)
            finally:
                await engine.close()
            return groups, engine, alive

    groups, engine, alive = asyncio.run(main())
    assert {request.status for group in groups for request in group.requests} == {Status.COMPLETED}
    assert len(alive.generations()) == 150
    assert engine.metrics["breaker_opened"] == 2
    assert engine.metrics["reroutes"] >= 50


def test_a_server_that_dies_in_mid_run_and_comes_back_costs_no_request() -> None:
    async def main() -> tuple[list[Group], list[FakeEngine]]:
        servers = [FakeEngine(SCRIPT, tokenizer=TOKENIZER) for _ in range(2)]
        async with servers[0], servers[1]:
            engine = engine_for("generate", [server.url for server in servers])
            play = asyncio.create_task(rollout_for(engine).generate(["Say hi."] * 150))
            await until(lambda: len(servers[0].generations()) >= 20)
            await servers[0].stop()
            await asyncio.sleep(0.3)
            await servers[0].start()
            groups = await play
            await engine.close()
            return groups, servers

    groups, _ = asyncio.run(main())
    requests = [request for group in groups for request in group.requests]
    sound(requests)
    assert {request.status for request in requests} == {Status.COMPLETED}


def test_closing_the_engine_in_mid_run_ends_every_request() -> None:
    """R14."""

    async def main() -> tuple[list[Group], FakeEngine]:
        slow = [Rule(fault=faults.Delay(seconds=30))]
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER, faults=slow) as fake:
            engine = engine_for("sglang", fake.url, settings=HttpSettings(timeout_s=60))
            play = asyncio.create_task(rollout_for(engine).generate(["Say hi."] * 30))
            await until(lambda: fake.num_running == 30)
            await engine.close()
            groups = await play
            await settled(fake)
            return groups, fake

    groups, _ = asyncio.run(main())
    requests = [request for group in groups for request in group.requests]
    sound(requests)
    assert {request.stop_reason for request in requests} == {StopReason.NO_ENGINE}


@pytest.mark.parametrize("route", ROUTES)
def test_log_probs_that_are_not_those_of_the_sampling_stop_the_run_before_it_starts(
    route: str,
) -> None:
    async def main(kind: Any, **params: Any) -> list[Request]:
        fake = FakeEngine(SCRIPT, tokenizer=TOKENIZER, log_prob_kind=kind)
        requests, _, _ = await play(route, fake=fake, params=SamplingParams(**params))
        return requests

    for kind, params, remedy in (
        ("raw", {"temperature": 0.6}, "processed_logprobs"),
        ("processed", {"top_p": 0.9}, "top_p 1"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            asyncio.run(main(kind, **params))
    for kind, params in (
        ("raw", {"temperature": 1.0}),
        ("processed", {"temperature": 0.6}),
        ("scaled", {"temperature": 0.6, "top_p": 0.9}),
    ):
        [request] = asyncio.run(main(kind, **params))
        assert request.status is Status.COMPLETED, request.error
        assert {turn.log_prob_kind for turn in request.sample.turns[::2]} == {"scaled"}


@pytest.mark.parametrize("after_a_run", [False, True])
def test_no_run_starts_with_a_closed_engine(after_a_run: bool) -> None:
    async def main() -> None:
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER) as fake:
            engine = engine_for("sglang", fake.url)
            rollout = rollout_for(engine)
            if after_a_run:
                await rollout.generate(["Say hi."])
            await engine.close()
            for start in (rollout.generate(["Say hi."]), rollout.run(rollout.request("Say hi."))):
                with pytest.raises(ConfigError, match="SGLangEngine of this rollout was closed"):
                    await start

    asyncio.run(main())

"""TransformersEngine under aborts, cancellation, failing passes, bad requests and shutdown."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import asyncio
import threading
from collections.abc import Callable

from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.engines.batcher import Batcher
from fsm_rollout.engines.ragged import KeyValues
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason
from tests.tiny_llama import (
    CONTEXT,
    NEVER,
    VOCABULARY,
    ask,
    assert_log_probs_are_plain,
    columns,
    ids,
    sampled,
    serve,
    watched,
)


class Held:
    """Once it `is_on`, passes of the model run up to the `last`, which waits to be let go."""

    def __init__(self, last: int) -> None:
        self.last, self.passes = last, 0
        self.is_on, self.go = False, threading.Event()

    def __call__(self, _: list[int]) -> None:
        self.passes += self.is_on
        if self.passes == self.last:
            self.go.wait(100)

    async def reached(self) -> None:
        await until(lambda: self.passes >= self.last)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another thread makes it true
        await asyncio.sleep(0.001)


def test_an_abort_returns_the_tokens_so_far_and_frees_the_place() -> None:
    prompt = ids(7, 10)
    full = serve(lambda engine: ask(engine, prompt, 100, seed=3, **NEVER))

    async def use(engine: TransformersEngine) -> tuple[Generation, Generation]:
        held.is_on = True
        running = asyncio.create_task(ask(engine, prompt, 100, request="a", seed=3, **NEVER))
        waiting = asyncio.create_task(ask(engine, ids(8, 5), 3, request="b", **NEVER))
        await held.reached()
        assert not waiting.done()
        await engine.abort("a")
        await engine.abort("unknown")
        held.go.set()
        return await running, await waiting

    held = Held(5)  # a pass for each token
    with watched(held):
        partial, other = serve(use, max_batch=1)
    count = len(partial.token_ids)
    assert 0 < count <= held.last
    assert partial.finish == "abort"
    assert sampled(partial) == sampled(full)[:count]
    assert_log_probs_are_plain(prompt, partial)
    assert (len(other.token_ids), other.finish) == (3, "length")


def test_an_abort_while_waiting_returns_no_token() -> None:
    async def use(engine: TransformersEngine) -> Generation:
        running = asyncio.create_task(ask(engine, ids(7, 10), 30, request="a", **NEVER))
        waiting = asyncio.create_task(ask(engine, ids(8, 5), 30, request="b", **NEVER))
        await asyncio.sleep(0)
        await engine.abort("b")
        reply = await waiting
        await running
        return reply

    reply = serve(use, max_batch=1)
    assert (sampled(reply), reply.finish) == ([], "abort")


def test_cancelling_the_task_ends_the_work() -> None:
    async def use(engine: TransformersEngine) -> None:
        held.is_on = True
        task = asyncio.create_task(ask(engine, ids(9, 10), 100, **NEVER))
        await held.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.go.set()
        await ask(engine, ids(10, 5), 1, request="other")  # in a batch of one: the place is free
        count = held.passes
        await asyncio.sleep(0.05)
        assert held.passes == count < 100

    held = Held(3)
    with watched(held):
        serve(use, max_batch=1)


def test_the_event_loop_never_waits_for_torch() -> None:
    entered, released = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold(_: list[int]) -> None:
        entered.set()
        in_time.append(released.wait(100))

    async def use(engine: TransformersEngine) -> None:
        with watched(hold):
            task = asyncio.create_task(ask(engine, ids(9, 10), 1))
            await until(entered.is_set)  # the pass is under way, and the loop still runs
            released.set()
            await task

    serve(use)
    assert in_time == [True]


def test_closing_fails_what_is_pending_and_refuses_what_comes() -> None:
    async def use(engine: TransformersEngine) -> None:
        asked = (ask(engine, ids(i, 10), 100, request=f"{i}", **NEVER) for i in range(3))
        tasks = [asyncio.create_task(request) for request in asked]
        held.is_on = True
        await held.reached()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        held.go.set()
        await closing
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="was closed") as caught:
                await task
            assert caught.value.reason is StopReason.NO_ENGINE
        with pytest.raises(EngineError, match="is closed"):
            await ask(engine, ids(0, 5))

    held = Held(3)
    with watched(held):
        serve(use, max_batch=2)


def test_a_forward_that_fails_fails_the_guilty_request_only() -> None:
    poison = 9

    def explode(tokens: list[int]) -> None:
        if poison in tokens:
            raise RuntimeError("out of memory")

    async def use(engine: TransformersEngine) -> list[Generation | BaseException]:
        prompts = [ids(0, 10), [*ids(1, 10), poison], ids(2, 10)]
        asked = (ask(engine, p, 9, request=f"{i}", top_k=1, **NEVER) for i, p in enumerate(prompts))
        replies = await asyncio.gather(*asked, return_exceptions=True)
        return [*replies, await ask(engine, ids(3, 10), 5, **NEVER)]

    with watched(explode):
        first, guilty, third, later = serve(use)
    assert isinstance(guilty, EngineError)
    assert "request 1: the model failed on 11 tokens (RuntimeError: out of memory)" in str(guilty)
    assert (guilty.reason, guilty.final) == (StopReason.ENGINE_ERROR, False)
    for prompt, reply in ((ids(0, 10), first), (ids(2, 10), third), (ids(3, 10), later)):
        assert isinstance(reply, Generation)
        assert_log_probs_are_plain(prompt, reply)


@pytest.mark.parametrize(("owner", "method"), [(KeyValues, "fork"), (Batcher, "step")])
def test_a_failure_outside_of_the_forward_fails_who_runs_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no room")

    async def use(engine: TransformersEngine) -> Generation:
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            asked = (ask(engine, ids(i, 5), request=f"{i}") for i in range(3))
            for reply in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(reply, EngineError)
                assert "no room" in str(reply)
                assert reply.reason is StopReason.ENGINE_ERROR
        return await ask(engine, ids(0, 5))

    assert_log_probs_are_plain(ids(0, 5), serve(use))


def test_a_failure_of_what_a_caller_wants_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("its weights are elsewhere")

    async def use(engine: TransformersEngine) -> Generation:
        with monkeypatch.context() as patch:
            patch.setattr(Batcher, "abort", fail)
            patch.setattr(Batcher, "forget", fail)
            await engine.abort("0")
            engine.forget()
            while not engine._inbox.empty() and engine._thread.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await asyncio.wait_for(ask(engine, ids(0, 5)), 30)

    assert_log_probs_are_plain(ids(0, 5), serve(use))


@pytest.mark.parametrize(
    ("prompt", "budget", "reason", "says"),
    [
        ([], 5, StopReason.ENGINE_ERROR, "0 prompt tokens"),
        ([5], 0, StopReason.ENGINE_ERROR, "max_new_tokens=0"),
        ([5, VOCABULARY], 5, StopReason.ENGINE_ERROR, "own tokenizer"),
        ([5] * CONTEXT, 5, StopReason.MAX_CONTEXT, "Limits.max_context"),
    ],
)
def test_a_request_that_cannot_run_is_refused_for_good(
    prompt: list[int], budget: int, reason: StopReason, says: str
) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        serve(lambda engine: ask(engine, prompt, budget))
    assert (caught.value.reason, caught.value.final) == (reason, True)


def test_media_is_refused() -> None:
    async def use(engine: TransformersEngine) -> None:
        who = {"request_id": "r", "session_id": "r"}
        await engine.generate(columns([5]), 1, SamplingParams(), **who, media=[b"image"])

    with pytest.raises(EngineError, match="text only"):
        serve(use)

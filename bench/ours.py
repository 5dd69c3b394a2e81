"""Ours: the real loop with engine, codec, parser, tool session, guards and record, as by default.

Only with `PreEncoded` do the ids of an observation come from a cache, as the bare loop's do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.conversation import Conversation
from bench.peers import cpu_seconds
from fsm_rollout.codec import Codec
from fsm_rollout.columns import Columns, Prompt
from fsm_rollout.engines.base import Engine, Generation, SamplingParams, checked
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import Tool

LIMITS = Limits(max_context=1_000_000)
PARAMS = SamplingParams(temperature=1.0)


class PreEncoded(Codec):
    """A codec that has encoded every observation before: `delta` is a look-up."""

    def delta(
        self,
        last_id: int | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        room: int | None = None,
    ) -> list[int]:
        cache: dict[Any, list[int]] = self.__dict__.setdefault("_cache", {})
        key = last_id, *(message["content"] for message in messages)
        if key not in cache:
            cache[key] = super().delta(last_id, messages, room=room)
        return cache[key]


class InProcess:
    """An engine without I/O: verl's is measured with one like it."""

    def __init__(self, played: Conversation) -> None:
        self._sampled = played.sampled
        self._turns: Counter[str] = Counter()

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        replies = self._sampled[self._turns[session_id]]
        self._turns[session_id] += 1
        await asyncio.sleep(0)
        ids = list(replies[hash(session_id) % len(replies)])
        return checked(ids, [-0.5] * len(ids), "stop", max_new_tokens=max_new_tokens)

    async def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing is open."""


def toolset(observation: str, count: int = 1) -> list[type[Tool]]:
    """`count` tools that answer every call with `observation`; the model calls the first."""
    return [_tool(f"search_{i}" if i else "search", observation) for i in range(count)]


def _tool(called: str, observation: str) -> type[Tool]:
    class Search(Tool):
        """Search the corpus for passages relevant to a query and return the best ones."""

        name = called

        async def execute(self, query: str, language: str = "en", limit: int = 10) -> str:
            """
            query: what to look for, in a few words or a whole sentence of usual length
            language: the language of the passages that are wanted, as a code of two letters
            limit: how many passages to return at most, the best ones first
            """
            return observation

    return Search


async def ours(
    url: str, played: Conversation, codec: Codec, tools: Sequence[type[Tool]], count: int
) -> float:
    """CPU seconds of `count` conversations at once over HTTP."""
    engine = SGLangEngine(url, vocab_size=codec.vocab_size)
    return await _play(engine, played, codec, tools, count)


async def ours_without_io(
    played: Conversation, codec: Codec, tools: Sequence[type[Tool]], count: int
) -> float:
    """CPU seconds of `count` conversations at once with an engine in this process."""
    return await _play(InProcess(played), played, codec, tools, count)


async def _play(
    engine: Engine, played: Conversation, codec: Codec, tools: Sequence[type[Tool]], count: int
) -> float:
    rollout = Rollout(
        engine, codec=codec, tools=tools, limits=LIMITS, params=PARAMS, max_concurrent=count
    )
    requests: list[Request] = []
    prompt = Prompt(played.prompt)  # once per group, as `Rollout.generate` does it

    async def play() -> None:
        request = Request(prompt_ids=prompt, index=len(requests), limits=LIMITS)
        requests.append(request)
        await rollout.run(request)

    try:
        await play()  # warm
        _check(requests[0], len(played.sampled))
        seconds = await cpu_seconds([play] * count)
    finally:
        await engine.close()
    for request in requests:
        _check(request, len(played.sampled))
    if found := violations(requests[-1].sample):
        raise RuntimeError(f"the last sample is unsound: {found}")
    return seconds


def _check(request: Request, turns: int) -> None:
    if request.status is not Status.COMPLETED or request.num_turns != turns:
        raise RuntimeError(
            f"request {request.index} is {request.status} ({request.stop_reason}) after "
            f"{request.num_turns} turns: {request.error}"
        )

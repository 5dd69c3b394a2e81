"""Peers: what bench/turn.py compares with: a bare aiohttp loop, the floor, and the httpx pattern.

Both send the same bytes to the same server as we do, keep ids and log-probs, and check that there
is a finite log-prob for every id. The floor encodes each id once, decodes replies into typed values
and keeps arrays; a turn moves a request through a dict of states. The httpx pattern is that of
slime and miles: lists, the whole prompt through `json=` in every turn, `json.loads` of the reply.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import aiohttp
import httpx
import msgspec

from bench.conversation import Conversation

Observe: TypeAlias = Callable[[], list[int]]
"""the ids of an observation, from its text or from a cache"""
Post: TypeAlias = Callable[[bytes], Awaitable[bytes]]

_NEXT = {
    ("pending", "generate"): "generating",
    ("generating", "observe"): "tool_calling",
    ("tool_calling", "generate"): "generating",
    ("generating", "complete"): "completed",
}


class _Meta(msgspec.Struct, gc=False):
    finish_reason: dict[str, Any]
    output_token_logprobs: list[tuple[float, int, None]]
    prompt_tokens: int
    weight_version: str = ""


class _Reply(msgspec.Struct, gc=False):
    text: str
    meta_info: _Meta


_reply = msgspec.json.Decoder(_Reply).decode


class Observed(NamedTuple):
    """An observation, ready to be appended by the floor."""

    ids: array[int]
    encoded: bytes
    """with a comma in front"""

    @classmethod
    def of(cls, ids: list[int]) -> Observed:
        return cls(array("i", ids), b"," + msgspec.json.encode(ids)[1:-1])


class _State:
    """A request of the floor."""

    __slots__ = ("encoded", "ids", "log_probs", "mask", "prompt_length", "status")

    def __init__(self, prompt: array[int], encoded: bytes) -> None:
        self.status = "pending"
        self.ids, self.prompt_length = prompt[:], len(prompt)
        self.log_probs = array("f")
        self.mask = bytearray()
        self.encoded = bytearray(encoded)

    def fire(self, event: str) -> None:
        new = len(self.ids) - self.prompt_length
        if not new == len(self.log_probs) == len(self.mask):
            raise ValueError(f"{new} ids, {len(self.log_probs)} log-probs, {len(self.mask)} masks")
        self.status = _NEXT[self.status, event]

    def append(self, ids: list[int], log_probs: list[float]) -> None:
        self.ids.fromlist(ids)
        self.log_probs.fromlist(log_probs)
        self.mask += b"\1" * len(ids)
        self.encoded += b","
        self.encoded += memoryview(msgspec.json.encode(ids))[1:-1]

    def observe(self, observed: Observed) -> None:
        self.ids.extend(observed.ids)
        self.log_probs.frombytes(bytes(4 * len(observed.ids)))
        self.mask += bytes(len(observed.ids))
        self.encoded += observed.encoded


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body around its ids."""

    head: bytes
    tail: bytes


async def floor(
    url: str, played: Conversation, body: Body, observe: Callable[[], Observed], count: int
) -> float:
    """CPU seconds of `count` conversations at once over bare aiohttp."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    jar = aiohttp.DummyCookieJar()
    headers = {"content-type": "application/json"}
    prompt = array("i", played.prompt)
    encoded = msgspec.json.encode(played.prompt)[1:-1]

    async def play(post: Post) -> None:
        state = _State(prompt, encoded)
        state.fire("generate")
        while True:
            reply = _reply(await post(b"".join((body.head, state.encoded, body.tail))))
            pairs = reply.meta_info.output_token_logprobs
            ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            if not math.isfinite(sum(log_probs)):
                raise ValueError("a log-prob is not finite")
            state.append(ids, log_probs)
            if reply.text.find("<tool_call>") < 0:
                state.fire("complete")
                break
            state.fire("observe")
            state.observe(observe())
            state.fire("generate")

    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
    ) as session:

        async def post(data: bytes) -> bytes:
            async with session.post(f"{url}/generate", data=data, headers=headers) as reply:
                return await reply.read()

        await play(post)  # warm
        return await cpu_seconds([lambda: play(post)] * count)


async def httpx_pattern(
    url: str, played: Conversation, body: Body, observe: Observe, count: int
) -> float:
    """CPU seconds of `count` conversations at once over httpx, lists and whole-prompt JSON."""
    limits = httpx.Limits(max_connections=count)
    rest: dict[str, Any] = json.loads(body.head + body.tail)

    async def play(client: httpx.AsyncClient) -> None:
        ids, log_probs, mask = list(played.prompt), list[float](), list[int]()
        while True:
            payload = {**rest, "input_ids": ids}
            reply = await client.post(f"{url}/generate", json=payload)
            reply.raise_for_status()
            output = json.loads(reply.content)
            pairs = output["meta_info"]["output_token_logprobs"]
            new = [pair[1] for pair in pairs]
            new_log_probs = [pair[0] for pair in pairs]
            if len(new) != len(new_log_probs) or not math.isfinite(sum(new_log_probs)):
                raise ValueError("log-probs are missing")
            ids, log_probs, mask = ids + new, log_probs + new_log_probs, mask + [1] * len(new)
            if output["text"].find("<tool_call>") < 0:
                break
            new = observe()
            ids, log_probs = ids + new, log_probs + [0.0] * len(new)
            mask = mask + [0] * len(new)

    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        await play(client)  # warm
        return await cpu_seconds([lambda: play(client)] * count)


async def cpu_seconds(plays: Sequence[Callable[[], Awaitable[object]]]) -> float:
    """CPU time of this process while all of them run at once."""
    started = time.process_time()
    await asyncio.gather(*(play() for play in plays))
    return time.process_time() - started

"""A server on loopback that answers with canned bytes, read by the real engines and loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from fsm_rollout.codec import Codec, ParsedTurn
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import Tool
from fsm_rollout.turn import ToolCall
from tests.dialects import Answer, Dialect, Said

REASONS = {
    "missing_logprobs": StopReason.MISSING_LOG_PROBS,
    "missing_finish_reason": StopReason.BAD_REPLY,
    "unknown_finish_reason": StopReason.BAD_REPLY,
    "length_mismatch": StopReason.BAD_REPLY,
    "missing_tokens": StopReason.BAD_REPLY,
    "missing_token_ids": StopReason.BAD_REPLY,
    "bad_token_id": StopReason.BAD_REPLY,
    "oov_token": StopReason.BAD_REPLY,
    "non_finite_logprob": StopReason.BAD_REPLY,
    "clamped_logprob": StopReason.BAD_REPLY,
    "positive_logprob": StopReason.BAD_REPLY,
    "prompt_drift": StopReason.BAD_REPLY,
    "missing_prompt_ids": StopReason.PROMPT_OVERFLOW,  # we send ids: only an empty prompt has none
    "context_overflow": StopReason.MAX_CONTEXT,
    "repetition": StopReason.REPETITION,
    "server_error": StopReason.ENGINE_ERROR,
    "bad_request": StopReason.ENGINE_ERROR,
    "stream_truncated": StopReason.BAD_REPLY,
}
"""names of the case files → ours"""

CALL = 900
SETTINGS = HttpSettings(max_tries=1)


class IdCodec:
    """A codec whose texts are the ids themselves. Turns that end with CALL call a tool."""

    stop_ids = frozenset({9})
    vocab_size = 1_000

    async def prompt_async(self, messages: Any) -> list[int]:
        return [int(token) for token in str(messages).split()]

    async def delta_async(
        self, last_id: int | None, messages: Any, *, room: int | None = None
    ) -> list[int]:
        return [4] * 7

    async def parse_async(self, ids: list[int], *, finish: str, call_id: str) -> ParsedTurn:
        text = await self.decode_async(ids)
        found = (ToolCall("look", {}, f"{call_id}_0"),) if list(ids[-1:]) == [CALL] else ()
        return ParsedTurn(text, "", text, found)

    async def decode_async(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Look(Tool):
    """Looks."""

    def execute(self) -> str:
        return ""


def request_for(prompt: Sequence[int], **limits: Any) -> Request:
    values = {"max_context": 64, "max_new_tokens": 8, "max_attempts": 1} | limits
    return Request(" ".join(map(str, prompt)), limits=Limits(**values))


async def played(engine: Any, request: Request) -> Request:
    rollout = Rollout(engine, codec=cast(Codec, IdCodec()), tools=[Look])
    try:
        await rollout.loop.run(request)
    finally:
        await engine.close()
    assert not violations(request.sample)
    return request


def play(
    dialect: Dialect, *answers: Answer | Said, prompt: Sequence[int] = (1, 2, 3), **limits: Any
) -> tuple[Request, Server]:
    """One request against a server that gives these answers."""

    async def drive() -> tuple[Request, Server]:
        said = [dialect.answer(a) if isinstance(a, Said) else a for a in answers]
        async with serve(*said) as server:
            stream = dialect.events is not None
            engine = dialect.engine(server.url, stream=stream, settings=SETTINGS, vocab_size=1_000)
            return await played(engine, request_for(prompt, **limits)), server

    return asyncio.run(drive())


def ended(request: Request) -> tuple[list[int], list[float], list[int]]:
    """The response: ids, log-probs, mask."""
    sample = request.sample
    log_probs = sample.rollout_log_probs
    assert log_probs is not None
    ids = sample.columns.response_ids()
    return ids, [round(float(value), 6) for value in log_probs], sample.loss_mask.tolist()


@dataclass
class Server:
    """Answers generations from `answers`, in order, the last one for ever; the rest by `routes`."""

    answers: list[Answer]
    url: str = ""
    routes: dict[str, Answer] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    others: list[tuple[str, str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        value = json.loads(body) if body else None
        if request.path not in ("/generate", "/inference/v1/generate", "/v1/completions"):
            self.others.append((request.method, request.path_qs, value))
            other = self.routes.get(request.path, Answer(b"{}"))
            return web.Response(status=other.status, body=other.body)
        self.asked.append(value)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        kind = "text/event-stream" if answer.is_stream else "application/json"
        return web.Response(status=answer.status, body=answer.body, content_type=kind)


@asynccontextmanager
async def serve(*answers: Answer, routes: dict[str, Answer] | None = None) -> AsyncIterator[Server]:
    """A Server on a free port of loopback."""
    server = Server(list(answers), routes=routes or {})
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()

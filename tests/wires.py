"""A plain client of inference servers for tests: what went over the wire, with no check at all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WIRES = ("sglang", "generate", "completions")
PATHS = {
    "sglang": "/generate",
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
}
ABORTED_AS = {"sglang": "{}", "generate": "generate-tokens-{}", "completions": "cmpl-{}-0"}


@dataclass
class Heard:
    """A reply in common terms; `text` is the body as it came."""

    status: int
    text: str
    ids: list[int] = field(default_factory=list)
    log_probs: list[Any] | None = None
    ids_of_log_probs: list[int] = field(default_factory=list)
    finish: Any = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    versions: list[tuple[str, int]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


def body(
    wire: str,
    ids: Sequence[int] = (1, 2, 3),
    *,
    rid: str = "0" * 32,
    limit: int = 32,
    stream: bool = False,
    log_probs: bool = True,
    **params: Any,
) -> dict[str, Any]:
    """A request; `params` are temperature, top_p, top_k, seed."""
    seed = params.pop("seed", None)
    if wire == "sglang":
        return {
            "input_ids": list(ids),
            "rid": rid,
            "return_logprob": log_probs,
            "stream": stream,
            "sampling_params": {"max_new_tokens": limit, "sampling_seed": seed, **params},
        }
    options = {"include_usage": True} if stream else None
    params |= {"max_tokens": limit, "seed": seed, "logprobs": 1 if log_probs else None}
    common = {"request_id": rid, "stream": stream, "stream_options": options}
    if wire == "generate":
        return {"token_ids": list(ids), "sampling_params": params, **common}
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"prompt": list(ids), **shown, **params, **common}


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def call(
    session: aiohttp.ClientSession, url: str, path: str, content: Any = None, method: str = "POST"
) -> Any:
    """JSON of a control route, or its text when it is none."""
    async with session.request(method, url + path, json=content) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    return json.loads(text) if response.content_type == "application/json" and text else text


async def ask(
    session: aiohttp.ClientSession, url: str, wire: str, *args: Any, **kwargs: Any
) -> Heard:
    """One request to generate, decoded as far as it can be. Errors of the connection are raised."""
    session_id = kwargs.pop("session_id", "")
    headers = {"x-smg-routing-key": session_id, "x-session-id": session_id}
    content = body(wire, *args, **kwargs)
    async with session.post(url + PATHS[wire], json=content, headers=headers) as response:
        text = await response.text()
    heard = Heard(response.status, text)
    if response.status != 200:
        return heard
    if not content["stream"]:
        _hear(wire, heard, json.loads(text), cumulative=True)
        return heard
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            heard.events.append(event)
            _hear(wire, heard, event, cumulative=False)
    return heard


def _hear(wire: str, heard: Heard, said: dict[str, Any], *, cumulative: bool) -> None:
    if "error" in said:
        return
    if wire == "sglang":
        _hear_sglang(heard, said)
        return
    if usage := said.get("usage"):
        heard.completion_tokens = usage["completion_tokens"]
        heard.prompt_tokens = usage["prompt_tokens"]
    for choice in said["choices"]:
        heard.ids += choice["token_ids"] or []
        heard.finish = choice["finish_reason"]
        heard.versions = _spans(choice.get("weight_versions"))
        if choice["logprobs"] is None:
            continue
        pairs = _pairs(choice["logprobs"])
        heard.log_probs = [*(heard.log_probs or ()), *(value for value, _ in pairs)]
        heard.ids_of_log_probs += [token_id for _, token_id in pairs]


def _pairs(log_probs: dict[str, Any]) -> list[tuple[Any, int]]:
    if "content" in log_probs:
        return [(at["logprob"], at["token_id"]) for at in log_probs["content"]]
    ids = [int(token.removeprefix("token_id:")) for token in log_probs["tokens"]]
    return list(zip(log_probs["token_logprobs"], ids, strict=True))


def _hear_sglang(heard: Heard, said: dict[str, Any]) -> None:
    meta = said["meta_info"]
    is_delta = bool(heard.ids) and said["output_ids"][: len(heard.ids)] != heard.ids
    heard.ids = [*heard.ids, *said["output_ids"]] if is_delta else said["output_ids"]
    heard.finish = meta["finish_reason"] and meta["finish_reason"]["type"]
    heard.completion_tokens = meta["completion_tokens"]
    heard.prompt_tokens = meta.get("prompt_tokens")
    heard.versions = _spans(meta["weight_versions"])
    if (triples := meta.get("output_token_logprobs")) is not None:
        before = (heard.log_probs or [], heard.ids_of_log_probs) if is_delta else ([], [])
        heard.log_probs = [*before[0], *(value for value, _, _ in triples)]
        heard.ids_of_log_probs = [*before[1], *(token_id for _, token_id, _ in triples)]


def _spans(spans: list[dict[str, Any]] | None) -> list[tuple[str, int]]:
    return [(span["version"], span["end"] - span["start"]) for span in spans or ()]

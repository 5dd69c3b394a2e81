"""vLLM's OpenAI wire with token ids (0.32): POST /v1/completions.

Ignored in a request: penalties, grammars, stop strings, n, echo. Without a tokenizer the text is
empty and tokens are spelled `token_id:7`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from uuid import uuid4

import msgspec

from fsm_rollout.testing.fake_engine.model import Sampling
from fsm_rollout.testing.fake_engine.reply import Reply
from fsm_rollout.testing.fake_engine.vllm import (
    MODEL,
    VLLM,
    StreamOptions,
    decoded,
    echo,
    running_usage,
    usage,
)
from fsm_rollout.testing.fake_engine.wire import DONE, Asked, encode, text_of


class CompletionRequest(msgspec.Struct):
    """The body of /v1/completions, as far as the fake engine obeys it."""

    prompt: msgspec.Raw = msgspec.Raw()
    request_id: str | None = None
    model: str | None = None
    max_tokens: int | None = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None


_decode = msgspec.json.Decoder(CompletionRequest).decode


class Completions(VLLM):
    """The wire of /v1/completions. The server names a request `cmpl-<id>-0`, shows `cmpl-<id>`."""

    path = "/v1/completions"

    def asked(self, body: bytes, request_id: str | None) -> Asked:
        request, prompt = decoded(body, _decode, "prompt")
        one = 1.0
        return Asked(
            rid=f"cmpl-{request_id or request.request_id or uuid4().hex}-0",
            prompt=prompt,
            sampling=Sampling(
                one if request.temperature is None else request.temperature,
                one if request.top_p is None else request.top_p,
                request.top_k or 0,
                request.min_p or 0.0,
            ),
            limit=request.max_tokens,
            seed=request.seed or 0,
            stop_ids=request.stop_token_ids or (),
            streams=bool(request.stream),
            log_probs=request.logprobs is not None,
            request=request,
        )

    def body(self, asked: Asked, reply: Reply) -> bytes:
        choice = self._choice(asked, reply, 0, len(reply.ids), is_last=True)
        choice |= {"prompt_logprobs": None, "routed_experts": None}
        return encode(
            {
                **_head(reply),
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage(reply, len(reply.ids)),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def event(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> bytes | None:
        if not stop:
            return None  # the server sends no chunk before the first token, not even of an abort
        event = {
            **_head(reply),
            "choices": [self._choice(asked, reply, start, stop, is_last=is_last)],
        }
        if so_far := running_usage(asked, reply, stop):
            event["usage"] = so_far
        return encode(event)

    def ending(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        options = asked.request.stream_options
        if options is not None and options.include_usage:
            yield encode({**_head(reply), "choices": [], "usage": usage(reply, len(reply.ids))})
        yield DONE

    def _choice(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> dict[str, Any]:
        ids, shows_ids = reply.ids[start:stop], asked.request.return_token_ids
        return {
            "index": 0,
            "text": text_of(self._tokenizer, ids),
            "logprobs": self._log_probs(asked, reply, start, stop),
            **self._ended(reply, is_last),
            "prompt_token_ids": echo(reply) if shows_ids and not start else None,
            "token_ids": ids if shows_ids else None,
        }

    def _log_probs(
        self, asked: Asked, reply: Reply, start: int, stop: int
    ) -> dict[str, Any] | None:
        if reply.log_probs is None:
            return None
        count, as_ids = asked.request.logprobs or 0, asked.request.return_tokens_as_token_ids
        positions = list(self._positions(asked, reply, start, stop))
        tokens = [self._spelled(token_id, as_ids) for _, token_id, _ in positions]
        offset = sum(len(self._spelled(token_id, as_ids)) for token_id in reply.ids[:start])
        told, sampling = self._told, asked.sampling
        return {
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[: len(tokens)],
            "token_logprobs": [value for _, _, value in positions],
            "tokens": tokens,
            "top_logprobs": [told(sampling, *at, count, as_ids) for at in positions],
        }

    def _encoded(self, *position: Any) -> msgspec.Raw:
        *ranking, as_ids = position
        ranked = self._ranked(*ranking)[: ranking[-1] + 1]
        return msgspec.Raw(encode({self._spelled(r.token_id, as_ids): r.logprob for r in ranked}))

    def _spelled(self, token_id: int, as_ids: bool | None) -> str:
        if as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return text_of(self._tokenizer, [token_id])


def _head(reply: Reply) -> dict[str, Any]:
    return {
        "id": reply.rid.removesuffix("-0"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
    }

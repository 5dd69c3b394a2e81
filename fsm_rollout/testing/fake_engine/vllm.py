"""vLLM's token-in, token-out wire (0.32): POST /inference/v1/generate; and what completions share.

Ignored in a request: penalties, grammars, stop strings, media.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, repeat
from typing import Any
from uuid import uuid4

import msgspec

from fsm_rollout.testing.fake_engine.model import NUM_STATES, FakeModel, Sampling
from fsm_rollout.testing.fake_engine.prompt import Prompt
from fsm_rollout.testing.fake_engine.reply import Reply
from fsm_rollout.testing.fake_engine.wire import (
    DONE,
    Asked,
    BadRequest,
    encode,
    kept_ids,
)

MODEL = "fake"


class SamplingParams(msgspec.Struct, frozen=True):
    """`sampling_params` of generate, as far as the fake engine obeys them."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of both routes."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateRequest(msgspec.Struct):
    """The body of /inference/v1/generate, as far as the fake engine obeys it."""

    token_ids: msgspec.Raw = msgspec.Raw()
    request_id: str | None = None
    model: str | None = None
    sampling_params: SamplingParams = SamplingParams()
    return_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class LogProb(msgspec.Struct):
    """One candidate of a position."""

    token_id: int
    logprob: Any
    rank: int | None


class Position(LogProb):
    """The sampled token of a position, and the likeliest ones."""

    top_logprobs: list[LogProb]


class VLLM:
    """What both routes share. `sampling_mask` is the server's --return-sampling-mask."""

    path: str
    session_header = "x-session-id"

    def __init__(
        self, model: FakeModel, *, tokenizer: Any, eos_id: int, sampling_mask: bool
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._sampling_mask = sampling_mask
        self._piece = lru_cache(65536)(self._encoded)

    def _encoded(self, *position: Any) -> msgspec.Raw:
        """The JSON of one position, as the route spells it."""
        raise NotImplementedError

    def _told(self, *position: Any) -> msgspec.Raw:
        try:
            return self._piece(*position)
        except TypeError:  # a fault's word in place of a number cannot be hashed
            return self._encoded(*position)

    def too_long(self, asked: Asked, max_context: int) -> str | None:
        room = max_context - asked.prompt.num_ids
        if room < 0:
            return (
                f"This model's maximum context length is {max_context} tokens. However, your "
                f"prompt contains {asked.prompt.num_ids} input tokens, which exceeds this limit "
                "even without any output tokens."
            )
        limit = room if asked.limit is None else min(room, asked.limit)
        return f"max_tokens must be at least 1, got {limit}." if limit < 1 else None

    def error(self, status: int, message: str) -> bytes:
        kind = {400: "BadRequestError", 503: "ServiceUnavailableError"}.get(
            status, "InternalServerError"
        )
        return encode({"error": {"message": message, "type": kind, "param": None, "code": status}})

    def error_event(self, status: int, message: str) -> bytes:
        return self.error(status, message)

    def _ended(self, reply: Reply, is_last: bool) -> dict[str, Any]:
        """finish_reason and stop_reason; the model's own end-of-text is no stop reason."""
        matched = None if reply.matched == self._eos_id else reply.matched
        return {
            "finish_reason": reply.finish if is_last else None,
            "stop_reason": matched if is_last else None,
        }

    def _positions(
        self, asked: Asked, reply: Reply, start: int, stop: int
    ) -> Iterator[tuple[int, int, Any]]:
        """(state, id, log-prob) of what is reported of ids[start:stop]. The last call tells what a
        fault added behind the ids, too.
        """
        assert reply.log_probs is not None
        end = stop if stop < len(reply.ids) else None
        before = [reply.ids[start - 1] if start else asked.prompt.last(1)[0], *reply.ids[start:]]
        states = [token_id % NUM_STATES for token_id in before]
        ids, values = reply.ids_of_log_probs[start:end], reply.log_probs[start:end]
        return zip(chain(states, repeat(0)), ids, values, strict=False)

    def _ranked(
        self, sampling: Sampling, state: int, token_id: int, value: Any, count: int
    ) -> list[LogProb]:
        """The sampled id, then the likeliest `count` others that were kept."""
        found = self.model.distribution(state, sampling)
        others = [
            LogProb(other, other_value, rank)
            for rank, (other, other_value) in enumerate(found.top(count), 1)
            if other != token_id
        ]
        rank = found.ranks.get(token_id, len(found.ids)) + 1
        return [LogProb(token_id, value, rank), *others]

    def _prefill(self, asked: Asked, count: int | None) -> list[Any] | None:
        """`prompt_logprobs`: for each id of the prompt but the first, {id: its log-prob}."""
        if count is None:
            return None
        ids = asked.prompt.ids
        return [
            None,
            *(
                {str(token_id): {"logprob": value, "rank": None, "decoded_token": None}}
                for token_id, value in zip(ids[1:], self.model.prefill(ids), strict=True)
            ),
        ]


class Generate(VLLM):
    """The wire of /inference/v1/generate. The server calls a request `generate-tokens-<id>`."""

    path = "/inference/v1/generate"

    def asked(self, body: bytes, request_id: str | None) -> Asked:
        request, prompt = decoded(body, _decode_generate, "token_ids")
        params = request.sampling_params
        return Asked(
            rid=f"generate-tokens-{request_id or request.request_id or uuid4().hex}",
            prompt=prompt,
            sampling=Sampling(params.temperature, params.top_p, params.top_k, params.min_p),
            limit=params.max_tokens,
            seed=params.seed or 0,
            stop_ids=params.stop_token_ids or (),
            streams=bool(request.stream),
            log_probs=params.logprobs is not None,
            request=request,
        )

    def body(self, asked: Asked, reply: Reply) -> bytes:
        request = asked.request
        return encode(
            {
                "request_id": reply.rid,
                "model": MODEL,
                "created": int(time.time()),
                "usage": usage(reply, len(reply.ids)),
                "prompt_logprobs": self._prefill(asked, request.sampling_params.prompt_logprobs),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": echo(reply) if request.return_token_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
                "choices": [self._choice(asked, reply, 0, len(reply.ids), is_last=True)],
            }
        )

    def event(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> bytes | None:
        event: dict[str, Any] = {
            "request_id": reply.rid,
            "usage": running_usage(asked, reply, stop),
            "output_mode": "tokens",
            "choices": [self._choice(asked, reply, start, stop, is_last=is_last)],
        }
        if asked.request.return_token_ids and not start:
            event["prompt_token_ids"] = echo(reply)
        return encode(event)

    def ending(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        options = asked.request.stream_options
        if options is not None and options.include_usage:
            total = usage(reply, len(reply.ids))
            yield encode(
                {"request_id": reply.rid, "usage": total, "output_mode": "tokens", "choices": []}
            )
        yield DONE

    def _choice(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> dict[str, Any]:
        masks = kept_ids(self.model, asked, reply, start, stop) if self._sampling_mask else None
        return {
            "index": 0,
            **self._ended(reply, is_last),
            "token_ids": reply.ids[start:stop],
            "routed_experts": None,
            "sampling_mask": masks,
            "weight_versions": reply.spans if is_last else None,
            "logprobs": self._log_probs(asked, reply, start, stop),
        }

    def _log_probs(
        self, asked: Asked, reply: Reply, start: int, stop: int
    ) -> dict[str, Any] | None:
        if reply.log_probs is None:
            return None
        count = max(1, asked.request.sampling_params.logprobs or 0)
        told, sampling = self._told, asked.sampling
        return {
            "content": [
                told(sampling, *at, count) for at in self._positions(asked, reply, start, stop)
            ]
        }

    def _encoded(self, *position: Any) -> msgspec.Raw:
        *_, token_id, value, count = position
        ranked = self._ranked(*position)[:count]
        return msgspec.Raw(encode(Position(token_id, value, ranked[0].rank, ranked)))


_decode_generate = msgspec.json.Decoder(GenerateRequest).decode


def decoded(body: bytes, decode: Callable[[bytes], Any], field: str) -> tuple[Any, Prompt]:
    try:
        request = decode(body)
        prompt = Prompt(getattr(request, field))
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequest(f"{field}: {error}") from error
    if request.model not in (None, MODEL):
        raise BadRequest(f"The model `{request.model}` does not exist; this is {MODEL!r}.")
    return request, prompt


def echo(reply: Reply) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % reply.prompt_items)


def usage(reply: Reply, count: int) -> dict[str, Any]:
    count += reply.completion_error
    return {
        "prompt_tokens": reply.prompt_tokens,
        "total_tokens": reply.prompt_tokens + count,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": max(0, reply.prompt_tokens - 1)},
    }


def running_usage(asked: Asked, reply: Reply, stop: int) -> dict[str, Any] | None:
    options = asked.request.stream_options
    if options is None or not (options.include_usage and options.continuous_usage_stats):
        return None
    return usage(reply, stop)

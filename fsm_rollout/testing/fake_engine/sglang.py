"""SGLang 0.5.23's native wire: POST /generate, streamed cumulatively or incrementally.

Ignored in a request: penalties, grammars, stop strings, media. Without a tokenizer a reply has no
`text`, as from a server that was started with --skip-tokenizer-init.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec

from fsm_rollout.testing.fake_engine.model import FakeModel, Sampling
from fsm_rollout.testing.fake_engine.prompt import Prompt
from fsm_rollout.testing.fake_engine.reply import Reply
from fsm_rollout.testing.fake_engine.wire import (
    DONE,
    Asked,
    BadRequest,
    distribution_at,
    encode,
    kept_ids,
    text_of,
)


class SamplingParams(msgspec.Struct, frozen=True):
    """`sampling_params`, as far as the fake engine obeys them."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None


class GenerateRequest(msgspec.Struct):
    """The body of /generate, as far as the fake engine obeys it."""

    input_ids: msgspec.Raw = msgspec.Raw()
    rid: str | None = None
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool = False
    stream: bool = False


_decode = msgspec.json.Decoder(GenerateRequest).decode


class SGLang:
    """The wire of /generate; `incremental` is the server's --incremental-streaming-output."""

    path = "/generate"
    session_header = "x-smg-routing-key"

    def __init__(self, model: FakeModel, *, tokenizer: Any, incremental: bool) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._incremental = incremental

    def asked(self, body: bytes, request_id: str | None) -> Asked:
        try:
            request = _decode(body)
            prompt = Prompt(request.input_ids)
        except (msgspec.DecodeError, ValueError) as error:
            raise BadRequest(str(error)) from error
        params = request.sampling_params
        return Asked(
            rid=request.rid or uuid4().hex,
            prompt=prompt,
            sampling=Sampling(params.temperature, params.top_p, params.top_k, params.min_p),
            limit=params.max_new_tokens,
            seed=params.sampling_seed or 0,
            stop_ids=params.stop_token_ids or (),
            streams=request.stream,
            log_probs=request.return_logprob,
            request=request,
        )

    def too_long(self, asked: Asked, max_context: int) -> str | None:
        num_ids, limit = asked.prompt.num_ids, asked.limit or 0
        if num_ids >= max_context:
            return (
                f"The input ({num_ids} tokens) is longer than the model's context length "
                f"({max_context} tokens)."
            )
        if num_ids + limit <= max_context:
            return None
        return (
            "Requested token count exceeds the model's maximum context length of "
            f"{max_context} tokens. You requested a total of {num_ids + limit} tokens: {num_ids} "
            f"tokens from the input messages and {limit} tokens for the completion."
        )

    def body(self, asked: Asked, reply: Reply) -> bytes:
        return self._output(asked, reply, 0, len(reply.ids), is_last=True)

    def event(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> bytes | None:
        if not self._incremental:
            start = 0
        elif reply.was_waiting:  # the server repeats the last id, and its log-probs are not cut
            start = max(0, stop - 1)
        return self._output(asked, reply, start, stop, is_last=is_last)

    def ending(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        yield DONE

    def error(self, status: int, message: str) -> bytes:
        return encode({"error": {"message": message}})

    def error_event(self, status: int, message: str) -> bytes:
        kind = "invalid_request_error"
        return encode(
            {"error": {"message": message, "type": kind, "code": status, "retryable": False}}
        )

    def _output(self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool) -> bytes:
        ids = reply.ids[start:stop]
        output: dict[str, Any] = {"output_ids": ids}
        if self._tokenizer is not None:
            output = {"text": text_of(self._tokenizer, ids), **output}
        if asked.request.return_prompt_token_ids:
            output["prompt_token_ids"] = msgspec.Raw(b"[%b]" % reply.prompt_items)
        meta: dict[str, Any] = {
            "id": reply.rid,
            "finish_reason": _finish_reason(reply) if is_last else None,
            "weight_version": reply.version,
            "weight_versions": reply.spans,
            "completion_tokens": stop + reply.completion_error,
        }
        if not reply.was_waiting:
            meta["prompt_tokens"] = reply.prompt_tokens
            meta["cached_tokens"] = asked.prompt.num_ids - 1
            meta["num_retractions"] = meta["reasoning_tokens"] = 0
        if reply.log_probs is not None:
            meta |= self._log_probs(asked, reply, start, None if is_last else stop)
        if asked.request.return_sampling_mask:
            meta["output_token_sampling_mask"] = kept_ids(self.model, asked, reply, start, stop)
            meta["output_token_sampling_mask_length"] = stop
        if is_last:
            meta["e2e_latency"] = 0.0
            meta["response_sent_to_client_ts"] = time.time()
        output["meta_info"] = meta
        return encode(output)

    def _log_probs(
        self, asked: Asked, reply: Reply, start: int, stop: int | None
    ) -> dict[str, Any]:
        assert reply.log_probs is not None
        shown = slice(start, stop)
        pairs = zip(reply.log_probs[shown], reply.ids_of_log_probs[shown], strict=False)
        found: dict[str, Any] = {
            "input_token_logprobs": self._prefill(asked),
            "output_token_logprobs": [(value, token_id, None) for value, token_id in pairs],
            "output_token_logprobs_length": len(reply.log_probs[:stop]),
        }
        if count := asked.request.top_logprobs_num:
            found["output_top_logprobs"] = [
                [(value, token_id, None) for token_id, value in at.top(count)]
                for i in range(len(reply.ids))[shown]
                if (at := distribution_at(self.model, asked, reply, i))
            ]
        return found

    def _prefill(self, asked: Asked) -> list[Any]:
        start = asked.request.logprob_start_len
        if start < 0:
            return []
        ids = asked.prompt.ids
        values = [None, *self.model.prefill(ids)]
        return [(value, token_id, None) for value, token_id in zip(values, ids, strict=True)][
            start:
        ]


def _finish_reason(reply: Reply) -> Any:
    match reply.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": reply.matched}
        case "length":
            return {"type": "length", "length": len(reply.ids)}
        case "abort" if reply.was_waiting:
            return {"type": "abort", "message": "Abort in waiting queue"}
        case "abort":
            status = reply.abort_status
            return {"type": "abort", "message": "Aborted", "status_code": status, "err_type": None}
        case other:
            return {"type": other}

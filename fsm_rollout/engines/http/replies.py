"""Replies: what the wires share in reading what a server said.

Typed decoding, the tokens of one reply put together, finish words, and what a refusal means.
Whatever goes wrong in it is an EngineError, whose message begins with the wire's name (`source`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.http.wire import Ask
from fsm_rollout.errors import EngineError, InvariantError
from fsm_rollout.limits import StopReason
from fsm_rollout.replay import counters_of, routed_experts_of, top_p_of, weight_runs_of

T = TypeVar("T")

_FINISHES = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "repetition",
    "tool_calls": "stop",  # the server's reading of the text; ours decides
    "function_call": "stop",
}

NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""sent along, for a server's own defaults would change what is sampled, and its log-probs not"""

_OVERFLOW = re.compile(
    r"context (length|window)|maximum model length|maximum allowed length|max_model_len"
    r"|max_tokens must be at least 1, got 0",  # vLLM clamped what we asked for to no room at all
    re.IGNORECASE,
)
BUSY = frozenset({408, 425, 429})
"""statuses of a server that asks for patience; others below 500 are final"""
_EXCERPT = 300
"""characters of a server's message that an error shows"""
_INTS = msgspec.json.Decoder(list[int])


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, source: str) -> T:
    """`data` as typed, in one pass; EngineError(bad_reply) that names the path of what is wrong."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        excerpt = data[:80].decode(errors="replace")
        raise bad(f"{source}: {error}; the reply begins with {excerpt!r}") from error


def bad(message: str) -> EngineError:
    """A reply that can't be taken for data."""
    return EngineError(message, reason=StopReason.BAD_REPLY)


def failed(message: str, *, final: bool = False) -> EngineError:
    """A server that did not do what it was asked."""
    return EngineError(message, reason=StopReason.ENGINE_ERROR, final=final)


def refusal(source: str, status: int, body: bytes, remedies: Mapping[int, str]) -> EngineError:
    """What a status other than 200 means: a full context, a fault that may pass or that won't."""
    said = server_message(body)
    message = f"{source}: HTTP {status}: {said}"
    if not 100 <= status < 500 or status in BUSY:  # a code inside a reply may be none of HTTP
        return failed(message)
    if status >= 400 and _OVERFLOW.search(said):
        return EngineError(message, reason=StopReason.MAX_CONTEXT, final=True)
    moved = "it redirects: give the URL that it redirects to" if 300 <= status < 400 else ""
    remedy = remedies.get(status, moved)
    return failed(f"{message}; {remedy}" if remedy else message, final=True)


def server_message(body: bytes) -> str:
    """The message in an error body of any server, shortened to an excerpt."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = body.decode(errors="replace")
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    text = " ".join(str(found).split())
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]} …"


def finish_word(word: str, source: str) -> str:
    """A server's finish reason in our words; one that is unknown stays as it is, to be refused."""
    if word == "error":
        raise failed(f"{source}: the server failed while it generated (finish_reason 'error')")
    return _FINISHES.get(word, word)


def prompt_echo(raw: msgspec.Raw, ask: Ask, source: str) -> list[int] | None:
    """The prompt ids that the server says it took; None when it said none, or exactly ours."""
    echo = bytes(raw)
    if echo in (b"", b"null") or echo == b"[" + ask.ids + b"]":
        return None
    return decoded(_INTS, echo, f"{source}: prompt_token_ids")


def encoded_media(items: Sequence[Any], source: str) -> bytes:
    """Media items as a JSON array. EngineError when one is not JSON: a PIL image, say."""
    try:
        return msgspec.json.encode(items)
    except TypeError as error:
        raise failed(
            f"{source}: media must be sent as a URL, a data URI or base64 text: {error}", final=True
        ) from error


def is_filtered(params: SamplingParams) -> bool:
    """Sampling keeps some ids only: there is a mask to replay."""
    return params.top_p < 1 or params.top_k > 0


def replayed(
    meta: Mapping[str, Any],
    count: int,
    ask: Ask,
    *,
    source: str,
    needed: Mapping[str, str],
    is_abort: bool,
    shape: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The fields of a Reply of `count` tokens that replay.py reads from `meta`.

    `needed`: those that must be there, and how a server is brought to report them.
    """
    prompt_tokens = meta.get("prompt_tokens") if ask.media else None  # placeholders take more
    total = (prompt_tokens or ask.num_ids) + count
    try:
        found: dict[str, Any] = {
            "top_p": top_p_of(meta, count),
            "routed_experts": routed_experts_of(meta, total, start=ask.experts_start, shape=shape),
            "weight_versions": weight_runs_of(meta, count),
        }
    except InvariantError as error:
        raise bad(f"{source}: {error}") from error
    for name, remedy in needed.items():
        if count and found[name] is None:
            if is_abort:  # it came before the report: the tokens can't be kept
                raise EngineError(f"{source}: aborted, no {name}", reason=StopReason.ENGINE_ABORT)
            raise failed(f"{source}: no {name} reported: {remedy}", final=True)
    return found | {"counters": counters_of(meta, count)}


class Parts:
    """The new tokens of one reply, which may arrive in parts."""

    __slots__ = ("_source", "_wanted", "ids", "log_probs", "masks")

    def __init__(self, ask: Ask, source: str) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.masks: list[Any] = []
        """per token the ids that sampling kept, if the server says so"""
        self._wanted = ask.log_probs
        self._source = source

    def add(self, ids: list[int], log_probs: list[float] | None, masks: list[Any] | None) -> None:
        """Take over the tokens of one part. EngineError when it lacks log-probs asked for."""
        if ids and self._wanted and log_probs is None:
            raise EngineError(
                f"{self._source}: {len(ids)} tokens without the log-probs that were asked for",
                reason=StopReason.MISSING_LOG_PROBS,
            )
        if self._wanted and log_probs is not None:
            if len(log_probs) != len(ids):
                raise bad(f"{self._source}: {len(log_probs)} log-probs for {len(ids)} tokens")
            self.log_probs = _joined(self.log_probs, log_probs)
        if masks is not None:
            if len(masks) != len(ids):
                raise bad(f"{self._source}: {len(masks)} sampling masks for {len(ids)} tokens")
            self.masks = _joined(self.masks, masks)
        self.ids = _joined(self.ids, ids)

    def counted(self, total: int | None) -> None:
        """Compare with the number of tokens that the server says it sampled."""
        if total is not None and total != len(self.ids):
            what = "missing" if total > len(self.ids) else "surplus"
            raise bad(
                f"{self._source}: {what} tokens: {len(self.ids)} ids, completion_tokens {total}"
            )


def _joined(held: list[T], new: list[T]) -> list[T]:
    """`new` behind `held`, which it extends; the first part is not copied."""
    if not held:
        return new
    held += new
    return held

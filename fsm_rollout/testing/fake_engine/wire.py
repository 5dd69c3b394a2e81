"""Wire: what server.py needs from a protocol: to decode a request and to word a reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from fsm_rollout.testing.fake_engine.model import NUM_STATES, Distribution, FakeModel, Sampling
from fsm_rollout.testing.fake_engine.prompt import Prompt
from fsm_rollout.testing.fake_engine.reply import Reply

DONE = b"[DONE]"
encode = msgspec.json.Encoder().encode


class BadRequest(Exception):
    """What a server answers with status 400 and this text."""


class Asked(msgspec.Struct, kw_only=True):
    """One request to generate, whatever its wire."""

    rid: str
    """as the server knows it, and as an abort must name it"""
    prompt: Prompt
    sampling: Sampling
    limit: int | None
    """None: as much as the context holds"""
    seed: int
    stop_ids: Sequence[int]
    streams: bool
    log_probs: bool
    request: Any
    """the wire's own struct, with all else"""


class Wire(Protocol):
    """One route that generates. `model` reports log-probs of the kind that this server reports."""

    path: str
    session_header: str
    model: FakeModel

    def asked(self, body: bytes, request_id: str | None) -> Asked:
        """Decode a request; `request_id` is the header of that name. BadRequest when it is none."""
        ...

    def too_long(self, asked: Asked, max_context: int) -> str | None:
        """Why the server refuses a prompt of this length; None: it does not."""
        ...

    def body(self, asked: Asked, reply: Reply) -> bytes:
        """A whole reply."""
        ...

    def event(
        self, asked: Asked, reply: Reply, start: int, stop: int, *, is_last: bool
    ) -> bytes | None:
        """The event that tells ids[start:stop] and how it ended. None: the server sends nothing."""
        ...

    def ending(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        """The events after the last one that tells ids."""
        ...

    def error(self, status: int, message: str) -> bytes:
        """The body of an HTTP error."""
        ...

    def error_event(self, status: int, message: str) -> bytes:
        """The event of an error in a stream."""
        ...


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """What ids say; those out of vocabulary, a fault, say nothing. "" without a tokenizer."""
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode([i for i in ids if 0 <= i < len(tokenizer)])
    return text


def distribution_at(model: FakeModel, asked: Asked, reply: Reply, i: int) -> Distribution:
    """What id number i was sampled from."""
    last = reply.ids[i - 1] if i else asked.prompt.last(1)[0]
    return model.distribution(last % NUM_STATES, asked.sampling)


def kept_ids(
    model: FakeModel, asked: Asked, reply: Reply, start: int, stop: int
) -> list[list[int]]:
    """For each of ids[start:stop], what top-k, top-p and min-p kept: sampling-mask replay."""
    kept = []
    for i in range(start, stop):
        found = distribution_at(model, asked, reply, i)
        ids = found.ids[: found.kept]
        kept.append(ids if reply.ids[i] in ids else [reply.ids[i], *ids])
    return kept

"""Seen: what the fake engine saw of one request; `fake.seen` lists them as they came."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Outcome = Literal["running", "done", "aborted", "disconnected", "refused"]


class Seen(msgspec.Struct, kw_only=True):
    """A request that the server got, in the order in which they came."""

    number: int
    path: str
    rid: str = ""
    """of a generation: the server's id of it, which an abort must name"""
    session: str | None = None
    """the key of session affinity, from the header"""
    num_ids: int = 0
    """of the prompt"""
    body: bytes = b""
    outcome: Outcome = "running"
    num_new_ids: int = 0
    fault: Any = None

    @property
    def ids(self) -> list[int]:
        """The prompt of a generation."""
        sent = msgspec.json.decode(self.body)
        return next(sent[k] for k in ("input_ids", "token_ids", "prompt") if k in sent)

"""Wire: how one kind of inference server is spoken to, as bytes. No network and no state.

call.py and transport.py move the bytes; engines/sglang.py and engines/vllm.py each implement a
Wire. What a server said comes out as a Reply, normalised but not yet checked: the engine makes a
Generation of it, or an EngineError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from fsm_rollout.arrays import Floats, Ints
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.replay import RoutedExperts, TopP, WeightVersion


class Ask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One try of one `generate`, as a wire needs it."""

    ids: bytes | bytearray
    """the prompt and response so far as JSON array items, `1,2,3`"""
    num_ids: int
    max_new_tokens: int
    params: SamplingParams
    rid: str
    """32 hex digits, new for each try: no id is a prefix of another"""
    session_id: str
    log_probs: bool
    """ask for log-probs; False in a run that is sampled without"""
    stream: bool
    experts_start: int = 0
    """rows of routed experts that the sample holds: a server need not send them again"""
    media: Sequence[Any] = ()
    """what stands in place of the placeholder ids, in their order"""


class Reply(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a server said, under our names. Lengths, ranges and finishes are not checked yet."""

    token_ids: Ints
    log_probs: Floats | None
    rid: str | None = None
    """the request that it answers, in the server's words; None: it did not say"""
    finish: str | None
    """stop, length, abort or repetition; what else it says is the server's word, unmapped"""
    matched: int | str | None = None
    weight_versions: Sequence[tuple[WeightVersion, int]] = ()
    prompt_tokens: int | None = None
    """as the server counted them; None: it did not say"""
    prompt_token_ids: Sequence[int] | None = None
    """the prompt as the server took it; None: it did not say"""
    log_prob_kind: LogProbKind | None = None
    """None: what the engine was found to report"""
    top_p: TopP | None = None
    routed_experts: RoutedExperts | None = None
    counters: Mapping[str, int | float] = {}
    """cached_tokens, spec_accepted_tokens, spec_draft_tokens, spec_verify_count"""


class Stream(Protocol):
    """Puts a streamed reply together, O(new tokens) per event where the server allows it."""

    def feed(self, event: bytes) -> None:
        """Take the data of one server-sent event, `[DONE]` included. EngineError when it is bad."""
        ...

    def reply(self) -> Reply:
        """The whole reply, once the stream has ended. EngineError when it lacks its end."""
        ...


class Wire(Protocol):
    """The protocol of one server. `path` takes the POST of `generate`."""

    name: str
    path: str
    log_prob_kind: LogProbKind
    """what the server reports unless it is told otherwise, or found out to be"""

    def headers(self, ask: Ask) -> Mapping[str, str]:
        """Headers beside the content type: the key of session affinity."""
        ...

    def body(self, ask: Ask) -> bytes:
        """The request's body."""
        ...

    def reply(self, body: bytes, ask: Ask) -> Reply:
        """The reply of a request that did not stream. EngineError(bad_reply) when it is none."""
        ...

    def stream(self, ask: Ask) -> Stream:
        """What puts a streamed reply together."""
        ...

    def refusal(self, status: int, body: bytes) -> EngineError:
        """What an HTTP status other than 200 means: its reason, and whether it is final."""
        ...

    def abort(self, rid: str) -> tuple[str, bytes]:
        """Path and body of the POST that aborts exactly this try."""
        ...

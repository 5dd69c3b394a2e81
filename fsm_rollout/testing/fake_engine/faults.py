"""Faults: all that the fake engine can do wrong. One small struct each; plan.py says when.

Three kinds: what happens to the bytes (transport), what an event stream lacks, what a reply says
(content). A content fault is a `spoil` of the Reply, so it shows on both wires, streaming or not.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine.model import FakeModel
from fsm_rollout.testing.fake_engine.reply import Reply


class NotApplicable(Exception):
    """The plan wants a fault that this request cannot show; the text says why."""


class Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """Base of all faults; `type` names one in YAML."""

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        """Change what is said. NotApplicable when this reply has nothing to change."""


# What happens to the bytes.


class Status(Fault, frozen=True, kw_only=True, tag="status"):
    """An HTTP error in place of a reply; nothing is generated."""

    status: int = 503
    body: str | None = None
    """None: as the wire words its errors"""
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ConfigError(f"status must be in 400..599, got {self.status}")


class Delay(Fault, frozen=True, kw_only=True, tag="delay"):
    """The server thinks that much longer before it starts. An abort cuts it short."""

    seconds: float


class Late(Fault, frozen=True, kw_only=True, tag="late"):
    """A reply that comes that much too late, and that no abort hurries."""

    seconds: float


class Stall(Fault, frozen=True, kw_only=True, tag="stall"):
    """Silence in the middle of the body."""

    after_bytes: int = 0
    """of the body; -1: before the status line"""
    seconds: float | None = None
    """None: for ever"""


class Reset(Fault, frozen=True, kw_only=True, tag="reset"):
    """The connection breaks in the middle of the body."""

    after_bytes: int = 0
    """of the body; -1: before the status line"""
    politely: bool = False
    """close it (FIN) in place of a reset (RST)"""


class Garbage(Fault, frozen=True, kw_only=True, tag="garbage"):
    """Something else than JSON; in a stream, in place of the first event."""

    body: str = "<html><body>Bad Gateway</body></html>"


class Truncated(Fault, frozen=True, kw_only=True, tag="truncated"):
    """JSON that stops before its end, in a body that HTTP calls complete; a stream's last event."""

    keep: float = 0.5
    """share of its bytes"""


class Duplicate(Fault, frozen=True, kw_only=True, tag="duplicate"):
    """The whole response twice on one connection; each event of a stream twice."""


# What an event stream lacks.


class MissingEnd(Fault, frozen=True, kw_only=True, tag="missing_end"):
    """A stream without its last events. Without streaming: finish reason null."""

    done: bool = False
    """send `[DONE]` all the same"""

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        if not reply.streams:
            reply.finish = None


class ErrorEvent(Fault, frozen=True, kw_only=True, tag="error_event"):
    """An error in the middle of a stream. Without streaming: an error object under status 200."""

    after_events: int = 1
    status: int = 500
    message: str = "Internal server error"


# What a reply says.


class MissingLogProbs(Fault, frozen=True, kw_only=True, tag="missing_log_probs"):
    """No log-probs although they were asked for."""

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        log_probs(reply)
        reply.log_probs = None


class LogProbCount(Fault, frozen=True, kw_only=True, tag="log_prob_count"):
    """Fewer (-) or more (+) log-probs than ids."""

    by: int = -1

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        values = log_probs(reply)
        ids = list(reply.ids_of_log_probs)
        if self.by < 0:
            if not values:
                raise NotApplicable("the reply is empty")
            reply.log_probs, reply.log_prob_ids = values[: self.by], ids[: self.by]
        else:
            reply.log_probs = [*values, *[-0.5] * self.by]
            reply.log_prob_ids = [*ids, *[0] * self.by]


class LogProbValue(Fault, frozen=True, kw_only=True, tag="log_prob_value"):
    """A log-prob that is none: -9999, 0.5, or `nan`, `inf`, `-inf` as Python's json writes them."""

    value: float | Literal["nan", "inf", "-inf", "null"] = "nan"
    at: int = 0

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        values = list(log_probs(reply))
        words = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity", "null": b"null"}
        word = words.get(self.value) if isinstance(self.value, str) else None
        values[position(reply, self.at)] = self.value if word is None else msgspec.Raw(word)
        reply.log_probs = values


class LogProbIds(Fault, frozen=True, kw_only=True, tag="log_prob_ids"):
    """Log-probs that name other ids than the reply's."""

    at: int = 0

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        log_probs(reply)
        ids = list(reply.ids_of_log_probs)
        at = position(reply, self.at)
        ids[at] = (ids[at] + 1) % model.vocab_size
        reply.log_prob_ids = ids


class OutOfVocabulary(Fault, frozen=True, kw_only=True, tag="out_of_vocabulary"):
    """An id that the vocabulary does not have."""

    id: int | None = None
    """None: the first one too large"""
    at: int = 0

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        ids = list(reply.ids)
        ids[position(reply, self.at)] = model.vocab_size if self.id is None else self.id
        reply.ids, reply.log_prob_ids = ids, None


class TooManyTokens(Fault, frozen=True, kw_only=True, tag="too_many_tokens"):
    """More tokens than were asked for."""

    by: int = 1

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        missing = reply.limit + self.by - len(reply.ids)
        reply.ids = [*reply.ids, *[0] * missing]
        if reply.log_probs is not None:
            reply.log_probs = [*reply.log_probs, *[-0.5] * missing]


class Empty(Fault, frozen=True, kw_only=True, tag="empty"):
    """Not one token, finish `stop`."""

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.cut(0)
        reply.finish = "stop"


class PromptCount(Fault, frozen=True, kw_only=True, tag="prompt_count"):
    """Another prompt than the one that was sent: its count, and its last id where it is echoed."""

    by: int = 1

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.prompt_tokens += self.by
        reply.prompt_items += b",0" * max(1, self.by)


class CompletionCount(Fault, frozen=True, kw_only=True, tag="completion_count"):
    """A count of new tokens that is not the number of ids."""

    by: int = 1

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.completion_error = self.by


class FinishReason(Fault, frozen=True, kw_only=True, tag="finish_reason"):
    """A finish reason of your own; null too."""

    finish: str | None = "tired"

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.finish, reply.matched = self.finish, None


class Abort(Fault, frozen=True, kw_only=True, tag="abort"):
    """The server aborts it by itself after a share of the tokens; SGLang can blame a status."""

    share: float = 0.5
    status: int | None = None

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.cut(int(self.share * len(reply.ids)))
        reply.abort_status = self.status


class WeightChange(Fault, frozen=True, kw_only=True, tag="weight_change"):
    """New weights in the middle of the reply: two runs of versions."""

    version: str = "new"
    share: float = 0.5

    def spoil(self, reply: Reply, model: FakeModel) -> None:
        reply.version_change = (self.version, self.share)


AnyFault: TypeAlias = (
    Status
    | Delay
    | Late
    | Stall
    | Reset
    | Garbage
    | Truncated
    | Duplicate
    | MissingEnd
    | ErrorEvent
    | MissingLogProbs
    | LogProbCount
    | LogProbValue
    | LogProbIds
    | OutOfVocabulary
    | TooManyTokens
    | Empty
    | PromptCount
    | CompletionCount
    | FinishReason
    | Abort
    | WeightChange
)

TRANSPORT: tuple[type[Any], ...] = (
    Status,
    Delay,
    Late,
    Stall,
    Reset,
    Garbage,
    Truncated,
    Duplicate,
)
"""what can happen to any request, not to generations only"""


def position(reply: Reply, at: int) -> int:
    """Where position `at` of the ids is; negative: from the end."""
    if not -len(reply.ids) <= at < len(reply.ids):
        raise NotApplicable(f"position {at} of a reply of {len(reply.ids)} tokens")
    return at


def log_probs(reply: Reply) -> list[Any]:
    if reply.log_probs is None:
        raise NotApplicable("the request asked for no log-probs")
    return reply.log_probs

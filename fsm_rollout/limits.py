"""Status, StopReason, Limits: how a request stands, why it ended, and its budgets.

Closed vocabularies and a leaf: guards, engines, tools and adapters all read it.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

import msgspec

from fsm_rollout.errors import ConfigError

CUT_MARK = "[truncated]"
"""what a tool's response shows where a budget cut it"""


class Status(StrEnum):
    """Where a request stands. The values are slime's strings where slime has them."""

    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        """True for COMPLETED, TRUNCATED and ABORTED."""
        return self in TERMINAL


TERMINAL = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.ABORTED})


class StopReason(StrEnum):
    """Why a request ended. Each reason belongs to exactly one terminal status.

    ABORTED reasons are infrastructure only: what the policy did is never aborted, or it would not
    pay for it. `retryable`: starting again from scratch may help. `resumable`: the tokens so far
    are good and the request may go on from them.
    """

    status: Status
    retryable: bool
    resumable: bool

    def __new__(
        cls, value: str, status: Status, retryable: bool = False, resumable: bool = False
    ) -> StopReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.status = status
        member.retryable = retryable
        member.resumable = resumable
        return member

    # COMPLETED: the policy, a tool or the environment said that it is over.
    STOP = "stop", Status.COMPLETED
    TOOL_STOP = "tool_stop", Status.COMPLETED
    ENV_DONE = "env_done", Status.COMPLETED
    INVALID_CALLS = "invalid_calls", Status.COMPLETED
    # TRUNCATED: a budget is used up.
    LENGTH = "length", Status.TRUNCATED
    REPETITION = "repetition", Status.TRUNCATED
    MAX_RESPONSE = "max_response", Status.TRUNCATED
    MAX_CONTEXT = "max_context", Status.TRUNCATED
    MAX_TURNS = "max_turns", Status.TRUNCATED
    MAX_TOOL_CALLS = "max_tool_calls", Status.TRUNCATED
    OBSERVATION_OVERFLOW = "observation_overflow", Status.TRUNCATED
    TIMEOUT = "timeout", Status.TRUNCATED
    # ABORTED: infrastructure failed; never training data.
    PROMPT_OVERFLOW = "prompt_overflow", Status.ABORTED
    ENGINE_ABORT = "engine_abort", Status.ABORTED, True, True
    ENGINE_ERROR = "engine_error", Status.ABORTED, True, True
    NO_ENGINE = "no_engine", Status.ABORTED, True, True
    MISSING_LOG_PROBS = "missing_log_probs", Status.ABORTED, True, True
    BAD_REPLY = "bad_reply", Status.ABORTED, True, True
    INVARIANT = "invariant", Status.ABORTED, True
    TOOL_UNAVAILABLE = "tool_unavailable", Status.ABORTED, True
    AGENT_ERROR = "agent_error", Status.ABORTED, True
    REWARD_ERROR = "reward_error", Status.ABORTED, True
    DEADLINE = "deadline", Status.ABORTED, True
    CANCELLED = "cancelled", Status.ABORTED, True, True
    STALE = "stale", Status.ABORTED, True
    PAUSED = "paused", Status.ABORTED, True, True


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every budget of a request, spent per request over all its samples.

    Raises ConfigError when a value is out of range or two limits contradict each other.
    """

    max_context: int = 32_768
    """prompt + response tokens of one sample"""
    max_prompt: int | None = None
    """prompt tokens; a longer prompt is refused (ABORTED prompt_overflow), never cut"""
    max_response: int | None = None
    """response tokens, sampled and observed"""
    max_new_tokens: int = 4_096
    """sampled tokens of one turn"""
    max_turns: int = 16
    """model turns"""
    max_tool_calls: int = 64
    """executed tool calls"""
    max_parallel_calls: int = 8
    """tool calls of one turn that are executed; the rest is answered with a message"""
    max_invalid_calls: int = 8
    """malformed, unknown or badly typed calls that are answered with a message; one more ends the
    request as COMPLETED(invalid_calls), so 0 stops at the first"""
    max_tool_response_tokens: int | None = None
    """content tokens of one tool response; None: only the room that is left"""
    max_tool_response_chars: int | None = None
    """characters of one tool response; None: only what its tokens allow"""
    max_attempts: int = 3
    """attempts from scratch, the first one included"""
    tool_timeout_s: float = 30.0
    """each tool hook: create, execute, calc_reward"""
    release_timeout_s: float = 10.0
    """each release; then it is abandoned with a report"""
    turn_timeout_s: float = 600.0
    """one engine call"""
    request_timeout_s: float = 3_600.0
    """one attempt, tools included"""

    def __post_init__(self) -> None:
        least = {"max_tool_calls": 0, "max_invalid_calls": 0}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            low = least.get(name, 1)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name.endswith("_s"):
                if not is_number or not 0 < value < inf:
                    raise ConfigError(f"Limits.{name} must be > 0 seconds, got {value!r}")
            elif not isinstance(value, int) or not is_number or value < low:
                raise ConfigError(f"Limits.{name} must be a whole number >= {low}, got {value!r}")
        if self.max_prompt is not None and self.max_prompt > self.max_context:
            raise ConfigError(
                f"Limits contradict: max_prompt ({self.max_prompt}) > "
                f"max_context ({self.max_context})"
            )
        if self.max_prompt is not None and self.max_response is not None:
            total = self.max_prompt + self.max_response
            if total > self.max_context:
                raise ConfigError(
                    f"Limits contradict: max_prompt ({self.max_prompt}) + max_response "
                    f"({self.max_response}) = {total} > max_context ({self.max_context}); "
                    "raise max_context or lower one of the two"
                )

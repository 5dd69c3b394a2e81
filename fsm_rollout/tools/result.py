"""CallResult: the answer to one call of the model, and what a failure reads like to it.

Made by tools/session.py, read by the loop. Texts for the model are short and the same on every run:
no traceback, no memory address; the log has those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsm_rollout.tools.base import ToolResponse
from fsm_rollout.turn import ToolCall

Outcome = Literal[
    "ok",
    "tool_error",
    "error",
    "timeout",
    "cancelled",
    "unavailable",
    "unknown_tool",
    "bad_arguments",
    "malformed",
    "dropped",
]
EXECUTED: tuple[Outcome, ...] = ("ok", "tool_error", "error", "timeout", "cancelled")
COUNTERS: Mapping[Outcome, str] = {
    "tool_error": "tool_refusals",
    "error": "tool_errors",
    "timeout": "tool_timeouts",
    "cancelled": "tool_calls_cancelled",
    "unavailable": "tool_calls_unavailable",
    "unknown_tool": "tool_calls_unknown",
    "bad_arguments": "tool_calls_bad_arguments",
    "malformed": "tool_calls_malformed",
    "dropped": "tool_calls_dropped",
}
MALFORMED: Mapping[str, str] = {
    "invalid_json": "it is not valid JSON",
    "not_an_object": "the call must be a JSON object",
    "args_not_object": "the arguments must be a JSON object",
    "missing_name": "the call names no tool",
    "bad_name": "the name of the tool must be a string",
    "empty": "the call is empty",
    "unterminated": "the call has no end",
    "bad_header": "the header of the call cannot be read",
    "non_finite": "numbers must be finite",
    "too_deep": "it is nested too deeply",
    "invalid_unicode": "it is not valid Unicode",
    "call_in_open_reasoning": "the reasoning was not closed before the call",
}


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answer to one call."""

    call: ToolCall
    response: ToolResponse
    outcome: Outcome
    seconds: float = 0.0
    """wall time of `execute`, without the wait for a free slot"""

    @property
    def is_invalid(self) -> bool:
        """The model's fault; counts against Limits.max_invalid_calls."""
        return self.outcome in ("malformed", "unknown_tool", "bad_arguments")

    @property
    def executed(self) -> bool:
        """`execute` was started; counts against Limits.max_tool_calls."""
        return self.outcome in EXECUTED


def malformed_text(call: ToolCall) -> str:
    """What to tell the model about a call that could not be parsed."""
    why = MALFORMED.get(call.error or "", "it cannot be parsed")
    return f"malformed tool call, not executed: {why}"


def valid_unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced: it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

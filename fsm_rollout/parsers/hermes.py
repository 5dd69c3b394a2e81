"""hermes: JSON calls in `<tool_call>` tags, `<think>` reasoning, as of Hermes, Qwen2.5 and Qwen3.

    <think>why</think>text <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> text

Read from left to right. Reasoning ends at its first `</think>`; one that no `<think>` precedes ends
the reasoning that the turn began with. A body is decoded first and then needs its end tag, the next
opener, or the end of a turn that was not cut. Other bodies end at the first end tag, before an
opener at the start of a line, or with the reasoning around them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsm_rollout.parsers.base import Parsed, decode_json, object_call
from fsm_rollout.turn import ToolCall

_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")
# Repeated before a body an opener still opens one call. Spelt so that a search skips to each "<".
_OPENER = re.compile(r"<tool_call>\s*+(?:<tool_call>\s*+)*+")
_TAG = re.compile(rf"<(?:/?think>|{_OPENER.pattern[1:]})")
_ENDED = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_ENDED_IN_CUT_TURN = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>))")
_RESYNC = re.compile(r"(</tool_call>)|^(?=<tool_call>)|(?=</think>)", re.MULTILINE)


class Hermes:
    """The parser of hermes-style calls; see the module for the format."""

    name = "hermes"

    def __init__(self, *, generation_prompt: str = "") -> None:
        opened, closed = (generation_prompt.rfind(tag) for tag in ("<think>", "</think>"))
        self._starts_in_reasoning = opened > closed

    def parse(self, text: str, *, finish: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """Read a whole turn; see `Parser.parse`. `tools` is not needed: JSON is typed."""
        is_cut = finish != "stop"
        turn = _Turn(text if is_cut else _without_turn_end(text), is_cut=is_cut)
        if self._starts_in_reasoning:
            turn.read_reasoning()
        while tag := _TAG.search(turn.text, turn.position):
            turn.read_content(tag.start())
            match tag[0]:
                case "<think>":
                    turn.position = tag.end()
                    turn.read_reasoning()
                case "</think>":
                    turn.read_lone_close(tag.end())
                case _:
                    turn.read_call(tag)
        turn.read_content(len(turn.text))
        return Parsed(
            reasoning="".join(turn.reasoning),
            content="".join(turn.content),
            calls=tuple(turn.calls),
            spans=tuple(turn.spans),
        )


class _Turn:
    """A turn being read: `position` only moves on; what lies behind it is filed in the lists."""

    def __init__(self, text: str, *, is_cut: bool) -> None:
        self.text = text
        self.position = 0
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[ToolCall] = []
        self.spans: list[tuple[int, int]] = []
        self._is_cut = is_cut
        self._ended = _ENDED_IN_CUT_TURN if is_cut else _ENDED

    def read_content(self, stop: int) -> None:
        """Take the text up to `stop` as content."""
        self.content.append(self.text[self.position : stop])
        self.position = stop

    def read_reasoning(self) -> None:
        """Take the text up to `</think>` as reasoning, or all of it: then a call is an error."""
        start = self.position
        close = self.text.find("</think>", start)
        if close >= 0:
            self.reasoning.append(self.text[start:close])
            self.position = close + len("</think>")
            return
        self.reasoning.append(self.text[start:])
        while opener := _OPENER.search(self.text, self.position):
            self.read_call(opener, error="call_in_open_reasoning")
        self.position = len(self.text)

    def read_lone_close(self, stop: int) -> None:
        """Take a `</think>` without opener: all before it was reasoning, unless some was closed."""
        if self.reasoning:
            self.read_content(stop)
            return
        self.reasoning.append(self.text[: self.position])
        self.position = stop
        for pieces in (self.content, self.calls, self.spans):
            pieces.clear()

    def read_call(self, opener: re.Match[str], *, error: str | None = None) -> None:
        """Take the attempt behind `opener`; `error` overrules what its body says."""
        start = opener.start()
        call, stop = self._attempt(start, opener.end())
        if error:
            call = ToolCall(name=call.name, error=error, raw=self.text[start:stop])
        self.calls.append(call)
        self.spans.append((start, stop))
        self.position = stop

    def _attempt(self, start: int, body: int) -> tuple[ToolCall, int]:
        text = self.text
        value, behind, error = decode_json(text, body)
        ended = None if error else self._ended.match(text, behind)
        if ended:
            return object_call(value, raw=text[start : ended.end()]), ended.end()
        ran_out = self._is_cut and error == "unterminated"  # then tags are text in its last string
        resync = None if ran_out else _RESYNC.search(text, behind)
        stop = resync.end() if resync else len(text)
        if resync is None or not resync[1]:
            error = "unterminated"
        elif resync.start() == body:
            error = "empty"
        elif error != "too_deep":
            error = "invalid_json"
        return ToolCall(name="", error=error, raw=text[start:stop]), stop


def _without_turn_end(text: str) -> str:
    bare = text.rstrip()
    for token in _TURN_ENDS:
        if bare.endswith(token):
            return bare.removesuffix(token)
    return text

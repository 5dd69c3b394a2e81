"""Parser: the text of one finished model turn to reasoning, content and tool calls.

One small class per wire format, found by name in `fsm_rollout.parsers`; the codec calls it once a
turn. What always holds: `parse` is total (any text gives a Parsed, never an exception) and linear
in the text; every attempt to call a tool is kept in order, well-formed or not; nothing inside
reasoning is a call; no call is guessed from a body that was cut. Unknown tool names and badly typed
arguments stay calls: the tools answer them.

The functions below are what the JSON formats share. They decode a value first and let the parser
look for the end tag behind it, so tags inside strings are text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from fsm_rollout.turn import ToolCall

MAX_DEPTH = 128
"""levels of nesting in a call; a bound of our own, as the interpreter's depends on its stack"""


class Parsed(msgspec.Struct, frozen=True):
    """What a turn says, verbatim: only markup and the end-of-turn token are left out."""

    reasoning: str
    """the thinking, without its tags; drafts of calls in it included"""
    content: str
    """all text outside reasoning and calls"""
    calls: tuple[ToolCall, ...] = ()
    """every attempt in order; malformed ones carry `error` and `raw`. `id` (unless the format has
    ids) and `span` are the codec's to fill"""
    spans: tuple[tuple[int, int], ...] = ()
    """characters [start, stop) of each call in the parsed text; ascending, disjoint"""


class Parser(Protocol):
    """A wire format. Its factory takes `generation_prompt`, the text that the template puts before
    each turn, which may have opened the reasoning already."""

    name: str

    def parse(self, text: str, *, finish: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        """Read a whole turn. Never raises.

        `finish` is the engine's finish reason: unless it is "stop" the turn was cut, and a call
        without its end tag is `unterminated`; complete calls stay calls in the record, and the loop
        executes none of them. `tools` are the schemas of the declared tools, for formats whose
        arguments are untyped text.
        """
        ...


class Decoded(NamedTuple):
    """A JSON value and the position behind it; or an error code and the position it started at."""

    value: Any
    stop: int
    error: str | None


def decode_json(text: str, start: int) -> Decoded:
    """Decode the JSON value at `start`; its strings may hold raw control characters.

    The error is `too_deep`, `unterminated` (the text ends before the value does) or `invalid_json`.
    """
    found = _JSON_RUN.match(text, start)
    run = found[0] if found else ""
    try:
        value, length = _DECODER.raw_decode(run)
    except RecursionError:
        return Decoded(None, start, "too_deep")
    except json.JSONDecodeError as error:
        ran_out = error.msg.startswith("Unterminated string") or (
            start + len(run) == len(text) and _CUT_SHORT.fullmatch(run, error.pos)
        )
        return Decoded(None, start, "unterminated" if ran_out else "invalid_json")
    except ValueError:  # an integer that is longer than the interpreter converts
        return Decoded(None, start, "invalid_json")
    return Decoded(value, start + length, None)


def object_call(value: object, *, raw: str) -> ToolCall:
    """The call that a decoded `{"name": ..., "arguments": {...}}` makes, well-formed or not."""
    if not isinstance(value, dict):
        return ToolCall(name="", error="not_an_object", raw=raw)
    name = value.get("name")
    if name is None:
        return ToolCall(name="", error="missing_name", raw=raw)
    if not isinstance(name, str) or not name.strip():
        return ToolCall(name="", error="bad_name", raw=raw)
    return named_call(name, value.get("arguments", value.get("parameters")), raw=raw)


def named_call(name: str, arguments: object, *, raw: str) -> ToolCall:
    """The call of `name` with decoded `arguments` (None: no arguments), well-formed or not."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error="args_not_object", raw=raw)
    if error := _flaw(name, arguments):
        return ToolCall(name=name, error=error, raw=raw)
    return ToolCall(name=name, arguments=arguments)


# As far as a text could be JSON, quoted strings whole. Only this run is decoded: JSONDecodeError
# counts the lines before the error, which would make a text full of bad calls quadratic.
_JSON_RUN = re.compile(r'(?:[\s\w{}\[\]:,.+-]++|"(?:[^"\\]++|\\.?)*+"?)*+', re.DOTALL)
_CUT_SHORT = re.compile(r"[\w.+-]*+|\\u?\w*+")  # a literal, a number, an escape
_DECODER = json.JSONDecoder(strict=False)
_SURROGATE = re.compile("[\ud800-\udfff]")


def _flaw(*values: object) -> str | None:
    """Why decoded values can't be handed on: they must encode to finite, bounded JSON in UTF-8."""
    level: list[object] = list(values)
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, str):
                if _SURROGATE.search(value):
                    return "invalid_unicode"
            elif isinstance(value, float):
                if not math.isfinite(value):
                    return "non_finite"
            elif isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return None
        level = below
    return "too_deep"

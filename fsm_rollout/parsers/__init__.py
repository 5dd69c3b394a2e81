"""parsers: model text to tool calls; one parser per wire format, found by name, loaded when used.

A package adds its own through an entry point of the group `fsm_rollout.parsers`: its name is the
parser's, its object a factory `(*, generation_prompt: str) -> Parser`. It can't replace a built-in.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.parsers.base import Parsed, Parser

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "Parsed", "Parser", "detect", "get_parser"]

GROUP = "fsm_rollout.parsers"
_BUILT_IN = {"hermes": "fsm_rollout.parsers.hermes:Hermes"}


def get_parser(name: str, *, generation_prompt: str = "") -> Parser:
    """The parser called `name`, for turns that the template opens with `generation_prompt`.

    Raises ConfigError when no parser has that name, or when a plug-in can't be loaded.
    """
    known = _known()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown parser {name!r}: {hint}known are {', '.join(sorted(known))}; others are "
            "plug-ins of the entry-point group fsm_rollout.parsers"
        )
    return _make(known[name], generation_prompt)


def detect(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The names of the parsers that find a well-formed call in `text`, sorted.

    For the warning when a run's own parser finds none; plug-ins that fail are passed over.
    """
    names = []
    for name, entry in sorted(_known().items()):
        with suppress(Exception):  # foreign code, and another parser's text
            parsed = _make(entry, "").parse(text, finish="stop", tools=tools)
            if any(call.error is None for call in parsed.calls):
                names.append(name)
    return names


def _known() -> dict[str, EntryPoint]:
    from importlib.metadata import EntryPoint, entry_points

    plug_ins = {entry.name: entry for entry in entry_points(group=GROUP)}
    return plug_ins | {name: EntryPoint(name, at, GROUP) for name, at in _BUILT_IN.items()}


def _make(entry: EntryPoint, generation_prompt: str) -> Parser:
    try:
        parser: Parser = entry.load()(generation_prompt=generation_prompt)
    except Exception as error:
        raise ConfigError(
            f"parser {entry.name!r} can't be made from its entry point {entry.value!r}: {error!r}; "
            "it must name a factory (*, generation_prompt: str) -> Parser"
        ) from error
    return parser

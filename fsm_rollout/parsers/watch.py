"""FormatWatch: notices that the model writes its tool calls in a format that the parser can't read.

The codec shows it each turn. Such a model never acts and its reward collapses, without an error
anywhere: so it is said once, loudly, with the parser that would do. It is over with the first call
that is read well, and after some turns without one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fsm_rollout.parsers import detect
from fsm_rollout.turn import ToolCall

logger = logging.getLogger(__name__)

_TURNS = 64
"""turns without a good call that are shown to the other parsers"""
_MALFORMED = 16
"""malformed calls, and no good one, of which none of the parsers can make anything"""
_EXCERPT = 200
"""characters of a turn in the warning"""


class FormatWatch:
    """Watches the turns of one run, which declares `tools`; `name` is its parser's.

    What is in `told` is not said again: sub-agents with other tools have watches of their own.
    """

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]], told: set[str]) -> None:
        self._name, self._tools, self._told = name, tools, told
        self._turns_left = _TURNS if tools else 0
        self._malformed = 0
        self._looking = threading.Lock()  # long turns are parsed in threads

    def look(self, text: str, calls: Sequence[ToolCall]) -> None:
        """See a finished turn and what the run's parser found in it."""
        if self._turns_left:
            with self._looking:
                self._look(text, calls)

    def _look(self, text: str, calls: Sequence[ToolCall]) -> None:
        if not self._turns_left:
            return
        self._turns_left -= 1
        self._malformed += len(calls)
        if any(call.error is None for call in calls):
            self._turns_left = 0
        elif able := [name for name in detect(text, self._tools) if name != self._name]:
            self._warn(f"parser {' or '.join(map(repr, able))} reads what it writes: use it", text)
        elif self._malformed >= _MALFORMED:
            self._warn("no other parser that is installed reads them either", text)

    def _warn(self, advice: str, text: str) -> None:
        self._turns_left = 0
        if advice in self._told:
            return
        self._told.add(advice)
        logger.warning(
            "parser %r reads no tool call of this model, so it never acts; %s. The last turn: %r",
            self._name,
            advice,
            text[:_EXCERPT],
        )

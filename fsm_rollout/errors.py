"""Errors: one class per boundary. A bad rollout is data (an aborted request), not a crash.

    RolloutError
    ├── ConfigError        a config, row, tool class or template that a run cannot start with
    │   └── TemplateError  a chat template whose delta cannot be proved
    ├── InvariantError     a write or an export would break an invariant; nothing was changed
    ├── HandOverError      a batch holds what a trainer must not have; names the sample
    ├── IllegalEvent       the table has no edge for (status, event)
    ├── GuardRefused       the edge exists and one of its guards said no
    ├── EngineError        the inference engine failed or answered nonsense; carries a StopReason
    └── ToolError          what a tool wants to tell the model

Messages say what happened, where (request, attempt, turn, tool, file, row) and how to fix it.
What the code of others raises is none of these: see failures.py.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fsm_rollout.limits import StopReason


class RolloutError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(RolloutError):
    """A config, row, tool class or template that a run cannot start with; names file and field."""


class TemplateError(ConfigError):
    """A chat template whose delta cannot be proved; the message shows both renders."""


class InvariantError(RolloutError):
    """A write or an export would break an invariant. Nothing was changed.

    `code` names the invariant: `missing_log_probs`, or `R3.<n>.<word>` with the numbers of
    docs/explanation/invariants.md.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class HandOverError(RolloutError):
    """Samples that must not be trained on, or do not fit a batch; names each and says why."""


class IllegalEvent(RolloutError):
    """The transition table has no edge for this status and event, or the reason does not fit it."""


class GuardRefused(RolloutError):
    """The edge exists, but a guard said no; `guard` is its name. The request was not changed.

    `means` is the StopReason that the refusal stands for; None: the caller is to blame.
    """

    def __init__(self, guard: str, message: str, means: StopReason | None = None) -> None:
        super().__init__(guard, message, means)
        self.guard = guard
        self.message = message
        self.means = means

    def __str__(self) -> str:
        return self.message


class EngineError(RolloutError):
    """The inference engine failed or gave an answer that did not pass the checks.

    `reason` is the StopReason (of ABORTED or TRUNCATED) that the request ends with; `final` says
    that a retry cannot help (an HTTP 400, an unknown parameter).
    """

    def __init__(self, message: str, *, reason: StopReason, final: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.final = final

    def __reduce__(self) -> tuple[object, ...]:
        return _engine_error, (str(self), self.reason, self.final)


class ToolError(RolloutError):
    """Raise it in a tool to tell the model what went wrong; its text becomes the observation."""


def hint(word: object, known: Iterable[str]) -> str:
    """What to say of a word that is none of `known`: which one was meant, or all of them."""
    near = difflib.get_close_matches(str(word), known := list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"


def _engine_error(message: str, reason: StopReason, final: bool) -> EngineError:
    return EngineError(message, reason=reason, final=final)

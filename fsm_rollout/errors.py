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
What the code of others raises (tools, rewards, agents, engines) costs one request, and is told here
in a line, and to the log by `log_failure`.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsm_rollout.limits import StopReason

_MAX_ERROR_CHARS = 300
_MAX_SHOWN_CHARS = 2_000
_MAX_LOGGED_CHARS = 16_384
_MAX_KINDS = 1_000
"""of failures that are counted apart"""


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


def _engine_error(message: str, reason: StopReason, final: bool) -> EngineError:
    return EngineError(message, reason=reason, final=final)


def describe(error: BaseException) -> str:
    """An exception in one short line, without what changes from run to run."""
    name = type(error).__name__
    lines = message(error).lstrip()[:_MAX_ERROR_CHARS].rstrip().splitlines()
    if not lines:
        return name
    line = re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", lines[0])
    return f"{name}: {line}"


def message(error: BaseException) -> str:
    """The text of an exception; "" when even that raises."""
    try:
        return str(error)
    except Exception:
        return ""


def shown(value: object) -> str:
    """`repr` of what others gave or raised, cut; its type when even that raises."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def log_failure(
    logger: logging.Logger,
    where: str,
    what: str,
    how: str,
    error: BaseException | None = None,
    *,
    level: int = logging.ERROR,
    place: str = "",
) -> None:
    """Log "`where`: `what` `how`": the first of its kind in full, then the 10th, 100th … in a line.

    `what` is the same for all requests: with the type of the exception and the line that raised it
    (or `place`, or `how`) it makes the kind. So one bug that meets 10,000 requests is told 5 times.
    Code that a model wrote may raise what it likes, where it likes: behind _MAX_KINDS kinds all
    further ones are one.
    """
    frame = None if error is None else error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is not None:
        place += f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    elif not place:
        place = how  # a deadline, say
    kind = what, type(error).__qualname__, place[:_MAX_ERROR_CHARS]
    with _counting:
        if kind not in _failures and len(_failures) >= _MAX_KINDS:
            kind = _ANY_OTHER
        count = _failures[kind] = _failures.get(kind, 0) + 1
    how = how[:_MAX_LOGGED_CHARS]
    if count == 1:
        # a traceback holds the whole text of the exception
        is_short = error is not None and len(message(error)) <= _MAX_LOGGED_CHARS
        logger.log(level, "%s: %s %s", where, what, how, exc_info=error if is_short else None)
    elif str(count).strip("0") == "1":
        how = how.partition("\n")[0]
        whose = "further kinds" if kind is _ANY_OTHER else "its kind"
        logger.log(
            level,
            "%s: %s %s (no. %d of %s in this process; the first was logged in full)",
            *(where, what, how, count, whose),
        )


_failures: dict[tuple[str, str, str], int] = {}
_counting = threading.Lock()  # engines and reward functions fail in threads
_ANY_OTHER = "", "", ""

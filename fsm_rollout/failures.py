"""Failures: what the code of others raised: tools, rewards, agents, engines.

It costs one request, and is told there in a line by `describe` or `shown`, and to the log by
`log_failure`, which tells one bug once, however many requests meet it.
"""

from __future__ import annotations

import logging
import re
import threading

_MAX_ERROR_CHARS = 300
_MAX_SHOWN_CHARS = 2_000
_MAX_LOGGED_CHARS = 16_384
_MAX_KINDS = 1_000
"""of failures that are counted apart"""


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

"""Clock: the deadline of what one call waits for, which others may move or bring about.

call.py has one for each `generate`. It does what `asyncio.timeout` does, at half the cost:
a plain `with`, used again for each wait, whose deadline can be moved.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Clock:
    """`with clock.within(s): await …` raises TimeoutError after `s` seconds, or on `interrupt`."""

    __slots__ = ("_before", "_end", "_has_rung", "_loop", "_seconds", "_sooner", "_task")

    def __init__(self) -> None:
        self._end: asyncio.TimerHandle | None = None  # while it runs
        self._sooner: asyncio.TimerHandle | None = None  # the deadline that was set last
        self._loop = asyncio.get_running_loop()
        self._has_rung = False
        self._seconds = 0.0
        self._task: asyncio.Task[object]

    def now(self) -> float:
        """Seconds, by the clock that the deadlines go by."""
        return self._loop.time()

    def within(self, seconds: float) -> Clock:
        """Set the end of the next wait."""
        self._seconds = seconds
        return self

    def extend(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, never beyond the end."""
        if self._end is not None:
            if self._sooner is not None:
                self._sooner.cancel()
            self._sooner = self._loop.call_later(seconds, self.interrupt)

    def interrupt(self) -> None:
        """Let the wait end now; nothing happens when there is none."""
        if self._end is not None and not self._has_rung:
            self._has_rung = True
            self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._end = self._loop.call_later(self._seconds, self.interrupt)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._end is not None
        self._end.cancel()
        self._end = None
        if self._sooner is not None:
            self._sooner.cancel()
            self._sooner = None
        if self._has_rung:
            self._has_rung = False
            if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
                raise TimeoutError from error  # the cancel was ours, and nobody else's

"""Clock: the deadline of what one call waits for, which others may move or bring about.

call.py has one for each `generate`. It does what `asyncio.timeout` does, at half the cost:
a plain `with`, used again for each wait, whose deadline moves on without a new timer.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Clock:
    """`with clock.within(s): await …` raises TimeoutError after `s` seconds, or on `interrupt`."""

    __slots__ = ("_before", "_deadline", "_end", "_has_rung", "_loop", "_task", "_timer")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None  # while it runs
        self._has_rung = False
        self._task: asyncio.Task[object]
        self._loop: asyncio.AbstractEventLoop

    def within(self, seconds: float) -> Clock:
        """Set the end of the next wait."""
        self._loop = asyncio.get_running_loop()
        self._end = self._deadline = self._loop.time() + seconds
        return self

    def extend(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, never beyond the end."""
        if self._timer is None:
            return
        deadline = min(self._loop.time() + seconds, self._end)
        is_sooner, self._deadline = deadline < self._deadline, deadline
        if is_sooner:
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._ring)

    def interrupt(self) -> None:
        """Let the wait end now; nothing happens when there is none."""
        if self._timer is not None and not self._has_rung:
            self._has_rung = True
            self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._has_rung:
            self._has_rung = False
            if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
                raise TimeoutError from error  # the cancel was ours, and nobody else's

    def _ring(self) -> None:
        if self._loop.time() < self._deadline:  # it was extended meanwhile
            self._timer = self._loop.call_at(self._deadline, self._ring)
        else:
            self.interrupt()

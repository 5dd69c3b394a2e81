"""FastForward: an event loop whose time passes only when nothing is left to do.

Then it jumps to the next timer, so that deadlines of an hour cost nothing and are met to the
microsecond. A loop with neither work nor a timer is stuck for ever, which is an error at once. Not
for code that waits for threads or sockets.
"""

from __future__ import annotations

import asyncio
import selectors


class FastForward(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=FastForward)`."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: FastForward) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("stuck: a task waits for what never comes, without a deadline")
        if not (ready := super().select(0)):
            self._loop.jump(timeout)
        return ready

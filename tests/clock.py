"""Event loops whose time is not that of the machine: tests keep their deadlines on any of them.

FastForward jumps to the next timer when nothing is left to do; a test asks for it. Unhurried does
not count what a stall takes; conftest.py makes it the loop of every test that asks for none.
"""

from __future__ import annotations

import asyncio
import selectors
import time

Ready = list[tuple[selectors.SelectorKey, int]]
_LATE_S = 0.001
"""how much later than it should a wait may end, and count"""
_SLICE_S = 0.02


class FastForward(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=FastForward)`: deadlines of an hour cost nothing.

    They are met to the microsecond. A loop with neither work nor a timer is stuck for ever, which
    is an error at once. Not for code that waits for threads or sockets.
    """

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

    def select(self, timeout: float | None = None) -> Ready:
        if timeout is None:
            raise RuntimeError("stuck: a task waits for what never comes, without a deadline")
        if not (ready := super().select(0)):
            self._loop.jump(timeout)
        return ready


class Unhurried(asyncio.SelectorEventLoop):
    """asyncio's loop, but a machine that stops for a second takes nothing of any deadline.

    Of a wait its timeout counts, and of what runs between two waits the CPU time, up to a slice (a
    collection of garbage may take longer): the rest is the machine's. It waits in slices, so that a
    stop in a long wait takes no more than one, and threads that were stopped too get theirs.
    Nothing is added: no deadline comes early, and each comes.
    """

    def __init__(self) -> None:
        self._lost_s = 0.0
        super().__init__(_Measured(self))

    def time(self) -> float:
        """Seconds, without those that were lost."""
        return super().time() - self._lost_s

    def lose(self, seconds: float) -> None:
        """Don't count what went beyond the expected by so much."""
        self._lost_s += max(seconds - _LATE_S, 0.0)


class _Measured(selectors.DefaultSelector):
    def __init__(self, loop: Unhurried) -> None:
        super().__init__()
        self._loop = loop
        self._left: tuple[float, float] | None = None  # when the last wait ended: (clock, CPU)

    def select(self, timeout: float | None = None) -> Ready:
        begun = time.monotonic()
        if self._left is not None:
            ended, cpu = self._left
            ran_s = max(time.thread_time() - cpu, 0.0)  # < 0: it was another thread
            self._loop.lose(begun - ended - min(ran_s, _SLICE_S))
        if timeout is not None:
            timeout = min(max(timeout, 0.0), _SLICE_S)
        ready = super().select(timeout)
        ended = time.monotonic()
        if timeout is not None:
            self._loop.lose(ended - begun - timeout)
        self._left = ended, time.thread_time()
        return ready

"""Ticker: how long an event loop was held up, told apart from a machine that is busy elsewhere.

A task that wakes every millisecond and notes its longest delay. What the kernel says that this
process' own threads waited for a CPU meanwhile (Linux: schedstat) is the machine's fault and is
taken off; so is what exceeds the CPU time of the process, which was stopped then. What is left was
spent on the loop itself, or waiting for the GIL.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.001
_TASKS = Path("/proc/self/task")


class Ticker:
    """`async with Ticker() as ticker: ...`, then `ticker.stall_s`."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        """the longest time that no task could run"""
        self.ticks = 0

    async def __aenter__(self) -> Ticker:
        self._ticking = asyncio.create_task(self._tick())
        await asyncio.sleep(0)  # it has started
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.sleep(2 * INTERVAL_S)  # a stall that ends the block counts
        self._ticking.cancel()

    async def _tick(self) -> None:
        main = str(threading.get_native_id())
        before = _clocks()
        last, busy = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(INTERVAL_S)
            now, after = time.perf_counter(), _clocks()
            late = now - last - INTERVAL_S
            ran, starved = (b - a for a, b in zip(before[main], after[main], strict=True))
            # while this thread could not run for want of the GIL, its holder may have starved
            # while this thread could not run for want of the GIL, its holder may have starved
            others = sum(
                after[thread][1] - before[thread][1]
                for thread in after.keys() & before.keys() - {main}
            )
            blocked = max(late - ran - starved - others, 0.0)
            all_ran = time.process_time() - busy  # also threads that came or went
            self.stall_s = max(self.stall_s, min(late, ran) + min(blocked, all_ran))
            self.ticks += 1
            last, busy, before = time.perf_counter(), time.process_time(), after


def _clocks() -> dict[str, tuple[float, float]]:
    """Of each thread, the seconds that it ran and that it waited for a CPU."""
    clocks = {str(threading.get_native_id()): (0.0, 0.0)}
    if _TASKS.exists():
        for task in _TASKS.iterdir():
            try:
                ran, starved, _ = (task / "schedstat").read_text().split()
            except OSError:  # the thread has ended
                continue
            clocks[task.name] = (int(ran) / 1e9, int(starved) / 1e9)
    return clocks

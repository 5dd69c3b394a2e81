"""Timers: `call_later` for deadlines of a few lengths that nearly always are cancelled in time.

Each turn sets several: of the engine's reply, of its HTTP exchange, of a tool. Timers of one length
end in the order in which they began, so that one timer of the event loop serves all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Timer:
    """A callback that waits for its time."""

    __slots__ = ("_queue", "callback", "when")

    def __init__(self, when: float, callback: Callable[[], object], queue: _Queue) -> None:
        self.when = when  # as the event loop tells the time
        self.callback = callback
        self._queue = queue

    def cancel(self) -> None:
        """Don't call; nothing happens when it was called or cancelled before."""
        self._queue.waiting.pop(self, None)


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """As the running event loop's own, in constant time. `callback` must not raise."""
    loop = asyncio.get_running_loop()
    if _queues.loop is not loop:
        _queues.loop, _queues.by_length = loop, {}
    queue = _queues.by_length.get(seconds)
    if queue is None:
        queue = _queues.by_length[seconds] = _Queue(loop, seconds)
    timer = Timer(loop.time() + seconds, callback, queue)
    queue.waiting[timer] = None
    return timer


class _Queue:
    """Timers of one length, in their order. Forgotten when it is found empty at its next look."""

    __slots__ = ("_loop", "_seconds", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.waiting: dict[Timer, None] = {}
        self._loop = loop
        self._seconds = seconds
        loop.call_later(seconds, self._look)

    def _look(self) -> None:
        while timer := next(iter(self.waiting), None):
            if timer.when > self._loop.time():
                self._loop.call_at(timer.when, self._look)
                return
            del self.waiting[timer]
            timer.callback()
        _queues.by_length.pop(self._seconds, None)


class _Queues(threading.local):
    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.by_length: dict[float, _Queue] = {}


_queues = _Queues()

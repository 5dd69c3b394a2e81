"""LoopThread: an event loop in a thread of its own. TRL is synchronous, and so is its worker's API.

Not `asyncio.run`: a notebook's thread runs a loop already, and an engine's connections outlive a
step only if their loop does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines. The thread starts with the first; `close` ends it and what still runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it; the future is done when it is."""
        if self._thread is None:
            is_ready = threading.Event()
            self._thread = threading.Thread(
                target=self._serve, args=(is_ready,), name=self._name, daemon=True
            )
            self._thread.start()
            is_ready.wait()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Start it and wait; what interrupts the wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self, *, wait: bool = True) -> None:
        """Cancel what runs, end the thread and wait for that. A second call does nothing."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            if wait:
                self._thread.join()
        self._thread = None

    def _serve(self, is_ready: threading.Event) -> None:
        with asyncio.Runner() as runner:  # its end cancels what is left
            self._loop, self._end = runner.get_loop(), asyncio.Event()
            is_ready.set()
            runner.run(self._wait())

    async def _wait(self) -> None:
        await self._end.wait()

"""Batcher: requests that end one by one, scored many at a time by one call.

What comes while a call runs goes into the next one. A call that fails is made again for each of its
requests alone, at the same time, so that one request costs no other its reward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fsm_rollout.request import Request

Call = Callable[[list[Request]], Coroutine[Any, Any, list[object]]]
"""one call; it keeps its own deadline"""
Waiting = tuple[Request, "asyncio.Future[object]"]


class Batcher:
    """At most `calls` calls at the same time, each with up to `size` requests, until one fails.

    It serves one event loop.
    """

    def __init__(self, call: Call, size: int, wait_s: float, *, calls: int) -> None:
        self._call = call
        self._size = size
        self._wait_s = wait_s
        self._max_calls = calls
        self._waiting: deque[Waiting] = deque()
        self._callers: set[asyncio.Task[None] | None] = set()
        self._filled = asyncio.Event()

    async def score(self, request: Request) -> object:
        """What the function says of the request. Raises what the call raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._waiting.append((request, future))
        if len(self._waiting) >= self._size:
            self._filled.set()
        if len(self._callers) < self._max_calls:
            self._callers.add(loop.create_task(self._work()))
        return await future

    async def _work(self) -> None:
        """Make calls until nobody waits."""
        batch: list[Waiting] = []
        try:
            while self._waiting:
                if len(self._waiting) < self._size:
                    self._filled.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._wait_s):
                            await self._filled.wait()
                while self._waiting and len(batch) < self._size:
                    batch.append(self._waiting.popleft())
                await self._score(batch)
                batch.clear()
        finally:
            self._callers.discard(asyncio.current_task())  # at once: who comes now needs another
            for _, future in batch:  # after a cancel, at the end of the event loop
                future.cancel()

    async def _score(self, batch: list[Waiting]) -> None:
        """Every future of the batch gets its score or an exception."""
        try:
            await self._settle(batch)
        except Exception as error:
            if len(batch) == 1:
                [(_, future)] = batch
                return None if future.done() else future.set_exception(error)
            await asyncio.gather(*(self._score([waiting]) for waiting in batch))

    async def _settle(self, batch: list[Waiting]) -> None:
        batch = [waiting for waiting in batch if not waiting[1].done()]  # some were cancelled
        if not batch:
            return
        requests = [request for request, _ in batch]
        call = asyncio.create_task(self._call(requests))

        def look(_: object) -> None:
            if all(future.done() for _, future in batch):  # cancelled, all of them
                call.cancel()

        for _, future in batch:
            future.add_done_callback(look)
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
        if not call.cancelled():
            for (_, future), score in zip(batch, call.result(), strict=True):
                if not future.done():
                    future.set_result(score)

"""FakeRouter: SGLang's router in front of fake engines, or of real ones.

It forwards /generate to one worker, the same for the same routing key, and names its workers. What
else a worker can do, it cannot: aborts and pauses must go past it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

ROUTING_KEY = "x-smg-routing-key"


class FakeRouter:
    """A router on `url` while it is entered. `old`: as before 0.3, /list_workers for /workers."""

    def __init__(self, workers: Sequence[str], *, old: bool = False) -> None:
        self.workers = list(workers)
        self.port = 0
        self._old = old
        self._turn = itertools.count()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=256 * 2**20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        if self._old:
            app.router.add_get("/list_workers", self._list_workers)
        else:
            app.router.add_get("/workers", self._list_workers_with_ids)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=8192).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get(ROUTING_KEY)
        number = next(self._turn) if key is None else zlib.crc32(key.encode())
        worker = self.workers[number % len(self.workers)]
        headers = {"Content-Type": "application/json"} | ({ROUTING_KEY: key} if key else {})
        body = await request.read()
        response: web.StreamResponse | None = None
        try:
            async with self._session.post(worker + "/generate", data=body, headers=headers) as got:
                response = web.StreamResponse(
                    status=got.status, headers={"Content-Type": got.headers["Content-Type"]}
                )
                await response.prepare(request)
                async for chunk in got.content.iter_any():
                    await response.write(chunk)
                return response
        except aiohttp.ClientError as error:
            if response is not None and response.prepared:  # what was begun cannot be taken back
                if request.transport is not None:
                    request.transport.abort()
                return response
            return web.json_response({"error": {"message": f"{worker}: {error}"}}, status=503)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": self.workers})

    async def _list_workers_with_ids(self, request: web.Request) -> web.Response:
        known = [
            {"id": str(i), "url": url, "is_healthy": True} for i, url in enumerate(self.workers)
        ]
        return web.json_response({"workers": known, "total": len(known)})

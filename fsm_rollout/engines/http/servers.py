"""Servers: the endpoints of one engine within reach: knocked at, told to abort, called.

call.py sends its tries through it; engine.py owns it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from fsm_rollout.engines.http.endpoints import Endpoint, Endpoints
from fsm_rollout.engines.http.transport import Answer, Fault, Transport
from fsm_rollout.engines.http.wire import Wire
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason

logger = logging.getLogger(__name__)

_NO_TRY = "0" * 32
_EXCERPT = 300
"""characters of a refusal that its error shows"""


class Servers:
    """Endpoints, the wire they speak and the connections to them; shared by all calls."""

    def __init__(
        self,
        wire: Wire,
        urls: str | Sequence[str],
        headers: Mapping[str, str],
        settings: HttpSettings,
    ) -> None:
        if not isinstance(settings, HttpSettings):
            raise ConfigError(f"settings must be HttpSettings(...), got {settings!r}")
        self.wire = wire
        self.salt = uuid4().hex[:8]  # begins the ids of tries: a server may have other clients
        self.endpoints = Endpoints(urls)
        self.settings = settings
        self.metrics: Counter[str] = Counter()
        self.control_urls: Sequence[str] = ()
        self.is_closed = False
        self.transport = Transport(
            headers,
            connect_timeout_s=settings.connect_timeout_s,
            first_byte_timeout_s=settings.first_byte_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
            close_timeout_s=settings.abort_timeout_s,
            max_connecting=settings.max_connecting,
        )

    async def knock(self, endpoint: Endpoint) -> bool:
        """Ask an endpoint that was left alone for something cheap: to abort a try that isn't."""
        self.metrics["knocks"] += 1
        path, body = self.wire.abort(_NO_TRY)
        try:
            answer = await self._abort_at(endpoint.url + path, body)
        except Fault as fault:
            self.failed(endpoint, str(fault))
            return False
        if answer.status >= 500:
            self.failed(endpoint, f"HTTP {answer.status} to a knock")
            return False
        self.endpoints.revived(endpoint)
        return True

    def failed(self, endpoint: Endpoint, why: str) -> None:
        """Book a failure of an endpoint, and tell when it was the one too many."""
        if self.endpoints.failed(endpoint, why):
            self.metrics["breaker_opened"] += 1
            logger.warning(
                "%r is left alone until it answers again; while no server does, calls wait up to "
                "engine_wait_s=%g: check that it runs and that the URL is right",
                endpoint,
                self.settings.engine_wait_s,
            )

    async def abort(self, endpoint: Endpoint, rid: str) -> None:
        """Abort one try where it may run. Best effort, in a short time, and counted."""
        self.metrics["aborts_sent"] += 1
        path, body = self.wire.abort(rid)
        urls = self.control_urls
        if not urls or endpoint.url in urls:
            urls = (endpoint.url,)
        answers = await asyncio.gather(
            *(self._abort_at(url + path, body) for url in urls), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, Fault):
                self.metrics["aborts_failed"] += 1
                if urls == (endpoint.url,):  # it hangs: a cancelled try alone would not tell
                    self.failed(endpoint, f"no answer to an abort: {answer}")
            elif isinstance(answer, BaseException):
                raise answer

    async def call(
        self, method: str, path: str, body: object | None, urls: Sequence[str], timeout_s: float
    ) -> dict[str, Any]:
        """What each of these base URLs answers: JSON, or text where it is none."""
        data = b"" if body is None else msgspec.json.encode(body)
        answers = await asyncio.gather(
            *(self._call(method, url, path, data, timeout_s) for url in urls),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(urls, answers, strict=True))

    async def _abort_at(self, url: str, body: bytes) -> Answer:
        return await self.transport.control(
            "POST", url, body, timeout_s=self.settings.abort_timeout_s
        )

    async def _call(self, method: str, url: str, path: str, data: bytes, timeout_s: float) -> Any:
        target = url.rstrip("/") + path
        try:
            answer = await self.transport.control(method, target, data, timeout_s=timeout_s)
        except Fault as fault:
            raise EngineError(f"{method} {target}: {fault}", reason=StopReason.NO_ENGINE) from fault
        text = answer.body.decode(errors="replace")
        if answer.status != 200:
            raise EngineError(
                f"{method} {target}: HTTP {answer.status}: {text[:_EXCERPT]}",
                reason=StopReason.ENGINE_ERROR,
            )
        try:
            return msgspec.json.decode(answer.body) if answer.body else None
        except (msgspec.DecodeError, RecursionError):
            return text

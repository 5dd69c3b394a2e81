"""Transport: HTTP exchanges over kept-alive connections, each under a deadline.

servers.py and call.py send aborts, control calls and generations through it. What goes
wrong on the way is a Fault, which says how far the exchange came.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import hdrs

from fsm_rollout.engines.http.clock import Clock
from fsm_rollout.engines.http.sse import Events
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason

FaultKind = Literal["connect", "disconnect", "timeout", "broken", "reply", "server", "busy"]
"""connect: nothing was sent. disconnect: no byte came back. timeout, broken (cut, or no HTTP),
reply (no answer to what was asked): the server may be at work. server: 5xx. busy: replies.BUSY."""

_LARGE_BODY = 2**20
"""bytes above which aiohttp warns of a body that is not a file"""
_MAX_RETRY_AFTER_S = 30.0
_SPARE_FILES = 256
"""open files beside the generations': control calls, the program's own"""
_MAX_CONTROLS = 64
"""aborts and control calls at a time with one server: aborting everything must not double the
connections, nor one that hangs keep the others waiting"""
_HEADER_NAME, _HEADER_VALUE = (
    re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII),
    re.compile(r"[^\r\n\0]*"),
)
_LINGER_S = 1.0
"""for the end of a stream after `[DONE]`, so that its connection can be kept"""
_KEEPALIVE_S = 300
"""longer than most tools run; a server that closes earlier costs a new connection"""


class Fault(Exception):
    """An exchange without a usable answer. `error`: what it means if it is not tried again."""

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        error: EngineError | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind
        self.error = error
        self.retry_after_s = retry_after_s


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A whole HTTP answer. `is_stream`: its events were handed out and the body is empty."""

    status: int
    body: bytes = b""
    retry_after_s: float = 0.0
    is_stream: bool = False


class Transport:
    """The connections of one engine, opened where the first exchange runs.

    They are closed by `close`, or else with their event loop; in another loop it opens new ones.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        close_timeout_s: float,
        max_connecting: int,
    ) -> None:
        self._headers = _checked(headers)
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._close_timeout_s = close_timeout_s
        self._max_connecting = max_connecting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession
        self._controls: defaultdict[str, asyncio.Semaphore]  # of each server
        self._lifetime: AsyncGenerator[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        clock: Clock,
        timeout_s: float,
        on_event: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """One generation within `timeout_s`; whoever has the `clock` may end it. Raises Fault.

        With `on_event`, a stream's events are handed out as they come; what it raises is passed on.
        """
        response: aiohttp.ClientResponse | None = None
        data: Any = body if len(body) <= _LARGE_BODY else io.BytesIO(body)
        try:
            with clock.within(timeout_s):
                if on_event is not None:
                    clock.extend(self._first_byte_timeout_s)
                session = self._opened or await self._open()
                response = await session.post(
                    url, data=data, headers=headers, allow_redirects=False
                )
                if on_event is None or not _is_stream(response):
                    if not response.content.is_eof():
                        clock.extend(self._idle_timeout_s)
                    return _answer(response, await response.read())
                await self._hand_out(response, on_event, clock)
            await _read_off(response)
            return Answer(200, is_stream=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _fault(error, has_begun=response is not None) from error

    async def control(self, method: str, url: str, body: bytes, *, timeout_s: float) -> Answer:
        """One abort or control call, within `timeout_s`. Raises Fault."""
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(timeout_s):
                session = self._opened or await self._open()
                async with (
                    self._controls[url.split("/", 3)[2]],
                    session.request(method, url, data=body, allow_redirects=False) as response,
                ):
                    return _answer(response, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _fault(error, has_begun=response is not None) from error

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work that ends by itself run in the background; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let what was spawned end, then cut what still runs and close every connection."""
        self._is_closed = True
        lifetime, self._lifetime = self._lifetime, None
        if lifetime is not None:
            await lifetime.aclose()

    @property
    def _opened(self) -> aiohttp.ClientSession | None:
        return self._session if self._loop is asyncio.get_running_loop() else None

    async def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise Fault("connect", "the engine was closed")
        if self._loop is not None and self._loop.is_running():
            raise EngineError(
                "this engine is in use in another event loop: make one for each loop",
                reason=StopReason.ENGINE_ERROR,
                final=True,
            )
        self._loop = asyncio.get_running_loop()
        self._controls = defaultdict(lambda: asyncio.Semaphore(_MAX_CONTROLS))
        self._session = aiohttp.ClientSession(
            connector=_Connector(self._max_connecting, self._connect_timeout_s),
            headers=self._headers,
            request_class=_Request,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        self._tasks.clear()
        self._lifetime = self._live(self._session)
        await anext(self._lifetime)
        return self._session

    async def _live(self, session: aiohttp.ClientSession) -> AsyncGenerator[None]:
        """Ends when it is told to, or else with the event loop, which ends every generator."""
        try:
            yield
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._close_timeout_s + _LINGER_S)
            for task in self._tasks:
                task.cancel()
            self._loop = None  # nothing more is sent through this session
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await session.close()

    async def _hand_out(
        self,
        response: aiohttp.ClientResponse,
        on_event: Callable[[bytes], None],
        clock: Clock,
    ) -> None:
        events = Events()
        try:
            while True:
                clock.extend(self._idle_timeout_s)
                chunk = await response.content.readany()
                for event in events.feed(chunk) if chunk else events.flush():
                    on_event(event)
                    if event == b"[DONE]":
                        return
                if not chunk:
                    return
        except BaseException:
            response.close()
            raise


class _Request(aiohttp.ClientRequest):
    """Our headers in place of aiohttp's; those of a session are copied again for each request."""

    DEFAULT_HEADERS = {  # noqa: RUF012
        hdrs.ACCEPT: "*/*",
        hdrs.ACCEPT_ENCODING: "identity",
        hdrs.CONTENT_TYPE: "application/json",
        hdrs.USER_AGENT: "fsm-rollout",
    }


class _Connector(aiohttp.TCPConnector):
    """Ramps connections up: at most so many handshakes at a time with each server.

    Thousands at once would overflow the server's backlog and wait for TCP's retries.
    """

    def __init__(self, max_connecting: int, timeout_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_socket)
        self._timeout_s = timeout_s
        self._ramps: defaultdict[Any, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(max_connecting)
        )

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
    ) -> Any:
        async with self._ramps[req.connection_key], asyncio.timeout(self._timeout_s):
            return await super()._create_connection(req, traces, timeout)

    async def _get(self, key: Any, traces: Any) -> Any:
        """A kept connection in which nothing lies: a reply that came twice is nobody's."""
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                break
            connection.close()
        return connection

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        """Cut a connection that is given up: closing would first send what nobody reads."""
        if (should_close or protocol.should_close) and protocol.transport is not None:
            protocol.transport.abort()
        super()._release(key, protocol, should_close=should_close)


def _socket(address: Any) -> socket.socket:
    """A socket that finds out by itself when its peer, or a router in between, has forgotten it."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    return sock


async def _read_off(response: aiohttp.ClientResponse) -> None:
    """Read what comes behind the last event, so that the connection can be kept."""
    try:
        if not response.content.is_eof():
            async with asyncio.timeout(_LINGER_S):
                await response.content.read()
    except (aiohttp.ClientError, TimeoutError):
        pass
    finally:
        response.release()


def _checked(headers: object) -> dict[str, str]:
    """Headers as they can be sent; no error shows a value, which may be a key."""
    if not isinstance(headers, Mapping):
        raise ConfigError("headers must be a mapping, such as {'Authorization': 'Bearer …'}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"header {name!r}: no name of a header")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"header {name!r}: its value must be one line of text")
    return dict(headers)


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    """An error, and what a server says that doesn't stream, come as one JSON document."""
    return response.status == 200 and response.content_type != "application/json"


def _answer(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    if response.status == 200:
        return Answer(200, body)
    try:
        after_s = float(response.headers.get("Retry-After", 0))
    except ValueError:  # a date
        after_s = 0.0
    return Answer(response.status, body, min(max(after_s, 0.0), _MAX_RETRY_AFTER_S))


def _fault(error: Exception, *, has_begun: bool) -> Fault:
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Fault("connect", message)
    if isinstance(error, TimeoutError):
        return Fault("timeout", "no answer in time")
    if isinstance(error, aiohttp.ClientConnectionError) and not has_begun:
        return Fault("disconnect", message)
    return Fault("broken", message)


def reserve_files(max_concurrent: int) -> None:
    """Let this process open a connection for each request; ConfigError when it must not."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    need = max_concurrent + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"{max_concurrent} requests in flight need {need} open files, this process may have "
            f"{hard}: raise the limit (`ulimit -n {need}`, LimitNOFILE= of a systemd unit, "
            f"--ulimit nofile={need} of docker), or lower max_concurrent to "
            f"{max(hard - _SPARE_FILES, 1)}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

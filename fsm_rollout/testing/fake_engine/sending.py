"""Sending: a body or a stream of events on its way to the client, and what befalls the bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from fsm_rollout.testing.fake_engine.faults import (
    Duplicate,
    ErrorEvent,
    Garbage,
    Late,
    MissingEnd,
    Reset,
    Stall,
    Status,
    Truncated,
)
from fsm_rollout.testing.fake_engine.wire import DONE

JSON = "application/json"
EVENTS = "text/event-stream"


def refuse(status: int, body: bytes, fault: Status | None = None) -> web.Response:
    """An HTTP error; of a Status, with the body and the header that it wants."""
    headers = {}
    if fault is not None and fault.retry_after_s is not None:
        headers["Retry-After"] = f"{fault.retry_after_s:g}"
    if fault is not None and fault.body is not None:
        body = fault.body.encode()
    return web.Response(status=status, body=body, headers=headers, content_type=JSON)


async def send_body(
    request: web.Request, body: bytes, fault: Any, *, status: int = 200, content_type: str = JSON
) -> web.StreamResponse:
    """A response that is complete by itself."""
    match fault:
        case Garbage(body=garbage):
            body = garbage.encode()
        case Truncated(keep=keep):
            body = body[: int(keep * len(body))]
        case Late(seconds=seconds):
            await asyncio.sleep(seconds)
        case Stall() | Reset() | Duplicate():
            response = web.StreamResponse(status=status, headers={"Content-Type": content_type})
            response.content_length = len(body)
            pipe = _Pipe(request, response, fault)
            if await pipe.open() and await pipe.write(body) and isinstance(fault, Duplicate):
                head = f"HTTP/1.1 {status} OK\r\nContent-Type: {content_type}\r\n"
                again = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
                pipe.transport.write(again)
            return response
        case _:
            pass
    return web.Response(body=body, status=status, content_type=content_type)


async def send_events(
    request: web.Request,
    events: AsyncIterator[tuple[bytes, bool]],
    fault: Any,
    *,
    error: bytes | None,
) -> web.StreamResponse:
    """Server-sent events: (data, whether it belongs to the stream's end)."""
    response = web.StreamResponse(headers={"Content-Type": EVENTS})
    pipe = _Pipe(request, response, fault)
    if not await pipe.open():
        return response
    number = 0
    async for event, is_end in events:
        data, number = event, number + 1
        match fault:
            case Garbage(body=garbage) if number == 1:
                data = garbage.encode()
            case Truncated(keep=keep) if is_end and data != DONE:
                data = data[: int(keep * len(data))]
            case MissingEnd(done=done) if is_end and not (done and data == DONE):
                continue
            case ErrorEvent(after_events=after) if error and (is_end or number > after):
                await pipe.write(b"data: %b\n\ndata: %b\n\n" % (error, DONE))
                return response
            case Late(seconds=seconds) if is_end and data != DONE:
                await asyncio.sleep(seconds)
            case _:
                pass
        framed = b"data: %b\n\n" % data
        if not await pipe.write(framed * 2 if isinstance(fault, Duplicate) else framed):
            break
    return response


class _Pipe:
    """Writes a response's body and lets a Stall or Reset strike at its byte."""

    def __init__(self, request: web.Request, response: web.StreamResponse, fault: Any) -> None:
        assert request.transport is not None
        self.transport = request.transport
        self._request = request
        self._response = response
        self._fault = fault if isinstance(fault, Stall | Reset) else None
        self._sent = 0

    async def open(self) -> bool:
        """False: the connection is gone."""
        if self._fault is not None and self._fault.after_bytes < 0 and not await self._strike():
            return False
        await self._response.prepare(self._request)
        return True

    async def write(self, data: bytes) -> bool:
        """False: the connection is gone."""
        if self._fault is not None and self._sent + len(data) >= self._fault.after_bytes:
            at = self._fault.after_bytes - self._sent
            if at:
                await self._response.write(data[:at])
            data = data[at:]
            if not await self._strike():
                return False
        self._sent += len(data)
        await self._response.write(data)
        return True

    async def _strike(self) -> bool:
        fault, self._fault = self._fault, None
        while self.transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if isinstance(fault, Stall):
            await asyncio.sleep(86_400 if fault.seconds is None else fault.seconds)
            return True
        assert fault is not None
        if fault.politely:
            self.transport.close()
            return False
        await asyncio.sleep(0.005)  # what was sent before a reset may else be lost with it
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
        return False

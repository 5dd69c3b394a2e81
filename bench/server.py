"""The other end of bench/turn.py: canned replies over HTTP/1.1, from a process of its own.

    with serving([script, ...]) as urls: ...

A script holds the replies of a conversation turn by turn: bodies that are sent in rotation to
POSTs of at least so many bytes. Turns are told apart by the length of what is asked alone, so the
server parses nothing and costs the same whoever asks. Other requests are answered 404. Run as a
program it reads its scripts from standard input and serves until that is closed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

import msgspec

Script: TypeAlias = list[tuple[int, list[bytes]]]
"""(least bytes of a request's body, bodies to answer it with), ascending"""

_BACKLOG = 16_384
_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def serving(scripts: Sequence[Script]) -> Iterator[list[str]]:
    """One URL per script."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin
        assert server.stdout
        sent = msgspec.msgpack.encode(list(scripts))
        server.stdin.write(len(sent).to_bytes(8) + sent)
        server.stdin.flush()
        ports = server.stdout.readline().decode().split()
        yield [f"http://127.0.0.1:{port}" for port in ports]
        server.stdin.close()


class Connection(asyncio.Protocol):
    """Keep-alive, one request at a time."""

    def __init__(self, script: Script) -> None:
        self._least = [least for least, _ in script]
        self._replies = [cycle(replies) for _, replies in script]
        self._head = bytearray()
        self._reply = b""
        self._missing = 0
        """bytes of the body that are still to come; 0: between two requests"""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's is no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(_END)
            if end < 0:
                return
            head, received = bytes(self._head[:end]), len(self._head) - end - len(_END)
            self._head.clear()
            length = _content_length(head)
            self._reply = self._reply_to(head, length)
            self._missing = length - received
        if not self._missing:
            self._transport.write(self._reply)

    def _reply_to(self, head: bytes, length: int) -> bytes:
        turn = bisect_right(self._least, length) - 1
        is_known = turn >= 0 and head.startswith(b"POST /generate ")
        return next(self._replies[turn]) if is_known else _NOT_FOUND


def _content_length(head: bytes) -> int:
    head = head.lower()
    at = head.find(_LENGTH)
    return int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else 0


def _with_head(body: bytes) -> bytes:
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return head.encode() + str(len(body)).encode() + _END + body


async def serve(scripts: Sequence[Script]) -> None:
    """Serve each script on a port of its own until standard input ends."""
    loop = asyncio.get_running_loop()
    ports = []
    for script in scripts:
        whole = [(least, [_with_head(body) for body in bodies]) for least, bodies in script]
        server = await loop.create_server(
            partial(Connection, whole), "127.0.0.1", 0, backlog=_BACKLOG
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(*ports, flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)


def main() -> None:
    size = int.from_bytes(sys.stdin.buffer.read(8))
    scripts = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=list[Script])
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(scripts))


if __name__ == "__main__":
    main()

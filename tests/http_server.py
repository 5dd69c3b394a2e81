"""A raw HTTP server and the smallest Wire, for the tests of engines/http/engine.py.

The server answers each `/generate` with the next step of its plan, and well once that is used up.
It works below HTTP, so that a step can break it anywhere.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, LogProbKind, SamplingParams
from fsm_rollout.engines.http import HttpEngine, HttpSettings
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason

T = TypeVar("T")
GOOD = {"ids": [7, 8], "lps": [-0.5, -0.25], "finish": "stop"}
BAD = {"ids": [66, 66], "lps": [-6.0, -6.0], "finish": "stop"}
"""what a try that fails would have brought: it must never be seen"""
Step = Callable[["Server", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


class TinyWire:
    """JSON in, JSON out; streamed, one event for each token."""

    name = "tiny"
    path = "/generate"
    log_prob_kind: LogProbKind = "scaled"

    def headers(self, ask: Ask) -> Mapping[str, str]:
        return {"X-Session": ask.session_id}

    def body(self, ask: Ask) -> bytes:
        return b'{"rid":"%s","ids":[%s]}' % (ask.rid.encode(), bytes(ask.ids))

    def reply(self, body: bytes, ask: Ask) -> Reply:
        return reply_of(decoded(body))

    def stream(self, ask: Ask) -> TinyStream:
        return TinyStream()

    def refusal(self, status: int, body: bytes) -> EngineError:
        message = f"tiny: HTTP {status}: {body[:80].decode(errors='replace')}"
        if b"too long" in body:
            return EngineError(message, reason=StopReason.MAX_CONTEXT)
        return EngineError(message, reason=StopReason.ENGINE_ERROR, final=status in (400, 404))

    def abort(self, rid: str) -> tuple[str, bytes]:
        return "/abort", b'{"rid":"%s"}' % rid.encode()


class TinyStream:
    """Puts the tokens together; the last event has a finish."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = {"ids": [], "lps": [], "finish": None}

    def feed(self, event: bytes) -> None:
        if event != b"[DONE]":
            part = decoded(event)
            if part["ids"] is None:
                raise EngineError("tiny: no ids", reason=StopReason.MISSING_LOG_PROBS)
            self.got["ids"] += part["ids"]
            self.got["lps"] += part["lps"]
            self.got["finish"] = part["finish"]

    def reply(self) -> Reply:
        if self.got["finish"] is None:
            raise EngineError("tiny: the stream lacks its end", reason=StopReason.BAD_REPLY)
        return reply_of(self.got)


def decoded(body: bytes) -> Any:
    try:
        said = json.loads(body)
        said["finish"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"tiny: {error!r}", reason=StopReason.BAD_REPLY) from error
    return said


def reply_of(said: dict[str, Any]) -> Reply:
    return Reply(
        rid=said.get("rid"),
        token_ids=said["ids"],
        log_probs=said["lps"],
        finish=said["finish"],
        prompt_tokens=said.get("prompt_tokens"),
        prompt_token_ids=said.get("prompt_token_ids"),
    )


class Server:
    """`async with Server(step, step, …) as server`: `seen` is what came in, in its order."""

    def __init__(self, *plan: Step, always: Step | None = None, port: int = 0) -> None:
        self.plan = list(plan)
        self.always = always or answer()
        self.port = port
        self.seen: list[tuple[str, str]] = []  # (path, rid)
        self.headers: dict[str, str] = {}  # of the last try
        self.connections = 0
        self.opened = 0
        self.abort_step: Step = answer({})
        self.cuts = 0  # connections that ended while their step ran
        self.tick = asyncio.Event()  # something came, or went
        self.aborted: dict[str, asyncio.Event] = {}
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def generated(self) -> list[str]:
        """The rids of the tries that came."""
        return [rid for path, rid in self.seen if path == "/generate"]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what came, or went, makes it so."""
        async with asyncio.timeout(40):
            while not is_so():
                self.tick.clear()
                await self.tick.wait()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=2**24, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.connections += 1
        self.opened += 1
        try:
            while True:
                await self._exchange(reader, writer)
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.connections -= 1
            self.tick.set()
            self._handlers.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(headers.get("Content-Length", 0))) or "{}")
        rid = body.get("rid", "")
        self.seen.append((path, rid))
        self.tick.set()
        if path == "/abort":
            self.aborted.setdefault(rid, asyncio.Event()).set()
            await self._watched(self.abort_step(self, writer, body), reader)
        elif path == "/generate":
            self.headers = headers
            step = self.plan.pop(0) if self.plan else self.always
            await self._watched(step(self, writer, body), reader)
        else:
            await answer({"path": path, "body": body})(self, writer, body)

    async def _watched(self, step: Awaitable[None], reader: asyncio.StreamReader) -> None:
        """Run the step, and stop it when the client goes."""
        work = asyncio.ensure_future(step)
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cuts += 1
                self.tick.set()
                raise ConnectionResetError
            work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


@contextmanager
def elsewhere(server: Server) -> Iterator[Server]:
    """The server in a thread and event loop of its own: it outlives the client's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def head(
    length: int | None, *, status: int = 200, kind: str = "application/json", more: str = ""
) -> bytes:
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\n{size}{more}\r\n".encode()


def raw(data: bytes, *, then: str = "cut") -> Step:
    """These bytes and the connection is cut, closed, or nothing more comes."""

    async def step(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(data)
        await writer.drain()
        if then == "hang":
            await asyncio.Event().wait()
        if then == "cut":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: a reset, not an end
        if then != "keep":
            raise ConnectionResetError

    return step


def answer(said: object = GOOD, *, status: int = 200, more: str = "", delay_s: float = 0.0) -> Step:
    """A whole JSON answer."""
    data = said if isinstance(said, bytes) else json.dumps(said).encode()

    async def step(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await asyncio.sleep(delay_s)
        writer.write(head(len(data), status=status, more=more) + data)
        await writer.drain()

    return step


def until_aborted(partial: object) -> Step:
    """Generates for ever; an abort of its rid ends it with what it has."""

    async def step(server: Server, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await server.aborted.setdefault(body["rid"], asyncio.Event()).wait()
        await answer(partial)(server, writer, body)

    return step


def events(said: Mapping[str, Any] = GOOD, *, done: bool = True) -> bytes:
    """The body of a stream, one event for each token."""
    lines = []
    last = len(said["ids"]) - 1
    for number, (token, log_prob) in enumerate(zip(said["ids"], said["lps"], strict=True)):
        finish = said["finish"] if number == last else None
        part = {"ids": [token], "lps": [log_prob], "finish": finish}
        lines.append(b"data: " + json.dumps(part).encode() + b"\n\n")
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def chunked(*parts: bytes, end: bool = True) -> bytes:
    """A chunked stream with its head."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return (
        head(None, kind="text/event-stream", more="Transfer-Encoding: chunked\r\n")
        + chunks
        + (b"0\r\n\r\n" if end else b"")
    )


PATIENT = HttpSettings(timeout_s=60, idle_timeout_s=60, abort_timeout_s=30, max_tries=3)
"""deadlines that no machine misses"""
FAST = HttpSettings(
    connect_timeout_s=0.3,
    timeout_s=0.25,
    idle_timeout_s=0.12,
    abort_timeout_s=0.25,
    engine_wait_s=0.6,
    max_tries=3,
)
"""deadlines to wait for, on asyncio's loop: there a stall of the machine is no time (clock.py)"""


def engine_for(*servers: Server | str, settings: HttpSettings = PATIENT, **more: Any) -> HttpEngine:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return HttpEngine(TinyWire(), urls, settings=settings, vocab_size=100, **more)


async def ask(
    engine: HttpEngine,
    request_id: str = "r",
    *,
    session: str | None = None,
    prompt: tuple[int, ...] = (1, 2, 3),
) -> Generation:
    """One generate, whose home is the first server unless the session says otherwise."""
    return await engine.generate(
        Columns(prompt),
        8,
        SamplingParams(),
        request_id=request_id,
        session_id=session or at_home(engine, 0),
    )


def at_home(engine: HttpEngine, index: int) -> str:
    """A session whose home is the server `index`."""
    names = (f"session-{number}" for number in range(10_000))
    return next(n for n in names if engine.endpoints.home(n) is engine.endpoints[index])


def run(main: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """Run it to its end on asyncio's loop or uvloop."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)

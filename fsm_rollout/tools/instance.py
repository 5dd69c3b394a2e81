"""Instance: one tool object of a request, the flights of its hooks, and whether it owes a release.

Only tools/session.py uses it. `run` puts a hook into a flight of its own, under its deadline.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

import msgspec

from fsm_rollout.failures import describe
from fsm_rollout.limits import Limits
from fsm_rollout.tools.base import (
    FunctionTool,
    Tool,
    ToolResponse,
    json_parts,
    to_response,
)
from fsm_rollout.tools.schema import ToolSchema
from fsm_rollout.tools.supervisor import MAX_THREADS, Flight, gate

_AT_ONCE = nullcontext()
_SLICE = 1_000
"""parts of a JSON text that are written before the event loop goes on"""


class Ended(msgspec.Struct, frozen=True):
    """How one run of a hook ended."""

    value: Any = None
    error: BaseException | None = None
    """what the hook raised by itself, a CancelledError or TimeoutError of its own included"""
    stopped_s: float | None = None
    """we stopped it at this deadline, in seconds (or before, because the session closes)"""

    @property
    def fault(self) -> str | None:
        """What went wrong, in a few words; None: nothing."""
        if self.stopped_s is not None:
            return f"timed out after {self.stopped_s:g} s"
        return None if self.error is None else f"failed: {describe(self.error)}"


class Instance:
    """One tool object, made by `make`."""

    __slots__ = (
        "_create", "_label", "_limits", "_lock", "_on_abandon", "_schema", "_tool",
        "cls", "creation", "flights", "is_created", "is_live", "kwargs", "name",
    )  # fmt: skip

    def __init__(
        self, schema: ToolSchema, *, limits: Limits, label: str, on_abandon: Callable[[], None]
    ) -> None:
        self.cls = schema.cls
        self.name = schema.name
        self.is_live = False
        """`create` succeeded and the session is open"""
        self.is_created = False
        """`create` was started, or there is none"""
        self.kwargs: Mapping[str, Mapping[str, Any]] = {}
        """of each hook, from the row"""
        self.creation: asyncio.Task[None] | None = None
        self.flights: set[Flight] = set()
        self._schema = schema
        self._tool: Tool | None = None
        self._create: Flight | None = None
        self._lock: asyncio.Lock | None = None
        self._limits = limits
        self._label = label
        self._on_abandon = on_abandon

    @property
    def owes_release(self) -> bool:
        """`create` was started and did not fail by itself."""
        return self.is_created and not (self._create is not None and self._create.has_failed)

    @property
    def is_over(self) -> bool:
        """Nothing runs in it, and there is no release to run."""
        is_quiet = not self.flights and (self.creation is None or self.creation.done())
        return is_quiet and not (self.owes_release and self.defines("release"))

    @property
    def is_shared(self) -> bool:
        """Stateless: its calls may run beside each other in threads, and beside one that hangs."""
        return issubclass(self.cls, FunctionTool)

    @property
    def is_busy(self) -> bool:
        """An abandoned hook still runs in this object, so that no other may."""
        return not self.is_shared and any(f.is_abandoned and not f.is_done for f in self.flights)

    def make(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the object. Raises whatever its constructor raises."""
        self.kwargs = kwargs
        self._tool = self.cls()

    def defines(self, hook: str) -> bool:
        """The class has a hook of its own."""
        return hook in self._schema.own_hooks

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Holds the right to one more `execute`, once that may start."""
        needs_lock = self._needs_thread("execute") and not self.is_shared
        if not needs_lock and self.cls.max_concurrent is None:
            return _AT_ONCE
        return self._turn(needs_lock=needs_lock)

    @asynccontextmanager
    async def _turn(self, *, needs_lock: bool) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            if needs_lock:
                self._lock = self._lock or asyncio.Lock()
                await held.enter_async_context(self._lock)
            if self.cls.max_concurrent is not None:
                await held.enter_async_context(gate(self.cls, self.cls.max_concurrent))
            yield

    async def run(
        self,
        hook: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_start: Callable[[], None] = lambda: None,
    ) -> Ended:
        """Run a hook with `arguments`, or with the row's kwargs, until it ends or is out of time.

        `on_start` is called right before, behind the wait for a thread.
        What `execute` returns is made a ToolResponse, in the thread if it ran in one.
        The time of a sync hook starts when one of MAX_THREADS threads is free. A cancel stops the
        hook, within GRACE_S, and is raised again. An inline hook ends here and now.
        """
        kwargs = self.kwargs[hook] if arguments is None else arguments
        is_release = hook == "release"
        timeout_s = self._limits.release_timeout_s if is_release else self._limits.tool_timeout_s
        method = getattr(self._tool, hook)
        in_thread = self._needs_thread(hook)

        def call() -> Any:
            if hook == "create":
                self.is_created = True
            value = method(**kwargs)
            if hook != "execute":
                return value
            if isinstance(value, (str, ToolResponse)) or (
                in_thread and not inspect.isawaitable(value)
            ):
                return to_response(value)
            return _respond(value)

        if in_thread:
            async with gate("threads", MAX_THREADS):
                on_start()
                return await self._fly(hook, call, timeout_s, in_thread=True)
        on_start()
        if hook not in self._schema.async_hooks:
            ended = _inline(call)  # nothing could stop it, so it needs no task
            if ended.error is not None or not inspect.isawaitable(ended.value):
                return ended
            call = partial(_as_it_is, ended.value)
        return await self._fly(hook, call, timeout_s, in_thread=False)

    async def _fly(
        self, hook: str, call: Callable[[], Any], timeout_s: float, *, in_thread: bool
    ) -> Ended:
        flight = Flight(
            call,
            in_thread=in_thread,
            where=self._label,
            what=f"{hook} of tool {self.name}",
            on_abandon=self._on_abandon,
        )
        self.flights.add(flight)
        if hook == "create":
            self._create = flight
        try:
            if not await flight.settle(timeout_s):
                await flight.stop()
        except asyncio.CancelledError:
            await flight.stop()
            raise
        finally:
            if flight.is_done:
                self.flights.discard(flight)
        if flight.is_stopped:
            return Ended(stopped_s=timeout_s)
        value, error = flight.task.result()
        return Ended(value, error)

    async def halt(self, timeout_s: float) -> set[asyncio.Future[Any]]:
        """Stop every hook in flight; the threads among them that still run after `timeout_s`."""
        if self.creation is not None:
            self.creation.cancel()
            await asyncio.wait([self.creation])
        running = [flight for flight in self.flights if not flight.task.done()]
        await asyncio.gather(*(flight.stop() for flight in running))
        return await self.join_threads(timeout_s)

    async def join_threads(self, timeout_s: float) -> set[asyncio.Future[Any]]:
        """Wait for the threads of its hooks; those among them that still run after `timeout_s`."""
        threads = [f.thread for f in self.flights if f.thread is not None and not f.thread.done()]
        if not threads:
            return set()
        _, hanging = await asyncio.wait(threads, timeout=timeout_s)
        return hanging

    def _needs_thread(self, hook: str) -> bool:
        return self.cls.blocking and hook not in self._schema.async_hooks


def _inline(call: Callable[[], Any]) -> Ended:
    try:
        return Ended(value=contextvars.copy_context().run(call))
    except (SystemExit, KeyboardInterrupt) as error:
        return Ended(error=RuntimeError(f"the tool raised {type(error).__name__}"))
    except BaseException as error:  # a CancelledError of its own is the tool's error
        return Ended(error=error)


def _as_it_is(value: Any) -> Any:
    return value


async def _respond(value: Any) -> ToolResponse:
    """`to_response` of a value, awaited if need be; the event loop goes on meanwhile."""
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, (dict, list)):
        text = io.StringIO()
        for number, part in enumerate(json_parts(value), 1):
            text.write(part)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        value = text.getvalue()
    return to_response(value)

"""Flight: one call of a tool's hook, and the supervisor that owns what outlives its deadline.

tools/session.py starts flights and stops them. Nothing here waits for ever: `stop` cancels, waits
for GRACE_S and abandons. An abandoned flight (a task that swallows its cancellation, a thread that
hangs) is kept alive and reported here; nobody waits for it, neither asyncio.run nor the exit of the
interpreter.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fsm_rollout.failures import log_failure

logger = logging.getLogger(__name__)

GRACE_S = 0.2
"""how long a cancelled hook may take to clean up"""
MAX_THREADS = 64
"""sync hooks that run at the same time in an event loop; abandoned threads do not count"""
_IDLE_S = 10.0


class Flight:
    """One hook in flight: its task and, for a sync hook, the thread that no cancel stops.

    The hook is alone in its task, so that a CancelledError, TimeoutError or sys.exit() of the tool
    is told apart from ours and stops nothing else. `on_abandon` is called if it outlives its stop.
    """

    __slots__ = (
        "_on_abandon", "_waiter", "_what", "_where", "is_abandoned", "is_stopped", "task", "thread",
    )  # fmt: skip

    def __init__(
        self,
        hook: Callable[[], Any],
        *,
        in_thread: bool,
        where: str,
        what: str,
        on_abandon: Callable[[], None],
    ) -> None:
        self._where, self._what = where, what
        self.is_stopped = False
        self.is_abandoned = False
        self.thread = _threads.run(hook) if in_thread else None
        self.task: asyncio.Task[Outcome] = own(self._run(hook))
        """its result is (value, None) or (None, what the hook raised by itself); it never raises"""
        self._waiter: asyncio.Future[None] | None = None
        self._on_abandon = on_abandon

    @property
    def is_done(self) -> bool:
        """True once neither the task nor the thread runs."""
        return self.task.done() and (self.thread is None or self.thread.done())

    @property
    def has_failed(self) -> bool:
        """The hook raised by itself, not because it was stopped; nothing stops a thread."""
        if self.thread is not None and self.thread.done() and self.thread.result()[1] is not None:
            return True
        return not self.is_stopped and self.task.done() and self.task.result()[1] is not None

    async def settle(self, timeout_s: float) -> bool:
        """Wait until it is done, at most `timeout_s`; True if it is. Only its owner settles it."""
        if self.thread is not None:
            await self._wait(timeout_s)
        elif not self.task.done():  # as `_wait`, at half the price: each turn pays it
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        return self.is_done

    async def stop(self) -> None:
        """Cancel it, give it GRACE_S to clean up, abandon it. Our own cancel ends the grace."""
        if self.is_done:
            return
        self.is_stopped = True
        self.task.cancel()
        try:
            await self._wait(GRACE_S)
        finally:
            if not self.is_done and not self.is_abandoned:
                self._abandon()
            if self.task.done():  # perhaps before it began: then nothing else wakes `settle`
                self.wake()

    def _abandon(self) -> None:
        self.is_abandoned = True
        keep(self.task, self.thread)
        self._on_abandon()
        how = "swallows its cancellation" if self.thread is None else "hangs in its thread"
        log_failure(
            logger, self._where, self._what, f"{how}: it is abandoned", level=logging.WARNING
        )

    async def _run(self, hook: Callable[[], Any]) -> Outcome:
        try:
            value = hook() if self.thread is None else await self._join()
            return (await value if inspect.isawaitable(value) else value), None
        except (SystemExit, KeyboardInterrupt) as error:
            # would leave the event loop, and stop every other request
            fault = RuntimeError(f"the tool raised {type(error).__name__}")
            return None, fault.with_traceback(error.__traceback__)
        except BaseException as error:
            return None, error
        finally:
            self.wake()

    async def _join(self) -> Any:
        assert self.thread is not None
        value, error = await asyncio.shield(self.thread)
        if error is not None:
            raise error
        return value

    async def _wait(self, timeout_s: float) -> None:
        if not self.is_done:
            parts = [self.task] if self.thread is None else [self.task, self.thread]
            await asyncio.wait(parts, timeout=timeout_s)

    def wake(self) -> None:
        """End the wait of `settle`, whether it is done or not."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def own(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that only its owner cancels and waits for.

    asyncio.run ends by cancelling every task it knows and waiting for it: a release would be lost,
    and a tool that swallows its cancellation would be waited for without end.
    """
    task = asyncio.create_task(work)
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def keep(*futures: asyncio.Future[Any] | None) -> None:
    """Hold strong references until each is done: asyncio itself holds weak ones."""
    for future in futures:
        if future is not None and not future.done():
            _kept.add(future)
            future.add_done_callback(_kept.discard)


async def join(tasks: Sequence[asyncio.Task[Any]], *, pass_cancel: bool) -> None:
    """Wait for all of these tasks, each of them bounded; a cancel is raised when they have ended.

    `pass_cancel` cancels them too.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            if pass_cancel:
                for task in pending:
                    task.cancel()
    if cancelled is not None:
        raise cancelled


def gate(key: object, limit: int) -> asyncio.Semaphore:
    """The semaphore of `key` in the running event loop, shared by all sessions."""
    loop = asyncio.get_running_loop()
    if _gates.loop is not loop:
        _gates.loop, _gates.semaphores = loop, {}
    return _gates.semaphores.setdefault(key, asyncio.Semaphore(limit))


class _Gates(threading.local):
    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.semaphores: dict[object, asyncio.Semaphore] = {}


class _Threads:
    """Daemon threads that are reused while they answer; one that hangs is never waited for.

    A ThreadPoolExecutor joins its threads at exit, and starves behind a few that hang.
    """

    def __init__(self) -> None:
        self._idle: deque[_Jobs] = deque()
        os.register_at_fork(after_in_child=self._idle.clear)

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Outcome]:
        """Run `call` in a thread now. The future never raises: its result is (value, error)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        context = contextvars.copy_context()

        def deliver(outcome: Outcome) -> None:
            try:
                loop.call_soon_threadsafe(future.set_result, outcome)
            except RuntimeError:
                logger.debug("a sync hook ended after its event loop was closed")

        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name="fsm-tool", daemon=True).start()
        jobs.put((lambda: context.run(call), deliver))
        return future

    def _work(self, jobs: _Jobs) -> None:
        while True:
            try:
                call, deliver = jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                try:
                    self._idle.remove(jobs)
                except ValueError:  # taken this very moment: its job is on the way
                    continue
                return
            outcome = _call(call)
            self._idle.append(jobs)
            deliver(outcome)
            del call, deliver, outcome


def _call(call: Callable[[], Any]) -> Outcome:
    try:
        return call(), None
    except Exception as error:
        return None, error
    except BaseException as error:  # KeyboardInterrupt, CancelledError: no signals of ours in here
        return None, RuntimeError(f"the tool raised {type(error).__name__}")


Outcome = tuple[Any, BaseException | None]
"""what a hook returned, or what it raised"""
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Outcome], None]]]
_threads = _Threads()
_gates = _Gates()
_kept: set[asyncio.Future[Any]] = set()

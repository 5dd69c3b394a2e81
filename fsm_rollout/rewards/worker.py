"""Worker: a process that calls reward functions, and is killed when a call is out of time.

One process per worker, so that killing it touches one call; `Workers` are those of one function.
They are spawned: a function is found by its name, and the request is sent without its tools, its
engine's cache and its replay data.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import copy
from multiprocessing.util import Finalize
from typing import Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.request import Request
from fsm_rollout.tools.supervisor import Flight, Outcome, gate

START_S = 120.0
"""a process imports what its function needs: for some that is torch"""
_GRACE_S = 5.0


class Workers:
    """Up to `most` processes that are started when they are needed and stay for the next call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[_Worker] = []
        self._gate = object()

    async def call(
        self, function: Callable[..., Any], given: Request | list[Request], timeout_s: float
    ) -> Outcome | None:
        """(value, None) or (None, what was raised); None: no value within `timeout_s`.

        The time starts when a process is free and has started.
        """
        sent = detached(given) if isinstance(given, Request) else [detached(r) for r in given]
        async with gate(self._gate, self._most):
            worker = self._idle.pop() if self._idle else _Worker()
            flight = Flight(
                lambda: worker.call(function, sent, timeout_s),
                in_thread=True,
                where="rewards",
                what="a process",
                on_abandon=lambda: None,
            )
            try:
                is_done = await flight.settle(START_S + timeout_s + _GRACE_S)
            finally:
                if not flight.is_done:  # cancelled
                    worker.kill()
                    await flight.stop()
                if worker.is_alive:
                    self._idle.append(worker)
        if not is_done:
            return None
        value, error = flight.task.result()
        return None if isinstance(error, _OutOfTime) else (value, error)


class _Worker:
    """One process. `call` runs in a thread; `kill` may be called from another."""

    def __init__(self) -> None:
        self.is_alive = True
        self._executor: ProcessPoolExecutor | None = None
        self._pid = 0

    def call(self, function: Callable[..., Any], sent: object, timeout_s: float) -> Any:
        try:
            executor = self._executor or self._start()
            try:
                future = executor.submit(_call, function, sent)
            except BrokenProcessPool:  # the process died while it was idle
                future = self._start().submit(_call, function, sent)
            try:
                return future.result(timeout_s)
            except TimeoutError as error:
                self.kill()
                raise _OutOfTime from error
        except BrokenProcessPool as error:
            was_started = self._pid > 0
            self.kill()
            why = "its process died: killed, out of memory, or a crash in C" if was_started else (
                "its process could not start: put the function into a module that can be imported "
                'alone, and what starts the run under `if __name__ == "__main__":`'
            )  # fmt: skip
            raise RuntimeError(why) from error
        except (RuntimeError, _OutOfTime):  # what `_call` made of the function's own
            raise
        except Exception as error:
            raise RuntimeError(f"request or score cannot be sent to a process: {error}") from error

    def kill(self) -> None:
        """End it now, whatever it does."""
        self.is_alive = False
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            if self._pid:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def _start(self) -> ProcessPoolExecutor:
        self._pid = 0
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
        self._executor = executor
        if not self.is_alive:  # killed before it was born
            raise BrokenProcessPool
        try:
            self._pid = executor.submit(os.getpid).result(START_S)
        except TimeoutError as error:
            self.kill()
            raise RuntimeError(f"its process did not start within {START_S:g} s") from error
        return executor


class _OutOfTime(Exception):
    """The call had no value in time; its process is gone."""


def check_importable(function: Callable[..., Any], name: str) -> None:
    """Raise ConfigError unless another process finds `function` by module and name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = getattr(function, "__qualname__", "")
    try:
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part)
        is_found = found is function
    except AttributeError:
        is_found = False
    is_typed_in = module is not None and module.__name__ == "__main__" and not (
        getattr(module, "__file__", None)
    )  # fmt: skip
    if not is_found or is_typed_in:
        raise ConfigError(
            f"{name} cannot run in another process, which finds it by its name: "
            "define it at the top level of a module (no lambda, no method, no notebook cell)"
        )


def detached(request: Request) -> Request:
    """A copy to be sent: without the tools, which stay here, and without replay data."""
    twin = copy(request)
    twin.session = None
    twin.prompt_ids = None
    twin.children = [detached(child) for child in request.children]
    twin.samples = [copy(sample) for sample in request.samples]
    for sample in twin.samples:
        sample.request = twin
        sample.columns = copy(sample.columns)
        sample.columns.replay = None
    return twin


def _prepare() -> None:
    """In the process: Ctrl-C is for the parent, and no parent means no work.

    It ends without a wait for threads and processes that a function left running: the parent, which
    waits for it, would not end either.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Finalize(None, _leave, exitpriority=0)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _leave() -> None:
    sys.stdout.flush()
    os._exit(0)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., Any], sent: object) -> Any:
    """In the process: what is raised goes back as text, since not all exceptions can be sent."""
    try:
        return function(sent)
    except BaseException as error:
        raise RuntimeError(f"in a process, {error!r}\n{traceback.format_exc()}") from None

"""Tool sessions in any interleaving: Hypothesis opens, calls, answers, cancels and closes them.

Time is virtual and every hook waits for its answer, so that a run is decided by the rules alone.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from fsm_rollout.errors import ToolError
from fsm_rollout.limits import Limits
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import CallResult, ToolSession
from fsm_rollout.tools.supervisor import GRACE_S
from fsm_rollout.turn import ToolCall

LIMITS = Limits(tool_timeout_s=10.0, release_timeout_s=5.0, max_parallel_calls=3)
NAMES = ("puppet", "second")
FAULTS: dict[str, Any] = {
    "nothing": None,
    "nonsense": object(),
    "nan": float("nan"),
    "tool error": ToolError("no"),
    "error": ValueError("boom"),
    "own timeout": TimeoutError(),
    "own cancel": asyncio.CancelledError(),
    "exit": SystemExit(1),
}
CALLS = {
    "good": ToolCall("puppet", {"n": 1}),
    "second": ToolCall("second", {"n": 2}),
    "malformed": ToolCall("puppet", error="invalid_json"),
    "bad": ToolCall("puppet", {"n": "x"}),
    "unknown": ToolCall("nobody", {}),
}
KINDS = ["good", "good", "second", "malformed", "bad", "unknown"]


class VirtualTime(selectors.SelectSelector):
    """A selector that never sleeps: waiting moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits and nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class Waiting:
    """A hook that has started and waits for its answer."""

    def __init__(self, tool: Puppet, hook: str) -> None:
        self.tool, self.hook = tool, hook
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False


class Puppet(Tool):
    """A tool whose hooks end as the machine says."""

    machine: SessionMachine

    def __init__(self) -> None:
        self.started = Counter[str]()
        self.failed_by_itself = False
        self.overlapped: list[str] = []
        self.is_stubborn = self.machine.is_stubborn
        self.machine.puppets.append(self)

    async def create(self) -> Any:
        return await self.act("create")

    async def execute(self, n: int) -> Any:
        return await self.act("execute")

    async def calc_reward(self) -> Any:
        return await self.act("calc_reward")

    async def release(self) -> Any:
        return await self.act("release")

    async def act(self, hook: str) -> Any:
        self.started[hook] += 1
        if hook == "release" and not self.is_stubborn:
            self.overlapped = [w.hook for w in self.machine.waiting if w.tool is self]
        waiting = Waiting(self, hook)
        self.machine.waiting.append(waiting)
        try:
            answer = await self.wait(waiting)
            if isinstance(answer, BaseException):
                self.failed_by_itself |= hook == "create" and not waiting.was_cancelled
                raise answer
            return answer
        finally:
            if waiting in self.machine.waiting:
                self.machine.waiting.remove(waiting)

    async def wait(self, waiting: Waiting) -> Any:
        while True:
            try:
                return await asyncio.shield(waiting.future)
            except asyncio.CancelledError:
                waiting.was_cancelled = True
                if not self.is_stubborn:
                    raise


class SessionMachine(RuleBasedStateMachine):
    """One session after the other; `waiting` are the hooks that wait for an answer."""

    @initialize()
    def start(self) -> None:
        self.clock = VirtualTime()
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.time = lambda: self.clock.now  # type: ignore[method-assign]
        self.waiting: list[Waiting] = []
        self.puppets: list[Puppet] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.turns: list[tuple[list[ToolCall], asyncio.Task[list[CallResult]]]] = []
        classes = [type(name, (Puppet,), {"name": name, "machine": self}) for name in NAMES]
        self.toolset = Toolset(classes)
        self.session = ToolSession(self.toolset, limits=LIMITS)
        self.is_closed = True

    def run(self, work: Coroutine[Any, Any, Any], *, soon: bool = False) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks.append(task)
        if not soon:
            self.spin()
        return task

    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def spin(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(12):
            self.loop.run_until_complete(asyncio.sleep(0))

    @property
    def is_idle(self) -> bool:
        return all(task.done() for task in self.tasks)

    @property
    def is_ready(self) -> bool:
        return not self.is_closed and self.is_idle and not self.opening.cancelled()

    @precondition(lambda self: self.is_closed and self.is_idle)
    @rule(soon=st.booleans(), is_stubborn=st.booleans())
    def open(self, soon: bool, is_stubborn: bool) -> None:
        self.end()
        self.session = ToolSession(self.toolset, limits=LIMITS)
        self.is_closed = False
        self.is_stubborn = is_stubborn
        self.opening = self.run(self.session.open(), soon=soon)

    @precondition(lambda self: self.is_ready)
    @rule(kinds=st.lists(st.sampled_from(KINDS), max_size=6), allowed=st.integers(0, 6))
    def execute(self, kinds: list[str], allowed: int) -> None:
        calls = [structs.replace(CALLS[kind], id=str(n)) for n, kind in enumerate(kinds)]
        self.turns.append((calls, self.run(self.session.execute(calls, allowed=allowed))))

    @precondition(lambda self: self.is_ready)
    @rule()
    def calc_rewards(self) -> None:
        self.run(self.session.calc_rewards())

    @precondition(lambda self: not self.is_closed)
    @rule(soon=st.booleans(), again=st.booleans())
    def close(self, soon: bool, again: bool) -> None:
        self.is_closed = True
        self.run(self.session.close(), soon=soon)
        if again:
            self.run(self.session.close(), soon=soon)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def answer_well(self, index: int) -> None:
        self.answer(index, 1.0)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9), how=st.sampled_from(sorted(FAULTS)))
    def answer_badly(self, index: int, how: str) -> None:
        self.answer(index, FAULTS[how])

    def answer(self, index: int, answer: Any) -> None:
        waiting = self.waiting[index % len(self.waiting)]
        if not waiting.future.done():
            waiting.future.set_result(answer)
        self.spin()

    @precondition(lambda self: not self.is_idle)
    @rule(index=st.integers(0, 9), soon=st.booleans())
    def cancel(self, index: int, soon: bool) -> None:
        running = [task for task in self.tasks if not task.done()]
        running[index % len(running)].cancel()
        if not soon:
            self.spin()

    @precondition(lambda self: not self.is_idle)
    @rule(seconds=st.sampled_from([GRACE_S / 2, GRACE_S, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @invariant()
    def a_release_is_started_once_at_most_and_only_after_its_create(self) -> None:
        for puppet in self.puppets:
            assert puppet.started["release"] <= puppet.started["create"] <= 1
            assert not (puppet.failed_by_itself and puppet.started["release"])
            assert not puppet.overlapped

    @invariant()
    def results_are_those_of_the_calls_in_their_order(self) -> None:
        for calls, task in self.turns:
            if task.done() and not task.cancelled():
                results = task.result()
                assert [r.call for r in results] == calls
                assert sum(r.executed for r in results) <= LIMITS.max_parallel_calls

    @invariant()
    def a_cancelled_task_leaves_no_hook_behind_that_can_be_stopped(self) -> None:
        if self.is_idle:
            assert not [w for w in self.waiting if w.hook != "release" and not w.tool.is_stubborn]

    def end(self) -> None:
        """Close, whether that was begun or not; it takes no longer than it may."""
        self.run(self.session.close())
        self.pass_time(2 * LIMITS.release_timeout_s + 3 * GRACE_S)
        assert self.is_idle, "something waits for ever"

    def teardown(self) -> None:
        self.end()
        for puppet in self.puppets:
            owed = puppet.started["create"] and not puppet.failed_by_itself
            assert puppet.started["release"] == owed
        for waiting in self.waiting:
            waiting.future.cancel()
        self.loop.close()


TestSessionMachine = SessionMachine.TestCase


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

"""check_tool_contract: puts a Tool class through its life with the real session, faults included.

    def test_my_tool(tool_contract):
        tool_contract(MyTool, arguments={"query": "cats"}, create_kwargs={"index": "pets"})

What a tool promises: it answers good arguments and refuses bad ones without crashing; its objects
share nothing; every await can be cancelled, or hang, without a leak; it does not block the event
loop; rewards are finite; `release` works after an interrupted `create`, and twice.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast

from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits
from fsm_rollout.tools.base import HOOKS, Tool
from fsm_rollout.tools.registry import Toolset, ToolSpec, find_tool
from fsm_rollout.tools.result import CallResult
from fsm_rollout.tools.session import ToolSession
from fsm_rollout.turn import ToolCall

MAX_STEP_S = 0.25
"""how long an async hook may hold the event loop"""
MAX_POINTS = 50
"""awaits of one hook at which it is cancelled and made to hang"""
_HANG_S = 0.05
_HUGE = "x" * 200_000


def check_tool_contract(
    tool: ToolSpec,
    *,
    arguments: Mapping[str, Any],
    create_kwargs: Mapping[str, Any] | None = None,
    bad_arguments: Iterable[Mapping[str, Any]] = (),
    deterministic: bool = True,
) -> None:
    """Raise AssertionError naming the promise that `tool` breaks.

    `arguments` are of a call that the tool answers; `bad_arguments` of calls that it must refuse,
    beside those that follow from the schema. `deterministic=False` is for a tool that may answer
    the same call differently; whether its objects share state cannot be told then.
    """
    cls = find_tool(tool)
    contract = _Contract(cls, {**arguments}, {cls.name: {"create_kwargs": create_kwargs or {}}})
    asyncio.run(contract.check([{**bad} for bad in bad_arguments], deterministic=deterministic))


@dataclass
class _Watch:
    """What the hooks of one object did. Point 0 of a hook is its start, point n its n-th await."""

    on_point: Callable[[str, int], bool]
    """called at each point; True: let the hook hang there"""
    started: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    tool: Tool | None = None
    longest_step_s: float = 0.0

    def enter(self, tool: Tool, hook: str) -> None:
        self.tool = tool
        self.started[hook] += 1
        self.on_point(hook, 0)


@dataclass
class _Steps:
    """Awaits a hook's coroutine, and stops at each of its awaits on the way."""

    work: Any
    hook: str
    watch: _Watch

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.work.__await__()
        step: Callable[[], Any] = partial(inner.send, None)
        number = 0
        while True:
            started = time.perf_counter()
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            finally:
                seconds = time.perf_counter() - started
                self.watch.longest_step_s = max(self.watch.longest_step_s, seconds)
            number += 1
            self.watch.points[self.hook] = max(self.watch.points[self.hook], number)
            try:
                if self.watch.on_point(self.hook, number):
                    yield from asyncio.get_running_loop().create_future()
                step = partial(inner.send, (yield waited_for))
            except BaseException as error:
                step = partial(inner.throw, error)


@dataclass
class _Life:
    """One object in a session of its own."""

    session: ToolSession
    watch: _Watch
    arguments: Mapping[str, Any]
    results: list[CallResult] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> CallResult:
        given = self.arguments if arguments is None else arguments
        self.results += await self.session.execute([ToolCall(name, {**given})], allowed=1)
        return self.results[-1]

    async def run(self, name: str, *, between: Callable[[], Any] | None = None) -> None:
        """Open, two calls, reward, close twice. `between` is awaited between the calls."""
        try:
            await self.session.open()
            await self.call(name)
            if between is not None:
                await between()
            await self.call(name)
            self.rewards = await self.session.calc_rewards()
        finally:
            await self.session.close()
            await self.session.close()

    def said(self) -> tuple[object, ...]:
        """What the object answered, to be compared with what another one did."""
        responses = [result.response for result in self.results]
        return [(r.text, r.reward, r.stop) for r in responses], self.rewards


class _Contract:
    def __init__(
        self, cls: type[Tool], arguments: dict[str, Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.cls = cls
        self.name = cls.name
        self.arguments = arguments
        self.kwargs = kwargs

    async def check(self, bad_arguments: list[dict[str, Any]], *, deterministic: bool) -> None:
        """All promises, the plain ones first: the later ones build on them."""
        try:
            self.schema = Toolset([self.cls])[self.name]
            Toolset([self.cls]).check_row(self.kwargs)
        except ConfigError as error:
            raise AssertionError(f"tool {self.name!r} cannot be used: {error}") from error
        alone = await self._check_life()
        await self._check_second_release(alone)
        if deterministic:
            await self._check_objects(alone)
        await self._check_arguments(bad_arguments)
        await self._check_interruptions(alone)

    async def _check_life(self) -> _Life:
        life = self._life()
        await life.run(self.name)
        if life.watch.longest_step_s > MAX_STEP_S:  # a busy machine is not the tool's fault
            life = self._life()
            await life.run(self.name)
        seconds = life.watch.longest_step_s
        self._promise(not life.session.unavailable, f"{life.session.unavailable.get(self.name)}")
        for result in life.results:
            said = f"{result.outcome}: {result.response.text}"
            self._promise(result.outcome == "ok", f"a good call was not answered: {said}")
        self._promise(seconds <= MAX_STEP_S, f"a hook blocks the event loop for {seconds:.2f} s")
        errors = life.session.reward_errors.get(self.name)
        self._promise(not errors, f"the reward must be a finite number or None: {errors}")
        self._check_released(life, "after a whole life")
        return life

    async def _check_second_release(self, life: _Life) -> None:
        try:
            value = life.watch.tool.release() if life.watch.tool is not None else None
            if inspect.isawaitable(value):
                await value
        except Exception as error:
            raise AssertionError(
                f"tool {self.name!r}: a second release raises {error!r}; after a crash a release "
                "may be repeated, so it must not fail"
            ) from error

    async def _check_objects(self, alone: _Life) -> None:
        inner, outer, *others = (self._life() for _ in range(4))
        await outer.run(self.name, between=partial(inner.run, self.name))
        await asyncio.gather(*(life.run(self.name) for life in others))
        for life in (inner, outer, *others):
            self._promise(
                life.said() == alone.said(),
                f"an object beside another one answers {life.said()}, alone {alone.said()}: "
                "objects share state, or the tool is not deterministic",
            )

    async def _check_arguments(self, refused: list[dict[str, Any]]) -> None:
        life = self._life()
        try:
            await life.session.open()
            for arguments in (*self._odd_arguments(), *refused):
                result = await life.call(self.name, arguments)
                shown = {name: repr(value)[:40] for name, value in arguments.items()}
                said = f"{result.outcome}: {result.response.text[:200]}"
                self._promise(
                    result.outcome not in ("error", "timeout"),
                    f"execute fails for {shown} ({said}); raise ToolError to refuse arguments",
                )
                self._promise(
                    arguments not in refused or result.outcome in ("bad_arguments", "tool_error"),
                    f"bad arguments {shown} are not refused: {said}",
                )
        finally:
            await life.session.close()
        self._check_released(life, "after bad arguments")

    def _odd_arguments(self) -> Iterator[dict[str, Any]]:
        """Calls as models make them: parameters missing, unknown, of another type, huge."""
        yield {**self.arguments, "no_such_parameter": 1}
        for name, schema in self.schema.parameters.get("properties", {}).items():
            yield {key: value for key, value in self.arguments.items() if key != name}
            yield {**self.arguments, name: {"no": ["such", "type"]}}
            if isinstance(schema, dict) and schema.get("type") == "string":
                yield {**self.arguments, name: _HUGE}

    async def _check_interruptions(self, alone: _Life) -> None:
        for hook in HOOKS:
            for number in range(min(alone.watch.points[hook], MAX_POINTS) + 1):
                await self._check_cancel(hook, number)
                if number > 0 and hook != "release":
                    await self._check_hang(hook, number)

    async def _check_cancel(self, hook: str, number: int) -> None:
        loop = asyncio.get_running_loop()

        def cancel(*point: object) -> bool:
            if point != (hook, number):
                return False
            loop.call_soon_threadsafe(task.cancel)
            return number > 0 and hook != "release"  # so that it is there when the cancel arrives

        life = self._life(cancel)
        task = asyncio.create_task(life.run(self.name))
        await asyncio.wait([task])
        in_thread = not inspect.iscoroutinefunction(getattr(self.cls, hook))
        when = f"when {hook} is cancelled {_place(number)}"
        self._check_released(life, when, may_linger=in_thread)

    async def _check_hang(self, hook: str, number: int) -> None:
        life = self._life(lambda *point: point == (hook, number), tool_timeout_s=_HANG_S)
        await life.run(self.name)
        self._check_released(life, f"when {hook} times out {_place(number)}")

    def _check_released(self, life: _Life, when: str, *, may_linger: bool = False) -> None:
        metrics, started = life.session.metrics, life.watch.started
        owed = self._has("release") and (started["create"] > 0 or not self._has("create"))
        self._promise(
            may_linger or not metrics["tool_zombies"],
            f"{when} it does not end: it swallows its cancellation",
        )
        self._promise(not metrics["release_errors"], f"release fails {when}")
        self._promise(started["release"] == owed, f"release ran {started['release']} times {when}")

    def _promise(self, kept: bool, broken: str) -> None:
        if not kept:
            raise AssertionError(f"tool {self.name!r}: {broken}")

    def _has(self, hook: str) -> bool:
        return getattr(self.cls, hook) is not getattr(Tool, hook)

    def _life(
        self,
        on_point: Callable[[str, int], bool] = lambda hook, number: False,
        *,
        tool_timeout_s: float = 10.0,
    ) -> _Life:
        watch = _Watch(on_point)
        limits = Limits(tool_timeout_s=tool_timeout_s, release_timeout_s=10.0)
        session = ToolSession(
            Toolset([_watched(self.cls, watch)]),
            kwargs=self.kwargs,
            limits=limits,
            label="contract",
        )
        return _Life(session, watch, self.arguments)


def _place(number: int) -> str:
    return f"at its await no. {number}" if number else "at its start"


def _watched(cls: type[Tool], watch: _Watch) -> type[Tool]:
    """A subclass that is the same to the session, and tells `watch` what its hooks do."""
    hooks = {
        h: _watched_hook(cls, h, watch) for h in HOOKS if getattr(cls, h) is not getattr(Tool, h)
    }
    return type(cls.__name__, (cls,), {"name": cls.name, "__doc__": cls.__doc__, **hooks})


def _watched_hook(cls: type[Tool], hook: str, watch: _Watch) -> Callable[..., Any]:
    static = inspect.getattr_static(cls, hook)

    def start(self: Tool, **kwargs: Any) -> Any:
        watch.enter(self, hook)
        return static.__get__(self, cls)(**kwargs)

    async def start_and_wait(self: Tool, **kwargs: Any) -> Any:
        return await _Steps(start(self, **kwargs), hook, watch)

    original = getattr(cls, hook)
    is_async = inspect.iscoroutinefunction(original)
    watched: Any = wraps(original)(start_and_wait if is_async else start)
    signature = inspect.signature(static.__get__(cls, cls))
    self_first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    watched.__signature__ = signature.replace(
        parameters=[self_first, *signature.parameters.values()]
    )
    return cast("Callable[..., Any]", watched)

"""ToolSession: the tool objects of one request, from `open` to `close`. One per attempt.

Always: results come back in the order of the calls; `release` is started exactly once for every
`create` that returned or was interrupted, never beside a running thread of the same object, or is
handed on with a report; every hook runs as its own task under a deadline; whatever a tool does
(raise, hang, swallow its cancellation, raise CancelledError itself, answer nonsense) stays in this
session; no wait is unbounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsm_rollout.errors import ToolError
from fsm_rollout.failures import log_failure, message
from fsm_rollout.limits import Limits
from fsm_rollout.tools.base import Tool, ToolResponse, TruncateSide, cut_text, finite
from fsm_rollout.tools.instance import Ended, Instance
from fsm_rollout.tools.registry import Toolset, hook_kwargs
from fsm_rollout.tools.result import (
    COUNTERS,
    CallResult,
    Outcome,
    malformed_text,
    valid_unicode,
)
from fsm_rollout.tools.supervisor import join, keep, own
from fsm_rollout.turn import ToolCall

__all__ = ["CallResult", "ToolSession"]

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 8
_MAX_CHARS = 262_144


class ToolSession:
    """Call `open` once, `execute` per turn, `calc_rewards` at the end, and `close` in any case.

    `kwargs` is the row's `tools_kwargs`; `label` names the request in the log. `metrics` counts the
    outcomes of calls by result.COUNTERS, and tools_unavailable, tool_outputs_cut, tool_zombies,
    reward_errors, release_errors, releases_late.
    """

    def __init__(
        self,
        toolset: Toolset,
        *,
        kwargs: Mapping[str, Any] | None = None,
        limits: Limits,
        label: str = "request",
    ) -> None:
        self.unavailable: dict[str, str] = {}
        """tools whose `create` failed, and why"""
        self.failed_required: list[str] = []
        """those of them that are `required`; the loop aborts with tool_unavailable"""
        self.reward_errors: dict[str, str] = {}
        """tools whose `calc_reward` failed, and why; the loop aborts with reward_error"""
        self.metrics: Counter[str] = Counter()
        self.by_tool: dict[str, float] = defaultdict(float)
        """`<tool>/<outcome>`: how its calls ended; `<tool>/seconds`: what its `execute` took"""
        self._toolset = toolset
        self._limits = limits
        self._label = label
        self._kwargs = kwargs or {}
        self._is_open = False
        self._is_created = False
        self._rewards: dict[str, float] = {}
        self._has_rewards = False
        self._releases: list[asyncio.Task[None]] | None = None
        self._instances = {
            name: Instance(toolset[name], limits=limits, label=label, on_abandon=self._count_zombie)
            for name in toolset
        }

    @property
    def is_alive(self) -> bool:
        """True while the session can go on.

        `open` returned, every `create` ended without an interruption, no abandoned hook still runs,
        `close` was not called.
        """
        is_whole = self._is_open and self._is_created
        return is_whole and not any(i.is_busy for i in self._instances.values())

    @property
    def is_closed(self) -> bool:
        """True before `open`, and again once `close` has ended."""
        if self._releases is None:
            return not self._is_open
        return all(release.done() for release in self._releases)

    def token_cap(self, name: str) -> int | None:
        """Content tokens that a response of the tool `name` may have; None: what room is left."""
        own_cap = self._toolset.classes.get(name, Tool).max_response_tokens
        caps = [cap for cap in (own_cap, self._limits.max_tool_response_tokens) if cap is not None]
        return min(caps, default=None)

    def truncate_side(self, name: str) -> TruncateSide:
        """The side of an oversized response of the tool `name` that is dropped."""
        return self._toolset.classes.get(name, Tool).truncate_side

    async def open(self) -> None:
        """Create every tool, concurrently. Failures are in `unavailable` and `failed_required`."""
        if self._is_open or self._releases is not None:
            raise RuntimeError(f"{self._label}: a tool session is opened once")
        self._is_open = True
        creations = []
        for instance in self._instances.values():
            if self._make(instance):
                instance.creation = asyncio.create_task(self._create(instance))
                creations.append(instance.creation)
        await join(creations, pass_cancel=True)
        self._is_created = True

    async def execute(
        self,
        calls: Sequence[ToolCall],
        *,
        allowed: int,
        on_start: Callable[[], None] = lambda: None,
    ) -> list[CallResult]:
        """Answer every call, in order; run the first min(max_parallel_calls, allowed) good ones.

        `on_start` is called for each of them when it starts. A cancel stops them all, within
        GRACE_S, and is raised again; those that had started are counted as `cancelled`.
        """
        self._check_open("execute")
        room = min(self._limits.max_parallel_calls, allowed)
        answers: dict[int, CallResult] = {}
        runs: dict[int, Coroutine[Any, Any, CallResult]] = {}
        for number, call in enumerate(calls):
            ready = self._prepare(call)
            if isinstance(ready, CallResult):
                answers[number] = ready
            elif len(runs) >= room:
                answers[number] = self._answer(call, "dropped", "not executed: limit reached")
            else:
                runs[number] = self._execute(call, *ready, on_start)
        if len(runs) == 1:  # the usual case: no task of its own
            [(number, run)] = runs.items()
            answers[number] = await run
        else:
            tasks = {number: asyncio.create_task(run) for number, run in runs.items()}
            await join(list(tasks.values()), pass_cancel=True)
            answers |= {number: task.result() for number, task in tasks.items()}
        return [answers[number] for number in range(len(calls))]

    async def calc_rewards(self) -> dict[str, float]:
        """The reward of each tool that has one, asked for once, in the order of the tools.

        One that raises, times out or is not a finite number is in `reward_errors` instead, and one
        whose object has a thread of an earlier call that still runs after tool_timeout_s.
        """
        self._check_open("calc_rewards")
        if not self._has_rewards:
            self._has_rewards = True
            able = [i for i in self._instances.values() if i.is_live and i.defines("calc_reward")]
            await join([asyncio.create_task(self._reward(i)) for i in able], pass_cancel=True)
            self.metrics["reward_errors"] += len(self.reward_errors)
        return {name: self._rewards[name] for name in self._instances if name in self._rewards}

    async def close(self) -> None:
        """Release every tool that needs it; any number of closes, cancelled or not, release once.

        Takes at most twice release_timeout_s (for threads that still run, then for `release`)
        and 3 * GRACE_S.
        """
        self._is_open = False
        if self._releases is None:
            self._releases = []
            for instance in self._instances.values():
                instance.is_live = False
                if not instance.is_over:
                    self._releases.append(own(self._release(instance)))
        await join(self._releases, pass_cancel=False)

    def _make(self, instance: Instance) -> bool:
        """Make the tool object; True if its `create` is still to be run."""
        schema = self._toolset[instance.name]
        try:
            given = hook_kwargs(instance.name, self._kwargs)
            instance.make(
                {hook: schema.check_kwargs(hook, kwargs) for hook, kwargs in given.items()}
            )
        except Exception as error:
            self._fail(instance, Ended(error=error))
            return False
        if instance.defines("create"):
            return True
        instance.is_live = instance.is_created = True
        return False

    async def _create(self, instance: Instance) -> None:
        ended = await instance.run("create")
        if ended.fault is None:
            instance.is_live = True
        else:
            self._fail(instance, ended)

    def _fail(self, instance: Instance, ended: Ended) -> None:
        """Note that the tool cannot be used."""
        self.unavailable[instance.name] = f"create {ended.fault}"
        if instance.cls.required:
            self.failed_required.append(instance.name)
        self.metrics["tools_unavailable"] += 1
        self._log(instance, "create", ended)

    def _prepare(self, call: ToolCall) -> CallResult | tuple[Instance, dict[str, Any]]:
        """The tool and the arguments to execute; or the answer to a call that can't be executed."""
        if call.error is not None:
            return self._answer(call, "malformed", malformed_text(call))
        instance = self._instances.get(call.name)
        if instance is None:
            known = ", ".join(self._instances) or "none"
            return self._answer(
                call, "unknown_tool", f"unknown tool {call.name[:64]!r} (tools: {known})"
            )
        if not instance.is_live:
            why = self.unavailable.get(instance.name, "it was not created")
            return self._answer(call, "unavailable", f"{instance.name} is unavailable: {why}")
        try:
            fixed = instance.kwargs["execute"]
            return instance, self._toolset[instance.name].validate(call.arguments, fixed=fixed)
        except ToolError as error:
            return self._answer(
                call, "bad_arguments", f"bad arguments for {instance.name}: {error}"
            )

    async def _execute(
        self,
        call: ToolCall,
        instance: Instance,
        arguments: dict[str, Any],
        on_start: Callable[[], None],
    ) -> CallResult:
        name, started = instance.name, 0.0

        def start() -> None:
            nonlocal started
            started = time.perf_counter()
            on_start()

        async with instance.turn():
            if instance.is_busy or not instance.is_live:
                why = "an earlier call is still running" if instance.is_busy else "it was closed"
                return self._answer(call, "unavailable", f"{name} is unavailable: {why}")
            try:
                ended = await instance.run("execute", arguments, on_start=start)
            except asyncio.CancelledError:
                if started:
                    seconds = time.perf_counter() - started
                    self._answer(call, "cancelled", "", seconds=seconds)
                raise
            seconds = time.perf_counter() - started
        if ended.fault is None:
            return self._answer(call, "ok", ended.value, seconds=seconds)
        if isinstance(ended.error, ToolError):
            text = message(ended.error) or f"{name} failed"
            return self._answer(call, "tool_error", text, seconds=seconds)
        outcome: Outcome = "error" if ended.stopped_s is None else "timeout"
        self._log(instance, "execute", ended)
        return self._answer(call, outcome, f"{name} {ended.fault}", seconds=seconds)

    def _answer(
        self,
        call: ToolCall,
        outcome: Outcome,
        response: ToolResponse | str,
        *,
        seconds: float = 0.0,
    ) -> CallResult:
        """Count the outcome and cut the response: characters first, tokens are for the codec."""
        if outcome in COUNTERS:
            self.metrics[COUNTERS[outcome]] += 1
        if call.name in self._instances:  # others are names that the model made up
            self.by_tool[f"{call.name}/{outcome}"] += 1
            self.by_tool[f"{call.name}/seconds"] += seconds
        if isinstance(response, str):
            response = ToolResponse(response)
        tokens = self.token_cap(call.name)
        max_chars = _MAX_CHARS if tokens is None else tokens * _CHARS_PER_TOKEN
        max_chars = min(max_chars, self._limits.max_tool_response_chars or max_chars)
        text = response.text
        if len(text) > max_chars:
            self.metrics["tool_outputs_cut"] += 1
            text = cut_text(
                text, max_chars, side=self._toolset.classes.get(call.name, Tool).truncate_side
            )
        text = valid_unicode(text)
        if text is not response.text:
            response = replace(response, text=text)
        return CallResult(call, response, outcome, seconds)

    async def _reward(self, instance: Instance) -> None:
        name = instance.name
        self.reward_errors[name] = "calc_reward was interrupted"
        if await instance.join_threads(self._limits.tool_timeout_s):
            self.reward_errors[name] = "an earlier call is still running"
            return
        ended = await instance.run("calc_reward")
        if ended.fault is None and ended.value is not None:
            try:
                self._rewards[name] = finite(ended.value, what="the reward")
            except Exception as error:
                ended = Ended(error=error)
        del self.reward_errors[name]
        if ended.fault is not None:
            self.reward_errors[name] = f"calc_reward {ended.fault}"
            self._log(instance, "calc_reward", ended)

    async def _release(self, instance: Instance) -> None:
        hanging = await instance.halt(self._limits.release_timeout_s)
        if not hanging:
            await self._release_now(instance)
        elif instance.owes_release:
            self.metrics["releases_late"] += 1
            self._log(instance, "release", Ended(), how="waits for a thread that hangs")
            keep(own(self._release_late(instance, hanging)))

    async def _release_late(self, instance: Instance, hanging: set[asyncio.Future[Any]]) -> None:
        await asyncio.wait(hanging)
        await self._release_now(instance)

    async def _release_now(self, instance: Instance) -> None:
        if instance.owes_release and instance.defines("release"):
            ended = await instance.run("release")
            if ended.fault is not None:
                self.metrics["release_errors"] += 1
                self._log(instance, "release", ended)

    def _check_open(self, method: str) -> None:
        if not self._is_open:
            raise RuntimeError(f"{self._label}: {method} needs a tool session that is open")

    def _count_zombie(self) -> None:
        self.metrics["tool_zombies"] += 1

    def _log(self, instance: Instance, hook: str, ended: Ended, how: str = "") -> None:
        what, how = f"{hook} of tool {instance.name}", how or ended.fault or ""
        log_failure(logger, self._label, what, how, ended.error, level=logging.WARNING)

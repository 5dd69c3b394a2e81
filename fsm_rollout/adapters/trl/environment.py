"""Environment: a class that was written for TRL's `environment_factory`, unchanged, as our tools.

`reset(**row)` sets an object up and may say something, which goes to the end of the prompt; its
other public methods, sync or async, are tools; `get_reward()`, if there is one, is the reward.
Each object has a thread of its own, which runs its methods one after the other, in the order of the
calls. Objects are made once and used again, as `reset` clears them; one that hangs is dropped.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from fsm_rollout.adapters.trl.loop_thread import LoopThread
from fsm_rollout.codec.messages import text_of
from fsm_rollout.dataset import PromptRow
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.request import Request
from fsm_rollout.tools.base import Tool


class Environment:
    """`RolloutFunc(environment=Environment(MyEnvironment))`; the same for RolloutWorker.

    `factory` takes no arguments and gives an object of one class. Raises ConfigError when that has
    no `reset`, or no other public method.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        probe = factory()
        self.name = type(probe).__name__
        methods = dict(inspect.getmembers(type(probe), inspect.isfunction))
        if "reset" not in methods:
            raise ConfigError(f"environment {self.name} has no method `reset`")
        names = [n for n in methods if n not in ("reset", "get_reward") and not n.startswith("_")]
        if not names:
            raise ConfigError(f"environment {self.name} has no public method to be a tool")
        self.tools = [_tool(methods[name], is_first=name == names[0]) for name in names]
        self.has_reward = "get_reward" in methods
        self._idle = [_Stage(lambda: probe)]

    @asynccontextmanager
    async def entered(
        self, row: PromptRow, columns: Mapping[str, Any], *, timeout_s: float
    ) -> AsyncIterator[PromptRow]:
        """The row for one request, with what `reset(**columns)` said and an object for its tools.

        Raises what `reset` raises, and TimeoutError.
        """
        stage = self._idle.pop() if self._idle else _Stage(self._factory)
        try:
            async with asyncio.timeout(timeout_s):
                await stage.enter(columns)
            kwargs: dict[str, Any] = dict(row.tools_kwargs)
            for tool in self.tools:
                kwargs[tool.name] = {**kwargs.get(tool.name, {}), "create_kwargs": {"stage": stage}}
            prompt = _said(row.prompt, stage.observation)
            yield msgspec.structs.replace(row, prompt=prompt, tools_kwargs=kwargs)
        finally:
            if stage.is_busy:
                stage.thread.close(wait=False)
            else:
                self._idle.append(stage)

    def close(self) -> None:
        """End the threads of the objects, and forget these."""
        while self._idle:
            self._idle.pop().thread.close()

    async def reward(self, request: Request) -> dict[str, float]:
        """What the environment's `get_reward` says; nothing when that is None."""
        stage: _Stage = request.tools_kwargs[self.tools[0].name]["create_kwargs"]["stage"]
        value = await stage.call("get_reward")
        return {} if value is None else {self.name: value}


class _Stage:
    """One object of the environment and its thread. A request has it to itself."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.thread = LoopThread("environment")
        self.observation: Any = None
        self._factory = factory
        self._made: Any = None
        self._columns: Mapping[str, Any] = {}
        self._is_fresh = False
        self._turn = asyncio.Lock()
        self._num_asked = self._num_ended = 0  # each is written by one thread

    @property
    def is_busy(self) -> bool:
        """A method that nobody waits for still runs."""
        return self._num_asked != self._num_ended

    def __deepcopy__(self, memo: object) -> _Stage:
        return self  # the kwargs of a row are copied for each request

    async def enter(self, columns: Mapping[str, Any]) -> None:
        """Reset the object for a request."""
        self._columns = columns
        self.observation = await self.call("reset", **columns)
        self._is_fresh = True

    async def begin(self) -> None:
        """Begin an attempt: all but the first reset the object again, and must hear the same."""
        if self._is_fresh:
            self._is_fresh = False
        elif await self.call("reset", **self._columns) != self.observation:
            raise ToolError("reset said something else than before; the prompt holds the old words")

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run a method in the object's thread; a cancel does not stop one that blocks."""

        async def run() -> Any:
            try:
                async with self._turn:  # async methods, too, would interleave at their awaits
                    if self._made is None:
                        self._made = self._factory()
                    value = getattr(self._made, name)(**arguments)
                    return await value if inspect.isawaitable(value) else value
            finally:
                self._num_ended += 1

        self._num_asked += 1
        return await asyncio.wrap_future(self.thread.submit(run()))


def _tool(method: Callable[..., Any], *, is_first: bool) -> type[Tool]:
    """The tool of one method; the first tool of a request begins its attempts."""

    async def create(self: Any, stage: _Stage | None = None) -> None:
        if stage is None:
            raise ToolError("this row has not entered its environment")
        self.stage = stage
        if is_first:
            await stage.begin()

    @functools.wraps(method)
    async def execute(self: Any, **arguments: Any) -> str:
        value = await self.stage.call(method.__name__, **arguments)
        return text_of(value) if isinstance(value, list) else str(value)  # as TRL tells the model

    return type(
        method.__name__,
        (Tool,),
        {"name": method.__name__, "required": True, "create": create, "execute": execute},
    )


def _said(prompt: str | list[dict[str, Any]], observation: Any) -> str | list[dict[str, Any]]:
    """The prompt with an observation at the end of its last message, as TRL puts it there."""
    if observation is None:
        return prompt
    try:
        text = text_of(observation)
    except ConfigError as error:
        raise ToolError(f"what reset returned {error}") from error
    if isinstance(prompt, str):
        return prompt + text
    *earlier, last = prompt
    return [*earlier, {**last, "content": text_of(last.get("content")) + text}]

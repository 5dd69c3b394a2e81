"""The tool contract: the built-in tools keep it, and each broken promise is named."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from fsm_rollout.testing.tool_contract import check_tool_contract
from fsm_rollout.tools.base import Tool, tool

COUNT = itertools.count()


class Good(Tool):
    """A well-behaved async tool with several awaits in each hook."""

    async def create(self, size: int = 3) -> None:
        await asyncio.sleep(0)
        self.words = [""] * size
        await asyncio.sleep(0)

    async def execute(self, word: str) -> str:
        await asyncio.sleep(0)
        self.words.append(word)
        await asyncio.sleep(0)
        return str(len(self.words))

    async def calc_reward(self) -> float:
        await asyncio.sleep(0)
        return len(self.words) / 10

    async def release(self) -> None:
        await asyncio.sleep(0)


def check(cls: type[Tool], **kwargs: Any) -> None:
    check_tool_contract(cls, arguments={"word": "w"}, **kwargs)


def test_a_well_behaved_tool_keeps_the_contract() -> None:
    check(Good, create_kwargs={"size": 5}, bad_arguments=[{}, {"word": 3}])


def test_the_fixture_is_the_check(tool_contract: Callable[..., None]) -> None:
    assert tool_contract is check_tool_contract


def test_the_calculator_keeps_the_contract() -> None:
    check_tool_contract(
        "calculator",
        arguments={"expression": "(3 + 4) * 5"},
        bad_arguments=[{"expression": "__import__('os')"}, {"expression": "9**9**9"}],
    )


def test_the_gsm8k_tool_keeps_the_contract() -> None:
    check_tool_contract(
        "gsm8k",
        arguments={"answer": "5"},
        create_kwargs={"ground_truth": "#### 5"},
        bad_arguments=[{"answer": "5 or 6"}],
    )


def test_functions_and_sync_tools_keep_the_contract() -> None:
    def repeat(word: str, times: int = 2) -> str:
        return word[:10] * min(times, 5)

    class Sync(Tool):
        def create(self) -> None:
            self.n = 0

        def execute(self, word: str) -> int:
            self.n += 1
            return self.n

        def release(self) -> None: ...

    for made in (repeat, tool(blocking=False)(repeat), Sync):
        check_tool_contract(made, arguments={"word": "w"})


def test_a_tool_that_is_not_deterministic_can_say_so() -> None:
    class Random(Good):
        async def execute(self, word: str) -> str:
            return str(next(COUNT))

    check(Random, deterministic=False)
    with pytest.raises(AssertionError, match="share state, or the tool is not deterministic"):
        check(Random)


class SharedList(Good):
    words: list[str] = []  # noqa: RUF012  what is wrong with it

    async def create(self) -> None: ...  # type: ignore[override]


class SharedSlot(Good):
    current: Any = None

    async def create(self) -> None:  # type: ignore[override]
        SharedSlot.current = self
        self.words = []

    async def execute(self, word: str) -> str:
        return str(SharedSlot.current is not None)

    async def release(self) -> None:
        SharedSlot.current = None


class ReleaseOnlyOnce(Good):
    async def create(self) -> None:  # type: ignore[override]
        self.words = [""]
        self.open = True

    async def release(self) -> None:
        assert self.open
        self.open = False


class ReleaseNeedsAll(Good):
    async def release(self) -> None:
        self.words.clear()


class Blocks(Good):
    async def execute(self, word: str) -> str:
        time.sleep(0.3)  # noqa: ASYNC251  what is wrong with it
        return "x"


class SwallowsInExecute(Good):
    async def execute(self, word: str) -> str:
        while True:
            try:
                return await asyncio.sleep(0.001, "x")
            except asyncio.CancelledError:
                await asyncio.sleep(1)


class SwallowsInCreate(Good):
    async def create(self, size: int = 3) -> None:
        self.words = [""]
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(1)


class NanReward(Good):
    async def calc_reward(self) -> float:
        return float("nan")


class Unconvertible(Good):
    async def execute(self, word: str) -> str:
        return b"bytes"  # type: ignore[return-value]


class CrashesOnNumbers(Good):
    async def execute(self, word: Any) -> str:
        return f"got {word.upper()}"


class AcceptsEverything(Good):
    async def execute(self, word: str) -> str:
        return "fine"


class HangsOnHuge(Good):
    async def execute(self, word: str) -> str:
        if len(word) > 100_000:
            raise MemoryError
        return "fine"


class CreateRaises(Good):
    async def create(self, size: int = 3) -> None:
        raise RuntimeError("no sandbox")


class NoSchema(Tool):
    def execute(self, word: complex) -> None: ...


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (SharedList, "objects share state"),
        (SharedSlot, "objects share state"),
        (ReleaseOnlyOnce, "a second release raises AssertionError"),
        (ReleaseNeedsAll, "release fails when create is cancelled at its await no. 1"),
        (Blocks, r"blocks the event loop for \d"),
        (SwallowsInExecute, "when execute is cancelled at its .* swallows its cancellation"),
        (SwallowsInCreate, "when create is cancelled at its .* swallows its cancellation"),
        (NanReward, "must be a finite number or None: .*nan"),
        (Unconvertible, "a good call was not answered: error: .*got bytes"),
        (CrashesOnNumbers, "execute fails for .*no.*such.*AttributeError"),
        (HangsOnHuge, "execute fails for .*xxx.*MemoryError"),
        (CreateRaises, "create failed: RuntimeError: no sandbox"),
        (NoSchema, "cannot be used: .*no JSON Schema for parameter 'word'"),
    ],
)
def test_each_broken_promise_is_named(broken: type[Tool], promise: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)tool '{broken.name}'.*{promise}"):
        check(broken)


def test_arguments_that_must_be_refused_and_are_not_are_named() -> None:
    with pytest.raises(AssertionError, match=r"bad arguments .* are not refused: ok: fine"):
        check(AcceptsEverything, bad_arguments=[{"word": "rm -rf /"}])


def test_kwargs_and_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(AssertionError, match="unknown parameter `sise`, did you mean `size`"):
        check(Good, create_kwargs={"sise": 1})
    with pytest.raises(AssertionError, match="a good call was not answered: bad_arguments"):
        check_tool_contract(Good, arguments={"wrd": "w"})

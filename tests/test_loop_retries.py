"""A request that is paused and retried from outside: while its tools open or are released, or its
reward is made."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
from typing import Any

from fsm_rollout.agent import Agent, Context
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from tests.playing import CALL, TOKENIZER


class Box(Tool):
    """A sandbox, which takes a while to start."""

    name = "echo"
    made = released = 0
    is_starting: asyncio.Event

    async def create(self) -> None:
        Box.made += 1
        Box.is_starting.set()
        await asyncio.sleep(0.02)

    async def execute(self, text: str) -> str:
        """text: what to run"""
        return text

    def calc_reward(self) -> float:
        return 1.0

    def release(self) -> None:
        Box.released += 1


async def chat(ctx: Context) -> None:
    turn = await ctx.generate()
    while turn.calls:
        await ctx.observe(await ctx.call_tools())
        turn = await ctx.generate()


AGENTS = pytest.mark.parametrize("agent", [None, chat], ids=["loop", "agent"])


def retried(
    rollout: Rollout, begun: asyncio.Event, *, reason: StopReason, cancels: bool = False
) -> Request:
    """A request that somebody retries once something has begun."""
    Box.made = Box.released = 0
    request, machine = rollout.request("hello"), rollout.loop.machine

    async def main() -> None:
        playing = asyncio.create_task(rollout.run(request), name="playing")
        await begun.wait()
        machine.fire(Event.ABORT, request, reason)
        machine.fire(Event.RETRY, request)
        if cancels:
            await asyncio.sleep(0)
            playing.cancel()
        await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()

    asyncio.run(main())
    assert Box.released == Box.made
    assert request.is_sealed
    return request


def rollout_of(agent: Agent | None, **parts: Any) -> Rollout:
    engine = ScriptedEngine([CALL, "done"] * 2, tokenizer=TOKENIZER)
    return Rollout(engine, TOKENIZER, agent=agent, **{"tools": [Box], **parts})


@AGENTS
def test_tools_that_open_meanwhile_are_those_of_nobody(agent: Agent | None) -> None:
    begun = Box.is_starting = asyncio.Event()
    request = retried(rollout_of(agent), begun, reason=StopReason.PAUSED)
    assert (request.status, request.reward) == (Status.COMPLETED, 1.0)
    assert (request.attempt, Box.made, request.num_tool_calls) == (2, 2, 1)


@AGENTS
def test_and_are_released_when_it_is_cancelled_too(agent: Agent | None) -> None:
    begun = Box.is_starting = asyncio.Event()
    request = retried(rollout_of(agent), begun, reason=StopReason.PAUSED, cancels=True)
    assert (request.stop_reason, Box.made) == (StopReason.CANCELLED, 1)


@AGENTS
def test_it_is_played_again_when_its_reward_was_on_its_way(agent: Agent | None) -> None:
    begun, Box.is_starting = asyncio.Event(), asyncio.Event()

    async def reward(request: Request) -> float:
        begun.set()
        await asyncio.sleep(0.02)
        return float(request.attempt)

    rollout = rollout_of(agent, reward=reward)
    request = retried(rollout, begun, reason=StopReason.STALE)
    assert (request.status, request.reward, Box.made) == (Status.COMPLETED, 2.0, 2)


@AGENTS
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_it_is_played_again_when_its_tools_were_being_released(
    agent: Agent | None, *, is_cancelled: bool
) -> None:
    begun, Box.is_starting = asyncio.Event(), asyncio.Event()

    class Slow(Box):
        name = "echo"

        async def release(self) -> None:  # type: ignore[override]
            super().release()
            if is_cancelled and not begun.is_set():
                for task in asyncio.all_tasks():
                    if task.get_name() == "playing":
                        task.cancel()
            begun.set()
            await asyncio.sleep(0.02)

    request = retried(rollout_of(agent, tools=[Slow]), begun, reason=StopReason.PAUSED)
    if is_cancelled:
        assert (request.stop_reason, Box.made) == (StopReason.CANCELLED, 1)
    else:
        assert (request.status, request.attempt, Box.made) == (Status.COMPLETED, 2, 2)

"""Unhurried, the event loop under all tests: a stall is no time, yet each deadline comes."""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

import pytest

from tests.clock import Unhurried

STALL_S = 0.3


async def times(work: Any) -> tuple[float, float]:
    """What `work` takes by the loop's clock, and by the machine's."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Unhurried)
    mine, real = loop.time(), time.monotonic()
    await work
    return loop.time() - mine, time.monotonic() - real


def test_a_stall_while_something_runs_is_no_time() -> None:
    async def stalls() -> None:
        time.sleep(STALL_S)  # noqa: ASYNC251
        await asyncio.sleep(0)

    mine, real = asyncio.run(times(stalls()))
    assert mine < 0.1 < STALL_S <= real


def test_a_stall_while_it_waits_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    select = selectors.DefaultSelector.select

    def stalled(self: Any, timeout: float | None = None) -> Any:
        ready = select(self, timeout)
        time.sleep(STALL_S)
        return ready

    monkeypatch.setattr(selectors.DefaultSelector, "select", stalled)
    mine, real = asyncio.run(times(asyncio.sleep(0.05)))
    assert 0.049 < mine < 0.1 < STALL_S <= real


def test_a_deadline_comes_and_never_early() -> None:
    mine, real = asyncio.run(times(asyncio.sleep(0.1)))
    assert 0.099 < mine <= real + 1e-6


def burn(seconds: float) -> None:
    """CPU time, as a collection of garbage takes it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_runs_long_at_a_stretch_counts_no_more_than_a_slice() -> None:
    async def burns() -> None:
        burn(STALL_S)
        await asyncio.sleep(0)

    mine, real = asyncio.run(times(burns()))
    assert mine < 0.1 < STALL_S <= real


def test_a_deadline_comes_to_what_never_waits() -> None:
    async def spins() -> None:
        while True:
            burn(0.001)
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(spins(), 0.1))

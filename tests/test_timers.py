"""Timers: they ring when the event loop's own would, in their order, and not once cancelled."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.timers import Timer, call_later
from tests.http_server import run

both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])

lengths = st.sampled_from([0.0, 0.004, 0.01, 0.02])
timers_set = st.lists(st.tuples(lengths, lengths, st.none() | lengths), max_size=12)
"""(when it is set, its length, when it is cancelled)"""


@both_loops
@settings(max_examples=25, deadline=None)
@given(timers_set)
def test_each_rings_once_at_its_time_unless_it_was_cancelled(
    loop: str, timers: list[tuple[float, float, float | None]]
) -> None:
    async def main() -> None:
        rung: dict[int, float] = {}
        due: dict[int, float] = {}
        cancelled: dict[int, bool] = {}
        now = asyncio.get_running_loop().time

        def ring(number: int) -> None:
            assert number not in rung
            rung[number] = now()

        def cancel(number: int, timer: Timer) -> None:
            cancelled[number] = number not in rung
            timer.cancel()
            timer.cancel()

        async def one(number: int, begin: float, length: float, end: float | None) -> None:
            await asyncio.sleep(begin)
            due[number] = now() + length
            timer = call_later(length, partial(ring, number))
            if end is not None:
                await asyncio.sleep(end)
                cancel(number, timer)

        await asyncio.gather(*(one(number, *timer) for number, timer in enumerate(timers)))
        await asyncio.sleep(0.03)
        for number in range(len(timers)):
            assert (number in rung) is not cancelled.get(number, False)
            assert number not in rung or 0 <= rung[number] - due[number] < 1

    run(main(), loop)


@both_loops
def test_a_thousand_of_one_length_take_one_timer_of_the_event_loop(loop: str) -> None:
    async def main() -> None:
        running = asyncio.get_running_loop()
        rung: list[int] = []
        asked = 0
        own = running.call_later

        def counted(*args: object) -> asyncio.TimerHandle:
            nonlocal asked
            asked += 1
            return own(*args)  # type: ignore[arg-type]

        timers = []
        with pytest.MonkeyPatch.context() as patch:
            if loop == "asyncio":  # uvloop's methods are read-only
                patch.setattr(running, "call_later", counted)
            timers = [call_later(0.01, partial(rung.append, number)) for number in range(1000)]
        assert asked == (loop == "asyncio")
        for timer in timers[::2]:
            timer.cancel()
        await asyncio.sleep(0.05)
        assert rung == list(range(1, 1000, 2))

    run(main(), loop)


def test_timers_of_an_event_loop_that_ended_do_not_ring_in_the_next() -> None:
    rung: list[str] = []

    async def before() -> None:
        call_later(0.01, partial(rung.append, "before"))

    async def after() -> None:
        call_later(0.01, partial(rung.append, "after"))
        await asyncio.sleep(0.04)

    asyncio.run(before())
    asyncio.run(after())
    assert rung == ["after"]

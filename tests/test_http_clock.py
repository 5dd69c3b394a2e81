"""Clock: a deadline that others may move or bring about is told from every cancel.

What takes how long is asked of a loop whose time is made up; both real ones run the rest.
"""

from __future__ import annotations

import asyncio

import pytest

from fsm_rollout.engines.http.clock import Clock
from tests.clock import FastForward
from tests.http_server import run

both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


async def _wait(clock: Clock, seconds: float) -> str:
    try:
        with clock.within(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        return "timed out"
    return "done"


@both_loops
def test_a_wait_ends_at_its_deadline_again_and_again(loop: str) -> None:
    async def main() -> None:
        clock = Clock()
        for _ in range(3):
            assert await _wait(clock, 0.03) == "timed out"
        with clock.within(0.2):
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)  # nothing rings behind it
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(main(), loop)


@pytest.mark.parametrize(("end", "took"), [(5.0, 19 * 0.02 + 0.05), (0.1, 0.1)])
def test_a_deadline_moves_with_each_sign_of_life_but_not_beyond_the_end(
    end: float, took: float
) -> None:
    async def signs_of_life(clock: Clock) -> None:
        for _ in range(20):
            clock.extend(0.05)
            await asyncio.sleep(0.02)

    async def main() -> None:
        clock = Clock()
        waiting = asyncio.create_task(_wait(clock, end))
        living = asyncio.create_task(signs_of_life(clock))
        started = clock.now()
        assert await waiting == "timed out"
        assert clock.now() - started == pytest.approx(took)
        await living

    with asyncio.Runner(loop_factory=FastForward) as runner:
        runner.run(main())


@both_loops
def test_an_interrupt_ends_the_wait_and_nothing_else(loop: str) -> None:
    async def main() -> None:
        clock = Clock()

        clock.interrupt()  # there is no wait yet
        waiting = asyncio.create_task(_wait(clock, 600))
        await asyncio.sleep(0)
        clock.interrupt()
        clock.interrupt()
        assert await waiting == "timed out"
        clock.interrupt()  # it is over
        with clock.within(600):
            await asyncio.sleep(0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("also", ["alone", "after an interrupt", "before an interrupt"])
def test_a_cancel_from_outside_is_no_timeout(loop: str, also: str) -> None:
    async def main() -> None:
        clock = Clock()
        waiting = asyncio.create_task(_wait(clock, 30))
        await asyncio.sleep(0)
        if also == "after an interrupt":
            clock.interrupt()
        waiting.cancel()
        if also == "before an interrupt":
            clock.interrupt()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main(), loop)


@both_loops
def test_a_deadline_around_it_is_told_apart(loop: str) -> None:
    async def main() -> None:
        clock = Clock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                assert await _wait(clock, 30) == "never"
        async with asyncio.timeout(30):
            assert await _wait(clock, 0.03) == "timed out"

    run(main(), loop)


@both_loops
def test_what_ends_with_its_deadline_leaves_no_cancel_behind(loop: str) -> None:
    async def main() -> None:
        clock = Clock()
        try:
            with clock.within(30):
                try:
                    asyncio.get_running_loop().call_soon(clock.interrupt)
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    raise ValueError("in the middle of cleaning up") from None
        except ValueError:
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(main(), loop)

"""Long texts don't hold up the event loop: 10 ms at most, through whole requests with the Qwen BPE.

What the machine's other processes take from us is not counted (tests/ticker.py), and a scene has
several tries: a stall that the code makes is there in every one of them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cache

from bench.stall import Stalls, texts
from tests.qwen import qwen_bpe
from tests.ticker import Ticker

LIMIT_S = 0.010
TRIES = 8


@cache
def stalls() -> Stalls:
    return Stalls()


def least(scene: Callable[[], float]) -> float:
    """The shortest of the scene's longest stalls; no more tries than it takes to be short."""
    best = scene()
    for _ in range(TRIES - 1):
        if best <= LIMIT_S:
            break
        best = min(best, scene())
    return best


@pytest.mark.parametrize("kind", ["prose", "digits", "cjk", "accents", "base64", "newlines", "x"])
def test_a_tool_output_of_a_megabyte_leaves_the_loop_free(kind: str) -> None:
    assert least(lambda: stalls().output(kind)) <= LIMIT_S


def test_a_prompt_of_100k_tokens_leaves_the_loop_free() -> None:
    assert least(stalls().prompt) <= LIMIT_S


def test_a_sampled_turn_of_56k_tokens_leaves_the_loop_free() -> None:
    assert least(stalls().turn) <= LIMIT_S


def stall_of(work: Callable[[], Awaitable[object]]) -> float:
    async def main() -> float:
        async with Ticker() as ticker:
            await work()
        return ticker.stall_s

    return asyncio.run(main())


def test_the_measure_sees_work_on_the_loop_and_a_thread_that_keeps_the_gil() -> None:
    async def busy() -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    text = texts(500_000)["prose"]
    assert stall_of(busy) >= 0.029
    assert stall_of(lambda: asyncio.to_thread(qwen_bpe().encode, text)) > 3 * LIMIT_S
    assert least(lambda: stall_of(lambda: asyncio.to_thread(time.sleep, 0.1))) <= LIMIT_S

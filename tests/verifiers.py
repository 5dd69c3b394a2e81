"""Reward functions that tests run in other processes: those find them by module and name."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from fsm_rollout.request import Request
from fsm_rollout.rewards import Score


class Odd(Exception):
    """An exception that cannot be rebuilt from what it carries."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def length(request: Request) -> float:
    assert request.session is None
    return float(len(request.sample.response or ""))


def pid(request: Request) -> float:
    return float(os.getpid())


def by_label(request: Request) -> Score:
    """What the label orders."""
    match request.label:
        case "loop":
            while True:
                pass
        case "hold":  # in C, with the GIL
            ctypes.pythonapi.usleep(ctypes.c_uint(600_000_000))
        case "raise":
            raise ValueError("no answer")
        case "odd":
            raise Odd(1, 2)
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(1)
        case "none":
            return None
        case "object":
            return object()  # type: ignore[return-value]
        case "sleep":
            time.sleep(0.2)
    return {"a": 1.0, "b": 0.5}


def tokens_of_rows(request: Request) -> float:
    return float(sum(len(row.tokens) for row in request.rows))


def note_and_loop(request: Request) -> float:
    Path(request.label).write_text(str(os.getpid()))
    while True:
        pass


def ranks(requests: list[Request]) -> list[float]:
    sizes = [len(request.sample.response or "") for request in requests]
    return [float(sorted(sizes).index(size)) for size in sizes]


async def coroutine(request: Request) -> float:
    return 1.0

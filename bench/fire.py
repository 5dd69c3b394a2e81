"""What a transition costs: `observe` and `generate` in turns on a real request, with all guards.

    python bench/fire.py --json FILE [--repeats 15] [--fires 20000]

fire_us           Machine.fire without a listener
fire_listener_us  Machine.fire with one listener
stock_us          the same edges and guards in stock `transitions`
dict_us           a bare dict lookup of the same table, no guards: the floor

CPU time per transition in microseconds. The four are interleaved in one process, so that a busy
moment hits them alike; the minimum is what the code costs, the median what it costs here and now.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from fsm_rollout import __version__
from fsm_rollout.limits import Limits, Status
from fsm_rollout.request import Request
from fsm_rollout.sample import ToolCall
from fsm_rollout.states.machine import Machine, Transition, stock_machine
from fsm_rollout.states.table import EDGES, Event

Loop = Callable[[int], None]
"""fires that many transitions"""


def a_request() -> Request:
    """GENERATING, 8k tokens in, with a call that waits; every budget is set and far away."""
    limits = Limits(max_response=30_000, max_turns=10**9, max_tool_calls=10**9)
    request = Request(limits=limits)
    request.set_prompt(range(8_000))
    Machine().fire(Event.GENERATE, request)
    request.append_response_tokens(
        range(256), [-1.0] * 256, meta_info={"finish_reason": "stop", "weight_version": "v1"}
    )
    request.sample.turns[-1].calls = (ToolCall("calculator"),)
    return request


def fire_loop(machine: Machine) -> Loop:
    request, fire = a_request(), machine.fire

    def loop(fires: int) -> None:
        for _ in range(fires // 2):
            fire(Event.OBSERVE, request)
            fire(Event.GENERATE, request)

    return loop


def stock_loop() -> Loop:
    request, events = a_request(), stock_machine().events
    observe, generate = events[Event.OBSERVE].trigger, events[Event.GENERATE].trigger

    def loop(fires: int) -> None:
        for _ in range(fires // 2):
            observe(request, request)
            generate(request, request)

    return loop


def dict_loop() -> Loop:
    table = {(source, edge.event): edge.dest for edge in EDGES for source in edge.sources}

    def loop(fires: int) -> None:
        status = Status.GENERATING
        for _ in range(fires // 2):
            status = table[status, Event.OBSERVE]
            status = table[status, Event.GENERATE]

    return loop


def nothing(record: Transition) -> None:
    """A listener."""


def measure(loops: dict[str, Loop], repeats: int, fires: int) -> dict[str, list[float]]:
    """CPU microseconds per transition, `repeats` of each loop, interleaved."""
    measured: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            started = time.process_time()
            loop(fires)
            measured[name].append((time.process_time() - started) / fires * 1e6)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fires", type=int, default=20_000)
    options = parser.parse_args()
    loops = {
        "fire_us": fire_loop(Machine()),
        "fire_listener_us": fire_loop(Machine([nothing])),
        "stock_us": stock_loop(),
        "dict_us": dict_loop(),
    }
    measured = measure(loops, options.repeats, options.fires)
    figures = {name: round(min(times), 3) for name, times in measured.items()}
    report = {
        **figures,
        "median": {name: round(statistics.median(times), 3) for name, times in measured.items()},
        "unit": "CPU microseconds per transition, minimum over repeats",
        "repeats": options.repeats,
        "fires": options.fires,
        "python": platform.python_version(),
        "fsm_rollout": __version__,
        "transitions": version("transitions"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name:18}{value:8.3f}   median {report['median'][name]:.3f}")


if __name__ == "__main__":
    main()

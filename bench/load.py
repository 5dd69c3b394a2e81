"""Ten thousand requests in flight against the fake engine: what is lost, what it costs, who waits.

    python bench/load.py --json FILE [--requests 10000] [--turns 5] [--quick]

The same rollout twice, each time in a process of its own, against a fake engine in another:
`plain`, and `tuned` (uvloop, a collector that runs rarely). Groups of 8 over HTTP, latency
log-normal, a tool call in each turn but the last. Reported: requests that are not COMPLETED after
all their turns (`lost`), violated invariants over all samples, CPU time per turn, memory per
request at the peak, how late a 5 ms ticker came (event-loop lag) and how long the loop computed
between its ticks. `--quick`: 200 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.conversation import qwen
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout, run
from fsm_rollout.testing.fake_engine import FakeEngine, Latency, LogNormal
from fsm_rollout.tools.base import tool

GROUP = 8
"""requests per prompt"""
REQUESTS, QUICK = 10_000, 200
NEW_TOKENS = 128
"""per turn, log-normal"""
MEAN_S, QUICK_MEAN_S = 1.0, 0.1
"""of a reply's latency, log-normal"""
PROMPT = "Work this out step by step, and use the calculator for every single step. " * 16
TICK_S = 0.005
MODES = ("plain", "tuned")


@tool(blocking=False)
def calculator(expression: str) -> str:
    """Compute.

    expression: what to compute
    """
    return f"{expression} = 42. " * 16


class Ticker:
    """How late it is woken every 5 ms, how long the loop computed meanwhile, and peak memory."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.busy: list[float] = []
        """CPU seconds between two wakes: lag that no other process causes"""
        self.peak_rss = rss()

    async def tick(self) -> None:
        """Runs until it is cancelled."""
        while True:
            started, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.lags.append(time.perf_counter() - started - TICK_S)
            self.busy.append(time.thread_time() - computed)
            if len(self.lags) % 10 == 0:
                self.peak_rss = max(self.peak_rss, rss())


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and max."""
    p50, p99, most = np.percentile(seconds, [50, 99, 100]) * 1e3
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(most, 2)}


def rss() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def play(url: str, requests: int, turns: int) -> dict[str, Any]:
    """One rollout of so many requests, all in flight at once."""
    limits = Limits(max_turns=turns, max_context=32_768)
    rollout = Rollout(
        SGLangEngine(url), qwen(), tools=[calculator], limits=limits, max_concurrent=requests
    )
    rows = [f"{PROMPT} Number {i}." for i in range(-(-requests // GROUP))]
    await rollout.start()
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.tick())
    before, wall, cpu = rss(), time.perf_counter(), time.process_time()
    groups = await rollout.generate(rows, num_samples=GROUP)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    played = [request for group in groups for request in group.requests]
    await rollout.loop.engine.close()
    return report(played, turns, cpu=cpu, wall=wall, memory=ticker.peak_rss - before) | {
        "loop_lag_ms": milliseconds(ticker.lags),
        "loop_busy_ms": milliseconds(ticker.busy),
    }


def report(
    played: list[Request], turns: int, *, cpu: float, wall: float, memory: int
) -> dict[str, Any]:
    """What came of the requests, and what they cost."""
    lost = [r for r in played if r.status is not Status.COMPLETED or r.num_turns != turns]
    samples = [sample for request in played for sample in request.samples]
    done = sum(request.num_turns for request in played)
    return {
        "requests": len(played),
        "lost": len(lost),
        "lost_reasons": dict(Counter(f"{r.status} {r.stop_reason}: {r.error}" for r in lost)),
        "violations": sum(len(violations(sample)) for sample in samples),
        "attempts": sum(request.attempt for request in played),
        "turns": done,
        "tokens_per_request": round(sum(s.columns.length for s in samples) / len(played), 1),
        "cpu_us_per_turn": round(cpu / done * 1e6, 1),
        "rss_kib_per_request": round(memory / len(played) / 1024, 1),
        "turns_per_s": round(done / wall, 1),
        "seconds": round(wall, 1),
    }


@contextmanager
def fake_engine(turns: int, mean_s: float) -> Iterator[str]:
    """The URL of a fake engine in another process."""
    command = [sys.executable, __file__, "--serve", str(mean_s), "--turns", str(turns)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        yield server.stdout.readline().strip()
        server.stdin.close()


def play_apart(url: str, mode: str, requests: int, turns: int) -> dict[str, Any]:
    """`play` in a process of its own, so that memory and collector start afresh."""
    options = ["--play", url, "--modes", mode, "--requests", str(requests), "--turns", str(turns)]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


async def serve(turns: int, mean_s: float) -> None:
    """Be the fake engine, until standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    engine = FakeEngine(
        tokenizer=qwen(),
        tokens=LogNormal(NEW_TOKENS, 0.5),
        tool_turns=turns - 1,
        latency=Latency(total_s=LogNormal(mean_s, 1.0)),
        record=False,
    )
    async with engine:
        print(engine.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--requests", type=int, help=f"default {REQUESTS}, quick {QUICK}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few requests, short latency")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    requests = options.requests or (QUICK if options.quick else REQUESTS)
    if options.serve is not None:
        return run(serve(options.turns, options.serve), tuned=True)
    if options.play:
        playing = play(options.play, requests, options.turns)
        print(json.dumps(run(playing, tuned="tuned" in options.modes)))
        return
    load = os.getloadavg()
    mean_s = QUICK_MEAN_S if options.quick else MEAN_S
    with fake_engine(options.turns, mean_s) as url:
        figures = {mode: play_apart(url, mode, requests, options.turns) for mode in options.modes}
    environment = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(value, 2) for value in load],
    }
    if options.json:
        options.json.write_text(json.dumps(figures | environment, indent=1) + "\n")
    show(figures)


def show(figures: dict[str, dict[str, Any]]) -> None:
    """Print the two runs side by side."""
    table = Table("", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(_shown(each[name]) for each in figures.values()))
    Console().print(table)


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {part}" for name, part in value.items())


if __name__ == "__main__":
    main()

"""What a turn costs the client: us, a bare aiohttp loop, the httpx pattern, and verl.

    python bench/turn.py --quick --json FILE     contexts of 1k and 8k, under 50 s
    python bench/turn.py --json FILE             1k, 8k, 32k and 128k
    python bench/turn.py --json FILE --verl .venv-verl/bin/python    and verl's ToolAgentLoop

One row per context and observation: `pre-encoded` (its ids are at hand) and `to-encode` (200 tokens
of text, encoded in each turn). Figures are CPU time of this process per turn of 256 new tokens with
log-probs; the server is another process, without latency. Everybody plays the same conversation,
sends the same bytes and gets the same replies. The variants take turns, so that a busy moment hits
them alike: the minimum is what the code costs, the median what it costs here and now.
docs/reference/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bench.conversation import OBSERVED, SAMPLED, TURNS, Conversation, conversation, qwen
from bench.ours import PARAMS, PreEncoded, ours, ours_without_io, toolset
from bench.peers import Body, Observe, Observed, floor, httpx_pattern
from bench.server import serving
from bench.verl import TOOLS, Verl
from fsm_rollout.codec import Codec
from fsm_rollout.engines.http.wire import Ask
from fsm_rollout.engines.sglang import SGLangWire
from fsm_rollout.rollout import run
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tuning import fast_loop

Variant: TypeAlias = Callable[[], float]
"""plays once; CPU microseconds per turn"""

IN_FLIGHT = {1_024: 1_000, 8_192: 1_000, 32_768: 250, 131_072: 64}
QUICK = {1_024: 500, 8_192: 500}
"""contexts, and how many conversations are played at once"""
QUICK_HTTPX = 64
"""of them over httpx, whose cost per request grows with their number"""
VERL_IN_FLIGHT = 32
QUICK_S = 30
"""no repeat is started that would end later than this"""


@dataclass
class Row:
    """One line of the table."""

    context: int
    observation: str
    in_flight: int
    httpx_in_flight: int
    variants: dict[str, Variant]
    """by the name of its figure; `verl_us.10` is figure 10 of verl_us"""
    measured: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, names: Collection[str]) -> None:
        """Play once each of these variants that the row has."""
        for name, variant in self.variants.items():
            if name.partition(".")[0] in names:
                self.measured.setdefault(name, []).append(variant())

    def report(self) -> dict[str, Any]:
        """The row as it goes to JSON: minima, and the medians beside them."""
        best = {name: min(times) for name, times in self.measured.items()}
        return {
            "context": self.context,
            "observation": self.observation,
            "in_flight": self.in_flight,
            "httpx_in_flight": self.httpx_in_flight,
            **_figures(best),
            "ratio": round(best["ours_us"] / best["aiohttp_floor_us"], 3),
            "median": _figures({n: statistics.median(t) for n, t in self.measured.items()}),
            "repeats": _figures({n: len(t) for n, t in self.measured.items()}),
        }


class Bench:
    """What all rows share: the tokenizer, the codecs and verl's process, if there is one."""

    def __init__(self, verl: Verl | None, *, most_httpx: int) -> None:
        self.tokenizer = qwen()
        self._most_httpx = most_httpx
        self.codec = self._codec(Codec, tools=1)
        self._verl = verl

    def rows(self, url: str, played: Conversation, in_flight: int) -> list[Row]:
        """The two rows of one conversation, which is served at `url`."""
        encode = self.tokenizer.backend_tokenizer.encode

        def observe() -> list[int]:
            ids = encode(played.observation, add_special_tokens=False).ids
            return [*played.before, *ids, *played.after]

        delta, observed = played.delta, Observed.of(played.delta)
        first = self._row(url, played, in_flight, PreEncoded, lambda: delta, lambda: observed)
        second = self._row(url, played, in_flight, Codec, observe, lambda: Observed.of(observe()))
        if self._verl is not None:
            count = min(in_flight, VERL_IN_FLIGHT)
            for number in TOOLS:
                second.variants |= {
                    f"verl_us.{number}": partial(
                        self._verl.microseconds, played, tools=number, count=count
                    ),
                    f"ours_without_io_us.{number}": self._without_io(played, number, count),
                }
        return [first, second]

    def _row(
        self,
        url: str,
        played: Conversation,
        in_flight: int,
        kind: type[Codec],
        observe: Observe,
        observed: Callable[[], Observed],
    ) -> Row:
        body, codec = self._body(), self._codec(kind, tools=1)
        given = toolset(played.observation)
        many, few = in_flight, min(in_flight, self._most_httpx)
        variants: dict[str, Variant] = {
            "aiohttp_floor_us": lambda: _us(floor(url, played, body, observed, many), many),
            "ours_us": lambda: _us(ours(url, played, codec, given, many), many),
            "httpx_us": lambda: _us(httpx_pattern(url, played, body, observe, few), few),
        }
        name = "pre-encoded" if kind is PreEncoded else "to-encode"
        return Row(len(played.prompt), name, many, few, variants)

    def _without_io(self, played: Conversation, number: int, count: int) -> Variant:
        codec, given = self._codec(Codec, tools=number), toolset(played.observation, number)
        return lambda: _us(ours_without_io(played, codec, given, count), count)

    def _codec(self, kind: type[Codec], *, tools: int) -> Codec:
        return kind(self.tokenizer, tools=Toolset(toolset("", tools)).schemas)

    def _body(self) -> Body:
        """A request's body around its ids, as our wire writes it."""
        params = msgspec.structs.replace(
            PARAMS, seed=1_234_567_890, stop_token_ids=tuple(self.codec.stop_ids)
        )
        ask = Ask(
            ids=b"1,2,3",
            num_ids=3,
            max_new_tokens=4_096,
            params=params,
            rid="0123456789abcdef" * 2,
            session_id="",
            log_probs=True,
            stream=False,
        )
        head, tail = SGLangWire().body(ask).split(b"1,2,3")
        return Body(head, tail)


def _us(playing: Coroutine[Any, Any, float], count: int) -> float:
    return run(playing, tuned=True) / count / TURNS * 1e6


def _figures(values: Mapping[str, float]) -> dict[str, Any]:
    """`{"a": 1, "b.1": 2, "b.10": 3}` as `{"a": 1, "b": {"1": 2, "10": 3}}`, rounded."""
    figures: dict[str, Any] = {}
    for name, value in values.items():
        whole, _, part = name.partition(".")
        if part:
            figures.setdefault(whole, {})[part] = round(value, 1)
        else:
            figures[name] = round(value, 1)
    return figures


def measure(rows: Sequence[Row], *, repeats: int, least: int, seconds: float) -> None:
    """Repeat all rows in turns, at least `least` times, then while there is time.

    httpx, which takes most of the time and varies least, takes part in every fourth.
    """
    names = {name.partition(".")[0] for row in rows for name in row.variants}
    started, longest = time.perf_counter(), 0.0
    for repeat in range(repeats):
        begun = time.perf_counter()
        if repeat >= least and begun + longest > started + seconds:
            break
        for row in rows:
            row.measure(names if repeat % 4 == 0 else names - {"httpx_us"})
        longest = max(longest, time.perf_counter() - begun)


def environment(load: tuple[float, float, float]) -> dict[str, Any]:
    """What the figures depend on."""
    packages = ("fsm-rollout", "aiohttp", "httpx", "msgspec", "tokenizers", "transformers")
    return {
        "unit": "CPU microseconds of the client per turn, minimum over repeats",
        "method": (
            f"{TURNS} turns of {SAMPLED} new tokens with log-probs, {OBSERVED} tokens observed in "
            "between, all conversations at once, new connections in each repeat; the server is "
            "another process without latency; variants interleaved; collector tuned for all"
        ),
        "versions": {name: version(name) for name in packages},
        "event_loop": "uvloop " + version("uvloop") if fast_loop() else "asyncio",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(value, 2) for value in load],
        "load_average_after": [round(value, 2) for value in os.getloadavg()],
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table: minima, and medians in brackets."""
    figures = {"ours_us": "ours", "aiohttp_floor_us": "floor", "httpx_us": "httpx"}
    print("CPU microseconds per turn, minimum (median)")
    heads = "".join(f"{head:>17}" for head in figures.values())
    print(f"context  observation  at once{heads}  ours / floor")
    for row in rows:
        cells = [f"{row[name]:.0f} ({row['median'][name]:.0f})" for name in figures]
        print(
            f"{row['context']:7}  {row['observation']:11}{row['in_flight']:9}"
            f"{''.join(f'{cell:>17}' for cell in cells)}{row['ratio']:14.2f}"
        )
    for row in rows:
        for number, verl_us in row.get("verl_us", {}).items():
            ours_us = row["ours_without_io_us"][number]
            print(
                f"context {row['context']}, tools declared: {number}, without I/O: "
                f"verl {verl_us:.0f}, ours {ours_us:.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="contexts of 1k and 8k, under 50 s")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--in-flight", type=int, help="conversations at once, of each context")
    parser.add_argument("--verl", help="the python of verl's environment")
    options = parser.parse_args()
    load = os.getloadavg()
    in_flight = QUICK if options.quick else IN_FLIGHT
    if options.in_flight is not None:
        in_flight = dict.fromkeys(in_flight, int(options.in_flight))
    most_httpx = QUICK_HTTPX if options.quick else max(in_flight.values())
    with ExitStack() as stack:
        verl = stack.enter_context(Verl(options.verl, qwen())) if options.verl else None
        bench = Bench(verl, most_httpx=most_httpx)
        played = [conversation(context, bench.codec) for context in in_flight]
        urls = stack.enter_context(serving([each.script() for each in played]))
        rows = [
            row
            for url, each in zip(urls, played, strict=True)
            for row in bench.rows(url, each, in_flight[len(each.prompt)])
        ]
        seconds = QUICK_S if options.quick else math.inf
        measure(rows, repeats=options.repeats, least=2, seconds=seconds)
    report = {"rows": [row.report() for row in rows], **environment(load)}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report["rows"])


if __name__ == "__main__":
    main()

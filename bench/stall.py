"""How far long texts hold up the event loop: tool outputs, a prompt of 100k tokens, a long turn.

    python bench/stall.py [--json FILE] [--repeats 5]

Each row plays whole requests through `Rollout` with the Qwen BPE, while a task that wakes every
millisecond notes its longest delay. `stall_ms` is the least of the repeats, which is what the code
does; `median_ms` and `worst_ms` say what it did here and now. tests/ticker.py says what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fsm_rollout import __version__
from fsm_rollout.codec import Codec
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.limits import Limits, Status
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from tests.qwen import qwen_tokenizer
from tests.ticker import Ticker

MEGABYTE = 1_000_000
PROMPT_TOKENS = 100_000
TURN_TOKENS = 56_000
LIMITS = Limits(max_context=131_072, max_new_tokens=65_536)
PROSE = "The result of the tool was 42, which is fine; see https://example.org/a?b=c for more.\n"


def texts(size: int = MEGABYTE) -> dict[str, str]:
    """A text of about `size` bytes of each kind that tokenizers treat in a way of its own."""
    chance = random.Random(0)
    return {
        "prose": PROSE * (size // len(PROSE)),
        "digits": "".join(chance.choices("0123456789", k=size)),
        "cjk": "".join(chr(chance.randrange(0x4E00, 0x9000)) for _ in range(size // 3)),
        "emoji": "".join(chr(chance.randrange(0x1F300, 0x1F600)) for _ in range(size // 4)),
        "accents": "e\u0301" * (size // 3),
        "base64": base64.b64encode(chance.randbytes(size * 3 // 4)).decode(),
        "newlines": "\n" * size,
        "spaces": " " * size,
        "x": "x" * size,
    }


class Fetch(Tool):
    """Fetch a document."""

    max_response_tokens = 125_000  # with less, the session cuts a megabyte before it is encoded
    texts: Mapping[str, str] = {}

    async def execute(self, name: str, notes: str = "") -> str:
        """name: which one"""
        return Fetch.texts[name]


class Canned:
    """An engine that costs nothing: a session's i-th answer is the i-th generation."""

    def __init__(self, replies: Sequence[Generation]) -> None:
        self._replies = replies
        self._asked: dict[str, int] = {}

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        number = self._asked.get(session_id, 0)
        self._asked[session_id] = number + 1
        return self._replies[number]

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


class Stalls:
    """The scenes; each returns the longest stall in seconds."""

    def __init__(self) -> None:
        Fetch.texts = texts()
        self._tools = Toolset([Fetch])
        self._codec = Codec(qwen_tokenizer("qwen3"), tools=self._tools.schemas)
        self._tokens_per_line = len(self._codec.vocabulary.encode(PROSE))
        self._done = self._reply("Done.")

    def nothing(self) -> float:
        """No rollout at all: what the machine does to the ticker."""

        async def main() -> float:
            async with Ticker() as ticker:
                await asyncio.sleep(0.3)
            return ticker.stall_s

        return asyncio.run(main())

    def output(self, kind: str, count: int = 1) -> float:
        """`count` requests at once whose tool returns the text of that kind."""
        return self._stall("Go.", [self._reply(_call(name=kind)), self._done], count)

    def prompt(self) -> float:
        """A group of four with one long prompt."""
        return self._stall(PROSE * (PROMPT_TOKENS // self._tokens_per_line), [self._done], 4)

    def turn(self) -> float:
        """A long sampled turn: reasoning, text and a call with a long argument, a third each."""
        third = PROSE * (TURN_TOKENS // self._tokens_per_line // 3)
        said = f"<think>{third}</think>{third}{_call(name='x', notes=third)}"
        return self._stall("Go.", [self._reply(said), self._done], 1)

    def _reply(self, text: str) -> Generation:
        ids = np.array(self._codec.vocabulary.encode(text + "<|im_end|>"), np.int32)
        log_probs = np.full(len(ids), -1.0, np.float32)
        return Generation(token_ids=ids, log_probs=log_probs, finish="stop")

    def _stall(self, prompt: str, replies: Sequence[Generation], count: int) -> float:
        async def main() -> float:
            rollout = Rollout(Canned(replies), codec=self._codec, tools=self._tools, limits=LIMITS)
            async with Ticker() as ticker:
                [group] = await rollout.generate([prompt], num_samples=count)
            for request in group.requests:
                assert request.status in (Status.COMPLETED, Status.TRUNCATED), request.error
                assert request.num_tool_calls == len(replies) - 1
            return ticker.stall_s

        return asyncio.run(main())


def _call(**arguments: str) -> str:
    call = json.dumps({"name": "fetch", "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def scenes() -> dict[str, Callable[[], float]]:
    """The rows of the table."""
    stalls = Stalls()
    return {
        "nothing at all": stalls.nothing,
        **{f"1 MB of {kind}": partial(stalls.output, kind) for kind in Fetch.texts},
        "1 MB of prose, 8 at once": partial(stalls.output, "prose", 8),
        "prompt of 100k tokens": stalls.prompt,
        "turn of 56k tokens": stalls.turn,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for name, scene in scenes().items():
        times = [scene() * 1e3 for _ in range(options.repeats)]
        least, median, worst = min(times), statistics.median(times), max(times)
        rows.append(
            {
                "name": name,
                "stall_ms": round(least, 2),
                "median_ms": round(median, 2),
                "worst_ms": round(worst, 2),
            }
        )
        print(f"{name:28}{least:8.2f} ms   median {median:.2f}, worst {worst:.2f}")
    report = {
        "rows": rows,
        "target_ms": 10,
        "unit": "milliseconds, the longest stall of the event loop; the least of the repeats",
        "repeats": options.repeats,
        "python": platform.python_version(),
        "fsm_rollout": __version__,
        "tokenizers": version("tokenizers"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

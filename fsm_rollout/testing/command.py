"""The command `fsm-rollout fake-engine`: one FakeEngine until it is told to stop.

cli.py registers it; the server and what it needs are imported when it runs.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fsm_rollout.errors import ConfigError
from fsm_rollout.tuning import fast_loop, tuned_gc

if TYPE_CHECKING:
    from fsm_rollout.testing.fake_engine import FakeEngine


def fake_engine(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free one")] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    reply: Annotated[
        list[str] | None,
        typer.Option(help="what turn 1, 2, ... says: repeat it; needs --tokenizer"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="directory or name that transformers can load")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="default: the tokenizer's, or 32000")
    ] = None,
    tokens_mean: Annotated[float, typer.Option(help="random ids per turn")] = 64,
    tokens_sigma: Annotated[float, typer.Option(help="log-normal; 0: always the mean")] = 0,
    tool_turns: Annotated[
        int, typer.Option(min=0, help="so many turns end with a tool call; needs --tokenizer")
    ] = 0,
    latency_mean: Annotated[float, typer.Option(help="seconds per reply")] = 0,
    latency_sigma: Annotated[float, typer.Option(help="log-normal; 0: always the mean")] = 0,
    token_latency: Annotated[float, typer.Option(min=0, help="seconds more per token")] = 0,
    chunk_tokens: Annotated[int, typer.Option(help="tokens per event of a stream")] = 1,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="SGLang streams deltas, not cumulatively")
    ] = False,
    log_prob_kind: Annotated[
        Literal["scaled", "raw", "processed"] | None,
        typer.Option(help="default: scaled as SGLang, raw as vLLM"),
    ] = None,
    faults: Annotated[Path | None, typer.Option(help="YAML: a plan of faults")] = None,
    max_context: Annotated[int, typer.Option(min=1, help="tokens")] = 131_072,
    seed: Annotated[int, typer.Option(help="of tokens, lengths and latencies")] = 0,
) -> None:
    """Serve an engine that looks like SGLang and vLLM, without a model, with faults to order."""
    from fsm_rollout.testing.fake_engine import (
        FakeEngine,
        FaultPlan,
        Latency,
        LogNormal,
        load_faults,
    )

    engine = FakeEngine(
        reply or None,
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
        vocab_size=vocab_size,
        tokens=LogNormal(tokens_mean, tokens_sigma),
        tool_turns=tool_turns,
        latency=Latency(
            total_s=LogNormal(latency_mean, latency_sigma),
            per_token_s=token_latency,
            chunk_tokens=chunk_tokens,
        ),
        faults=FaultPlan() if faults is None else load_faults(faults),
        log_prob_kind=log_prob_kind,
        incremental=incremental,
        max_context=max_context,
        seed=seed,
        record=False,
        host=host,
        port=port,
    )
    with tuned_gc(), asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_until_stopped(engine))


async def _until_stopped(engine: FakeEngine) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await engine.start()
    except OSError as error:
        raise ConfigError(f"{engine.url} cannot be served: {error}; choose a free port") from error
    try:
        typer.echo(f"serving on {engine.url}")
        await stopped.wait()
    finally:
        await engine.stop()


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--tokenizer {name!r} cannot be loaded: {why}") from error

"""The command line: `fsm-rollout run config.yaml` and `fsm-rollout verify samples.jsonl`."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fsm_rollout.config import RunConfig, ScriptedConfig, load_config
from fsm_rollout.dataset import PromptRow, read_rows, write_samples
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.request import Group

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()


@app.command()
def run(config: Annotated[Path, typer.Argument(help="YAML; see docs/reference/config.md")]) -> None:
    """Play every row of the config, write the samples, print the summary."""
    from fsm_rollout.trace import summarise

    settings = load_config(config)
    rows = read_rows(Path(settings.rows))
    started = time.monotonic()
    groups = asyncio.run(_rollout(settings, rows))
    requests = [request for group in groups for request in group.requests]
    console.print(summarise(requests, time.monotonic() - started).table(str(config)))
    for error in sorted({request.error for request in requests if request.error})[:5]:
        console.print(f"aborted: {error}", markup=False, highlight=False, soft_wrap=True)
    path = Path(settings.samples)
    count = write_samples(path, (sample for group in groups for sample in group.samples))
    console.print(f"{count} samples in {path}", highlight=False, soft_wrap=True)
    if not count:
        raise typer.Exit(1)


@app.command()
def verify(
    samples: Annotated[Path, typer.Argument(help="JSONL that `run` wrote")],
    model: Annotated[
        str | None, typer.Option(help="directory of the model that sampled: recompute log-probs")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="largest difference of a log-prob that passes")
    ] = 1e-3,
    dtype: Annotated[str, typer.Option(help="of the model's forward pass")] = "float32",
) -> None:
    """Check every invariant of every sample; with --model, every sampled token's log-prob too."""
    from fsm_rollout.verify import verify_samples

    report = verify_samples(samples, model, tolerance=tolerance, dtype=dtype)
    console.print(report.text(), highlight=False, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


async def _rollout(settings: RunConfig, rows: list[PromptRow]) -> list[Group]:
    from fsm_rollout.rollout import Rollout
    from fsm_rollout.trace import Progress

    engine, tokenizer = _engine(settings)
    try:
        with Progress(len(rows) * settings.num_samples, console=console) as progress:
            rollout = Rollout(
                engine,
                tokenizer,
                tools=settings.tools,
                parser=settings.parser,
                chat_template=settings.chat_template,
                limits=settings.limits,
                params=settings.sampling,
                reward=None if settings.reward is None else _imported(settings.reward),
                max_concurrent=settings.max_concurrent,
                seed=settings.seed,
                listeners=[progress],
            )
            return await rollout.generate(rows, num_samples=settings.num_samples)
    finally:
        await engine.close()


def _engine(settings: RunConfig) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    engine = settings.engine
    if isinstance(engine, ScriptedConfig):
        from fsm_rollout.engines.scripted import ScriptedEngine

        if settings.tokenizer is None:
            raise ConfigError(
                "engine.type scripted needs `tokenizer`: it has no model to take it from"
            )
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
        return ScriptedEngine(engine.replies, tokenizer=tokenizer), tokenizer
    from fsm_rollout.engines.transformers import TransformersEngine

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer or engine.model)
    return TransformersEngine(engine.model, device=engine.device, dtype=engine.dtype), tokenizer


def _imported(dotted: str) -> Any:
    """`module:name`, named by the config's author."""
    module, _, name = dotted.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"reward {dotted!r} is not an importable `module:name`: {error}"
        ) from error


def main() -> None:
    """Entry point: errors of ours are one line, not a traceback."""
    sys.path.insert(0, "")  # `module:name` of the config means the user's folder
    try:
        app()
    except RolloutError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from error

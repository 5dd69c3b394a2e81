"""The command line: run a config, verify its samples, serve a fake engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer
from rich.console import Console

from fsm_rollout.config import (
    RewardConfig,
    RunConfig,
    ScriptedConfig,
    SGLangConfig,
    TransformersConfig,
    VLLMConfig,
    imported,
    load_config,
)
from fsm_rollout.dataset import PromptRow, checked_rows, read_rows, sample_line, samples_file
from fsm_rollout.errors import ConfigError, InvariantError, RolloutError
from fsm_rollout.limits import Status
from fsm_rollout.parsers import get_parser
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardFunction, RewardPart, Rewards
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Listener, Transition
from fsm_rollout.testing.command import fake_engine
from fsm_rollout.tools.registry import Toolset

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()
app.command("fake-engine")(fake_engine)


@app.command()
def run(config: Annotated[Path, typer.Argument(help="YAML; see docs/reference/config.md")]) -> None:
    """Play every row of the config, write the samples, print the summary."""
    from fsm_rollout.trace import summarise

    settings = load_config(config)
    rows = read_rows(Path(settings.rows))
    path = Path(settings.samples)
    started = time.monotonic()
    with samples_file(path) as file:
        for given in (Path(settings.rows), config):
            if path.exists() and path.samefile(given):
                raise ConfigError(f"{config}: samples would replace {given}; give another file")
        requests, stopped = _play(settings, rows)
        usable = [r for r in requests if r.status is not Status.ABORTED]
        count = sum(_write(file, sample) for request in usable for sample in request.rows)
    if stopped is not None and not usable:
        raise stopped
    console.print(summarise(requests, time.monotonic() - started).table(str(config)))
    for error in sorted({request.error for request in requests if request.error})[:5]:
        _say(f"aborted: {error}")
    if stopped is not None:
        _say(f"stopped: {len(usable)} of {len(rows) * settings.num_samples} requests were played")
    _say(f"{count} samples in {path}" if count else f"no samples: nothing was written to {path}")
    if stopped is not None:
        raise stopped
    if count < sum(len(request.rows) for request in usable) or not count:
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
    _say(report.text())
    if not report.passed:
        raise typer.Exit(1)


def _play(settings: RunConfig, rows: list[PromptRow]) -> tuple[list[Request], BaseException | None]:
    """Every request that ended, in order, and what stopped the run before its end."""
    seen: dict[int, Request] = {}

    def remember(transition: Transition) -> None:
        if not transition.request.is_child:
            seen[transition.request.index] = transition.request

    from fsm_rollout.rollout import run as run_rollout

    stopped: BaseException | None = None
    try:
        run_rollout(_rollout(settings, rows, remember), tuned=settings.tuned)
    except KeyboardInterrupt:
        stopped = typer.Exit(130)
    except BaseException as error:  # a bug: the caller saves what there is before it is told
        stopped = error
    return [seen[index] for index in sorted(seen) if seen[index].is_sealed], stopped


async def _rollout(settings: RunConfig, rows: list[PromptRow], listener: Listener) -> None:
    from fsm_rollout.rollout import Rollout
    from fsm_rollout.trace import Progress

    tools = Toolset(settings.tools)
    checked_rows(rows, tools)  # before a model is loaded, as what follows
    get_parser(settings.parser)
    reward = Rewards.of(_reward(settings), tools)
    agent = None if settings.agent is None else imported(settings.agent, what="agent")
    engine, tokenizer = _engine(settings)
    try:
        with Progress(len(rows) * settings.num_samples, console=console) as progress:
            rollout = Rollout(
                engine,
                tokenizer,
                tools=tools,
                parser=settings.parser,
                chat_template=settings.chat_template,
                limits=settings.limits,
                params=settings.sampling,
                reward=reward,
                agent=agent,
                max_concurrent=settings.max_concurrent,
                seed=settings.seed,
                listeners=[progress, listener],
            )
            await rollout.generate(rows, num_samples=settings.num_samples)
    finally:
        await engine.close()


def _write(file: TextIO, sample: Sample) -> bool:
    """Whether it is sound and JSON can hold it; a sample that is not costs no other."""
    try:
        line = sample_line(sample)
    except InvariantError as error:
        _say(f"withheld: {error}")
        return False
    except (TypeError, ValueError, RecursionError) as error:
        _say(f"not written: sample {sample.sample_id}: {error}; keep to what JSON can hold")
        return False
    file.write(line)
    return True


def _engine(settings: RunConfig) -> tuple[Any, Any]:
    engine = settings.engine
    if isinstance(engine, TransformersConfig):
        from fsm_rollout.engines.transformers import TransformersEngine

        name = "engine.model" if settings.tokenizer is None else "tokenizer"
        tokenizer = _tokenizer(name, settings.tokenizer or engine.model)
        with _loading("engine.model", engine.model):
            return TransformersEngine(**msgspec.structs.asdict(engine)), tokenizer
    if settings.tokenizer is None:
        kind = engine.__struct_config__.tag
        raise ConfigError(f"engine.type {kind} needs `tokenizer`: it has no model to take it from")
    tokenizer = _tokenizer("tokenizer", settings.tokenizer)
    match engine:
        case ScriptedConfig():
            from fsm_rollout.engines.scripted import ScriptedEngine

            return ScriptedEngine(engine.replies, tokenizer=tokenizer), tokenizer
        case SGLangConfig():
            from fsm_rollout.engines.sglang import SGLangEngine

            return SGLangEngine(**msgspec.structs.asdict(engine)), tokenizer
        case VLLMConfig():
            from fsm_rollout.engines.vllm import VLLMEngine

            return VLLMEngine(**msgspec.structs.asdict(engine)), tokenizer


def _tokenizer(field: str, name: str) -> Any:
    from transformers import AutoTokenizer

    with _loading(field, name):
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _loading(field: str, name: str) -> Iterator[None]:
    """Whatever the files and their code raise is a ConfigError of the config's `field`."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{field}: {name!r} cannot be loaded, {type(error).__name__}: {why}; "
            "give a directory that transformers can load"
        ) from error


def _reward(settings: RunConfig) -> RewardFunction | Rewards | None:
    given = settings.reward
    if given is None or isinstance(given, str):
        return None if given is None else imported(given, what="reward")
    parts: dict[str, Any] = {}
    for name, part in given.items():
        if isinstance(part, RewardConfig):
            options = msgspec.structs.asdict(part)
            parts[name] = RewardPart(imported(options.pop("function"), what="reward"), **options)
        else:
            parts[name] = imported(part, what="reward") if isinstance(part, str) else part
    return Rewards(parts)


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors of ours are one line, not a traceback."""
    sys.path.insert(0, "")  # `module:name` of the config means the user's folder
    # read when torch is loaded: threads that spin while they wait slow each other down
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # read when transformers is loaded: its bars would stand between our lines
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except RolloutError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        _say(str(error))
        raise SystemExit(2) from error

"""`make demo`: a real language model does arithmetic without and with a calculator.

An unmodified SmolLM2-135M-Instruct, in this process, on the CPU. Shows the two summaries, one
sample token by token, writes every sample, and has `verify` recompute every log-prob.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from examples.demo.arithmetic import reward, rows
from fsm_rollout import Group, Limits, Rollout, SamplingParams, TransformersEngine
from fsm_rollout.dataset import write_samples
from fsm_rollout.request import samples_of
from fsm_rollout.testing.smollm2 import smollm2_dir
from fsm_rollout.trace import Progress, Summary, summarise, token_strip
from fsm_rollout.verify import verify_samples

LIMITS = Limits(max_context=2_048, max_new_tokens=48, max_turns=4)
PARAMS = SamplingParams(temperature=0.7, top_p=0.95)
console = Console()


async def play(model: Path, count: int, seed: int) -> dict[str, tuple[list[Group], Summary]]:
    """Both passes over the same problems."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = TransformersEngine(str(model))
    passes = {}
    try:
        for title, tools in (("without a tool", []), ("with a calculator", ["calculator"])):
            with Progress(count, title=title, console=console) as progress:
                rollout = Rollout(
                    engine,
                    tokenizer,
                    tools=tools,
                    chat_template="hermes",
                    limits=LIMITS,
                    params=PARAMS,
                    reward=reward,
                    seed=seed,
                    listeners=[progress],
                )
                started = time.monotonic()
                groups = await rollout.generate(rows(count, seed, tool=bool(tools)))
            requests = [request for group in groups for request in group.requests]
            passes[title] = groups, summarise(requests, time.monotonic() - started)
    finally:
        await engine.close()
    shown = passes["with a calculator"][0][0].requests[0].sample
    console.print(
        "\nOne sample with the calculator: sampled tokens in colour with log-probs (· is 0)\n"
    )
    console.print(token_strip(shown, rollout.codec.pieces, prompt_tail=12), soft_wrap=True)
    return passes


def main() -> int:
    """Play, show, verify. Exit status 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-out/samples.jsonl"))
    arguments = parser.parse_args()
    model = smollm2_dir()
    passes = asyncio.run(play(model, arguments.rows, arguments.seed))
    for title, (_, summary) in passes.items():
        console.print(summary.table(title))
    samples = []
    for title, (groups, _) in passes.items():
        for sample in samples_of(groups):
            sample.sample_id = f"{title}: {sample.sample_id}"  # both passes count from 0
            samples.append(sample)
    write_samples(arguments.out, samples)
    console.print(f"{len(samples)} samples in {arguments.out}; verifying them", highlight=False)
    report = verify_samples(arguments.out, str(model))
    console.print(report.text(), highlight=False)
    with_tool, without = (
        passes[t][1].reward or 0.0 for t in ("with a calculator", "without a tool")
    )
    console.print(f"[bold]right with the tool: {with_tool:.0%}, without: {without:.0%}[/]")
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())

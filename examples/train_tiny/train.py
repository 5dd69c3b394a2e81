"""GRPO on the CPU: a tiny model learns to call a tool and to use what it says.

    python examples/train_tiny/train.py --quick --seed 0 --json FILE           half a minute
    python examples/train_tiny/train.py --seed 0 1 2 --json FILE --plot FILE.png

Everything that a trainer of your own needs stands in `learn` and `train`. Beside the trained arm
run two controls from the same warmed-up weights: `lr0`, whose learning rate is 0, and `no_tool`,
whose tool never tells anything. Neither may get better.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if not __package__:  # run as a file: what lies beside it, whatever else is installed
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.train_tiny.boxes import EmptyBox, OpenBox, reward, rows, tokenizer
from examples.train_tiny.policy import tiny_llama, warm_up
from fsm_rollout import (
    Codec,
    Group,
    Limits,
    Request,
    Rollout,
    Sample,
    SamplingParams,
    Tool,
    TransformersEngine,
    run,
)
from fsm_rollout.adapters.advantages import group_advantages, importance_ratios, masked_mean
from fsm_rollout.adapters.tensors import padded
from fsm_rollout.dataset import PromptRow, write_samples
from fsm_rollout.request import samples_of
from fsm_rollout.tools.registry import Toolset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARMS: dict[str, tuple[float, type[Tool]]] = {  # learning rate, as a share, and tool
    "trained": (1.0, OpenBox),
    "lr0": (0.0, OpenBox),
    "no_tool": (1.0, EmptyBox),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 0
    steps: int = 8
    rows: int = 32
    """prompts per step"""
    num_samples: int = 8
    """rollouts per prompt"""
    held_out: int = 256
    """held-out prompts per evaluation"""
    evaluate_every: int = 8
    warm_up_steps: int = 200
    lr: float = 3e-3
    """falls to 0 over the steps"""
    epochs: int = 2
    minibatches: int = 2
    clip: float = 0.2
    temperature: float = 1.0


@dataclass
class Curve:
    """What an arm did: held-out prompts at some steps, and what each step cost."""

    step: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    tool_use: list[float] = field(default_factory=list)
    """share of rollouts in which the tool ran"""
    found: list[float] = field(default_factory=list)
    """share of rollouts that were told what is in the box"""
    batch_reward: list[float] = field(default_factory=list)
    """on the prompts trained on, per step, before the update"""
    max_log_prob_diff: float = 0.0
    """|trainer's - rollout's| over all trained tokens, before the update"""
    seconds: list[float] = field(default_factory=list)
    """of each step, its rollouts and its updates"""
    cpu_seconds: list[float] = field(default_factory=list)

    def add(self, step: int, groups: list[Group]) -> None:
        requests = [request for group in groups for request in group.requests]
        self.step.append(step)
        self.reward.append(fmean(request.reward or 0.0 for request in requests))
        self.tool_use.append(fmean(request.num_tool_calls > 0 for request in requests))
        self.found.append(fmean(was_told(request) for request in requests))


def was_told(request: Request) -> bool:
    said = [message["content"] for message in request.sample.messages if message["role"] == "tool"]
    return request.label in said


def rows_of(config: Config, step: int) -> list[PromptRow]:
    """The prompts of one step."""
    return rows(config.rows, config.seed + 1_000_003 * (step + 1))


def log_probs_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """log_softmax(logits / temperature) of the response tokens, float32 [B, R].

    The log-prob of a token belongs to the logits one before it: this is the one shift.
    """
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        logits_to_keep=batch["responses"].shape[1] + 1,
        use_cache=False,
    )
    logits = output.logits[:, :-1].float() / batch["temperatures"][..., None]
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, batch["responses"][..., None])
    return log_probs[..., 0]


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    config: Config,
    *,
    pad_id: int,
) -> float:
    """One step of GRPO on finished samples. Returns the largest gap between the log-probs."""
    batch = padded(samples, pad_id=pad_id, columns=["temperatures"])
    batch["advantages"] = torch.tensor(group_advantages(samples))[:, None]
    with torch.no_grad():
        gap = (log_probs_of(model, batch) - batch["rollout_log_probs"]).abs()
        largest = float(gap.masked_fill(batch["response_mask"] == 0, 0.0).max())
    useful = batch["advantages"][:, 0].nonzero()[:, 0]  # groups that differ in their rewards
    for _ in range(config.epochs if len(useful) else 0):
        for part in useful[torch.randperm(len(useful))].chunk(config.minibatches):
            mini = {name: values[part] for name, values in batch.items()}
            mask, advantages = mini["response_mask"], mini["advantages"]
            ratios = importance_ratios(log_probs_of(model, mini), mini["rollout_log_probs"], mask)
            clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
            loss = -masked_mean(torch.minimum(ratios * advantages, clipped * advantages), mask)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return largest


async def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    *,
    lr: float,
    tool: type[Tool],
) -> tuple[Curve, list[Sample]]:
    """Train `model` in place. Returns its curve and the samples of the last evaluation."""
    # cache_tokens: conversations this short gain nothing by keys and values that are kept
    engine = TransformersEngine(model, max_batch=512, prefill_tokens=16_384, cache_tokens=0)
    rollout = Rollout(
        engine,
        tokenizer,
        tools=[tool],
        limits=Limits(max_new_tokens=8, max_turns=2, max_tool_response_tokens=4),
        params=SamplingParams(temperature=config.temperature),
        reward=reward,
        max_concurrent=512,
        seed=config.seed,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    curve = Curve()
    pad_id: Any = tokenizer.pad_token_id
    torch.manual_seed(config.seed)

    async def evaluate(step: int) -> list[Sample]:
        groups = await rollout.generate(rows(config.held_out, config.seed, held_out=True))
        curve.add(step, groups)
        return samples_of(groups)

    try:
        for step in range(config.steps):
            engine.forget(weight_version=step)  # the weights are new: keys and values are stale
            if step % config.evaluate_every == 0:
                await evaluate(step)
            optimizer.param_groups[0]["lr"] = lr * (1 - step / config.steps)
            started, busy = time.perf_counter(), time.process_time()
            drawn = rows_of(config, step)
            samples = samples_of(await rollout.generate(drawn, num_samples=config.num_samples))
            gap = learn(model, optimizer, samples, config, pad_id=pad_id)
            curve.seconds.append(time.perf_counter() - started)
            curve.cpu_seconds.append(time.process_time() - busy)
            curve.batch_reward.append(fmean(sample.reward or 0.0 for sample in samples))
            curve.max_log_prob_diff = float(np.maximum(curve.max_log_prob_diff, gap))  # NaN stays
        engine.forget(weight_version=config.steps)
        return curve, await evaluate(config.steps)
    finally:
        await engine.close()


def play_arms(config: Config, out: Path) -> dict[str, Any]:
    """The warm-up, then every arm from its weights. `out` keeps the trained arm and its samples."""
    started = time.perf_counter(), time.process_time()
    words = tokenizer()
    start = tiny_llama(words, config.seed)
    codec = Codec(words, tools=Toolset([OpenBox]).schemas)
    warm_up(start, codec, seed=config.seed, steps=config.warm_up_steps)
    curves: dict[str, Curve] = {}
    for arm, (share, tool) in ARMS.items():
        model = copy.deepcopy(start)
        curves[arm], samples = run(train(model, words, config, lr=share * config.lr, tool=tool))
        shown = " ".join(f"{value:.2f}" for value in curves[arm].reward)
        print(f"seed {config.seed} {arm:8} reward on held-out prompts: {shown}", flush=True)
        if arm == "trained":
            write_samples(out / "samples.jsonl", samples)
            model.save_pretrained(out / "checkpoint")
            words.save_pretrained(out / "checkpoint")
    trained = curves["trained"]
    return {
        "seed": config.seed,
        "reward_first": trained.reward[0],
        "reward_last": trained.reward[-1],
        "reward_last_lr0": curves["lr0"].reward[-1],
        "reward_last_no_tool": curves["no_tool"].reward[-1],
        "tool_use_first": trained.tool_use[0],
        "tool_use_last": trained.tool_use[-1],
        "max_log_prob_diff": float(np.max([c.max_log_prob_diff for c in curves.values()])),
        "samples": str(out / "samples.jsonl"),
        "checkpoint": str(out / "checkpoint"),
        "seconds_per_step": fmean(trained.seconds),
        "cpu_seconds_per_step": fmean(trained.cpu_seconds),
        "seconds": time.perf_counter() - started[0],
        "cpu_seconds": time.process_time() - started[1],
        "config": asdict(config),
        "curves": {arm: asdict(curve) for arm, curve in curves.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--quick", action="store_true", help="8 steps instead of 16, evaluated at both ends"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path, default=Path("train-tiny-out/result.json"))
    parser.add_argument("--out", type=Path, help="where samples and checkpoint go: beside --json")
    parser.add_argument("--plot", type=Path, help="a PNG with the curves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    steps = arguments.steps or (8 if arguments.quick else 16)
    every = steps if arguments.quick else 2
    out = arguments.out or arguments.json.parent
    out.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in arguments.seed:
        config = Config(seed=seed, steps=steps, evaluate_every=every)
        runs.append(play_arms(config, out if len(arguments.seed) == 1 else out / f"seed-{seed}"))
    result = runs[0] if len(runs) == 1 else {"runs": runs}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        from examples.train_tiny.plot import plot

        plot(runs, arguments.plot)
    curves = f", curves in {arguments.plot}" if arguments.plot else ""
    print(f"numbers in {arguments.json}, samples and checkpoint in {out}{curves}")


if __name__ == "__main__":
    main()

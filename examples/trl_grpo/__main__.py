"""`python -m examples.trl_grpo`: TRL's GRPOTrainer on rollouts that this package plays.

SmolLM2-135M-Instruct learns two-digit arithmetic with a calculator, on the CPU. Each step prints
its mean reward (the share of right answers), calls per rollout, and its seconds; `--held-out`, what
sums that are not trained on earn before and after.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # about `rollout_func`

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.demo.arithmetic import reward as is_right
from examples.demo.arithmetic import rows
from fsm_rollout import Limits
from fsm_rollout.adapters.trl import RolloutFunc, reward
from fsm_rollout.dataset import PromptRow
from fsm_rollout.testing.smollm2 import smollm2_dir


class Report(TrainerCallback):
    """One line per step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = state.log_history[-1]
        if "reward" in logs:
            calls = logs.get("rollout/tool_calls/mean", math.nan)  # absent: all were aborted
            print(
                f"step {state.global_step:3}  reward {logs['reward']:.2f}  calls {calls:.2f}  "
                f"tokens {logs['completions/mean_length']:.0f}  loss {logs['loss']:+.3f}  "
                f"{time.monotonic() - self.started:.1f} s",
                flush=True,
            )


def main() -> None:
    """Train for `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1, help="per step")
    parser.add_argument("--generations", type=int, default=4, help="rollouts of each prompt")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=0, help="sums to evaluate with")
    parser.add_argument("--out", default="trl-out")
    options = parser.parse_args()

    path = smollm2_dir()
    train = rows(options.steps * options.prompts, options.seed, tool=True)
    held_out = unseen(rows(2 * options.held_out, options.seed + 1, tool=True), train)
    rollouts = RolloutFunc(
        tools=["calculator"],
        chat_template="hermes",
        reward=is_right,
        limits=Limits(max_context=2_048, max_new_tokens=48, max_turns=4),
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        processing_class=AutoTokenizer.from_pretrained(path),
        train_dataset=dataset(train),
        eval_dataset=dataset(held_out[: options.held_out]) if options.held_out else None,
        rollout_func=rollouts,
        reward_funcs=reward,
        callbacks=[Report()],
        args=GRPOConfig(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=options.generations,
            gradient_accumulation_steps=options.prompts,
            num_generations=options.generations,
            per_device_eval_batch_size=max(options.held_out, 1),
            num_generations_eval=1,
            max_completion_length=256,
            temperature=1.0,
            learning_rate=options.rate,
            seed=options.seed,
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate() if options.held_out else {}
    trainer.train()
    after = trainer.evaluate() if options.held_out else {}
    for name in ("eval_reward", "eval_rollout/tool_calls/mean"):
        if name in after:
            print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")
    rollouts.close()


def dataset(problems: Sequence[PromptRow]) -> Dataset:
    """The rows in the form that TRL takes."""
    return Dataset.from_list([{"prompt": row.prompt, "label": row.label} for row in problems])


def unseen(problems: Sequence[PromptRow], train: Sequence[PromptRow]) -> list[PromptRow]:
    """Those whose sum is not trained on."""
    seen = [row.prompt for row in train]
    return [row for row in problems if row.prompt not in seen]


if __name__ == "__main__":
    main()

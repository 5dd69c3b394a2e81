"""The same model, task and updates through TRL's own tool loop, beside `train.py`.

    python examples/train_tiny/trl_loop.py --seed 0 --json FILE

Both start from the same warmed-up weights and see the same prompts in the same order; both are
measured on the held-out prompts by the same rollouts. TRL plays with `environment_factory`. The
report also says in how many of TRL's rows the prompt and the tool's turn have the ids, and the
mask, that our codec gives them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

if not __package__:  # run as a file: what lies beside it, whatever else is installed
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.train_tiny.boxes import NOTHING, OpenBox, tokenizer
from examples.train_tiny.policy import tiny_llama, warm_up
from examples.train_tiny.train import Config, rows_of, train
from fsm_rollout import Codec, run
from fsm_rollout.tools.registry import Toolset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

RESPONSE_TEMPLATE = {  # how transformers reads a turn of our chat template back
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


class Boxes:
    """OpenBox as an environment of TRL: its public methods are the tools."""

    def reset(self, *, box: str, secret: str, **_: Any) -> None:
        self.box, self.secret = box, secret

    def open_box(self, box: str) -> str:
        """Look into a box.

        Args:
            box: the colour of the box to open

        Returns:
            What is in it.
        """
        return self.secret if box == self.box else NOTHING


def reward(
    completions: list[list[dict[str, Any]]], secret: list[str], **_: Any
) -> list[float | None]:
    """1.0 when the last thing said is what the box holds, else 0.0."""
    lasts = [completion[-1] for completion in completions]
    return [
        float(last["role"] == "assistant" and last.get("content") == label)
        for last, label in zip(lasts, secret, strict=True)
    ]


def trl_train(
    model: PreTrainedModel, words: PreTrainedTokenizerFast, config: Config, codec: Codec
) -> dict[str, Any]:
    """Train `model` in place with GRPOTrainer. Returns seconds per step and the compared rows."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    compared = {"rows_compared": 0, "rows_equal": 0}

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            for row, given in enumerate(inputs):
                compared["rows_compared"] += 1
                compared["rows_equal"] += _as_ours(output, row, given, codec)
            return output

    words.response_template = RESPONSE_TEMPLATE
    played = [row for step in range(config.steps) for row in rows_of(config, step)]
    data = [
        {"prompt": [{"role": "user", "content": row.prompt}]}
        | row.tools_kwargs["open_box"]["create_kwargs"]
        for row in played
    ]
    batch_size = config.rows * config.num_samples
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=config.seed,
            shuffle_dataset=False,
            per_device_train_batch_size=batch_size // config.minibatches,
            steps_per_generation=config.minibatches,
            num_iterations=config.epochs,
            num_generations=config.num_samples,
            max_steps=config.steps * config.epochs * config.minibatches,
            max_completion_length=32,
            max_tool_calling_iterations=1,
            temperature=config.temperature,
            top_k=0,
            learning_rate=config.lr,
            lr_scheduler_type="linear",
            epsilon=config.clip,
            beta=0.0,
            gradient_checkpointing=False,
        )
        trainer = Watched(
            model=model,
            args=arguments,
            processing_class=words,
            train_dataset=Dataset.from_list(data),
            reward_funcs=reward,
            environment_factory=Boxes,  # type: ignore[arg-type]
        )
        started, busy = time.perf_counter(), time.process_time()
        trainer.train()
    return compared | {
        "seconds_per_step": (time.perf_counter() - started) / config.steps,
        "cpu_seconds_per_step": (time.process_time() - busy) / config.steps,
    }


def _as_ours(output: dict[str, Any], row: int, given: dict[str, Any], codec: Codec) -> bool:
    """The row's prompt is our prompt, and what TRL does not train on is our delta, or nothing."""
    prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
    length = int(output["completion_mask"][row].sum())
    ids = output["completion_ids"][row][:length]
    untrained = ids[~output["tool_mask"][row][:length].bool()].tolist()
    (end,) = codec.stop_ids
    deltas = [
        codec.delta(
            end, [{"role": "tool", "name": "open_box", "tool_call_id": "", "content": said}]
        )
        for said in (given["secret"], NOTHING)
    ]
    return prompt == codec.prompt(given["prompt"]) and untrained in ([], *deltas)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, default=Path("train-tiny-out/trl.json"))
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)  # of TRL's use of transformers
    torch.set_num_threads(1)
    config = Config(seed=arguments.seed, steps=arguments.steps, evaluate_every=arguments.steps)
    words = tokenizer()
    start = tiny_llama(words, config.seed)
    codec = Codec(words, tools=Toolset([OpenBox]).schemas)
    warm_up(start, codec, seed=config.seed, steps=config.warm_up_steps)
    curve, _ = run(train(copy.deepcopy(start), words, config, lr=config.lr, tool=OpenBox))
    ours = {"reward_first": curve.reward[0], "reward_last": curve.reward[-1]}
    ours |= {"seconds_per_step": fmean(curve.seconds)}
    ours |= {"cpu_seconds_per_step": fmean(curve.cpu_seconds)}
    trl = trl_train(start, words, config, codec)
    measured, _ = run(train(start, words, replace(config, steps=0), lr=0.0, tool=OpenBox))
    trl |= {"reward_first": curve.reward[0], "reward_last": measured.reward[0]}
    result = {"seed": config.seed, "steps": config.steps, "fsm_rollout": ours, "trl": trl}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

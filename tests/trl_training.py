"""TRL's real GRPOTrainer over a tiny model that was taught, in a second, to call a tool."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import fsm_rollout
from fsm_rollout.adapters.trl import RolloutFunc, reward
from fsm_rollout.engines.scripted import Answer, Asked, ScriptedEngine
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when a trainer is made

TOKENIZER = tiny_tokenizer()
TEMPERATURE = 1.3
CALL = '<tool_call>\n{"name": "roll", "arguments": {}}\n</tool_call>'


class Roll(Tool):
    """Roll."""

    def create(self, pips: int = 6) -> None:
        self.pips, self.count = pips, 0

    def execute(self) -> str:
        self.count += 1
        return str(self.pips)

    def calc_reward(self) -> float:
        return float(self.count * self.pips)


def tiny_policy() -> PreTrainedModel:
    """An untaught one."""
    torch.manual_seed(0)
    eos: Any = TOKENIZER.eos_token_id
    pad: Any = TOKENIZER.pad_token_id
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1_024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    return model


def taught(lessons: Sequence[tuple[list[int], list[int], list[int]]]) -> PreTrainedModel:
    """A policy that was fitted to each (context, completion, mask)."""
    model = tiny_policy()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(70 * len(lessons)):
        context, completion, mask = lessons[step % len(lessons)]
        ids = torch.tensor([*context, *completion])
        trains = torch.tensor([*(0 for _ in context), *mask]).bool()
        output: Any = model(input_ids=ids[None], labels=torch.where(trains, ids, -100)[None])
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@cache
def _taught() -> PreTrainedModel:
    rollout = Rollout(ScriptedEngine([CALL, "6"], tokenizer=TOKENIZER), TOKENIZER, tools=[Roll])
    [group] = fsm_rollout.run(rollout.generate(rows(1)))
    [sample] = group.samples
    ids, start = sample.tokens.tolist(), sample.prompt_length
    return taught([(ids[:start], ids[start:], sample.loss_mask.tolist())])


def taught_policy() -> PreTrainedModel:
    """Calls `roll` more often than not."""
    return copy.deepcopy(_taught())


def prompt(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"go {number}"}]


def rows(count: int, **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt(n)} | {key: value(n) for key, value in columns.items()}
        for n in range(count)
    ]


def table(given: list[dict[str, Any]]) -> Any:
    """A `datasets.Dataset`, as TRL wants it."""
    return Dataset.from_list(given)


def scripted(script: Callable[[Asked], Answer] | Sequence[Answer]) -> ScriptedEngine:
    return ScriptedEngine(script, tokenizer=TOKENIZER)


@contextmanager
def training(
    rollout_func: Any,
    out: Path,
    *,
    dataset: list[dict[str, Any]] | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: Any = TOKENIZER,
    reward_funcs: Any = reward,
    trainer_kwargs: dict[str, Any] | None = None,
    **args: Any,
) -> Iterator[Any]:
    """A trainer of 4 samples a step in groups of 2, ready to `train`; closed afterwards."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_steps": 2,
        "max_completion_length": 160,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    given = dataset or rows(2)
    trainer: Any = GRPOTrainer(
        model=model or taught_policy(),
        reward_funcs=reward_funcs,
        args=GRPOConfig(str(out), **defaults | args),
        train_dataset=table(given),
        processing_class=tokenizer,
        rollout_func=rollout_func,
        **trainer_kwargs or {},
    )
    trainer.model.train()
    try:
        yield trainer
    finally:
        if isinstance(rollout_func, RolloutFunc):
            rollout_func.close()


def batch_of(trainer: Any) -> dict[str, torch.Tensor]:
    """What TRL makes of one call of the rollout function: its padded batch with advantages."""
    batch: dict[str, torch.Tensor] = trainer._generate_and_score_completions(
        next(iter(trainer.get_train_dataloader()))
    )
    return batch


def trained(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool [rows, completion]: the tokens that TRL's loss is over."""
    return (batch["completion_mask"] * batch["tool_mask"]).bool()


def recomputed(trainer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[rows, completion]: the log-probs of TRL's own forward pass."""
    with torch.no_grad():
        log_probs: torch.Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
        )[0]
    return log_probs


def gap(trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    """The largest difference between a log-prob that was handed over and TRL's own."""
    difference = recomputed(trainer, batch) - batch["sampling_per_token_logps"]
    return float(difference[trained(batch)].abs().max())

"""verl's own way from finished trajectories to a batch. Runs in verl's environment.

bench/verl.py starts it, for bench/handover.py, with a model directory and the two lengths. The
first line of standard input is a Job with rows, each later one asks for a measurement. The answer
is the CPU time per trajectory in microseconds. Timed are `_agent_loop_postprocess` of each and
`_postprocess` of all: padding, masks, positions, the batch. That the reward is known already spares
verl a reward worker.
"""

# mypy: disable-error-code="import-not-found"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)

NAMES = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
)


class Trajectory(msgspec.Struct):
    """One finished trajectory, in lists."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    log_probs: list[float]
    reward: float


class Job(msgspec.Struct):
    """Trajectories to keep, and where to write verl's batch of them; none: measure again."""

    rows: list[Trajectory] = []
    path: str = ""


class Bench:
    """A worker of verl and its trajectories."""

    def __init__(self, model: str, prompt_length: str, response_length: str) -> None:
        folder = Path(verl.__file__).parent / "trainer" / "config"
        rollout = "actor_rollout_ref.rollout"
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={model}",
                    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                    f"{rollout}.name=vllm",
                    f"{rollout}.prompt_length={prompt_length}",
                    f"{rollout}.response_length={response_length}",
                    f"{rollout}.calculate_log_probs=True",
                ],
            )
        self._worker: Any = AgentLoopWorker(config, llm_client=None)
        self._outputs: list[Any] = []

    def keep(self, rows: list[Trajectory]) -> None:
        """As verl's loops return them."""
        self._outputs = [
            AgentLoopOutput(
                prompt_ids=row.prompt,
                response_ids=row.response,
                response_mask=row.mask,
                response_logprobs=row.log_probs,
                reward_score=row.reward,
                metrics=AgentLoopMetrics(),
            )
            for row in rows
        ]

    async def batch(self) -> tuple[Any, float]:
        """verl's DataProto, and the CPU microseconds per trajectory."""
        started = time.process_time()
        padded = [
            await self._worker._agent_loop_postprocess(output, False, raw_prompt=[])
            for output in self._outputs
        ]
        made = self._worker._postprocess(padded)
        return made, (time.process_time() - started) / len(padded) * 1e6


async def main(bench: Bench, answers: Any) -> None:
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        if job.rows:
            bench.keep(job.rows)
        made, microseconds = await bench.batch()
        if job.path:
            np.savez(job.path, **{name: made.batch[name].numpy() for name in NAMES})
        print(microseconds, file=answers, flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # verl prints
        asyncio.run(main(Bench(*sys.argv[1:4]), out))

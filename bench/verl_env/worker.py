"""verl's own ToolAgentLoop, one measurement per line of standard input. Runs in verl's environment.

bench/verl.py starts it with a model directory and writes Jobs, as JSON. The answer is the CPU time
per turn in microseconds, as the only line of its kind on standard output.

Only `ToolAgentLoop.run` is timed: I/O is a fake client in this process, prompts are encoded
already, loops are made before the clock starts, what becomes of their results is left out.
"""

# mypy: disable-error-code="import-not-found"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import hydra
import msgspec
import uvloop
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
)
from verl.workers.rollout.replica import TokenOutput

_TOOL = '''
@function_tool("{name}")
async def {name}(query: str, language: str = "en", limit: int = 10) -> str:
    """Search the corpus for passages relevant to a query and return the best ones.

    Args:
        query: what to look for, in a few words or a whole sentence of usual length
        language: the language of the passages that are wanted, as a code of two letters
        limit: how many passages to return at most, the best ones first
    """
    return {observation!r}
'''
MOST_TOOLS = 30
_LOOP = "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}


class Job(msgspec.Struct):
    """One measurement: `count` conversations at once, with `tools` tools declared."""

    prompt: list[int]
    sampled: list[list[list[int]]]
    """[turns][variants][tokens]"""
    observation: str
    tools: int
    count: int


class Client:
    """In place of the inference server: answers at once, turn by turn."""

    def __init__(self, sampled: list[list[list[int]]]) -> None:
        self._sampled = sampled
        self._turns: defaultdict[str, int] = defaultdict(int)

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        await asyncio.sleep(0)
        replies = self._sampled[turn]
        ids = list(replies[hash(request_id) % len(replies)])
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1},
        )


class Bench:
    """The loops of one model directory and one observation: verl registers a tool once for all."""

    def __init__(self, model: str, observation: str, folder: Path) -> None:
        self._model = model
        file = folder / "tools.py"
        names = [f"search_{i}" if i else "search" for i in range(MOST_TOOLS)]
        functions = [_TOOL.format(name=name, observation=observation) for name in names]
        file.write_text("from verl.tools.function_tool import function_tool\n" + "".join(functions))
        self._worker: Any = AgentLoopWorker(self._config(file), llm_client=None)

    async def microseconds(self, job: Job, count: int) -> float:
        """CPU time per turn of `count` conversations at once."""
        loops = [self._loop(job) for _ in range(count)]
        prompt = [{"role": "user", "content": "encoded already"}]
        started = time.process_time()
        outputs = await asyncio.gather(*(loop.run(_SAMPLING, raw_prompt=prompt) for loop in loops))
        seconds = time.process_time() - started
        turns = len(job.sampled)
        for output in outputs:
            count_of_ids = len(output.response_ids)
            if output.num_turns != 2 * turns or len(output.response_logprobs) != count_of_ids:
                raise RuntimeError(f"verl played {output.num_turns} messages in {turns} turns")
        return seconds / count / turns * 1e6

    def _config(self, tools: Path) -> Any:
        folder = Path(verl.__file__).parent / "trainer" / "config"
        rollout = "actor_rollout_ref.rollout"
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            return compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={self._model}",
                    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                    f"{rollout}.name=vllm",
                    f"{rollout}.prompt_length=200000",
                    f"{rollout}.response_length=65536",
                    f"{rollout}.max_model_len=265536",
                    f"{rollout}.multi_turn.enable=True",
                    f"{rollout}.multi_turn.format=hermes",
                    f"{rollout}.multi_turn.max_tool_response_length=100000",
                    f"{rollout}.multi_turn.function_tool_path={tools}",
                    f"{rollout}.agent.default_agent_loop=tool_agent",
                    f"{rollout}.calculate_log_probs=True",
                ],
            )

    def _loop(self, job: Job) -> Any:
        worker = self._worker
        loop = hydra.utils.instantiate(
            config={"_target_": _LOOP},
            trainer_config=DictConfigWrap(config=worker.config),
            server_manager=Client(job.sampled),
            tokenizer=worker.tokenizer,
            processor=None,
            hf_model_type=worker.hf_model_type,
            dataset_cls=worker.dataset_cls,
            data_config=DictConfigWrap(worker.config.data),
            tools=ToolListWrap(worker.tools[: job.tools]),
        )
        loop.continuous_token_builder.build_initial_tokens = lambda *args, **kwargs: list(
            job.prompt
        )
        return loop


async def main(model: str, answers: Any) -> None:
    bench: Bench | None = None
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin.buffer:
            job = msgspec.json.decode(line, type=Job)
            bench = bench or Bench(model, job.observation, Path(folder))
            await bench.microseconds(job, 1)  # warm
            gc.collect()
            print(await bench.microseconds(job, job.count), file=answers, flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # verl prints
        gc.set_threshold(50_000, 50, 1_000)
        uvloop.install()
        asyncio.run(main(sys.argv[1], out))

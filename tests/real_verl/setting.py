"""What the tests against the real verl run on: a config, a tiny tokenizer, a scripted LLM client.

Imports verl, so only a test that has skipped without it imports this.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.real_verl.tools import schema

PROMPT, RESPONSE = 1024, 512
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 265,
    "max_position_embeddings": 524_288,
    "torch_dtype": "bfloat16",
}
"""verl reads the type alone: no weights are loaded"""
ENTRY = {"name": "fsm", "_target_": "fsm_rollout.adapters.verl.FsmAgentLoop"}
TOKENIZER = tiny_tokenizer()
PAD: Any = TOKENIZER.pad_token_id
EOS: Any = TOKENIZER.eos_token_id


@cache
def folder() -> Path:
    """The tokenizer as a model directory; configs and tools lie beside it."""
    path = Path(tempfile.mkdtemp(prefix="fsm-verl-"))
    TOKENIZER.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(_MODEL))
    for name, classes in {
        "check": ["Check"],
        "plain": ["Plain"],
        "both": ["Check", "Plain"],
    }.items():
        tools = [
            {
                "class_name": f"tests.real_verl.tools.{cls}",
                "config": {"type": "native"},
                "tool_schema": schema(cls.lower()),
            }
            for cls in classes
        ]
        (path / f"{name}.yaml").write_text(json.dumps({"tools": tools}))
    return path


def config(
    *,
    entry: Mapping[str, Any] | None = None,
    agent: str = "fsm",
    tools: str = "check",
    **overrides: Any,
) -> Any:
    """verl's own config with our entry; `overrides` are of the rollout, `multi_turn__x=1` inside.

    `tools` is the name of a tool YAML in `folder()`, "" for none.
    """
    entries = folder() / f"loop-{len(list(folder().iterdir()))}.yaml"
    entries.write_text(json.dumps([{**ENTRY, **(entry or {})}]))
    rollout = "actor_rollout_ref.rollout"
    values: dict[str, Any] = {
        "name": "vllm",
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "multi_turn.enable": True,
        "multi_turn.max_tool_response_length": 1000,
        "agent.agent_loop_config_path": entries,
        "agent.default_agent_loop": agent,
        "agent.num_workers": 1,
        "calculate_log_probs": True,
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    if tools:
        values["multi_turn.tool_config_path"] = folder() / f"{tools}.yaml"
    with initialize_config_dir(
        config_dir=str(Path(str(verl.__file__)).parent / "trainer" / "config"), version_base=None
    ):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder()}",
                "+actor_rollout_ref.model.override_config.attn_implementation=eager",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                *[f"{rollout}.{name}={value}" for name, value in values.items()],
            ],
        )


class Client:
    """In the place of verl's LLMServerClient: each trajectory is answered by a script.

    With several, the first trajectory to ask gets the first one, and so on. The last answer of a
    script is repeated.
    """

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = scripts
        self.asked: list[dict[str, Any]] = []
        self.told: dict[str, list[Any]] = {}
        """the (id, log-prob) pairs of each reply, by request"""
        self._turns: dict[str, list[Any]] = {}

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        self.asked.append({"request_id": request_id, **kwargs})
        if request_id not in self._turns:
            script = self.scripts[len(self._turns) % len(self.scripts)]
            self._turns[request_id] = list(script)
        left = self._turns[request_id]
        answer = left.pop(0) if len(left) > 1 else left[0]
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        pairs = list(zip(answer.token_ids, answer.log_probs or (), strict=False))
        self.told.setdefault(request_id, []).append(pairs)
        return answer.model_copy(deep=True)


def said(text: str, *, log_probs: Any = "made up", stop: str = "completed", **extra: Any) -> Any:
    """A TokenOutput of a text and the end of its turn, unless it was cut."""
    ids: Any = TOKENIZER.encode(text, add_special_tokens=False)
    if stop != "length":
        ids.append(EOS)
    if log_probs == "made up":
        log_probs = [-0.01 * (number % 97 + 1) for number in range(len(ids))]
    steps = {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
    return TokenOutput(
        token_ids=ids, log_probs=log_probs, stop_reason=stop, extra_fields={**steps, **extra}
    )


def call(name: str = "check", **arguments: Any) -> str:
    """The text of a tool call."""
    return CALL % (name, json.dumps(arguments))


EMPTY = TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted")


def rows(count: int, **columns: Any) -> DataProto:
    """A batch of equal rows; a list of columns other than `raw_prompt` has a value per row."""
    values: dict[str, Any] = {
        "raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "uid": [f"u{number}" for number in range(count)],
        "data_source": "sums",
        "reward_model": {"ground_truth": "42"},
        "extra_info": {},
        "tools_kwargs": {"check": {"create_kwargs": {"truth": "42"}}},
        **columns,
    }
    arrays = {"index": np.arange(count)}
    for name, value in values.items():
        arrays[name] = np.empty(count, dtype=object)
        is_column = isinstance(value, list) and name != "raw_prompt"
        arrays[name][:] = value if is_column else [copy.deepcopy(value) for _ in range(count)]
    return DataProto.from_dict(tensors={"d": torch.zeros(count, 1)}, non_tensors=arrays)


def played(worker_cls: type[AgentLoopWorker], settings: Any, client: Any, batch: DataProto) -> Any:
    """What a worker without ray makes of a batch, within 50 s."""

    async def play() -> Any:
        worker = worker_cls(settings, llm_client=client)
        return await asyncio.wait_for(worker.generate_sequences(batch), 50)

    return asyncio.run(play())

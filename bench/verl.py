"""Verl: the process that measures verl's ToolAgentLoop for bench/turn.py, in verl's environment.

bench/verl_env/requirements.txt says how that environment is made.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from bench.conversation import Conversation

TOOLS = (1, 10, 30)
_WORKER = Path(__file__).parent / "verl_env" / "worker.py"
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 524_288,
    "torch_dtype": "bfloat16",
}
"""verl reads a model's config for its type alone: no weights are loaded"""


class Verl:
    """A running worker. `python` is that of verl's environment."""

    def __init__(self, python: str, tokenizer: Any) -> None:
        self._python = python
        self._folder = tempfile.TemporaryDirectory()
        tokenizer.save_pretrained(self._folder.name)
        (Path(self._folder.name) / "config.json").write_text(json.dumps(_CONFIG))
        self._process = subprocess.Popen(
            [python, str(_WORKER), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def microseconds(self, played: Conversation, *, tools: int, count: int) -> float:
        """CPU time per turn of `count` conversations at once, I/O excluded."""
        assert self._process.stdin
        assert self._process.stdout
        job = {
            "prompt": played.prompt,
            "sampled": played.sampled,
            "observation": played.observation,
            "tools": tools,
            "count": count,
        }
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"verl's worker ended with {self._process.wait()}: run "
                f"`{self._python} {_WORKER} MODEL` to see why"
            )
        return float(answer)

    def __enter__(self) -> Verl:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

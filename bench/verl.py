"""Verl: processes that measure verl's own code, in verl's environment, for turn.py and handover.py.

bench/verl_env/requirements.txt says how that environment is made.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch

from bench.conversation import Conversation, qwen

TOOLS = (1, 10, 30)
_FOLDER = Path(__file__).parent / "verl_env"
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


class _Worker:
    """A running script of verl_env/. `python` is that of verl's environment."""

    def __init__(self, python: str, script: str, tokenizer: Any, *arguments: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        tokenizer.save_pretrained(self.folder.name)
        (Path(self.folder.name) / "config.json").write_text(json.dumps(_CONFIG))
        self._command = [python, str(_FOLDER / script), self.folder.name, *arguments]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, job: Any) -> float:
        """Send a job, as a line of JSON; the answer is a number."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"verl's worker ended with {self._process.wait()}: run "
                f"`{' '.join(self._command)}` to see why"
            )
        return float(answer)

    def __enter__(self) -> Self:
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
        self.folder.cleanup()


class Verl(_Worker):
    """verl's ToolAgentLoop."""

    def __init__(self, python: str, tokenizer: Any) -> None:
        super().__init__(python, "worker.py", tokenizer)

    def microseconds(self, played: Conversation, *, tools: int, count: int) -> float:
        """CPU time per turn of `count` conversations at once, I/O excluded."""
        return self.ask(
            {
                "prompt": played.prompt,
                "sampled": played.sampled,
                "observation": played.observation,
                "tools": tools,
                "count": count,
            }
        )


class VerlHandOver(_Worker):
    """What verl's AgentLoopWorker makes of finished trajectories, and verl's batch of them."""

    def __init__(
        self, python: str, *, pad_id: int, prompt_length: int, response_length: int
    ) -> None:
        tokenizer, lengths = qwen(), (str(prompt_length), str(response_length))
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        super().__init__(python, "handover.py", tokenizer, *lengths)

    def batch(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Give it the trajectories (prompt, response, mask, log_probs, reward): verl's tensors."""
        path = Path(self.folder.name) / "batch.npz"
        self.ask({"rows": rows, "path": str(path)})
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}

    def microseconds(self) -> float:
        """CPU time per trajectory to make the batch again."""
        return self.ask({})

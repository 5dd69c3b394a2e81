"""`python -m examples.slime`: what slime gets of a sample, without slime, a model or a GPU.

`generate` knows samples by their fields, so a class with those stands in the place of slime's; the
fake engine stands in the place of its SGLang router.
"""

from __future__ import annotations

import asyncio
import enum
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.adapters import slime
from fsm_rollout.testing.fake_engine import FakeEngine
from fsm_rollout.testing.tokenizer import tiny_tokenizer


@dataclass
class Sample:
    """slime's fields, as far as `generate` writes them."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any
    index: int = 0
    group_index: int = 0
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    reward: float | None = None
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: Any = None
    session_id: str | None = None
    status: Any = Status.PENDING


async def main() -> None:
    """Play one sample with a tool."""
    tokenizer = tiny_tokenizer()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    with tempfile.TemporaryDirectory() as checkpoint:
        tokenizer.save_pretrained(checkpoint)
        async with FakeEngine([call, "It is 42."], tokenizer=tokenizer) as server:
            args = Namespace(
                hf_checkpoint=checkpoint,
                sglang_router_ip="127.0.0.1",
                sglang_router_port=server.port,
                fsm_rollout={"tools": ["calculator"]},
            )
            sample = Sample([{"role": "user", "content": "What is 6 * 7?"}])
            played = await slime.generate(args, sample, {"max_new_tokens": 500})
    told = played.metadata["fsm_rollout"]
    print(
        f"{played.status.name}, because of {told['stop_reason']}, after {told['num_turns']} turns"
    )
    print(f"{played.response_length} response tokens, {sum(played.loss_mask)} of them trained")


if __name__ == "__main__":
    asyncio.run(main())

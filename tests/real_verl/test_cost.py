"""What a trajectory costs a worker process: verl's own loop, ours in verl's worker, our manager's.

CPU time of the same conversations, interleaved; servers answer at once. `-s` shows the table.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

from fsm_rollout.adapters.verl.manager import FsmAgentLoopWorker
from tests.real_verl.setting import Client, call, config, rows, said

pytestmark = [pytest.mark.real_verl, pytest.mark.timeout(300)]

TOOL_TURNS, COUNT, REPEATS = 8, 64, 3


class Instant(Client):
    """Without records and deep copies, which would cost more than what is measured."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        left = self._turns.setdefault(request_id, list(self.scripts[0]))
        answer = left.pop(0) if len(left) > 1 else left[0]
        await asyncio.sleep(0)
        return TokenOutput(
            token_ids=list(answer.token_ids),
            log_probs=list(answer.log_probs),
            stop_reason="completed",
            extra_fields=dict(answer.extra_fields),
        )


def milliseconds(worker_cls: Any, settings: Any, script: list[Any]) -> float:
    """CPU time of one of COUNT trajectories."""

    async def measure() -> float:
        worker = worker_cls(settings, llm_client=Instant(script))
        await worker.generate_sequences(rows(2))  # warm
        batch = rows(COUNT, uid=[f"u{number // 8}" for number in range(COUNT)])
        gc.collect()
        started = time.process_time()
        out = await worker.generate_sequences(batch)
        seconds = time.process_time() - started
        assert out.non_tensor_batch["__num_turns__"].tolist() == [2 * TOOL_TURNS + 2] * COUNT
        return seconds / COUNT * 1e3

    return asyncio.run(measure())


@pytest.mark.parametrize("length", [8_192, 32_768])
def test_our_manager_takes_less_than_half_of_what_verls_own_loop_takes(length: int) -> None:
    turn = said("y" * 48 + call(answer="42"))
    script = [said("x" * length + call(answer="42")), *[turn] * (TOOL_TURNS - 1), said("done")]
    ways = {
        "verl": (AgentLoopWorker, config(agent="tool_agent", response_length=length + 8_192)),
        "our loop": (AgentLoopWorker, config(response_length=length + 8_192)),
        "our manager": (FsmAgentLoopWorker, config(response_length=length + 8_192)),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, (worker_cls, settings) in ways.items():
            found[name].append(milliseconds(worker_cls, settings, script))
    print(f"\n{length} tokens and {TOOL_TURNS} tool turns, ms of CPU per trajectory:")
    print("".join(f"  {name}: {min(values):.1f}\n" for name, values in found.items()))
    assert 2 * min(found["our manager"]) < min(found["verl"])

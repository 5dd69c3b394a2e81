"""Whatever servers and tools do: what reaches verl keeps the invariants, read without our code."""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.utils import tensordict_utils

from fsm_rollout.adapters.verl import manager_tq
from fsm_rollout.adapters.verl.manager import FsmAgentLoopWorker
from tests.real_verl.setting import (
    EMPTY,
    PAD,
    PROMPT,
    Client,
    call,
    config,
    played,
    rows,
    said,
)

pytestmark = [pytest.mark.real_verl, pytest.mark.timeout(300)]

SETTINGS = config(response_length=160)
LOUD = said("x" * 40, log_probs=[float("nan")] * 41)
REPLIES = st.sampled_from(
    [
        said("It is 42."),
        said("No."),
        said(call(answer="42")),
        said(call(answer="raise")),
        said(call(answer="long")),
        said("<tool_call>{bad</tool_call>"),
        said(call("unknown")),
        said("cut off", stop="length"),
        said("cut off", stop="aborted"),
        said("short", log_probs=[-0.1]),
        said("silent", log_probs=None),
        said("", log_probs=[-0.1]),
        said("y" * 100),
        LOUD,
        EMPTY,
        RuntimeError("the server is gone"),
    ]
)
SCRIPTS = st.lists(st.lists(REPLIES, min_size=1, max_size=8), min_size=1, max_size=4)


@pytest.mark.parametrize("worker", [AgentLoopWorker, FsmAgentLoopWorker])
@given(scripts=SCRIPTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_a_batch_has_only_what_was_sampled(worker: Any, scripts: Any) -> None:
    client = Client(*scripts)
    out = played(worker, SETTINGS, client, rows(len(scripts)))
    assert len(out) == len(scripts)
    for number in range(len(scripts)):
        read(out, number, client)


class Queue:
    """In the place of the TransferQueue: what was put, in the order of its puts."""

    def __init__(self) -> None:
        self.tags: dict[str, list[str]] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def init(self) -> None: ...

    async def async_kv_put(self, *, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(key, []).append(tag["status"])

    async def async_kv_batch_put(self, *, keys: Any, fields: Any, tags: Any, **rest: Any) -> None:
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            row = {name: fields[name] for name in ("prompts", "responses", *PER_TOKEN)}
            self.rows[key] = {name: values[number].tolist() for name, values in row.items()}
            self.rows[key]["tag"] = tag


PER_TOKEN = ("input_ids", "position_ids", "response_mask", "rollout_log_probs", "rm_scores")


@given(scripts=SCRIPTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_v1_stores_only_what_was_sampled(scripts: Any) -> None:
    client, queue = Client(*scripts), Queue()
    columns = rows(1).non_tensor_batch
    prompts = tensordict_utils.get_tensordict(columns)
    tensordict_utils.assign_non_tensor_data(prompts, "global_steps", 5)
    tensordict_utils.assign_non_tensor_data(prompts, "__rollout_n__", len(scripts))

    async def play() -> None:
        worker = manager_tq.FsmAgentLoopWorkerTQ(SETTINGS, llm_client=client)
        await worker.generate_sequences(prompts)
        await asyncio.wait(worker.background_tasks, timeout=50)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager_tq, "tq", queue)
        asyncio.run(play())
    assert queue.tags == {"u0": ["running", "finished" if queue.rows else "failure"]}
    assert len(queue.rows) <= len(scripts)
    for key, row in queue.rows.items():
        uid, session, index = key.split("_")
        assert (uid, index) == ("u0", "0")
        assert int(session) < len(scripts)
        length = len(row["responses"])
        assert row["prompts"] + row["responses"] == row["input_ids"]
        assert row["position_ids"] == list(range(len(row["input_ids"])))
        assert row["rm_scores"] == [0.0] * (length - 1) + [0.75]
        assert row["tag"]["seq_len"] == len(row["input_ids"])
        assert [type(row["tag"][f"{end}_global_steps"]) for end in ("min", "max")] == [int, int]
        check_trained(row, client)


def read(out: DataProto, number: int, client: Client) -> None:
    """One row, token by token."""
    row = {name: out.batch[name][number].tolist() for name in {*out.batch.keys()}}
    status = out.non_tensor_batch["status"][number]
    attended = [i for i, bit in enumerate(row["attention_mask"]) if bit]
    assert attended == list(range(attended[0], attended[-1] + 1))
    assert attended[0] < PROMPT <= attended[-1]
    assert row["prompts"] + row["responses"] == row["input_ids"]
    assert all(
        row["input_ids"][i] == PAD for i in range(len(row["input_ids"])) if i not in attended
    )
    assert [row["position_ids"][i] for i in attended] == list(range(len(attended)))
    length = attended[-1] + 1 - PROMPT
    trained = [i for i, bit in enumerate(row["response_mask"]) if bit]
    assert all(i < length for i in trained)
    if status == "aborted":
        assert not trained
        return
    check_trained(row, client)


def check_trained(row: dict[str, Any], client: Client) -> None:
    """What is trained was sampled, in one session, with these log-probs, and nothing else was."""
    assert set(row["response_mask"]) <= {0, 1}
    trained = [i for i, bit in enumerate(row["response_mask"]) if bit]
    assert all(lp == 0.0 for i, lp in enumerate(row["rollout_log_probs"]) if i not in trained)
    sampled = [(row["responses"][i], row["rollout_log_probs"][i]) for i in trained]
    assert any(
        same(sampled, told[start:]) for told in client.told.values() for start in range(len(told))
    )


def same(sampled: Any, replies: Any) -> bool:
    """The tokens and log-probs of these replies, put together."""
    flat = [pair for reply in replies for pair in reply]
    return len(flat) == len(sampled) and all(
        a == c and abs(b - d) < 1e-6 for (a, b), (c, d) in zip(sampled, flat, strict=True)
    )

"""Whatever servers and tools do: what reaches verl keeps the invariants, read without our code."""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto

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

pytestmark = pytest.mark.real_verl

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
    assert set(row["response_mask"]) <= {0, 1}
    assert all(i < length for i in trained)
    assert all(lp == 0.0 for i, lp in enumerate(row["rollout_log_probs"]) if i not in trained)
    if status == "aborted":
        assert not trained
        return
    # what is trained was sampled, in one session, with these log-probs, and nothing else was
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

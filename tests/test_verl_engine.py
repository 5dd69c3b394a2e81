"""verl's LLM client as an engine, by any object with its `generate`; no verl here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from fsm_rollout.adapters.verl import VerlEngine
from fsm_rollout.adapters.verl.engine import PRIORITY, steps_of, version_of
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.replay_columns import ReplayColumns
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from tests.playing import TOKENIZER, ids

STOP = 9
PARAMS = SamplingParams(temperature=0.7, top_k=20, stop_token_ids=(STOP,))


class Client:
    """Answers with TokenOutputs, one behind the other."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs, self.asked = list(outputs), list[dict[str, Any]]()

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        self.asked.append({"request_id": request_id, **kwargs})
        output = self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        if isinstance(output, Exception):
            raise output
        return output


def output(
    token_ids: Sequence[int],
    log_probs: Any = "made up",
    stop: str | None = "completed",
    **more: Any,
) -> SimpleNamespace:
    if log_probs == "made up":
        log_probs = [-0.5] * len(token_ids)
    fields = {"routed_experts": None, "num_preempted": None, "extra_fields": {}, **more}
    return SimpleNamespace(token_ids=token_ids, log_probs=log_probs, stop_reason=stop, **fields)


def ask(reply: Any, *, most: int = 4, columns: Columns | None = None, **kwargs: Any) -> Generation:
    columns = Columns([1, 2, 3]) if columns is None else columns
    engine = VerlEngine(Client(reply), **kwargs)
    return asyncio.run(
        engine.generate(columns, most, PARAMS, request_id="r.1", session_id="session")
    )


@pytest.mark.parametrize(
    ("token_ids", "stop", "finish"),
    [
        ([5, STOP], "completed", "stop"),
        ([5, 6, 7, STOP], "completed", "stop"),  # the budget is used up, and the turn is over
        ([5, 6, 7, 8], "completed", "length"),
        ([5, 6], "completed", "stop"),  # at a stop token that the tokenizer does not tell of
        ([5, 6], None, "stop"),
        ([5, 6, 7, 8], "stop", "stop"),  # SGLang says which it was
        ([5, 6], "length", "length"),
        ([5, 6], "aborted", "abort"),
        ([], "aborted", "abort"),
        ([], "abort", "abort"),
    ],
)
def test_why_a_turn_ended(token_ids: list[int], stop: str | None, finish: str) -> None:
    assert ask(output(token_ids, stop=stop)).finish == finish


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (output([5, STOP], None), StopReason.MISSING_LOG_PROBS),
        (output([5, STOP], [-0.5]), StopReason.BAD_REPLY),
        (output([5, STOP], []), StopReason.BAD_REPLY),
        (output([5, STOP], [-0.5, float("nan")]), StopReason.BAD_REPLY),
        (output([5] * 5), StopReason.BAD_REPLY),
        (output([]), StopReason.BAD_REPLY),  # SGLang's answer where its counts differ
        (output([5], stop="exploded"), StopReason.BAD_REPLY),
        (output([5], routed_experts=np.zeros((2, 2, 1), int)), StopReason.BAD_REPLY),
    ],
)
def test_a_reply_that_is_no_data_is_an_error(reply: Any, reason: StopReason) -> None:
    with pytest.raises(EngineError) as caught:
        ask(reply)
    assert caught.value.reason is reason


def test_an_abort_before_the_first_token_needs_no_log_probs() -> None:
    generation = ask(output([], None, "aborted"))
    assert generation.token_ids.tolist() == []
    assert generation.weight_versions == ()


def test_what_verl_is_asked() -> None:
    client = Client(output([5, STOP]))
    PRIORITY.set(0)
    engine = VerlEngine(client)
    asyncio.run(engine.generate(Columns([1, 2]), 4, PARAMS, request_id="r", session_id="s"))
    assert client.asked == [
        {
            "request_id": "s",
            "prompt_ids": [1, 2],
            "sampling_params": {
                "temperature": 0.7,
                "top_p": 1.0,
                "top_k": 20,
                "repetition_penalty": 1.0,
                "logprobs": True,
                "max_tokens": 4,
                "stop_token_ids": [STOP],
            },
        }
    ]


def test_a_run_without_log_probs_asks_for_none() -> None:
    client = Client(output([5, STOP], None))
    columns = Columns([1], log_probs=False)
    engine = VerlEngine(client, log_prob_kind="processed")
    made = engine.generate(columns, 4, PARAMS, request_id="r", session_id="s")
    assert asyncio.run(made).log_probs is None
    assert not client.asked[0]["sampling_params"]["logprobs"]


def test_versions_and_counters() -> None:
    extra = {"global_steps": 5, "min_global_steps": 5, "max_global_steps": 5}
    more = {"num_cached_tokens": 3, "spec_num_draft_tokens": 2, "kv_transfer_params": {}}
    generation = ask(output([5, STOP], num_preempted=1, extra_fields={**extra, **more}))
    assert generation.weight_versions == ((5, 2),)
    assert generation.counters == {"num_preempted": 1, "cached_tokens": 3, "spec_draft_tokens": 2}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1))
def test_the_first_and_the_last_step_come_back(spans: list[tuple[int, int]]) -> None:
    told = [{"min_global_steps": low, "max_global_steps": low + more} for low, more in spans]
    runs = [(version_of(extra), 1) for extra in told]
    assert steps_of(runs) == (min(low for low, _ in spans), max(low + n for low, n in spans))


def test_steps_that_verl_does_not_know_are_unknown() -> None:
    assert version_of({}) is None
    assert version_of({"global_steps": 4}) == 4
    assert steps_of([(None, 3)]) is None
    assert steps_of([(None, 3), (2, 1)]) == (2, 2)
    assert steps_of([("step-two", 3)]) is None


@pytest.mark.parametrize("rows", [4, 5, 6])
def test_expert_rows_are_taken_from_those_of_the_whole_sequence(rows: int) -> None:
    experts = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2, 1)
    columns = Columns([1, 2, 3])
    columns.replay = ReplayColumns()
    reply = output([5, STOP], routed_experts=experts)
    found = ask(reply, columns=columns).routed_experts if rows >= 4 else None
    assert found is not None
    assert found.start == 0
    assert np.array_equal(found.rows, experts[:4])


def test_requests_through_verls_client() -> None:
    call = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
    client = Client(
        output(ids(call), None),  # tried again, from scratch
        output([], None, "aborted"),
        output(ids(call)),
        RuntimeError("the server is gone"),
        output(ids(call)),
        output(ids("done")),
    )
    from tests.playing import Echo

    rollout = Rollout(VerlEngine(client), TOKENIZER, tools=[Echo], limits=Limits(max_attempts=4))
    request: Request = asyncio.run(rollout.run(rollout.request("hello")))
    assert (request.stop_reason, request.attempt) == (StopReason.STOP, 4)
    assert len({asked["request_id"] for asked in client.asked}) == 1

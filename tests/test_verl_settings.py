"""verl's config as budgets, sampling and rows; no verl here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.adapters.verl.neutral import fill_neutral
from fsm_rollout.adapters.verl.settings import (
    check_training,
    limits_of,
    log_prob_kind_of,
    prompt_row_of,
    sampling_of,
    settings_of,
)
from fsm_rollout.adapters.verl.tracked import facts, validation_columns
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event


def rollout(**fields: Any) -> Any:
    turns = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
    }
    multi_turn = SimpleNamespace(**{name: fields.pop(name, turns[name]) for name in turns})
    rest = {
        "name": "vllm",
        "prompt_length": 100,
        "response_length": 200,
        "max_model_len": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs_mode": "processed_logprobs",
        "calculate_log_probs": True,
    }
    return SimpleNamespace(multi_turn=multi_turn, **{**rest, **fields})


def test_verls_limits_hold() -> None:
    limits = limits_of(rollout(max_parallel_calls=3, max_assistant_turns=5), {})
    assert (limits.max_prompt, limits.max_response, limits.max_context) == (100, 200, 300)
    assert (limits.max_turns, limits.max_parallel_calls, limits.max_tool_calls) == (5, 3, 15)
    assert limits.max_new_tokens == 200
    assert limits.max_tool_response_chars == 256
    assert limits_of(rollout(max_model_len=1000), {}).max_context == 1000


@pytest.mark.parametrize(
    ("assistant", "user", "turns"), [(None, None, 200), (4, None, 4), (None, 2, 3), (4, 2, 3)]
)
def test_turns(assistant: int | None, user: int | None, turns: int) -> None:
    found = limits_of(rollout(max_assistant_turns=assistant, max_user_turns=user), {})
    assert found.max_turns == turns


def test_the_entry_has_the_last_word_within_verls_tensors() -> None:
    limits = limits_of(rollout(), {"max_turns": 2, "tool_timeout_s": 1.5, "max_response": 150})
    assert (limits.max_turns, limits.tool_timeout_s, limits.max_response) == (2, 1.5, 150)
    with pytest.raises(ConfigError, match=r"raise rollout\.response_length"):
        limits_of(rollout(max_model_len=900), {"max_response": 201})
    with pytest.raises(ConfigError, match="max_turn"):
        limits_of(rollout(), {"max_turn": 2})
    with pytest.raises(ConfigError, match="raise max_context"):
        limits_of(rollout(max_model_len=200), {})


def test_an_unknown_key_of_the_entry() -> None:
    with pytest.raises(ConfigError, match="'fsm': unknown key 'tool'; did you mean 'tools'"):
        settings_of({"name": "fsm", "_target_": "x", "tool": ["calculator"]})
    with pytest.raises(ConfigError, match="'fsm'"):
        settings_of({"name": "fsm", "tools": "calculator"})


def test_sampling() -> None:
    verls = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}
    assert sampling_of({**verls, "logprobs": True}) == SamplingParams(temperature=0.7, top_p=0.9)
    with pytest.raises(ConfigError, match=r"repetition_penalty=1\.1"):
        sampling_of({**verls, "repetition_penalty": 1.1})
    with pytest.raises(ConfigError, match="min_p=0"):
        sampling_of({**verls, "min_p": 0.1})


@pytest.mark.parametrize(
    ("fields", "is_fine"),
    [
        ({}, True),
        ({"temperature": 0.6}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"top_p": 0.9, "calculate_log_probs": False}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.6}, False),
        ({"logprobs_mode": "raw_logprobs", "top_p": 0.9}, True),
        ({"name": "sglang", "logprobs_mode": None, "temperature": 0.6, "top_p": 0.9}, True),
    ],
)
def test_log_probs_that_a_trainer_would_not_recompute(fields: Any, is_fine: bool) -> None:
    config = rollout(**fields)
    kind = log_prob_kind_of(config)
    if is_fine:
        check_training(config, kind)
    else:
        with pytest.raises(ConfigError, match="not log_softmax"):
            check_training(config, kind)


def test_a_row_of_verls_dataset() -> None:
    given = {"create_kwargs": {"truth": "4", "unused": None}, "execute_kwargs": None}
    columns = {
        "raw_prompt": [{"role": "user", "content": "2 + 2?"}],
        "tools_kwargs": {"check": given, "another": None},
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train"},
        "data_source": "sums",
        "index": 7,
        "agent_name": "fsm",
    }
    row = prompt_row_of(columns, ["check"])
    assert row.prompt == [{"role": "user", "content": "2 + 2?"}]
    assert row.label == "4"
    assert row.tools_kwargs == {"check": {"create_kwargs": {"truth": "4"}}}
    assert row.id == "7"
    assert {*row.metadata} == {"reward_model", "extra_info", "data_source", "index"}


@pytest.mark.parametrize("prompt", [None, "2 + 2?", [["user", "2 + 2?"]]])
def test_a_row_without_messages(prompt: Any) -> None:
    columns = {} if prompt is None else {"raw_prompt": prompt}
    with pytest.raises(ConfigError, match=r"raw_prompt must hold a list of messages"):
        prompt_row_of(columns, [])


def test_kwargs_of_tools_that_a_row_left_out_are_left_out() -> None:
    columns = {"raw_prompt": [], "tools_kwargs": {"check": {"create_kwargs": {}}}}
    assert (
        prompt_row_of(columns, []).tools_kwargs == columns["tools_kwargs"]
    )  # a mistake: it is refused
    chosen = {**columns, "extra_info": {"tool_selection": ["another"]}}
    assert prompt_row_of(chosen, ["another"]).tools_kwargs == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(-10, 10), st.booleans()), min_size=1, max_size=9
    )
)
def test_rows_without_an_outcome_shift_no_mean(rows: list[tuple[str, float, bool]]) -> None:
    torch = pytest.importorskip("torch")
    np = pytest.importorskip("numpy")
    count = len(rows)
    batch = {
        "rm_scores": torch.tensor([[0.0, 0.0 if skip else reward] for _, reward, skip in rows])
    }
    infos = np.empty(count, dtype=object)
    infos[:] = [None if skip else {"acc": reward > 0, "why": "so"} for _, reward, skip in rows]
    columns = {
        "is_stand_in": np.array([skip for *_, skip in rows]),
        "reward_extra_info": infos,
    }
    keys = fill_neutral(batch, columns, [group for group, *_ in rows])
    assert keys == ([] if all(skip for *_, skip in rows) else ["acc", "why"])
    after = batch["rm_scores"].sum(-1).tolist()
    for group in "abc":
        members = [i for i, row in enumerate(rows) if row[0] == group]
        real = [rows[i][1] for i in members if not rows[i][2]]
        if real:
            mean = sum(after[i] for i in members) / len(members)
            assert mean == pytest.approx(sum(real) / len(real), abs=1e-4)
            assert [after[i] for i in members if not rows[i][2]] == pytest.approx(real)
    if keys:
        real = [reward > 0 for _, reward, skip in rows if not skip]
        assert min(real) <= min(columns["acc"]) <= max(columns["acc"]) <= max(real)
        assert [why is None for why in columns["why"]] == [skip for *_, skip in rows]


def test_copies_that_fill_a_batch_up_are_in_no_metric_of_an_evaluation() -> None:
    request = Request()
    Machine().fire(Event.ABORT, request, StopReason.ENGINE_ERROR)
    down = facts(request)
    good = replace(down, status=Status.COMPLETED, stop_reason=StopReason.STOP)
    played = [good, down, good, good, down, down]  # two of each, and the first ones again
    rates = validation_columns(played, list("aabbaa"), most=2)["rollout/abort_rate"]
    assert rates.tolist() == [0.5, None, 0.0, None, None, None]

"""Request and Group: budgets, a retry that forgets everything, a seal that records everything."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.columns import Column
from fsm_rollout.errors import ConfigError, EngineError, GuardRefused, InvariantError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Group, Request, samples_of
from fsm_rollout.sample import Media, Sample, ToolCall
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.testing.snapshot import snapshot
from fsm_rollout.testing.twin import Tools
from fsm_rollout.testing.walk import request_in

IDENTITY = {
    *("prompt", "prompt_ids", "index", "group_index", "limits", "mode", "label", "metadata"),
    *("tools_kwargs", "log_probs", "declared", "samples", "attempt", "seq", "final", "request"),
    *("rollout_id", "sample_id", "session_id", "train_metadata", "columns", "name", "row_id"),
    *("has_agent", "is_child", "is_fork", "_spawned", "num_asked"),
}
"""fields of Request and Sample that a retry keeps, by name; all others are generated"""


def a_used_request() -> Request:
    """Aborted, with something in every generated field of the request and of its sample."""
    request, machine = Request(index=3, declared=[Column("entropy")], prompt="2 + 2?"), Machine()
    request.set_prompt([1, 2])
    machine.fire(Event.GENERATE, request)
    request.append_response_tokens(
        [3, 4],
        [-1.0, -2.0],
        meta_info={"finish_reason": "stop", "weight_version": "v1"},
        text="hi",
        extra={"entropy": [0.5, 0.5]},
    )
    sample = request.sample
    sample.turns[-1].calls = (ToolCall("calculator"),)
    sample.media.append(Media(3, 1, "image"))
    sample.extra["board"] = [1]
    sample.reward, sample.reward_parts, sample.remove_sample = 1.0, {"tool": 1.0}, True
    sample.non_generation_time = 2.0
    request.reward, request.reward_parts, request.metrics = 1.0, {"tool": 1.0}, {"errors": 1.0}
    request.num_tool_calls, request.num_invalid_calls = 2, 1
    request.calls_before = 1, 1
    request.session = Tools()
    request.fork([1, 2, 3])
    request.spawn("a part of it")
    request.error = "boom"
    request.metrics = {"tool_errors": 1}
    request.was_over = True
    machine.fire(Event.ABORT, request, StopReason.ENGINE_ERROR)
    return request


def generated(thing: Request | Sample) -> dict[str, Any]:
    return {f.name: getattr(thing, f.name) for f in fields(thing) if f.name not in IDENTITY}


def untouched(used: Request | Sample, fresh: Request | Sample) -> set[str]:
    empty = generated(fresh)
    return {name for name, value in generated(used).items() if value == empty[name]}


def test_a_retried_request_starts_with_every_generated_field_empty() -> None:
    request, fresh = a_used_request(), Request(declared=[Column("entropy")])
    assert untouched(request, fresh) == {"is_sealed"}, "use the new field in a_used_request"
    assert untouched(request.samples[0], fresh.sample) == {"_status", "_stop_reason"}
    Machine().fire(Event.RETRY, request)
    assert generated(request) == generated(fresh)
    assert len(request.samples) == 1
    assert generated(request.sample) == generated(fresh.sample)
    assert (request.attempt, request.sample.tokens.tolist()) == (2, [1, 2])
    columns = request.sample.columns
    assert (columns.num_sampled, columns.num_trained, columns.response_length) == (0, 0, 0)
    assert columns.extra("entropy").size == 0


@given(
    prompt=st.integers(0, 20),
    context=st.integers(20, 60),
    response=st.none() | st.integers(1, 60),
    per_turn=st.integers(1, 30),
    turns=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["stop", "abort", "tool"])), max_size=6
    ),
)
def test_max_new_tokens_never_exceeds_the_remaining_budget(
    prompt: int,
    context: int,
    response: int | None,
    per_turn: int,
    turns: list[tuple[int, str]],
) -> None:
    request = Request(
        limits=Limits(max_context=context, max_response=response, max_new_tokens=per_turn)
    )
    request.set_prompt(range(prompt))
    spent, interrupted = 0, 0
    for wanted, kind in turns:
        budget = min(per_turn - interrupted, context - prompt - spent)
        if response is not None:
            budget = min(budget, response - spent)
        assert request.max_new_tokens == budget >= 0
        count = min(wanted, request.room if kind == "tool" else budget)
        if kind == "tool":
            request.append_response_tokens([1] * count, trainable=False)
        else:
            request.append_response_tokens(
                [1] * count, [-1.0] * count, meta_info={"finish_reason": kind}
            )
        spent += count
        if kind == "abort":
            interrupted += count
        elif kind == "stop" or count:
            interrupted = 0
    assert request.sample.columns.length <= context


def test_a_prompt_longer_than_allowed_is_refused_and_never_cut() -> None:
    for limits in (Limits(max_context=4), Limits(max_prompt=4)):
        request = Request(limits=limits)
        before = snapshot(request)
        with pytest.raises(InvariantError, match=r"R3\.5\.prompt.*5 tokens, allowed are 4"):
            request.set_prompt(range(5))
        assert snapshot(request) == before
        request.set_prompt(range(4))


def test_a_prompt_is_set_once() -> None:
    request = Request()
    request.set_prompt([1, 2])
    with pytest.raises(InvariantError, match="set once"):
        request.set_prompt([3])
    assert request.sample.tokens.tolist() == [1, 2]


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ABORTED])
def test_seal_records_the_outcome_on_every_sample(status: Status) -> None:
    machine = Machine()
    request = a_used_request() if status is Status.ABORTED else request_in(status, machine)
    reason = request.stop_reason
    request.reward, request.reward_parts = 0.5, {"answer": 0.5}
    request.seal()
    earned = (None, {}) if status is Status.ABORTED else (0.5, {"answer": 0.5})
    for sample in request.samples:
        assert (sample.status, sample.stop_reason) == (status, reason)
        assert (sample.reward, sample.reward_parts) == earned
        assert sample.is_sealed
        assert sample.request is None
    for event in (Event.RESUME, Event.RETRY) if status is Status.ABORTED else ():
        with pytest.raises(GuardRefused, match="sealed"):
            machine.fire(event, request)


def test_a_request_without_an_outcome_is_not_sealed() -> None:
    request = Request(index=4)
    with pytest.raises(InvariantError, match="request 4 is pending"):
        request.seal()
    assert not request.is_sealed


def test_a_sealed_request_is_not_reset_not_even_in_part() -> None:
    request = a_used_request()
    request.seal()
    before = snapshot(request)
    with pytest.raises(InvariantError, match="sealed"):
        request.reset()
    assert snapshot(request) == before


def test_the_status_of_a_request_cannot_be_written() -> None:
    with pytest.raises(AttributeError):
        Request().status = Status.COMPLETED  # type: ignore[misc]


def test_a_group_gives_the_samples_that_a_trainer_may_use() -> None:
    machine = Machine()
    statuses = (Status.COMPLETED, Status.ABORTED, Status.TRUNCATED, Status.GENERATING)
    group = Group(0, [request_in(status, machine) for status in statuses])
    assert not group.is_done
    assert [sample.status for sample in group.samples] == [Status.COMPLETED, Status.TRUNCATED]
    assert group.rewards == [None] * 4
    group.requests.pop()
    assert group.is_done
    assert samples_of([group, group]) == group.samples * 2


# -- plain values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Limits(max_turns=2),
        StopReason.ENGINE_ABORT,
        Column("entropy", "uint8", "T", 3),
        Media(1, 2, "image"),
        ToolCall("calculator", {"x": [1]}, id="a", span=(0, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_public_values_are_copied_and_pickled_equal(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value


@pytest.mark.parametrize(
    "error",
    [
        InvariantError("R3.1", "two lengths"),
        GuardRefused("aligned", "no"),
        EngineError("HTTP 400", reason=StopReason.ENGINE_ERROR, final=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_with_all_that_they_carry(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_request_in_flight_is_copied_with_its_samples() -> None:
    request = request_in(Status.GENERATING, Machine())
    twin = copy.deepcopy(request)
    twin.append_response_tokens([9], [-1.0])
    assert twin.sample.request is twin
    assert (twin.sample.response_length, request.sample.response_length) == (5, 4)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_turns": 0}, "max_turns must be a whole number >= 1, got 0"),
        ({"max_tool_calls": -1}, "max_tool_calls must be a whole number >= 0"),
        ({"tool_timeout_s": 0}, "tool_timeout_s must be > 0"),
        ({"turn_timeout_s": float("nan")}, "turn_timeout_s"),
        ({"max_prompt": 9, "max_context": 8}, "max_prompt .9. > max_context .8."),
        ({"max_prompt": 5, "max_response": 4, "max_context": 8}, "= 9 > max_context .8."),
    ],
)
def test_limits_that_cannot_be_are_config_errors(limits: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Limits(**limits)
    assert msgspec.structs.asdict(Limits())

"""The table, its guards, `fire` and `settle`: what moves, and what a refusal means."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fsm_rollout.errors import ConfigError, GuardRefused, IllegalEvent, InvariantError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import TERMINAL, Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states import guards
from fsm_rollout.states.machine import Machine, Transition, stock_machine
from fsm_rollout.states.table import EDGES, Event
from fsm_rollout.testing.snapshot import snapshot
from fsm_rollout.testing.walk import request_in
from fsm_rollout.turn import ToolCall


def a_request(prompt: int = 3, **limits: Any) -> Request:
    request = Request(index=7, limits=Limits(**limits))
    request.set_prompt(range(prompt))
    return request


def say(request: Request, count: int, finish: str | None = "stop") -> None:
    request.append_response_tokens([5] * count, [-1.0] * count, meta_info={"finish_reason": finish})


# -- the table -------------------------------------------------------------------------------------


def test_each_event_has_at_most_one_edge_from_a_status() -> None:
    pairs = [(edge.event, source) for edge in EDGES for source in edge.sources]
    assert len(pairs) == len(set(pairs))


def test_every_status_can_be_reached_and_only_an_aborted_request_goes_on() -> None:
    assert {edge.dest for edge in EDGES} == set(Status)
    leaving = {(e.event, s) for e in EDGES for s in e.sources if s in TERMINAL}
    assert leaving == {
        (Event.ABORT, Status.COMPLETED),
        (Event.ABORT, Status.TRUNCATED),
        (Event.RESUME, Status.ABORTED),
        (Event.RETRY, Status.ABORTED),
    }


def test_alignment_is_checked_on_every_edge_that_goes_on_with_the_tokens() -> None:
    unchecked = {edge.event for edge in EDGES if guards.aligned not in edge.guards}
    assert unchecked == {Event.ABORT, Event.RETRY}


def test_every_guard_says_what_its_refusal_means() -> None:
    used = {guard.__name__ for edge in EDGES for guard in edge.guards}
    ours = {g.__name__ for g in guards.REFUSALS if g.__module__ == guards.__name__}
    assert used == ours


def test_a_guard_of_the_users_own_refuses_and_settle_ends_with_what_it_means() -> None:
    @guards.guard(lambda r: f"{r.num_turns} turns were polite", StopReason.TIMEOUT)
    def still_welcome(request: Request) -> bool:
        return request.num_turns < 1

    try:
        machine = Machine(guards={Event.GENERATE: [still_welcome]})
        request = Request()
        machine.fire(Event.GENERATE, request)
        request.append_response_tokens([1], [-1.0], meta_info={"finish_reason": "stop"})
        request.sample.turns[-1].calls = (ToolCall("calculator"),)
        machine.fire(Event.OBSERVE, request)
        with pytest.raises(GuardRefused, match="still_welcome refused, 1 turns were polite"):
            machine.fire(Event.GENERATE, request)
        assert machine.settle(Event.GENERATE, request) is Status.TRUNCATED
        assert request.stop_reason is StopReason.TIMEOUT
    finally:
        del guards.REFUSALS[still_welcome]


def test_a_guard_that_was_not_declared_is_refused_by_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"guard <lambda> is not declared: .*guard"):
        Machine(guards={Event.GENERATE: [lambda request: True]})


def test_every_stop_reason_belongs_to_one_terminal_status() -> None:
    for reason in StopReason:
        assert reason.status in TERMINAL
        assert pickle.loads(pickle.dumps(reason)) is reason
        if reason.status is not Status.ABORTED:
            assert not reason.retryable
            assert not reason.resumable


def test_the_stock_machine_has_no_other_way_than_the_table() -> None:
    assert set(stock_machine().events) == set(Event)


# -- fire ------------------------------------------------------------------------------------------


def test_an_event_without_an_edge_is_illegal_and_names_the_request() -> None:
    request = a_request()
    before = snapshot(request)
    with pytest.raises(IllegalEvent, match="complete is not allowed in pending: request 7"):
        Machine().fire(Event.COMPLETE, request, StopReason.STOP)
    assert snapshot(request) == before


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Event.ABORT, None),
        (Event.ABORT, StopReason.STOP),
        (Event.TRUNCATE, StopReason.CANCELLED),
        (Event.GENERATE, StopReason.STOP),
    ],
)
def test_a_reason_that_does_not_fit_the_destination_is_illegal(
    event: Event, reason: StopReason | None
) -> None:
    with pytest.raises(IllegalEvent, match="cannot carry reason"):
        Machine().fire(event, a_request(), reason)


def test_a_refusal_names_the_guard_the_numbers_the_request_and_the_turn() -> None:
    request, machine = a_request(max_turns=1), Machine()
    machine.fire(Event.GENERATE, request)
    say(request, 2)
    request.sample.turns[-1].calls = (ToolCall("calculator"),)
    machine.fire(Event.OBSERVE, request)
    with pytest.raises(GuardRefused, match=r"1 of max_turns 1 .*request 7, attempt 1, turn 1") as e:
        machine.fire(Event.GENERATE, request)
    assert e.value.guard == "turns_left"


def test_a_listener_is_told_each_transition_and_no_refusal() -> None:
    told: list[Transition] = []
    request, machine = a_request(), Machine([told.append])
    machine.fire(Event.GENERATE, request)
    say(request, 2)
    with pytest.raises(GuardRefused):
        machine.fire(Event.OBSERVE, request)
    machine.fire(Event.COMPLETE, request, StopReason.STOP)
    assert [(t.seq, t.event, t.source, t.dest, t.reason, t.turn) for t in told] == [
        (1, Event.GENERATE, Status.PENDING, Status.GENERATING, None, 0),
        (2, Event.COMPLETE, Status.GENERATING, Status.COMPLETED, StopReason.STOP, 1),
    ]
    assert (told[1].num_tokens, told[1].num_sampled, told[1].request) == (5, 2, request)


def test_every_transition_takes_a_new_seq_even_a_retry() -> None:
    request, machine = a_request(), Machine()
    seen = [request.seq]
    for event, reason in (
        (Event.GENERATE, None),
        (Event.ABORT, StopReason.ENGINE_ERROR),
        (Event.RESUME, None),
        (Event.ABORT, StopReason.ENGINE_ERROR),
        (Event.RETRY, None),
    ):
        machine.fire(event, request, reason)
        seen.append(request.seq)
    assert seen == list(range(6))


# -- budgets and what their end means --------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "limits", "reason"),
    [
        (8, {"max_context": 8}, StopReason.MAX_CONTEXT),
        (3, {"max_context": 7}, StopReason.MAX_CONTEXT),
        (3, {"max_response": 4}, StopReason.MAX_RESPONSE),
        (3, {"max_new_tokens": 4}, StopReason.LENGTH),
        (3, {"max_context": 7, "max_response": 4, "max_new_tokens": 4}, StopReason.MAX_CONTEXT),
    ],
)
def test_the_budget_that_binds_names_the_end(
    prompt: int, limits: dict[str, int], reason: StopReason
) -> None:
    request, machine = a_request(prompt, **limits), Machine()
    if request.room:
        machine.fire(Event.GENERATE, request)
        say(request, 4, "abort")
        machine.fire(Event.ABORT, request, StopReason.ENGINE_ABORT)
        machine.fire(Event.RESUME, request)
    assert request.max_new_tokens == 0
    assert machine.settle(Event.GENERATE, request) is Status.TRUNCATED
    assert request.stop_reason is reason


def test_a_call_beyond_the_budget_of_calls_truncates() -> None:
    machine = Machine()
    request = request_in(Status.GENERATING, machine)
    request.num_tool_calls = request.limits.max_tool_calls
    machine.settle(Event.OBSERVE, request)
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TOOL_CALLS)


def test_a_turn_beyond_the_budget_of_turns_truncates_after_its_tools_ran() -> None:
    request, machine = a_request(max_turns=1), Machine()
    machine.fire(Event.GENERATE, request)
    say(request, 2)
    request.sample.turns[-1].calls = request_in(Status.GENERATING, machine).calls
    machine.settle(Event.OBSERVE, request)
    request.append_response_tokens([9], trainable=False)
    machine.settle(Event.GENERATE, request)
    assert request.stop_reason is StopReason.MAX_TURNS
    assert request.sample.loss_mask.tolist() == [1, 1, 0]


def test_a_broken_invariant_aborts_the_request_alone_and_a_retry_starts_sound() -> None:
    request, machine = a_request(), Machine()
    machine.fire(Event.GENERATE, request)
    say(request, 2)
    request.sample.columns._mask.append(1)
    with pytest.raises(GuardRefused, match="5 tokens, prompt_length 3, 3 loss_mask"):
        machine.fire(Event.COMPLETE, request, StopReason.STOP)
    machine.settle(Event.COMPLETE, request, StopReason.STOP)
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.INVARIANT)
    assert "aligned" in request.error
    machine.fire(Event.RETRY, request)
    assert (request.status, request.sample.response_length) == (Status.PENDING, 0)


def test_a_refusal_that_blames_the_caller_is_passed_on() -> None:
    request, machine = a_request(), Machine()
    machine.fire(Event.GENERATE, request)
    with pytest.raises(GuardRefused, match="not a finished model turn with tool calls"):
        machine.settle(Event.OBSERVE, request)
    assert request.status is Status.GENERATING


def test_an_answer_may_have_no_tokens() -> None:
    request, machine = a_request(), Machine()
    for _ in range(2):
        machine.fire(Event.GENERATE, request)
        say(request, 2)
        request.sample.turns[-1].calls = (ToolCall("echo"),)
        machine.fire(Event.OBSERVE, request)
        request.append_response_tokens([], trainable=False)
    machine.fire(Event.COMPLETE, request, StopReason.TOOL_STOP)
    assert [turn.kind for turn in request.sample.turns] == ["model", "model"]
    assert violations(request.sample) == []


def test_what_has_ended_cannot_be_settled_into_another_end() -> None:
    machine = Machine()
    request = request_in(Status.ABORTED, machine)
    request.sample.columns._mask.append(1)
    before = snapshot(request)
    with pytest.raises(GuardRefused) as refused:
        machine.settle(Event.RESUME, request)
    assert refused.value.guard == "aligned"
    assert snapshot(request) == before


# -- resume, retry, seal ---------------------------------------------------------------------------


def test_resume_keeps_everything_and_the_interrupted_turn_keeps_its_budget() -> None:
    request, machine = a_request(max_new_tokens=10), Machine()
    machine.fire(Event.GENERATE, request)
    say(request, 4, "abort")
    tokens, log_probs = request.sample.tokens.tobytes(), request.sample.rollout_log_probs
    request.num_tool_calls = 2
    machine.fire(Event.ABORT, request, StopReason.PAUSED)
    machine.fire(Event.RESUME, request)
    assert (request.status, request.stop_reason, request.attempt) == (Status.PENDING, None, 1)
    assert request.sample.tokens.tobytes() == tokens
    assert log_probs is not None
    assert request.sample.rollout_log_probs is not None
    assert request.sample.rollout_log_probs.tobytes() == log_probs.tobytes()
    assert (request.num_tool_calls, request.max_new_tokens) == (2, 6)
    machine.fire(Event.GENERATE, request)
    say(request, 1)
    assert [(turn.start, turn.stop) for turn in request.sample.turns] == [(0, 5)]
    assert request.max_new_tokens == 10


def test_tokens_are_not_resumed_once_the_tools_are_released() -> None:
    class Session:
        is_alive = False

    machine = Machine()
    request = request_in(Status.ABORTED, machine)
    request.session = Session()
    with pytest.raises(GuardRefused, match="only a retry can open new ones"):
        machine.fire(Event.RESUME, request)
    machine.fire(Event.RETRY, request)
    assert request.session is None


@pytest.mark.parametrize(
    ("end", "reason"),
    [(Event.COMPLETE, StopReason.TOOL_STOP), (Event.TRUNCATE, StopReason.MAX_TURNS)],
)
def test_what_had_ended_before_it_was_aborted_is_not_resumed(
    end: Event, reason: StopReason
) -> None:
    machine = Machine()
    request = request_in(Status.TOOL_CALLING, machine)
    request.append_response_tokens([8, 9], trainable=False)
    machine.fire(end, request, reason)
    machine.fire(Event.ABORT, request, StopReason.CANCELLED)
    with pytest.raises(GuardRefused, match="it had ended before"):
        machine.fire(Event.RESUME, request)
    machine.fire(Event.RETRY, request)
    machine.fire(Event.ABORT, request, StopReason.CANCELLED)
    assert machine.fire(Event.RESUME, request) is Status.PENDING


@pytest.mark.parametrize("reason", [r for r in StopReason if r.status is Status.ABORTED])
@pytest.mark.parametrize("final", [False, True])
def test_each_abort_reason_says_whether_it_may_go_on(reason: StopReason, final: bool) -> None:
    for event, allowed in ((Event.RESUME, reason.resumable), (Event.RETRY, reason.retryable)):
        request, machine = a_request(), Machine()
        machine.fire(Event.ABORT, request, reason)
        request.final = final
        if allowed and not final:
            assert machine.fire(event, request) is Status.PENDING
        else:
            with pytest.raises(GuardRefused):
                machine.fire(event, request)


def test_retries_end_with_the_last_attempt() -> None:
    request, machine = a_request(max_attempts=2), Machine()
    machine.fire(Event.ABORT, request, StopReason.ENGINE_ERROR)
    machine.fire(Event.RETRY, request)
    machine.fire(Event.ABORT, request, StopReason.ENGINE_ERROR)
    with pytest.raises(GuardRefused, match="attempt 2 of max_attempts 2"):
        machine.fire(Event.RETRY, request)


def test_an_outcome_may_be_taken_back_until_it_is_sealed() -> None:
    machine = Machine()
    machine.fire(Event.ABORT, request_in(Status.COMPLETED, machine), reason=StopReason.REWARD_ERROR)
    request = request_in(Status.COMPLETED, machine)
    request.seal()
    with pytest.raises(GuardRefused, match="sealed"):
        machine.fire(Event.ABORT, request, StopReason.REWARD_ERROR)
    with pytest.raises(InvariantError, match="sealed already"):
        request.seal()

"""Several rows of one request: forks of rewritten history, and the rows of sub-agents."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.errors import InvariantError
from fsm_rollout.invariants import check, violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Group, Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event

MACHINE = Machine()
STOP = {"finish_reason": "stop", "weight_version": "v1"}


def played(*turns: list[int], limits: Limits | None = None, **fields: object) -> Request:
    """GENERATING, behind these model turns with an observation of one token between them."""
    request = Request(limits=limits or Limits(), has_agent=True, **fields)  # type: ignore[arg-type]
    request.set_prompt([1, 2, 3])
    for number, ids in enumerate(turns):
        if number:
            MACHINE.fire(Event.OBSERVE, request)
            request.append_response_tokens([9], trainable=False)
        MACHINE.fire(Event.GENERATE, request)
        request.append_response_tokens(ids, [-1.0] * len(ids), meta_info=STOP)
    return request


def finished(request: Request, reward: float = 1.0) -> Request:
    MACHINE.fire(Event.COMPLETE, request, StopReason.STOP)
    request.reward = reward
    request.seal()
    return request


def test_a_fork_goes_on_from_context_that_is_not_trained_again() -> None:
    request = played([10, 11], [12, 13])
    MACHINE.fire(Event.OBSERVE, request)
    request.fork([1, 2, 3, 10, 11, 50], prompt="a summary")
    MACHINE.fire(Event.GENERATE, request)
    request.append_response_tokens([14], [-0.5], meta_info=STOP)
    first, second = finished(request).rows
    assert first.tokens.tolist() == [1, 2, 3, 10, 11, 9, 12, 13]
    assert (second.tokens.tolist(), second.prompt_length) == ([1, 2, 3, 10, 11, 50, 14], 6)
    assert (first.continued_by, second.continued_by) == (second.sample_id, "")
    assert (first.is_fork, second.is_fork) == (False, True)
    assert first.rollout_id == second.rollout_id
    assert first.sample_id != second.sample_id
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert (second.messages[0]["content"], second.loss_mask.tolist()) == ("a summary", [1])
    for sample in (first, second):
        check(sample)
        check(Sample.from_dict(json.loads(json.dumps(sample.to_dict()))))


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 100)), min_size=1, max_size=8
    )
)
def test_every_sampled_token_is_trained_once_wherever_it_is_forked(
    steps: list[tuple[int, bool, int]],
) -> None:
    request, number = played([100]), 101
    sampled = {100}
    for count, forks, percent in steps:
        MACHINE.fire(Event.OBSERVE, request)
        if forks:
            tokens = request.sample.tokens
            request.fork(tokens[: len(tokens) * percent // 100])
        MACHINE.fire(Event.GENERATE, request)
        ids = range(number, number + count)
        number += count
        sampled |= set(ids)
        request.append_response_tokens(list(ids), [-1.0] * count, meta_info=STOP)
    rows = finished(request).rows
    trained = Counter[int]()
    for row in rows:
        trained.update(row.tokens[row.prompt_length :][row.loss_mask.astype(bool)].tolist())
    assert trained == dict.fromkeys(sampled, 1)
    assert request.num_turns == 1 + len(steps)
    assert request.response_length == len(sampled)
    assert len(rows) == 1 + sum(forks for _, forks, _ in steps)


def test_budgets_are_spent_over_all_rows() -> None:
    request = played([10, 11, 12], limits=Limits(max_response=5, max_turns=2, max_context=64))
    MACHINE.fire(Event.OBSERVE, request)
    request.fork([1, 2, 3])
    assert (request.num_turns, request.response_length, request.room) == (1, 3, 2)
    MACHINE.fire(Event.GENERATE, request)
    assert request.max_new_tokens == 2
    with pytest.raises(InvariantError, match=r"R3\.5\.room"):
        request.append_response_tokens([13, 14, 15], [-1.0] * 3)
    request.append_response_tokens([13], [-1.0], meta_info=STOP)
    MACHINE.fire(Event.OBSERVE, request)
    MACHINE.settle(Event.GENERATE, request)
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)


def test_a_closed_row_is_not_written_and_a_fork_needs_a_finished_turn() -> None:
    request = played([10])
    first = request.sample
    MACHINE.fire(Event.OBSERVE, request)
    request.fork([1])
    with pytest.raises(InvariantError, match="continued by 0-1"):
        first.append_response_tokens([4], trainable=False)
    with pytest.raises(InvariantError, match="nothing was sampled yet"):
        request.fork([1])
    MACHINE.fire(Event.GENERATE, request)
    request.append_response_tokens([11], [-1.0], meta_info={"finish_reason": "abort"})
    with pytest.raises(InvariantError, match=r"R3\.4\.fork.*turn 2 is open"):
        request.fork([1])
    with pytest.raises(InvariantError, match="it is completed"):
        finished(played([10])).fork([1])


def test_a_fork_may_be_longer_than_max_prompt_but_not_than_the_context() -> None:
    request = played([10], limits=Limits(max_prompt=3, max_context=6))
    with pytest.raises(InvariantError, match=r"R3\.5\.prompt.*7 tokens, allowed are 6"):
        request.fork([1] * 7)
    assert len(request.samples) == 1
    assert not request.sample.continued_by
    MACHINE.fire(Event.OBSERVE, request)
    request.fork([1] * 6)
    MACHINE.settle(Event.GENERATE, request)
    assert request.stop_reason is StopReason.MAX_CONTEXT
    request.seal()
    assert [row.sample_id for row in request.rows] == ["0-0"]  # nothing was sampled in the other


def test_what_is_broken_in_an_earlier_row_aborts_the_request() -> None:
    request = played([10, 11])
    MACHINE.fire(Event.OBSERVE, request)
    first = request.sample
    request.fork([1])
    MACHINE.fire(Event.GENERATE, request)
    request.append_response_tokens([12], [-1.0], meta_info=STOP)
    log_probs = first.columns._log_probs
    assert log_probs is not None
    log_probs[0] = float("nan")
    MACHINE.settle(Event.COMPLETE, request, StopReason.STOP)
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.INVARIANT)
    assert request.rows == []


def test_the_outcome_stands_on_all_rows() -> None:
    request = played([10])
    MACHINE.fire(Event.OBSERVE, request)
    request.fork([1])
    MACHINE.fire(Event.GENERATE, request)
    request.append_response_tokens([12], [-1.0], meta_info={"finish_reason": "length"})
    MACHINE.fire(Event.TRUNCATE, request, StopReason.LENGTH)
    request.reward = 0.0
    request.seal()
    assert [(r.status, r.stop_reason) for r in request.rows] == [("truncated", "length")] * 2
    assert [violations(row, at_rest=True) for row in request.rows] == [[], []]


def test_the_rows_of_children_are_handed_on_with_those_of_their_parent() -> None:
    parent = played([10], index=7, group_index=2)
    children = [parent.spawn(f"part {n}") for n in range(3)]
    for child in children:
        child.set_prompt([5])
        MACHINE.fire(Event.GENERATE, child)
        child.append_response_tokens([20], [-1.0], meta_info=STOP)
    MACHINE.fire(Event.COMPLETE, children[0], StopReason.STOP)
    MACHINE.fire(Event.COMPLETE, children[1], StopReason.STOP)
    children[1].reward = 0.25
    MACHINE.fire(Event.ABORT, children[2], StopReason.ENGINE_ERROR)
    rows = Group(2, [finished(parent, reward=1.0)]).samples
    assert [(row.sample_id, row.reward) for row in rows] == [
        ("7-0", 1.0),
        ("7.1-0", 1.0),
        ("7.2-0", 0.25),
    ]
    assert {(row.rollout_id, row.index, row.group_index) for row in rows} == {(7, 7, 2)}
    at_rest = [Sample.from_dict(json.loads(json.dumps(row.to_dict()))) for row in rows]
    assert [row.is_child for row in at_rest] == [False, True, True]
    assert all(row.is_sealed for row in rows)


def test_a_retry_forgets_forks_and_children_but_no_seed_comes_twice() -> None:
    request = played([10])
    MACHINE.fire(Event.OBSERVE, request)
    first = request.spawn("a part").name
    request.fork([1])
    MACHINE.fire(Event.ABORT, request, StopReason.ENGINE_ERROR)
    MACHINE.fire(Event.RETRY, request)
    assert len(request.samples) == 1
    assert request.children == []
    assert (request.num_turns, request.response_length) == (0, 0)
    assert not request.sample.continued_by
    assert request.sample.tokens.tolist() == [1, 2, 3]
    assert request.spawn("a part").name != first

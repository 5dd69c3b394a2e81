"""Random operations, a directed walk, and machines of one's own: what users can run as well."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, rule

from fsm_rollout.limits import Limits, Status
from fsm_rollout.states.machine import Transition
from fsm_rollout.states.table import EDGES, Event
from fsm_rollout.testing.faults import CALLS, COLUMNS, FAULTS, FORMS, Reply, Setup
from fsm_rollout.testing.machines import (
    RolloutStateMachine,
    rollout_machine,
    run_rollout_machine,
    walk_every_edge,
)
from fsm_rollout.testing.operations import Player
from fsm_rollout.testing.twin import edge_name

EXAMPLES = 5 * settings().max_examples


def test_whatever_happens_in_any_order_the_request_agrees_with_its_reference() -> None:
    run_rollout_machine(rollout_machine(), max_examples=EXAMPLES)


def test_a_walk_takes_every_edge_and_meets_every_refusal() -> None:
    heard: list[Transition] = []
    taken = walk_every_edge(heard.append)
    edges = {
        (edge_name(edge.event, source), outcome)
        for edge in EDGES
        for source in edge.sources
        for outcome in ("moved", *(guard.__name__ for guard in edge.guards))
    }
    illegal = {(f"{event} in {status.name}", "illegal") for event in Event for status in Status}
    assert set(taken) == edges | illegal
    assert {(t.event, t.source, t.dest) for t in heard} == {
        (edge.event, source, edge.dest) for edge in EDGES for source in edge.sources
    }


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused_in_each_form_at_once_and_at_the_end_of_a_stream(
    fault: str, log_probs: bool, replay: bool
) -> None:
    coverage: Counter[tuple[str, str]] = Counter()
    player = Player((), coverage)
    for form in FORMS:
        for chunk in (0, 1):
            player.start(Setup(Limits(max_context=64), 3, log_probs, COLUMNS, replay=replay))
            player.fire(Event.GENERATE, None)
            player.sampled(Reply(2, finish="abort", form=form))
            player.sampled(Reply(4, fault=fault, chunk=chunk, form=form))
            if not FAULTS[fault].only_sampled:
                player.forced(Reply(4, fault=fault, chunk=chunk, form=form))
                player.observed(Reply(4, fault=fault, chunk=chunk, form=form))
            player.check()
    assert coverage["append sampled in GENERATING", fault] == 2 * len(FORMS)


@pytest.mark.parametrize("finish", ["stop", "length", "repetition", "abort", None])
def test_only_calls_of_a_turn_that_was_ended_are_answered(finish: str | None) -> None:
    player = Player((), Counter())
    player.start(Setup(Limits(max_context=64), 3, True, COLUMNS))
    player.fire(Event.GENERATE, None)
    player.sampled(Reply(4, finish=finish))
    player.attach(CALLS[1])
    player.fire(Event.OBSERVE, None)  # it and its reference must agree
    assert (player.request.status is Status.TOOL_CALLING) is (finish == "stop")
    player.check()


def test_a_listener_hears_the_transitions_of_a_request_in_order() -> None:
    last: Counter[int] = Counter()
    requests: list[object] = []

    def listener(record: Transition) -> None:
        if not requests or requests[-1] is not record.request:
            requests.append(record.request)
            last[id(record.request)] = 0
        assert record.seq == last[id(record.request)] + 1
        last[id(record.request)] = record.seq

    coverage = run_rollout_machine(rollout_machine(listener), max_examples=10)
    assert len(requests) > 1
    assert any(name == "generate PENDING -> GENERATING" for name, _ in coverage)


def test_the_same_seed_tries_the_same_steps() -> None:
    runs = [run_rollout_machine(rollout_machine(), max_examples=10, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_machine_of_ones_own_finds_what_its_invariant_forbids() -> None:
    class NoTwoTurns(RolloutStateMachine):
        @rule()
        def a_turn(self) -> None:
            self.player.fire(Event.GENERATE, None)

        @invariant()
        def one_turn_at_most(self) -> None:
            assert self.request.num_turns < 2, "a second turn"

    NoTwoTurns.TestCase.settings = settings(
        max_examples=200, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises(AssertionError, match="a second turn"):
        NoTwoTurns.TestCase().runTest()

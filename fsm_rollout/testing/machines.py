"""A Hypothesis state machine made from the transition table, for our tests and for yours.

Every event from every status with any reason, and everything that may happen to the tokens, right
and wrong, against a reference in plain lists. In a test file:

    TestRollout = rollout_machine(my_listener).TestCase

or subclass `RolloutStateMachine` with `@rule`s and `@invariant`s of your own: `self.player` does
things to `self.request` and keeps the reference in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fsm_rollout.limits import StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Listener
from fsm_rollout.states.table import EDGES, Event
from fsm_rollout.testing.faults import Setup, calls, replies, setups
from fsm_rollout.testing.operations import Player
from fsm_rollout.testing.tampering import TAMPERINGS
from fsm_rollout.testing.twin import edge_name
from fsm_rollout.testing.walk import walk_every_edge

__all__ = [
    "EDGE_NAMES",
    "OPERATIONS",
    "RolloutStateMachine",
    "rollout_machine",
    "run_rollout_machine",
    "walk_every_edge",
]

Operation: TypeAlias = Callable[..., None]
EDGE_NAMES = frozenset(edge_name(edge.event, source) for edge in EDGES for source in edge.sources)


def _reasons(event: Event) -> st.SearchStrategy[StopReason | None]:
    dests = {edge.dest for edge in EDGES if edge.event is event}
    fitting: list[StopReason | None] = [r for r in StopReason if r.status in dests]
    return st.sampled_from(fitting or [None]) | st.sampled_from([None, *StopReason])


def _on(event: Event, how: str) -> Operation:
    def operation(player: Player, reason: StopReason | None) -> None:
        getattr(player, how)(event, reason)

    return operation


OPERATIONS: dict[str, tuple[Operation, dict[str, st.SearchStrategy[Any]]]] = {
    f"{how}_{event}": (_on(event, how), {"reason": _reasons(event)})
    for how in ("fire", "settle")
    for event in Event
} | {
    "play": (Player.play, {"reply": replies()}),
    "play_on": (Player.play_on, {"answers": st.lists(replies(), min_size=2, max_size=6)}),
    "sampled": (Player.sampled, {"reply": replies()}),
    "observed": (Player.observed, {"reply": replies(sampled=False)}),
    "forced": (Player.forced, {"reply": replies(sampled=False)}),
    "image": (Player.image, {"length": st.integers(1, 4)}),
    "ask": (Player.ask, {}),
    "answer": (Player.answer, {"which": st.integers(0, 9), "reply": replies()}),
    "attach": (Player.attach, {"calls": calls}),
    "tool_calls": (
        Player.tool_calls,
        {"executed": st.integers(0, 2), "invalid": st.integers(0, 1)},
    ),
    "tools": (Player.tools, {"alive": st.booleans()}),
    "give_up": (Player.give_up, {}),
    "note": (Player.note, {}),
    "truncate": (Player.truncate, {"percent": st.integers(-1, 101)}),
    "mask_out": (
        Player.mask_out,
        {"percent": st.integers(-1, 101), "to_percent": st.none() | st.integers(0, 101)},
    ),
    "reset": (Player.reset, {}),
    "set_prompt": (Player.set_prompt, {"prompt": st.sampled_from([0, 1, 8, 100])}),
    "fork": (Player.fork, {"percent": st.integers(0, 100)}),
    "seal": (Player.seal, {"reward": st.sampled_from([None, 0.0, 1.5])}),
    "at_rest": (Player.at_rest, {}),
    "tamper": (Player.tamper, {"kind": st.sampled_from(sorted(TAMPERINGS))}),
    "renew": (Player.renew, {"setup": setups}),
}
"""Each operation with the strategies of its arguments."""


class RolloutStateMachine(RuleBasedStateMachine):
    """The rules are OPERATIONS. `coverage[edge or operation, fault]` counts them."""

    listeners: ClassVar[tuple[Listener, ...]] = ()
    coverage: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init_subclass__(cls) -> None:
        cls.coverage = Counter()

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.player = Player(self.listeners, self.coverage)
        self.player.start(setup)

    @property
    def request(self) -> Request:
        """The request at hand."""
        return self.player.request

    @invariant()
    def the_request_agrees_with_its_reference(self) -> None:
        self.player.check()

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.at_rest()


def _rule(name: str, operation: Operation, strategies: Any) -> Any:
    def step(self: RolloutStateMachine, **arguments: Any) -> None:
        operation(self.player, **arguments)

    step.__name__ = name
    as_rule: Any = rule(**strategies)
    return as_rule(step)


for _name, (_operation, _strategies) in OPERATIONS.items():
    setattr(RolloutStateMachine, _name, _rule(_name, _operation, _strategies))


def rollout_machine(*listeners: Listener) -> type[RolloutStateMachine]:
    """The machine with listeners of your own. Each subclass counts a coverage of its own."""
    return type("RolloutStateMachine", (RolloutStateMachine,), {"listeners": listeners})


def run_rollout_machine(
    machine: type[RolloutStateMachine] = RolloutStateMachine,
    *,
    max_examples: int = 100,
    stateful_step_count: int = 50,
    seed: int | None = None,
) -> Counter[tuple[str, str]]:
    """Run `machine`; returns what was covered. Raises what the first failing example raised.

    With a `seed` each run tries the same examples.
    """
    factory: Any = lambda: machine()  # noqa: E731
    if seed is not None:
        factory = hypothesis.seed(seed)(factory)
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=stateful_step_count,
            deadline=None,
            database=None,  # its key would be the same for all machines
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    return machine.coverage

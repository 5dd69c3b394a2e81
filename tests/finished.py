"""Finished samples of every kind, each beside what is in it as plain Python values.

Played through the record's own writers: forced tokens, spans taken out of training, empty replies
and observations, forks, replay data, declared columns, turns with and without a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fsm_rollout.columns import Column
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.replay import RoutedExperts, WeightVersion
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event

COLUMNS = (
    Column("teacher_log_probs", fill=-1),
    Column("weight", "float64", per="T", fill=1),
    Column("step", "int64", fill=7),
)
MACHINE = Machine()


@dataclass
class Token:
    """One token and all that was said about it."""

    id: int
    sampled: bool = False
    trained: bool = False
    log_prob: float = 0.0
    turn: int = -1
    """-1: of the prompt"""
    version: WeightVersion = None
    temperature: float | None = None
    kept: tuple[int, ...] = ()
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Plain:
    """What a trainer must find again of one sample."""

    prompt: list[Token]
    response: list[Token]
    turn_rewards: dict[int, float] = field(default_factory=dict)
    declared: tuple[Column, ...] = ()
    top_p: bool = False
    experts: list[int] | None = None
    """of the tokens that were forwarded"""
    reward: float | None = None
    removed: bool = False

    @property
    def tokens(self) -> list[Token]:
        return self.prompt + self.response

    @property
    def trained(self) -> list[int]:
        """The mask that a trainer must have."""
        return [int(token.trained and not self.removed) for token in self.response]


@dataclass(frozen=True)
class Turn:
    """A model turn or an observation to play."""

    kind: str = "model"
    forced: int = 0
    """tokens put in front of those that are sampled"""
    tokens: int = 3
    version: WeightVersion = 1
    temperature: float | None = 1.0
    reward: float | None = None
    fork: bool = False
    """the next turn starts a new sample, whose prompt is all that was so far"""


@dataclass(frozen=True)
class Play:
    """A request to play."""

    prompt: int = 2
    turns: Sequence[Turn] = (Turn(),)
    masked: tuple[int, int] | None = None
    """percents of the response that are taken out of training"""
    declared: tuple[Column, ...] = ()
    top_p: bool = False
    experts: bool = False
    removed: bool = False
    reward: float | None = 1.0
    reason: StopReason = StopReason.ENV_DONE


def play(
    plan: Play, *, index: int = 0, group_index: int = 0, log_probs: bool = True
) -> tuple[list[Sample], list[Plain]]:
    """The sealed samples of the request, and what is in each."""
    ids = count(1000 * (index + 1))
    request = Request(
        index=index,
        group_index=group_index,
        limits=Limits(max_context=4096),
        log_probs=log_probs,
        declared=plan.declared,
    )
    plain = Plain(_tokens(ids, plan.prompt, plan), [], declared=plan.declared)
    plains = [plain]
    request.set_prompt([token.id for token in plain.prompt])
    MACHINE.fire(Event.GENERATE, request)
    for turn in plan.turns:
        _append(request.sample, plain, turn, plan, ids, log_probs=log_probs)
        turns = request.sample.turns
        if turns and turns[-1].kind == "model" and turn.reward is not None:
            turns[-1].reward = plain.turn_rewards[len(turns) - 1] = turn.reward
        if turn.fork and turns:
            prompt = [
                Token(t.id, extra={c.name: c.fill for c in plan.declared}) for t in plain.tokens
            ]
            plain = Plain(prompt, [], declared=plan.declared)
            request.fork([token.id for token in prompt])
            plains.append(plain)
    for sample, plain in zip(request.samples, plains, strict=True):
        if plan.masked is not None:
            start, stop = (len(plain.response) * percent // 100 for percent in plan.masked)
            sample.mask_out(start, stop)
            for token in plain.response[start:stop]:
                token.trained = False
        sample.remove_sample = plan.removed
    if plan.reason.status == "completed":
        MACHINE.fire(Event.COMPLETE, request, plan.reason)
    else:
        MACHINE.fire(Event.TRUNCATE, request, plan.reason)
    request.reward = plan.reward
    request.seal()
    for sample, plain in zip(request.samples, plains, strict=True):
        plain.reward = plan.reward
        plain.removed = plan.removed or not any(token.trained for token in plain.response)
        if sample.rollout_routed_experts is None:
            plain.experts = None
    both = zip(request.samples, plains, strict=True)
    kept = [pair for n, pair in enumerate(both) if pair[0] in request.rows]
    return [sample for sample, _ in kept], [plain for _, plain in kept]


def _tokens(ids: Any, number: int, plan: Play, **values: Any) -> list[Token]:
    extra = {column.name: column.fill for column in plan.declared}
    return [Token(next(ids), extra=dict(extra), **values) for _ in range(number)]


def _append(
    sample: Sample, plain: Plain, turn: Turn, plan: Play, ids: Any, *, log_probs: bool
) -> None:
    if turn.kind == "observation":
        tokens = _tokens(ids, turn.tokens, plan)
        sample.append_response_tokens([token.id for token in tokens], trainable=False)
        plain.response += tokens
        for token in tokens:
            token.turn = len(sample.turns) - 1
        return
    forced = _tokens(ids, turn.forced, plan)
    if forced:
        sample.append_response_tokens([t.id for t in forced], trainable=False, forced=True)
    tokens = _tokens(
        ids,
        turn.tokens,
        plan,
        sampled=True,
        trained=True,
        version=turn.version,
        temperature=turn.temperature,
    )
    for token in tokens:
        token.log_prob = -(token.id % 97 + 1) / 8 if log_probs else 0.0
        token.kept = (token.id + 5, token.id)[token.id % 2 :] if plan.top_p else ()
        token.extra = {c.name: token.id % 11 for c in plan.declared}
    meta: dict[str, Any] = {"finish_reason": "stop", "weight_version": turn.version}
    if turn.temperature is not None:
        meta["temperature"] = turn.temperature
    if plan.top_p:
        meta["sampling_mask"] = [list(token.kept) for token in tokens]
        plain.top_p = True
    if plan.experts:
        held = len(plain.experts or [])
        rows = [t.id % 13 for t in [*plain.tokens, *forced, *tokens][:-1]]
        array = np.array([[[row], [row + 1]] for row in rows[held:]], np.uint8).reshape(-1, 2, 1)
        meta["routed_experts"] = RoutedExperts(array, held)
        plain.experts = rows
    sample.append_response_tokens(
        [token.id for token in tokens],
        [token.log_prob for token in tokens] if log_probs else None,
        meta_info=meta,
        extra={c.name: [t.extra[c.name] for t in tokens] for c in plan.declared},
    )
    plain.response += [*forced, *tokens]
    for token in [*forced, *tokens]:
        token.turn = len(sample.turns) - 1


turns = st.builds(
    Turn,
    kind=st.sampled_from(["model", "model", "observation"]),
    forced=st.sampled_from([0, 0, 0, 2]),
    tokens=st.integers(0, 5),
    version=st.sampled_from([3, 3, "4", None]),
    temperature=st.sampled_from([1.0, 0.5, None]),
    reward=st.sampled_from([None, None, 0.0, 0.25, -1.0]),
    fork=st.sampled_from([False, False, False, True]),
)
plays = st.builds(
    Play,
    prompt=st.integers(0, 5),
    # a COMPLETED request ends with a model turn that is closed
    turns=st.lists(turns, max_size=4).map(lambda turns: [*turns, Turn(tokens=len(turns) % 3)]),
    masked=st.none() | st.sampled_from([(0, 50), (30, 70), (0, 100)]),
    declared=st.sampled_from([(), COLUMNS[:1], COLUMNS]),
    top_p=st.booleans(),
    experts=st.booleans(),
    removed=st.sampled_from([False, False, False, True]),
    reward=st.sampled_from([0.0, 1.0, 0.1, -2.5]),
    reason=st.sampled_from([StopReason.ENV_DONE, StopReason.MAX_TURNS]),
)


@st.composite
def batches(draw: st.DrawFn, *, least: int = 1) -> tuple[list[Sample], list[Plain]]:
    """Samples of several requests in one run, in groups of two, and what is in each."""
    log_probs = draw(st.sampled_from([True, True, True, False]))
    samples, plains = [], []
    for index, plan in enumerate(draw(st.lists(plays, min_size=least, max_size=5))):
        more, facts = play(plan, index=index, group_index=index // 2, log_probs=log_probs)
        samples += more
        plains += facts
    return samples, plains

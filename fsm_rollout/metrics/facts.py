"""Facts: what metrics count of one request, without its tokens, so that it travels.

Where workers in several processes play a batch, they send these, and `metrics_of` counts them all
at once: a mean of the workers' means, or of their percentiles, would be wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fsm_rollout.limits import TERMINAL, Status, StopReason
from fsm_rollout.replay import WeightVersion
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample


class RowFacts(NamedTuple):
    """One row that a trainer is handed."""

    prompt_length: int
    response_length: int
    num_sampled: int
    num_trained: int
    """0 when the row is taken out of training"""
    is_removed: bool
    versions: tuple[WeightVersion, ...]
    """of its runs of tokens"""
    top_p_kept: int | None
    """ids that top-p kept over trained tokens; None: not told, or the row is not trained"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One request that ended or not; its children count with it."""

    group: Any
    """what requests of one prompt have in common: unique over all processes"""
    status: Status
    stop_reason: StopReason | None
    attempts: int
    num_turns: int
    num_tool_calls: int
    num_invalid_calls: int
    num_written_calls: int
    """calls that the policy wrote, in rows or not"""
    num_malformed_calls: int
    """those of them that the parser could not read"""
    reward: float | None
    reward_parts: dict[str, float]
    rows: tuple[RowFacts, ...]
    """none of an ABORTED request"""
    num_sampled: int
    """tokens, those that are in no row included"""
    generate_s: float
    tool_s: float
    counts: dict[str, float]
    """what its tools and its engine counted"""

    @property
    def is_usable(self) -> bool:
        """COMPLETED or TRUNCATED."""
        return self.status in TERMINAL and self.status is not Status.ABORTED


def facts_of(request: Request) -> Facts:
    """The facts of a request. Another `group` or `reward`: `msgspec.structs.replace`."""
    family = list(request.family)
    samples = [sample for one in family for sample in one.samples]
    calls = [call for sample in samples for turn in sample.turns for call in turn.calls]
    counts: Counter[str] = Counter()
    for one in family:
        counts.update(one.metrics)
    return Facts(
        group=request.group_index,
        status=request.status,
        stop_reason=request.stop_reason,
        attempts=request.attempt,
        num_turns=sum(one.num_turns for one in family),
        num_tool_calls=sum(one.num_tool_calls for one in family),
        num_invalid_calls=sum(one.num_invalid_calls for one in family),
        num_written_calls=len(calls),
        num_malformed_calls=sum(call.error is not None for call in calls),
        reward=request.reward,
        reward_parts=dict(request.reward_parts),
        rows=tuple(map(row_facts_of, request.rows)),
        num_sampled=sum(sample.columns.num_sampled for sample in samples),
        generate_s=sum(t.seconds for s in samples for t in s.turns if t.kind == "model"),
        tool_s=sum(sample.non_generation_time for sample in samples),
        counts=dict(counts),
    )


def row_facts_of(sample: Sample) -> RowFacts:
    """The facts of one row."""
    offsets = None if sample.remove_sample else sample.rollout_top_p_token_offsets
    kept = None
    if offsets is not None:
        kept = int(np.diff(offsets)[sample.loss_mask.astype(bool)].sum())
    return RowFacts(
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        num_sampled=sample.columns.num_sampled,
        num_trained=0 if sample.remove_sample else sample.columns.num_trained,
        is_removed=sample.remove_sample,
        versions=tuple(version for version, _ in sample.weight_versions),
        top_p_kept=kept,
    )

"""Export: a finished request as verl's rows: which samples, and what is told beside the tokens.

Every sample is asked for at `handover`. verl's V0 wants one row per input, so what must not be
trained on has a stand-in there: one token with mask 0. Every row has the same `extra_fields`.
"""

from __future__ import annotations

import logging
from typing import Any

from fsm_rollout.adapters.handover import log_left_out, sift
from fsm_rollout.adapters.verl.engine import COUNTERS, steps_of
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event

logger = logging.getLogger(__name__)

NO_REWARD = "its reward is None, which is not 0"
"""of a request whose reward was ours to give"""


def rows_of(request: Request, *, pad_id: int) -> list[Sample]:
    """The samples of a request that verl may have, none of an ABORTED one.

    One that has no response (a timeout before its first token) gets one token with mask 0: verl
    puts the reward of a row on its last response token.
    """
    good, refused = sift(request.rows, rewards=False, log_probs=request.log_probs)
    for refusal in refused:
        not_handed(refusal.sample, refusal.why)
        request.error = request.error or str(refusal)
    return [
        sample if sample.response_length else stand_in(sample, request, pad_id) for sample in good
    ]


def row_of(request: Request, *, pad_id: int) -> tuple[Sample, bool]:
    """The one row that verl's V0 takes of a request, and whether it has an outcome.

    If not, because the request was ABORTED, its sample refused or it has several, it is a stand-in:
    one pad token with mask 0 behind the prompt, or behind another pad token where the prompt never
    fitted.
    """
    rows = rows_of(request, pad_id=pad_id)
    if len(rows) > 1:
        request.error = several(request, len(rows))
        not_handed(request.sample, request.error)
        rows = []
    if rows:
        return rows[0], True
    return stand_in(request.samples[0], request, pad_id), False


def not_handed(sample: Sample, why: str, error: Exception | None = None) -> None:
    """Tell the log that verl does not get a sample."""
    how = "is not handed to verl"
    log_left_out(logger, sample.sample_id, how, why, error, level=logging.ERROR)


def several(request: Request, count: int) -> str:
    """Why V0 does not get a request."""
    return (
        f"request {request.index} has {count} samples, and verl's V0 takes one row per prompt: use "
        "V1 (verl.trainer.main_ppo)"
    )


def stand_in(sample: Sample, request: Request, pad_id: int) -> Sample:
    """A sealed row in the place of `sample` in which nothing is trained."""
    prompt = sample.tokens[: sample.prompt_length] if sample.prompt_length else [pad_id]
    limits = Limits(max_context=len(prompt) + 1)
    other = Request(limits=limits, log_probs=request.log_probs)
    other.set_prompt(prompt)
    other.append_response_tokens([pad_id], trainable=False)
    Machine().fire(Event.TRUNCATE, other, StopReason.MAX_CONTEXT)
    other.seal()
    other.sample.sample_id = sample.sample_id
    return other.sample


def extra_fields(
    request: Request, sample: Sample, *, drafts: bool = False, has_outcome: bool = True
) -> dict[str, Any]:
    """What verl keeps beside the tokens of a row, and shows its reward functions. Stable keys.

    `drafts`: with what verl's metrics of drafted tokens are made of, 0 where nothing was told.
    """
    turns = [turn for turn in sample.turns if turn.kind == "model"]
    steps = steps_of(sample.weight_versions) or (None, None)
    return {
        "sample_id": sample.sample_id,
        "status": str(request.status),
        "stop_reason": str(request.stop_reason),
        "error": request.error,
        "is_stand_in": not has_outcome,
        "attempts": request.attempt,
        "turn_scores": [turn.reward for turn in turns],
        "tool_rewards": [turn.reward for turn in turns if turn.reward is not None],
        "reward_parts": dict(request.reward_parts),
        "turn_spans": [(turn.start, turn.stop) for turn in turns],
        "num_tool_calls": request.num_tool_calls,
        # V0 logs a column of this name
        "tool_call_counts": sum(one.num_tool_calls for one in request.family),
        "num_invalid_calls": request.num_invalid_calls,
        "tool_metrics": dict(request.metrics),
        "min_global_steps": steps[0],
        "max_global_steps": steps[1],
        **{
            theirs: int(request.metrics.get(f"engine/{ours}", 0))
            for theirs, ours in COUNTERS.items()
            if drafts and theirs.startswith("spec_")
        },
    }


def metrics_of(request: Request) -> dict[str, Any]:
    """verl's AgentLoopMetrics: seconds, and how often vLLM preempted (-1: not told)."""
    turns = [turn for sample in request.samples for turn in sample.turns]
    return {
        "generate_sequences": sum(turn.seconds for turn in turns if turn.kind == "model"),
        "tool_calls": sum(sample.non_generation_time for sample in request.samples),
        "compute_score": 0.0,
        "num_preempted": int(request.metrics.get("engine/num_preempted", -1)),
    }

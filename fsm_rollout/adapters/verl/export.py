"""Export: a finished request as verl's rows: which samples, and what is told beside the tokens.

Every sample is asked for at `handover`. verl's V0 wants one row per input, so what must not be
trained on has a stand-in there: one token with mask 0. Every row has the same `extra_fields`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.verl.engine import steps_of
from fsm_rollout.arrays import Ints
from fsm_rollout.errors import HandOverError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event

logger = logging.getLogger(__name__)


def rows_of(request: Request, *, pad_id: int) -> list[Sample]:
    """The samples of a request that verl may train on, none of an ABORTED one.

    One that has no response (a timeout before its first token) gets one token with mask 0: verl
    reads the reward off the last token of a row.
    """
    good, refused = sift(request.rows, rewards=False, log_probs=request.log_probs)
    for refusal in refused:
        logger.error("not handed to verl: %s", refusal)
        request.error = request.error or str(refusal)
    return [
        sample
        if sample.response_length
        else stand_in(sample.tokens, pad_id, log_probs=request.log_probs, reward=sample.reward)
        for sample in good
    ]


def row_of(request: Request, *, pad_id: int, reward: float | None = None) -> tuple[Sample, bool]:
    """The one row that verl's V0 takes of a request, and whether it is the real one.

    Else it is a stand-in with `reward`, and the request's own prompt if it fits verl's tensors.
    Raises HandOverError for a request of several samples: V0 would lose all but one.
    """
    rows = rows_of(request, pad_id=pad_id)
    if len(rows) > 1:
        raise HandOverError(
            f"request {request.index} has {len(rows)} samples, and verl's V0 takes one row per "
            "prompt: use V1 (main_ppo.py with FsmAgentLoopManagerTQ, or verl's own manager)"
        )
    if rows:
        return rows[0], True
    sample = request.samples[0]
    prompt = sample.tokens[: sample.prompt_length]
    return stand_in(prompt, pad_id, log_probs=request.log_probs, reward=reward), False


def stand_in(prompt: Ints, pad_id: int, *, log_probs: bool, reward: float | None) -> Sample:
    """A sealed row of `prompt` and one pad token that is not trained."""
    ids = prompt if len(prompt) else [pad_id]
    request = Request(limits=Limits(max_context=len(ids) + 1), log_probs=log_probs)
    request.set_prompt(ids)
    request.append_response_tokens([pad_id], trainable=False)
    Machine().fire(Event.TRUNCATE, request, StopReason.MAX_CONTEXT)
    request.reward = reward
    request.seal()
    return request.sample


def extra_fields(request: Request, sample: Sample, *, sample_id: str) -> dict[str, Any]:
    """What verl keeps beside the tokens of a row, and shows its reward functions. Stable keys."""
    models = [turn for turn in sample.turns if turn.kind == "model"]
    steps = steps_of(sample.weight_versions) or (None, None)
    return {
        "sample_id": sample_id,
        "status": str(request.status),
        "stop_reason": str(request.stop_reason),
        "error": request.error,
        "attempts": request.attempt,
        "turn_scores": [turn.reward for turn in models],
        "tool_rewards": [turn.reward for turn in models if turn.reward is not None],
        "reward_parts": dict(request.reward_parts),
        "turn_spans": [(turn.start, turn.stop) for turn in models],
        "num_tool_calls": request.num_tool_calls,
        "num_invalid_calls": request.num_invalid_calls,
        "tool_metrics": dict(request.metrics),
        "min_global_steps": steps[0],
        "max_global_steps": steps[1],
    }


def metrics_of(request: Request, samples: Sequence[Sample]) -> dict[str, Any]:
    """verl's AgentLoopMetrics: seconds, and how often vLLM preempted (-1: not told)."""
    turns = [turn for sample in samples for turn in sample.turns]
    return {
        "generate_sequences": sum(turn.seconds for turn in turns if turn.kind == "model"),
        "tool_calls": sum(sample.non_generation_time for sample in samples),
        "num_preempted": int(request.metrics.get("engine/num_preempted", -1)),
    }


def is_usable(request: Request) -> bool:
    """It ended as the policy, its tools or its budgets would have it."""
    return request.status is not Status.ABORTED

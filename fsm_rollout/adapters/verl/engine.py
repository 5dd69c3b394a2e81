"""VerlEngine: verl's own LLM client (`LLMServerClient.generate`) as an Engine.

verl's client routes, keeps sessions on their server and knows the weights; what it returns is
checked here like any other engine's reply. Needs nothing of verl but an object with that method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, LogProbKind, SamplingParams, checked
from fsm_rollout.errors import EngineError, InvariantError
from fsm_rollout.limits import StopReason
from fsm_rollout.replay import RoutedExperts, WeightVersion, expert_rows, routed_experts_of

PRIORITY: ContextVar[int] = ContextVar("priority", default=0)
"""of the trajectory that this task plays, for vLLM's priority scheduling; verl counts it up"""

_FINISH = {"aborted": "abort", "abort": "abort", "stop": "stop", "length": "length"}
COUNTERS = {
    "num_cached_tokens": "cached_tokens",
    "spec_num_draft_tokens": "spec_draft_tokens",
    "spec_num_accepted_tokens": "spec_accepted_tokens",
    "spec_num_verify_steps": "spec_verify_steps",
}
"""verl's names in `TokenOutput.extra_fields`, and ours"""


class VerlEngine:
    """Asks `client.generate(request_id, *, prompt_ids, sampling_params)` for a `TokenOutput`.

    `log_prob_kind` is what the servers report: verl starts vLLM with `processed_logprobs`, which
    are log_softmax(logits / temperature) only without top-p and top-k.
    """

    def __init__(self, client: Any, *, log_prob_kind: LogProbKind = "scaled") -> None:
        self._client = client
        self._log_prob_kind: LogProbKind = log_prob_kind

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        """Up to `max_new_tokens` tokens after `columns`, checked. Raises EngineError."""
        if media:
            raise EngineError(
                "VerlEngine sends no media: play text only",
                reason=StopReason.ENGINE_ERROR,
                final=True,
            )
        priority = PRIORITY.get()
        output = await self._client.generate(
            session_id,  # keeps a trajectory on its server; verl gives each turn an id of its own
            prompt_ids=columns.tokens.tolist(),
            sampling_params={
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "repetition_penalty": 1.0,
                "logprobs": columns.has_log_probs,
                # verl's default takes the prompt for as long as it may be: short ones overshoot
                "max_tokens": max_new_tokens,
                "stop_token_ids": list(params.stop_token_ids),
            },
            **({"priority": priority} if priority else {}),
        )
        return self._generation(output, columns, max_new_tokens, params)

    async def abort(self, request_id: str) -> None:
        """Nothing: verl's client can't abort one request; its servers abort all at once."""

    async def close(self) -> None:
        """Nothing: the client is the trainer's."""

    def _generation(
        self, output: Any, columns: Columns, max_new_tokens: int, params: SamplingParams
    ) -> Generation:
        ids = list(output.token_ids)
        finish = _finish(output.stop_reason, ids, max_new_tokens, params.stop_token_ids)
        if not ids and finish != "abort":
            raise _bad(f"verl's server returned no tokens and stop_reason {output.stop_reason!r}")
        log_probs = output.log_probs if columns.has_log_probs else None
        extra = output.extra_fields or {}
        return checked(
            ids,
            log_probs if ids else (),
            finish,
            max_new_tokens=max_new_tokens,
            log_probs_required=columns.has_log_probs,
            weight_versions=[(version_of(extra), len(ids))] if ids else (),
            prompt_tokens=columns.length,
            log_prob_kind=self._log_prob_kind,
            engine_id="verl",
            routed_experts=_experts(output.routed_experts, columns, len(ids)) if ids else None,
            counters=_counters(output.num_preempted, extra),
        )


def _finish(
    reason: str | None, ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int]
) -> str:
    """verl's vLLM says "completed" of a stop and of a length: the last id and the count decide."""
    if reason not in (None, "completed"):
        return _FINISH.get(str(reason), str(reason))
    if ids and ids[-1] in stop_token_ids:
        return "stop"
    return "length" if len(ids) >= max_new_tokens else "stop"


def version_of(extra: Mapping[str, Any]) -> WeightVersion:
    """The weights that sampled a reply: a step; "3..5" when verl knows only the first and last."""
    step = extra.get("global_steps")
    first, last = extra.get("min_global_steps", step), extra.get("max_global_steps", step)
    if first is None or last is None or first == last:
        known: WeightVersion = last if first is None else first
        return known
    return f"{first}..{last}"


def steps_of(versions: Sequence[tuple[WeightVersion, int]]) -> tuple[int, int] | None:
    """The first and last step among versions that `version_of` made; None: none is known."""
    steps: list[int] = []
    for version, _ in versions:
        try:
            steps += [int(step) for step in str(version).split("..")] if version is not None else []
        except ValueError:  # a name, of a client that is not verl's
            return None
    return (min(steps), max(steps)) if steps else None


def _experts(value: Any, columns: Columns, count: int) -> RoutedExperts | None:
    """Those of tokens that have none yet; verl returns rows of the whole sequence each time."""
    if value is None:
        return None
    total = columns.length + count
    start = 0 if columns.replay is None else columns.replay.num_rows
    try:
        rows = expert_rows(np.asarray(value))
        return routed_experts_of({"routed_experts": rows[: total - 1]}, total, start=start)
    except InvariantError as error:
        raise _bad(f"verl's routed_experts: {error}") from error


def _counters(num_preempted: int | None, extra: Mapping[str, Any]) -> dict[str, int]:
    counters = {ours: extra.get(name) for name, ours in COUNTERS.items()}
    counters["num_preempted"] = num_preempted
    return {name: n for name, n in counters.items() if isinstance(n, int) and n >= 0}


def _bad(message: str) -> EngineError:
    return EngineError(message, reason=StopReason.BAD_REPLY)

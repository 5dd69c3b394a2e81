"""The trainer's own Sample, written once, when a request is over. player.py and step.py write it.

slime's and miles's differ, so fields are known by name: a sample gets those that it has. What
always holds of a sample that was written: tokens, mask, log-probs and replay data have the lengths
that the trainer slices by, and something to slice: slime's `tokens[-response_length:]` takes the
whole sequence when there is no response, so an empty one has one token that is not trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from fsm_rollout.adapters.slime.config import KEY
from fsm_rollout.arrays import FLOAT32_MAX, LOG_PROB_CEILING, LOG_PROB_FLOOR
from fsm_rollout.limits import Status
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample

_GENERATED: Mapping[str, Callable[[], Any]] = {
    "tokens": list,
    "response": str,
    "response_length": int,
    "reward": lambda: None,
    "loss_mask": lambda: None,
    "weight_versions": list,
    "rollout_log_probs": lambda: None,
    "rollout_top_p_token_ids": lambda: None,
    "rollout_top_p_token_offsets": lambda: None,
    "rollout_routed_experts": lambda: None,
    "rollout_indexer_topk": lambda: None,
    "teacher_log_probs": lambda: None,
    "opd_reverse_kl": lambda: None,
    "remove_sample": bool,
    "non_generation_time": float,
}
"""what a rollout writes, and what stands there before it"""


def session_of(sample: Any) -> str:
    """The key by which a router keeps a sample on one worker; given to a sample without one."""
    name = "session_id" if hasattr(sample, "session_id") else "routing_key"
    session = getattr(sample, name, None) or str(uuid4())
    setattr(sample, name, session)
    return str(session)


def clear(sample: Any) -> None:
    """Empty every generated field: what an earlier try left is no part of the next one."""
    for name, empty in _GENERATED.items():
        if hasattr(sample, name):
            setattr(sample, name, empty())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    set_status(sample, "pending")


def set_status(sample: Any, value: str) -> None:
    """The trainer's own word for a status."""
    sample.status = type(sample).Status(value)


def is_status(sample: Any, *values: str) -> bool:
    """A sample stands so; some write the word in place of the trainer's enum."""
    return getattr(sample.status, "value", sample.status) in values


def sibling_of(sample: Any) -> Any:
    """One more sample of the same rollout; nothing generated is shared."""
    other = copy.copy(sample)
    clear(other)
    return other


def write(sample: Any, row: Sample, request: Request, args: Any, *, reward: Any) -> None:
    """All that `row` of `request` holds, into the trainer's `sample`.

    `reward`: as the trainer wants it; None leaves it to the trainer's reward model.
    """
    clear(sample)
    tokens, prompt = row.tokens.tolist(), row.prompt_length
    log_probs = row.rollout_log_probs
    sample.tokens = tokens[:prompt]
    if row.response_length:
        _append(sample, row, tokens[prompt:], log_probs, args)
    elif row.status is not Status.ABORTED:
        _stand_in(sample, args)
    sample.weight_versions = [
        str(version)
        for turn in row.turns
        for version, count in turn.weight_versions
        if count and version is not None
    ]
    sample.non_generation_time = row.non_generation_time
    sample.remove_sample = row.remove_sample
    sample.reward = reward
    set_status(sample, row.status.value)
    _describe(sample, request, [t.reward for t in row.turns if t.reward is not None])
    _count(sample, row, request.metrics)


def fail(
    sample: Any,
    why: str,
    args: Any,
    request: Request | None = None,
    *,
    evaluation: bool = False,
) -> None:
    """FAILED, for good: two tokens that are not trained, and the reason in the metadata.

    Its reward is 0.0, since slime's metrics take no None; `post_process_rewards` leaves it out.
    """
    category = getattr(args, "log_reward_category", None)  # a key that slime's metrics look up
    clear(sample)
    _stand_in(sample, args)
    sample.remove_sample = True
    parts = {category: "failed"} if category else {}
    sample.reward = keyed(args, 0.0, parts, evaluation=evaluation)
    set_status(sample, "failed")
    _describe(sample, request)
    sample.metadata[KEY]["error"] = why


def keyed(args: Any, value: float, parts: Mapping[str, Any], *, evaluation: bool) -> Any:
    """The number, or with --reward-key the mapping that slime looks it up in.

    Of an evaluation slime's metrics want the one key, and its result --eval-reward-key.
    """
    names = ("reward_key", "eval_reward_key") if evaluation else ("reward_key",)
    keys = [key for name in names if (key := getattr(args, name, None))]
    return {**parts, **dict.fromkeys(keys, value)} if keys else value


def fault_of(sample: Any, args: Any) -> str:
    """Why a trainer must not have a sample, from whatever function it came; '': it may.

    What slime itself doesn't look at, or only to stop the whole step.
    """
    if is_status(sample, "aborted", "pending"):
        return f"it is {getattr(sample.status, 'value', sample.status)}"
    length, total = sample.response_length, len(sample.tokens)
    if not 0 < length <= total:
        return f"response_length {length} of {total} tokens"
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name, None)
        if values is not None and len(values) != length:
            return f"{len(values)} {name} for response_length {length} of {total} tokens"
    return _numbers_fault(sample) or _replay_fault(sample, args)


def _numbers_fault(sample: Any) -> str:
    """slime multiplies by the mask and takes the exponential of log-probs, whatever they are."""
    given = getattr(sample, "loss_mask", None), getattr(sample, "rollout_log_probs", None)
    try:
        mask, values = (None if g is None else np.asarray(g, np.float64) for g in given)
    except (TypeError, ValueError) as error:
        return f"loss_mask or rollout_log_probs are no numbers: {error}"
    if mask is not None and (wrong := mask[~((mask >= 0) & (mask <= 1))]).size:
        return f"a loss_mask is {wrong[0]:g}: not trained is 0, trained 1"
    if values is None:
        return ""
    if not np.isfinite(values).all():
        return "rollout_log_probs are not all finite"
    if (clamped := values < LOG_PROB_FLOOR).any():
        return f"a rollout_log_prob is {values[clamped][0]:g}: a clamp, not a probability"
    trained = values if mask is None else values[mask > 0]
    if (above := trained > LOG_PROB_CEILING).any():
        return f"a rollout_log_prob is {trained[above][0]:g}: no probability is above 1"
    return ""


def _replay_fault(sample: Any, args: Any) -> str:
    """slime replays what its flags say, of every sample."""
    length, total = sample.response_length, len(sample.tokens)
    ids, offsets, experts = (
        getattr(sample, f"rollout_{name}", None)
        for name in ("top_p_token_ids", "top_p_token_offsets", "routed_experts")
    )
    if offsets is not None and len(offsets) != length + 1:
        return f"{len(offsets)} top-p offsets for response_length {length}"
    if hasattr(sample, "rollout_top_p_token_ids") and getattr(args, "rollout_top_p", 1.0) != 1.0:
        if ids is None or offsets is None:
            return "it has no top-p ids, and --rollout-top-p is not 1"
        if int(offsets[-1]) != len(ids):
            return f"its top-p offsets end at {int(offsets[-1])} of {len(ids)} ids"
    if experts is None:
        if getattr(args, "use_rollout_routing_replay", False):
            return "it has no routed experts, and --use-rollout-routing-replay is set"
    elif len(experts) != total - 1:
        return f"{len(experts)} rows of routed experts for {total} tokens"
    return ""


def reward_value(sample: Any, args: Any) -> float | None:
    """The float32 that is trained on, of a reward that may be a mapping; None: there is none."""
    key = getattr(args, "reward_key", None)
    reward = sample.reward.get(key) if key and isinstance(sample.reward, Mapping) else sample.reward
    try:
        value = None if reward is None else float(reward)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if value is not None and abs(value) <= FLOAT32_MAX else None


# -- parts -----------------------------------------------------------------------------------------


def _append(sample: Any, row: Sample, response: list[int], log_probs: Any, args: Any) -> None:
    """The response, at once: by the sample's own method where it has one, which checks it."""
    values = None if log_probs is None else log_probs.tolist()
    ids, offsets = row.rollout_top_p_token_ids, row.rollout_top_p_token_offsets
    experts = row.rollout_routed_experts
    if experts is not None:
        experts = _padded(experts, len(row.tokens) - 1)
    if hasattr(sample, "append_response_tokens"):
        meta = {
            "top_p_token_ids": ids,
            "top_p_token_offsets": offsets,
            "routed_experts": experts,
        }
        sample.append_response_tokens(
            args,
            tokens=response,
            log_probs=values,
            trainable=True,
            meta_info={name: value for name, value in meta.items() if value is not None},
            text=row.response or "",
            update_terminal_info=False,
        )
    else:
        sample.tokens = sample.tokens + response
        sample.response_length = len(response)
        sample.response = row.response or ""
        sample.rollout_log_probs = values
        if experts is not None:
            sample.rollout_routed_experts = experts
    sample.loss_mask = row.loss_mask.tolist()


def _stand_in(sample: Any, args: Any) -> None:
    """One response token that is not trained, for a trainer that cannot slice an empty response."""
    sample.tokens = [*(sample.tokens or [0]), (sample.tokens or [0])[-1]]
    sample.response_length, sample.response = 1, ""
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    if getattr(args, "rollout_top_p", 1.0) != 1.0 and hasattr(sample, "rollout_top_p_token_ids"):
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [], [0, 0]
    if getattr(args, "use_rollout_routing_replay", False):
        none = np.empty((0, args.num_layers, args.moe_router_topk), np.int32)
        sample.rollout_routed_experts = _padded(none, len(sample.tokens) - 1)


def _padded(experts: npt.NDArray[Any], rows: int) -> npt.NDArray[np.int32]:
    """int32 [rows, layers, k]; tokens that were never forwarded, at the end, get k experts."""
    padded = np.empty((rows, *experts.shape[1:]), np.int32)
    padded[:] = np.arange(experts.shape[2])
    padded[: len(experts)] = experts
    return padded


def _describe(sample: Any, request: Request | None, turn_rewards: Sequence[float] = ()) -> None:
    """What the trainer's Sample has no field for, in its metadata."""
    told: dict[str, Any] = {"error": ""}
    if request is not None:
        told = {
            "error": request.error,
            "stop_reason": None if request.stop_reason is None else request.stop_reason.value,
            "attempt": request.attempt,
            "num_turns": request.num_turns,
            "num_tool_calls": request.num_tool_calls,
            "num_invalid_calls": request.num_invalid_calls,
            "reward_parts": dict(request.reward_parts),
            "turn_rewards": list(turn_rewards),
            "metrics": dict(request.metrics),
        }
    known = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    sample.metadata = {**known, KEY: told}


def _count(sample: Any, row: Sample, metrics: Mapping[str, float]) -> None:
    """The counters from which slime makes its own metrics."""
    starts = [row.prompt_length + turn.start for turn in row.turns if turn.kind == "model"]
    counts = {
        "prefix_cache_info": {
            "cached_tokens": metrics.get("engine/cached_tokens", 0),
            "total_prompt_tokens": sum(starts),
        },
        "spec_info": {
            "spec_accept_token_num": metrics.get("engine/spec_accepted_tokens", 0),
            "spec_draft_token_num": metrics.get("engine/spec_draft_tokens", 0),
            "spec_verify_ct": metrics.get("engine/spec_verify_count", 0),
            "completion_token_num": int(row.sampled.sum()),
        },
    }
    for name, values in counts.items():
        info = getattr(sample, name, None)
        for counter, value in values.items():
            if hasattr(info, counter):
                setattr(info, counter, int(value))

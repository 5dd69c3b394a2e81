"""Settings: what verl's config and the YAML entry say, as budgets, sampling and parts of a Rollout.

verl's own limits hold unless the entry's `limits` say otherwise. Imports no verl: a config is read
by attribute and key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from fsm_rollout.config import check_keys
from fsm_rollout.dataset import PromptRow, present
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.engines.probe import fits
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The YAML entry, beside `name` and `_target_`."""

    tools: list[str] = []
    """registered names or `module:Name`, beside the tools that verl loads itself"""
    parser: str | None = None
    """default: verl's `multi_turn.format`"""
    chat_template: str | None = None
    """replaces the tokenizer's: its text, or `hermes`"""
    limits: dict[str, Any] = {}
    """fields of Limits, in place of what verl's config says"""
    agent: str | None = None
    """`module:function`, a loop of yours; see `fsm_rollout.agent`"""
    reward: str | None = None
    """`module:function`; default: the sum of what the tools say, if one says something, else verl's
    reward loop decides; `verl`: it decides in any case"""
    max_abort_rate: float = 0.2
    """of 64 requests of a worker, for one reason: above it that worker logs an error"""
    log_prob_kind: LogProbKind | None = None
    """what the servers report; default: `scaled` of SGLang, of vLLM what `logprobs_mode` says"""


def settings_of(entry: Mapping[str, Any]) -> LoopSettings:
    """The entry, checked. ConfigError names the key and suggests the one that was meant."""
    values = {key: _plain(value) for key, value in entry.items() if key not in ("name", "_target_")}
    try:
        check_keys(values, LoopSettings, "")
        return msgspec.convert(values, LoopSettings)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"agent loop {entry.get('name')!r}: {error}") from error


def limits_of(rollout: Any, given: Mapping[str, Any]) -> Limits:
    """The budgets of `actor_rollout_ref.rollout`, with `given` in their place."""
    turns = rollout.multi_turn
    prompt, response = rollout.prompt_length, rollout.response_length
    bounds = [turns.max_assistant_turns]
    if turns.max_user_turns:
        bounds.append(turns.max_user_turns + 1)  # verl counts tool turns, and lets the model answer
    max_turns = min([bound for bound in bounds if bound], default=response)
    found = {
        "max_context": rollout.max_model_len or prompt + response,
        "max_prompt": prompt,
        "max_response": response,
        "max_new_tokens": response,
        "max_turns": max_turns,
        "max_tool_calls": max_turns * turns.max_parallel_calls,
        "max_parallel_calls": turns.max_parallel_calls,
        "max_tool_response_chars": turns.max_tool_response_length,
    }
    try:
        limits = msgspec.convert({**found, **given}, Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"limits of the agent loop: {error}") from error
    for name, width in (("max_prompt", prompt), ("max_response", response)):
        if (limit := getattr(limits, name)) is None or limit > width:
            raise ConfigError(
                f"limits of the agent loop: {name} {limit} is wider than verl's tensors ({width}); "
                f"raise rollout.{name.removeprefix('max_')}_length"
            )
    return limits


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """verl's `sampling_params`. ConfigError for what would change the log-probs unseen."""
    known = ("temperature", "top_p", "top_k", "logprobs", "repetition_penalty")
    strange = [f"{name}={value!r}" for name, value in params.items() if name not in known]
    if params.get("repetition_penalty", 1.0) != 1.0:
        strange.append(f"repetition_penalty={params['repetition_penalty']!r}")
    if strange:
        raise ConfigError(
            f"sampling parameters that fsm_rollout does not pass on: {', '.join(strange)}; "
            "log-probs under them would not be those of the policy"
        )
    return SamplingParams(
        temperature=float(params["temperature"]),
        top_p=float(params["top_p"]),
        top_k=max(int(params["top_k"]), 0),
    )


def log_prob_kind_of(rollout: Any) -> LogProbKind:
    """What the servers of `rollout.name` report."""
    if rollout.name != "vllm":
        return "scaled"
    kind = str(rollout.logprobs_mode or "raw_logprobs").removesuffix("_logprobs")
    if kind not in ("raw", "processed"):
        raise ConfigError(f"rollout.logprobs_mode {rollout.logprobs_mode!r} gives no log-probs")
    return cast("LogProbKind", kind)


def check_training(rollout: Any, kind: LogProbKind) -> None:
    """Log-probs of this kind are log_softmax(logits / temperature) as training samples."""
    params = SamplingParams(
        temperature=float(rollout.temperature),
        top_p=float(rollout.top_p),
        top_k=max(int(rollout.top_k), 0),
    )
    if rollout.calculate_log_probs and not fits(kind, params):
        raise ConfigError(
            f"rollout samples with temperature {params.temperature:g}, top_p {params.top_p:g}, "
            f"top_k {params.top_k}, and its log-probs are {kind} ones: not log_softmax(logits / "
            "temperature), which the trainer recomputes. Set top_p=1 and top_k=-1 with "
            "logprobs_mode=processed_logprobs, or calculate_log_probs=False"
        )


def prompt_row_of(columns: Mapping[str, Any], tools: Sequence[str]) -> PromptRow:
    """The row that one sample of verl's batch is.

    `raw_prompt` is the prompt, `reward_model.ground_truth` the label, everything else metadata.
    In a parquet file all rows have the same keys, and those that a row was written without read as
    None: they are left out of `tools_kwargs`. So are tools that `tool_selection` left out.
    """
    judged = columns.get("reward_model")
    selected = selection_of(columns)
    try:
        prompt = [dict(message) for message in columns["raw_prompt"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the column raw_prompt must hold a list of messages: {error!r}; set "
            "data.return_raw_chat=True"
        ) from error
    return PromptRow(
        id=str(columns.get("index", "")),
        prompt=prompt,
        label=judged.get("ground_truth") if isinstance(judged, Mapping) else None,
        metadata={name: value for name, value in columns.items() if name not in _NO_METADATA},
        tools_kwargs={
            name: hooks
            for name, hooks in present(_mapping(columns, "tools_kwargs")).items()
            if name in tools or not selected
        },
        where=f"row {columns.get('index', '?')}",
    )


def selection_of(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the tools that a row has; none: all."""
    selection = _mapping(columns, "extra_info").get("tool_selection")
    try:
        names = [] if selection is None else list(selection)
    except TypeError:
        names = None
    if names is None or isinstance(selection, str):
        raise ConfigError(
            f"extra_info.tool_selection must be a list of names of tools, got {selection!r}"
        )
    return tuple(map(str, names))


def _mapping(columns: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = columns.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"the column {name} must hold an object, got {type(value).__name__}")
    return value


_NO_METADATA = ("raw_prompt", "tools_kwargs", "agent_name", "priority")


def _plain(value: Any) -> Any:
    """Without OmegaConf's containers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value

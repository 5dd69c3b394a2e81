"""What slime's flags and the YAML say: tools and parser, budgets, sampling.

slime merges the YAML of --custom-config-path into its args; ours is the mapping `fsm_rollout` in
it. player.py asks. What cannot be honoured is a ConfigError here, before anything is sampled.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from fsm_rollout.config import check_keys
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits

KEY = "fsm_rollout"
"""of the YAML, and in the metadata of the samples that come back"""
TURN_TIMEOUT_S, REQUEST_TIMEOUT_S = 3_600.0, 14_400.0
"""a long turn on a full server; slime itself waits for ever"""
LONG_PROMPT = 32_768


class SlimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mapping `fsm_rollout` of the YAML that --custom-config-path names."""

    tools: list[str] = []
    """registered names, or `module:Name` of your own"""
    parser: str = "hermes"
    """the wire format of tool calls"""
    chat_template: str | None = None
    """replaces the tokenizer's own: a Jinja file, relative to the YAML, or `hermes`"""
    reward: str | None = None
    """`module:name` of a function of a request, or of `Rewards`; default: slime's reward model if
    its flags name one, else the sum of what the tools say"""
    agent: str | None = None
    """`module:function`, `async def agent(ctx)`: a loop of your own in place of the built-in one"""
    limits: dict[str, Any] = {}
    """budgets; those given here stand above what slime's flags say"""
    max_abort_rate: float = 0.2
    """of a step, for one reason: above it an error is logged, and `rollout/abort/alarm` counts"""
    stream: bool = False
    """tokens come as they are sampled"""
    log_prob_kind: LogProbKind | None = "scaled"
    """what the servers report; null: they are asked before the first sample"""


class Sampling(msgspec.Struct, frozen=True):
    """What one call of `generate` asks for."""

    params: SamplingParams
    stop: tuple[str, ...]
    max_new_tokens: int | None


def config_of(args: Any) -> SlimeConfig:
    """The mapping `fsm_rollout` of `args`, checked. ConfigError names the key that was meant."""
    values = getattr(args, KEY, None)
    if values is None:
        if near := difflib.get_close_matches(KEY, set(vars(args)) - {KEY}, 1, 0.8):
            raise ConfigError(f"unknown key {near[0]!r}; did you mean {KEY!r}?")
        return SlimeConfig()
    if not isinstance(values, Mapping):
        fields = ", ".join(SlimeConfig.__struct_fields__)
        raise ConfigError(f"{KEY}: expected a mapping of {fields}, got {type(values).__name__}")
    check_keys(values, SlimeConfig, f"{KEY}.")
    limits = values.get("limits")
    if isinstance(limits, Mapping):
        check_keys(limits, Limits, f"{KEY}.limits.")
    try:
        return msgspec.convert(values, SlimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: {error}") from error


def limits_of(
    args: Any, config: SlimeConfig, max_new_tokens: int | None, *, evaluation: bool
) -> Limits:
    """The budgets of a sample: the YAML's, else slime's.

    max_context: --rollout-max-context-len (--eval-max-context-len), else, to be trained, what the
    trainer's GPUs hold of one sample, context_parallel_size x max_tokens_per_gpu. max_response:
    --rollout-max-response-len; in an evaluation as long as one turn may be. max_new_tokens, of one
    turn: what the call samples at most.
    """
    context = getattr(args, "rollout_max_context_len", None)
    response = getattr(args, "rollout_max_response_len", None)
    if evaluation:
        context = getattr(args, "eval_max_context_len", None) or context
        response = max_new_tokens or response
    elif context is None and (per_gpu := getattr(args, "max_tokens_per_gpu", None)):
        context = per_gpu * (getattr(args, "context_parallel_size", None) or 1)
    if context is None and response is not None:  # slime sets no limit: the server does
        context = (getattr(args, "rollout_max_prompt_len", None) or LONG_PROMPT) + response
    found = {"max_context": context, "max_response": response, "max_new_tokens": max_new_tokens}
    values: dict[str, Any] = {
        "turn_timeout_s": TURN_TIMEOUT_S,
        "request_timeout_s": REQUEST_TIMEOUT_S,
        **{name: value for name, value in found.items() if value is not None},
        **config.limits,
    }
    if max_new_tokens is not None and isinstance(values["max_new_tokens"], int):
        values["max_new_tokens"] = min(values["max_new_tokens"], max_new_tokens)
    try:
        return msgspec.convert(values, Limits)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{KEY}.limits: {error}") from error


_OURS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "sampling_seed"})
"""text is decoded here, and each turn has a seed of its own"""
_NEUTRAL: Mapping[str, Any] = {
    "custom_params": {"return_top_p_token_ids": True},
    "frequency_penalty": 0,
    "ignore_eos": False,
    "min_new_tokens": 0,
    "min_p": 0,
    "n": 1,
    "no_stop_trim": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """slime's `sampling_params` in our words; the mapping is not changed.

    ConfigError names a parameter that is not sent: it would change what is sampled, and not the
    log-probs that the trainer recomputes.
    """
    rest = {name: value for name, value in given.items() if value is not None}
    stop = rest.pop("stop", ())
    max_new_tokens = rest.pop("max_new_tokens", None)
    values = {
        "temperature": rest.pop("temperature", 1.0),
        "top_p": rest.pop("top_p", 1.0),
        "top_k": max(rest.pop("top_k", 0), 0),  # -1: off
        "stop_token_ids": rest.pop("stop_token_ids", ()),
    }
    for name, value in rest.items():
        if name not in _OURS and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise ConfigError(
                f"sampling_params[{name!r}] = {value!r} is not sent: what is sampled would no "
                "longer have the log-probs that trainers recompute; leave it out"
            )
    try:
        params = msgspec.convert(values, SamplingParams)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"sampling_params: {error}") from error
    return Sampling(params, (stop,) if isinstance(stop, str) else tuple(stop), max_new_tokens)

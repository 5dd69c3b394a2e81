"""Trainer: what TRL's GRPOTrainer says of a run, and where that does not fit what we play.

`rollouts` asks here, once. Nothing is changed in the trainer but, while its model is sampled, which
modules are in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from fsm_rollout.adapters.trl.rewards import leaves_out_refused
from fsm_rollout.engines.base import Engine, SamplingParams
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits

if TYPE_CHECKING:
    import torch
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

EXTRA = (
    "env_reward", "reward_parts", "status", "stop_reason", "num_turns", "sample_id", "refused",
)  # fmt: skip
"""keys beside TRL's own, one value per row; reward functions get them as keyword arguments"""
METRICS = "rollout_metrics"
"""the same dict of the whole batch for each row"""


def misfits(trainer: GRPOTrainer, *, engine: Engine | None) -> Iterator[str]:
    """What of this trainer would train on something else than what was sampled."""
    args = args_of(trainer)
    if trainer.tools:
        yield (
            "the trainer has tools or environments of its own, so TRL would play its own tool loop "
            "and never read env_mask: give the tools to RolloutFunc, not to the trainer"
        )
    if args.mask_truncated_completions:
        yield (
            "mask_truncated_completions takes every completion that does not end with an eos token "
            "for a cut one, and one that a tool ended has none: use RolloutFunc(mask_truncated="
            "True) in its place"
        )
    if args.temperature <= 0:
        yield f"temperature is {args.temperature}: TRL divides the logits by it"
    changes = {
        "repetition_penalty": args.repetition_penalty not in (None, 1.0),
        "min_p": bool(args.min_p),
        "generation_kwargs": bool(args.generation_kwargs),
        "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex is not None,
    }
    for name in (name for name, is_set in changes.items() if is_set):
        yield (
            f"{name} is {getattr(args, name)!r}: it changes what is sampled, but not the log-probs "
            "that TRL recomputes, log_softmax(logits / temperature); leave it unset"
        )
    for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        if not leaves_out_refused(function):
            yield (
                f"the reward function {name} would score rows of samples that were refused, and so "
                f"move the baseline of their groups: decorate it with usable_only, or compute it "
                "in RolloutFunc(reward=...)"
            )
    if engine is None and args.use_vllm and args.vllm_mode != "server":
        yield (
            f"vllm_mode is {args.vllm_mode!r}, which has no interface for single requests: use "
            "'server', or give an engine"
        )
    if engine is None and not args.use_vllm and _is_sharded(trainer):
        yield "the model is sharded, and cannot be sampled in this process: give an engine"
    columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    if taken := sorted(columns.intersection([*EXTRA, METRICS])):
        yield f"train_dataset has the columns {', '.join(taken)}, which are keys of rollouts"
    if images := sorted(columns & {"image", "images"}):
        yield f"train_dataset has {images[0]}, and rollouts are of text only"


def engine_of(trainer: GRPOTrainer) -> Engine:
    """The trainer's vLLM server, whose weights it updates, or its own model."""
    args = args_of(trainer)
    if args.use_vllm:
        from fsm_rollout.engines.vllm import VLLMEngine

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return VLLMEngine(url, route="completions")
    from fsm_rollout.engines.transformers import TransformersEngine

    model = _model(trainer)
    with _modes_kept(model):
        return TransformersEngine(model)


def params_of(trainer: GRPOTrainer) -> SamplingParams:
    """How the trainer wants its policy sampled."""
    args = args_of(trainer)
    return SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=max(args.top_k or 0, 0)
    )


def limits_of(given: Limits | None, trainer: GRPOTrainer) -> Limits:
    """The given limits within what the trainer expects, or those that it implies."""
    most = args_of(trainer).max_completion_length
    if given is None:
        config = _model(trainer).config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or 32_768
        return Limits(max_context=context, max_response=most, max_new_tokens=most or context)
    if given.max_response is not None and most is not None and given.max_response > most:
        raise ConfigError(
            f"Limits.max_response is {given.max_response}, the trainer's max_completion_length "
            f"{most}: TRL takes longer completions without a word; make the two equal"
        )
    return msgspec.structs.replace(given, max_response=given.max_response or most)


def tokenizer_of(trainer: GRPOTrainer) -> Any:
    """The tokenizer, also when the trainer has a processor."""
    processing = trainer.processing_class
    return getattr(processing, "tokenizer", processing)


def args_of(trainer: GRPOTrainer) -> GRPOConfig:
    """The trainer's args, by the type that they have."""
    args: Any = trainer.args
    return args  # type: ignore[no-any-return]


@contextmanager
def serving(engine: Engine, trainer: GRPOTrainer) -> Iterator[None]:
    """The time in which an engine may be asked; one in this process needs the model for itself."""
    forget = getattr(engine, "forget", None)
    if forget is None:
        yield
        return
    model = _model(trainer)
    with _modes_kept(model):
        model.eval()
        forget(weight_version=trainer.state.global_step)
        yield


@contextmanager
def _modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Every module trains, or doesn't, afterwards as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def is_training(trainer: GRPOTrainer) -> bool:
    """False while it evaluates; TRL goes by the same."""
    model: Any = trainer.model
    return bool(model.training)


def _model(trainer: GRPOTrainer) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def _is_sharded(trainer: GRPOTrainer) -> bool:
    plugin = trainer.accelerator.state.deepspeed_plugin
    return trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)

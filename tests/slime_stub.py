"""slime's and miles's public types, as far as an adapter meets them; our own code, torch-free.

What they take and refuse is what reference notes say of slime 624b824 and miles 31f1ca9. `consume`
is the trainer's side: it reads samples as slime's `_convert_samples_to_train_data` and its losses
do, naively, and raises AssertionError where they would fail or train on the wrong tokens.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np
import pytest


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class _Common:
    """The fields that both have."""

    Status = Status

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Any = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


@dataclass
class MilesSample(_Common):
    routing_key: str | None = None
    rollout_indexer_topk: Any = None


@dataclass
class SlimeSample(_Common):
    session_id: str | None = None
    custom_rm_path: str | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Not atomic, like slime's: what fails may have written a part."""
        ids = [int(token) for token in tokens or []]
        meta = meta_info or {}
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"{len(log_probs)} log-probs for {len(ids)} tokens")
        if ids and trainable is (log_probs is None):
            raise ValueError("log-probs belong to trainable tokens, and to no others")
        self.response += text or ""
        held = self.response_length
        self.tokens += ids
        self.response_length += len(ids)
        self.loss_mask = [*(self.loss_mask or [1] * held), *[int(trainable)] * len(ids)]
        self.rollout_log_probs = [
            *(self.rollout_log_probs or [0.0] * held),
            *(log_probs or [0.0] * len(ids)),
        ]
        if "top_p_token_ids" in meta:
            if held:
                raise ValueError("top-p data must begin with the response")
            self.rollout_top_p_token_ids = np.asarray(meta["top_p_token_ids"], np.int32)
            self.rollout_top_p_token_offsets = np.asarray(meta["top_p_token_offsets"], np.int32)
        if (experts := meta.get("routed_experts")) is not None:
            shape = len(self.tokens) - 1, args.num_layers, args.moe_router_topk
            self.rollout_routed_experts = np.asarray(experts, np.int32).reshape(shape)
        if update_terminal_info and "finish_reason" in meta:
            raise AssertionError("an adapter that writes at the end says the status itself")
        if len(self.loss_mask) != self.response_length:
            raise ValueError(f"loss_mask {len(self.loss_mask)} != {self.response_length}")


@dataclass
class RolloutFnTrainOutput:
    samples: Any
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, Any]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


class _Singleton(type):
    _instances: dict[type, Any] = {}  # noqa: RUF012

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


class GenerateState(metaclass=_Singleton):
    def __init__(self, args: Any) -> None:
        self.args = args
        self.aborted = False


class _Loop:
    """slime's background event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(200)

    def close(self) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


async def async_rm(args: Any, sample: Any) -> Any:
    path = sample.custom_rm_path or args.custom_rm_path
    if path is None:
        raise NotImplementedError("no reward model is named")
    return await load_function(path)(args, sample)


async def batched_async_rm(args: Any, samples: list[Any]) -> list[Any]:
    rewards: list[Any] = await load_function(args.custom_rm_path)(args, samples)
    return rewards


async def _play(args: Any, sample: Any, *, evaluation: bool) -> Any:
    params = {"max_new_tokens": args.rollout_max_response_len}
    generate = load_function(args.custom_generate_function_path)
    played = await generate(args, sample, params, evaluation=evaluation)
    for one in played if isinstance(played, list) else [played]:
        if one.status is not Status.ABORTED and one.reward is None:
            one.reward = await async_rm(args, one)
    return played


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own rollout function: it plays its samples one by one."""

    async def step(groups: list[list[Any]]) -> list[list[Any]]:
        one_by_one = [[_play(args, s, evaluation=evaluation) for s in group] for group in groups]
        return [list(await asyncio.gather(*group)) for group in one_by_one]

    run = sys.modules["slime.utils.async_utils"].run
    if not evaluation:
        groups = run(step(data_source.get_samples(args.rollout_batch_size)))
        return RolloutFnTrainOutput(samples=groups, metrics={})
    found = {}
    for data_set in args.eval_datasets:
        group = [SlimeSample(index=i, **row) for i, row in enumerate(data_set.rows)]
        samples = flattened(run(step([group])))
        samples.sort(key=lambda sample: int(sample.index))
        key = args.eval_reward_key or args.reward_key
        found[data_set.name] = {
            "rewards": [s.reward[key] if key else s.reward for s in samples],
            "truncated": [s.status is Status.TRUNCATED for s in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data=found)


def flattened(samples: Any) -> list[Any]:
    """A batch as slime flattens it: by the shape of the first."""
    while isinstance(samples[0], list):
        samples = [one for several in samples for one in several]
    assert all(isinstance(one, _Common) for one in samples), "lists and samples are mixed"
    return list(samples)


LOGGED: list[dict[str, Any]] = []
"""what the tracker got, call by call"""


def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
    assert step_key in metrics
    LOGGED.append(metrics)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    return rollout_id


def _from_samples(args: Any, samples: Sequence[Any]) -> dict[str, float]:
    groups: dict[Any, list[Any]] = {}
    for sample in samples:
        reward = sample.reward[args.reward_key] if args.reward_key else sample.reward
        groups.setdefault(sample.group_index, []).append(reward)
    same = [rewards[0] for rewards in groups.values() if all(r == rewards[0] for r in rewards)]
    truncated = [sample.status is Status.TRUNCATED for sample in samples]
    return {
        "truncated_ratio": sum(truncated) / len(truncated),
        **{f"zero_std/count_{round(reward, 1)}": 1 for reward in same},
    }


def log_rollout_data(
    rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float
) -> None:
    path = args.custom_rollout_log_function_path
    given = rollout_id, args, samples, rollout_extra_metrics, rollout_time
    if path and load_function(path)(*given):
        return
    own = {f"rollout/{name}": value for name, value in _from_samples(args, samples).items()}
    log(args, {**(rollout_extra_metrics or {}), **own, "rollout/step": rollout_id}, "rollout/step")


def log_eval_rollout_data(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> None:
    path = args.custom_eval_rollout_log_function_path
    if path and load_function(path)(rollout_id, args, data, extra_metrics):
        return
    metrics = extra_metrics or {}
    for name, one in data.items():
        metrics[f"eval/{name}"] = sum(one["rewards"]) / len(one["rewards"])
        own = _from_samples(args, one["samples"])
        metrics |= {f"eval/{name}/{key}": value for key, value in own.items()}
    log(args, {**metrics, "eval/step": rollout_id}, "eval/step")


def call_dynamic_filter(function: Any, args: Any, group: Any) -> DynamicFilterOutput:
    output = function(args, group)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(bool(output))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    enough = remaining_batch_size > target_data_size or not output.keep_when_insufficient
    return not output.keep and enough


class DataSource:
    """Groups of samples of rows, and a buffer that is served first."""

    def __init__(self, args: Any, rows: Sequence[dict[str, Any]]) -> None:
        self.args, self.rows = args, rows
        self.buffer: list[list[Any]] = []
        self.num_groups = self.num_samples = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples:
            row = self.rows[self.num_groups % len(self.rows)]
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                group.append(
                    SlimeSample(
                        index=self.num_samples,
                        group_index=self.num_groups,
                        prompt=row["prompt"],
                        label=row.get("label"),
                        metadata=dict(row.get("metadata", {})),
                    )
                )
                self.num_samples += 1
            self.num_groups += 1
            groups.append(group)
        return groups

    def add_samples(self, groups: list[list[Any]]) -> None:
        for group in groups:
            assert len(group) == self.args.n_samples_per_prompt
        self.buffer += groups


def install(monkeypatch: pytest.MonkeyPatch) -> _Loop:
    """Let `slime` be importable, as it is where slime runs. Close the loop that is returned."""
    loop = _Loop()
    parts: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.misc": {"load_function": load_function},
        "slime.utils.async_utils": {"run": loop.run},
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
        "slime.rollout.rm_hub": {"async_rm": async_rm, "batched_async_rm": batched_async_rm},
        "slime.rollout.sglang_rollout": {
            "GenerateState": GenerateState,
            "generate_rollout": generate_rollout,
        },
        "slime.observability": {},
        "slime.observability.logging_utils": {"log": log},
        "slime.observability.metric_utils": {"compute_rollout_step": compute_rollout_step},
        "slime.rollout.filter_hub": {},
        "slime.rollout.filter_hub.base_types": {
            "call_dynamic_filter": call_dynamic_filter,
            "should_drop_dynamic_filter_output": should_drop_dynamic_filter_output,
        },
    }
    for name, values in parts.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_Singleton, "_instances", {})
    LOGGED.clear()
    return loop


def slime_args(**given: Any) -> Namespace:
    """slime's flags with its defaults; those that a rollout reads."""
    defaults: dict[str, Any] = {
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "group_rm": False,
        "custom_generate_function_path": "fsm_rollout.adapters.slime.generate",
        "custom_rm_path": None,
        "rm_type": None,
        "reward_key": None,
        "eval_reward_key": None,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 1_000,
        "rollout_max_context_len": None,
        "eval_max_context_len": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_seed": 42,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "context_parallel_size": 1,
        "max_tokens_per_gpu": None,
        "use_rollout_routing_replay": False,
        "num_layers": 2,
        "moe_router_topk": 2,
        "apply_chat_template_kwargs": {},
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "dynamic_sampling_filter_path": None,
        "custom_rollout_log_function_path": None,
        "custom_eval_rollout_log_function_path": None,
        "eval_datasets": [],
    }
    return Namespace(**defaults | given)


def consume(args: Any, samples: Sequence[Any]) -> list[dict[str, Any]]:
    """What the trainer makes of a flat batch: of each sample its tokens, and what is trained."""
    rows = []
    wants_top_p = args.rollout_top_p != 1.0
    for sample in samples:
        length, total = sample.response_length, len(sample.tokens)
        assert isinstance(sample.tokens, list)
        assert all(type(token) is int for token in sample.tokens)
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * length
        assert len(mask) == length, f"loss mask length {len(mask)} != response length {length}"
        if sample.remove_sample:
            mask = [0] * length
        # tokens[-0:] is all of them: it must have the length of the log-probs all the same
        assert len(sample.tokens[-length:]) == length, f"response_length {length} of {total}"
        assert total > length, "the log-prob of the first token would come from another sample"
        log_probs = sample.rollout_log_probs
        if samples[0].rollout_log_probs is not None:
            assert len(log_probs) == length, f"{len(log_probs)}, {length}, {total}"
            assert np.isfinite(log_probs).all()
        if wants_top_p:
            offsets = sample.rollout_top_p_token_offsets
            assert len(offsets) == length + 1
            assert (offsets[0], offsets[-1]) == (0, len(sample.rollout_top_p_token_ids))
            for place, is_trained in enumerate(mask):
                kept = sample.rollout_top_p_token_ids[offsets[place] : offsets[place + 1]]
                assert not is_trained or sample.tokens[total - length + place] in kept
        if args.use_rollout_routing_replay:
            experts = np.asarray(sample.rollout_routed_experts)
            assert experts.shape == (total - 1, args.num_layers, args.moe_router_topk)
            assert all(experts[:, layer].any() for layer in range(args.num_layers))
        assert sample.reward is not None
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)
        trained = {
            total - length + place: log_probs[place] for place in range(length) if mask[place]
        }
        rows.append({"tokens": sample.tokens, "trained": trained})
    return rows

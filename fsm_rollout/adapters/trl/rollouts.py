"""RolloutFunc: the `rollout_func` of TRL's GRPOTrainer, played by this package.

Always: one row per entry of `prompts`, in order; ids, log-probs and mask of a row are equally long
and belong together. TRL checks none of this: it pads what is short, and what it pads it trains on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.trl import rewards as trl_rewards
from fsm_rollout.adapters.trl.environment import Environment
from fsm_rollout.adapters.trl.loop_thread import LoopThread
from fsm_rollout.adapters.trl.rows import Played, Rows, RowSource
from fsm_rollout.adapters.trl.trainer import (
    EXTRA,
    METRICS,
    args_of,
    engine_of,
    is_training,
    limits_of,
    misfits,
    params_of,
    serving,
    tokenizer_of,
)
from fsm_rollout.agent import Agent
from fsm_rollout.dataset import PromptRow
from fsm_rollout.engines.base import Engine
from fsm_rollout.errors import ConfigError
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.metrics import Alarm
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardFunction, RewardPart, Rewards
from fsm_rollout.rollout import Rollout
from fsm_rollout.sample import Sample
from fsm_rollout.states.guards import Guard
from fsm_rollout.states.machine import Listener
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset, ToolSpec

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer

logger = logging.getLogger(__name__)

WATCHED = Alarm(default=0.2).watch
"""the metrics of a batch, and an error in the log when many were aborted for one reason"""


class RolloutFunc:
    """`GRPOTrainer(..., rollout_func=RolloutFunc(tools=[...]), reward_funcs=reward)`.

    `tools`, `reward`, `agent`, `parser`, `chat_template`, `listeners`, `guards` and
    `max_concurrent` are those of Rollout. The sampling comes from the trainer's args, and from
    `max_completion_length` the limit `max_response` where `limits` has none.

    `environment`: a class of TRL's `environment_factory`: its methods are tools beside `tools`, its
    reward is that of the rollout unless `reward` is given.
    `engine`: default: the trainer's vLLM server if it uses one, else the trainer's model itself, in
    this process. `rows`: what is played, with its columns; default: the trainer's own datasets.
    `mask_truncated`: TRUNCATED samples have a reward, but nothing of them is trained; in place of
    the trainer's `mask_truncated_completions`, which goes by the last token. `metrics`: what to log
    of each batch; the reward function `reward` hands it to the trainer's trackers.

    A sample that TRL must not have (ABORTED, no reward, an invariant broken, forked) becomes a row
    of one padding token: masked, with `env_reward` None and the reason in `refused`. It trains
    nothing and is in no baseline; the log has the reason.

    The first call raises ConfigError when the trainer or a row does not fit.
    """

    def __init__(
        self,
        *,
        tools: Toolset | Sequence[ToolSpec] = (),
        reward: RewardFunction | RewardPart | Rewards | None = None,
        agent: Agent | None = None,
        environment: Environment | None = None,
        limits: Limits | None = None,
        engine: Engine | None = None,
        rows: RowSource | None = None,
        mask_truncated: bool = False,
        metrics: Callable[[Sequence[Request]], Mapping[str, float]] = WATCHED,
        parser: str = "hermes",
        chat_template: str | None = None,
        max_concurrent: int = 256,
        listeners: Iterable[Listener] = (),
        guards: Mapping[Event, Iterable[Guard]] | None = None,
    ) -> None:
        if limits is not None and not isinstance(limits, Limits):
            raise ConfigError(f"limits must be Limits(...), got {limits!r}")
        if environment is not None:
            tools = [*(tools.classes.values() if isinstance(tools, Toolset) else tools)]
            tools += environment.tools
            if reward is None and environment.has_reward:
                reward = environment.reward
        self._environment = environment
        self._tools = tools if isinstance(tools, Toolset) else Toolset(tools)
        self._limits = limits
        self._engine = engine
        self._given_rows = None if rows is None else Rows({"rows": rows}, self._tools)
        self._rows: dict[str, Rows] = {}
        self._mask_truncated = mask_truncated
        self._metrics = metrics
        self._options: dict[str, Any] = {
            "tools": self._tools,
            "reward": reward,
            "agent": agent,
            "parser": parser,
            "chat_template": chat_template,
            "max_concurrent": max_concurrent,
            "listeners": listeners,
            "guards": guards,
        }
        self._trainer: GRPOTrainer | None = None
        self._rollout: Rollout | None = None
        self._thread = LoopThread("fsm-rollout")

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play each prompt once: TRL repeats them. Returns its three keys, `env_mask` and EXTRA."""
        if self._rollout is not None and self._trainer is not trainer:
            if self._engine is None:  # ours, whose thread holds the other trainer's model
                self._thread.run(self._rollout.loop.engine.close())
            self._rollout = None
        if self._rollout is None:
            self._rollout = self._start(trainer)
        rollout = self._rollout
        entries = self._entries(prompts, trainer)
        with serving(rollout.loop.engine, trainer):
            requests = self._thread.run(play(rollout, entries, self._environment))
        rows = handed(
            requests,
            pad_id=tokenizer_of(trainer).pad_token_id,
            rewards=trl_rewards.reward in trainer.reward_funcs,
            mask_truncated=self._mask_truncated,
        )
        return rows | {METRICS: dict(self._metrics(requests))}

    def close(self) -> None:
        """Close the engine, a given one too, and end the thread; for a process that goes on."""
        if self._rollout is not None:
            self._thread.run(self._rollout.loop.engine.close())
            self._thread.close()
        if self._environment is not None:
            self._environment.close()
        self._rollout = None

    def _start(self, trainer: GRPOTrainer) -> Rollout:
        if found := list(misfits(trainer, engine=self._engine)):
            raise ConfigError("RolloutFunc and this trainer don't fit: " + "; ".join(found))
        tools = self._tools.classes.values()
        earns = any(tool.calc_reward is not Tool.calc_reward for tool in tools)
        if trl_rewards.reward not in trainer.reward_funcs and (earns or self._options["reward"]):
            logger.warning(
                "what the rollouts earn, and their metrics, reach the trainer by "
                "`fsm_rollout.adapters.trl.reward`: add it to reward_funcs"
            )
        args, step = args_of(trainer), trainer.state.global_step  # not 0 when training was resumed
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._played, self._groups = count(step * per_step), count()
        self._trainer, self._rows = trainer, {}
        return Rollout(
            self._engine or engine_of(trainer),
            tokenizer_of(trainer),
            limits=limits_of(self._limits, trainer),
            params=params_of(trainer),
            seed=args.seed,
            **self._options,
        )

    def _rows_of(self, trainer: GRPOTrainer) -> Rows:
        if self._given_rows is not None:
            return self._given_rows
        name = "train_dataset" if is_training(trainer) else "eval_dataset"
        if name not in self._rows:
            given = getattr(trainer, name)
            sources = given if isinstance(given, dict) else {name: given}
            for title, source in sources.items():
                if not hasattr(source, "__getitem__"):
                    raise ConfigError(
                        f"{title} is {type(source).__name__}, in which prompts cannot be looked "
                        "up: give RolloutFunc its rows, as `rows`"
                    )
            self._rows[name] = Rows(sources, self._tools)
        return self._rows[name]

    def _entries(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> list[Entry]:
        rows, accelerator = self._rows_of(trainer), trainer.accelerator
        size = trainer.num_generations or 1
        if not is_training(trainer):
            size = trainer.num_generations_eval or size
        entries: list[Entry] = []
        previous, group_index = None, 0
        for place, prompt in enumerate(prompts, accelerator.process_index * len(prompts)):
            if prompt != previous or place % size == 0:  # two groups may have equal prompts
                previous, group_index = prompt, next(self._groups)
            index = next(self._played) * accelerator.num_processes + accelerator.process_index
            entries.append(Entry(rows[prompt], index, group_index))
        return entries


def handed(
    requests: Sequence[Request], *, pad_id: int, rewards: bool = True, mask_truncated: bool = False
) -> dict[str, list[Any]]:
    """The dict of TRL: one row per request, in order; a row of padding for a refused one."""
    found = [_usable(request, rewards=rewards) for request in requests]
    if refused := [(r, why) for r, (_, why) in zip(requests, found, strict=True) if why]:
        shown = "; ".join(f"request {r.index}: {why}" for r, why in refused[:3])
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        logger.warning("%d of %d samples are left out: %s%s", len(refused), len(found), shown, more)
    rows = [
        _row(request, sample, why, pad_id=pad_id, mask_truncated=mask_truncated)
        for request, (sample, why) in zip(requests, found, strict=True)
    ]
    keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", *EXTRA)
    return {key: [row[key] for row in rows] for key in keys}


def _usable(request: Request, *, rewards: bool) -> tuple[Sample | None, str]:
    """The one sample of a request that TRL may have; else why it may not."""
    samples = request.rows
    if not samples:
        return None, f"it is {request.status} ({request.stop_reason}): {request.error}"
    if len(samples) > 1:
        return None, (
            f"it has {len(samples)} samples, and GRPOTrainer takes one row per prompt: train them "
            "with AsyncGRPOTrainer and RolloutWorker"
        )
    good, refused = sift(samples, rewards=rewards)
    if refused:
        return None, refused[0].why
    if good[0].remove_sample:
        return None, "nothing of it is to be trained (remove_sample)"
    return good[0], ""


def _row(
    request: Request, sample: Sample | None, why: str, *, pad_id: int, mask_truncated: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "status": str(request.status),
        "stop_reason": str(request.stop_reason or ""),
        "num_turns": request.num_turns,
        "sample_id": request.sample.sample_id,
        "refused": why,
    }
    if sample is None:
        return row | {
            "prompt_ids": [pad_id],  # not its own, which may be longer than all others
            "completion_ids": [pad_id],
            "logprobs": [0.0],
            "env_mask": [0],
            "env_reward": None,
            "reward_parts": {},
        }
    mask, log_probs = sample.loss_mask.tolist(), sample.rollout_log_probs
    assert log_probs is not None  # `sift` looked
    is_masked = mask_truncated and sample.status is Status.TRUNCATED
    return row | {
        "prompt_ids": sample.tokens[: sample.prompt_length].tolist(),
        "completion_ids": sample.tokens[sample.prompt_length :].tolist(),
        "logprobs": log_probs.tolist(),
        "env_mask": [0] * len(mask) if is_masked else mask,
        "env_reward": sample.reward,
        "reward_parts": sample.reward_parts,
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """What one request is made of."""

    played: Played
    index: int
    group_index: int


async def play(
    rollout: Rollout, entries: Iterable[Entry], environment: Environment | None = None
) -> list[Request]:
    """One request of each entry, played. What a listener of the user raises costs its request."""
    await rollout.start()
    gate = asyncio.Semaphore(rollout.max_concurrent)

    async def one(entry: Entry) -> Request:
        async with gate:
            if environment is None:
                return await _run(rollout, entry.played.row, entry)
            try:
                async with environment.entered(
                    *entry.played, timeout_s=rollout.limits.tool_timeout_s
                ) as row:
                    return await _run(rollout, row, entry)
            except ConfigError:
                raise
            except Exception as error:
                where, how = f"request {entry.index}", f"failed: {describe(error)}"
                log_failure(logger, where, "reset", how, error, level=logging.WARNING)
                request = _request(rollout, entry.played.row, entry)
                request.error = f"reset of the environment failed: {shown(error)}"
                rollout.loop.machine.fire(Event.ABORT, request, StopReason.TOOL_UNAVAILABLE)
                return request

    try:
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(one(entry)) for entry in entries]
    except BaseExceptionGroup as faults:  # no request's fault, and each would have it
        raise faults.exceptions[0] from faults
    return [task.result() for task in playing]


async def _run(rollout: Rollout, row: PromptRow, entry: Entry) -> Request:
    request = _request(rollout, row, entry)
    try:
        await rollout.run(request)
    except ConfigError:
        raise
    except Exception as error:
        request.error = f"it was not played to its end: {shown(error)}"
        how = f"was not played to its end: {describe(error)}"
        log_failure(logger, f"request {request.index}", "it", how, error)
    return request


def _request(rollout: Rollout, row: PromptRow, entry: Entry) -> Request:
    return rollout.request(row, index=entry.index, group_index=entry.group_index)

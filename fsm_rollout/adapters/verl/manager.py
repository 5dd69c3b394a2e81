"""FsmAgentLoopManager: whole batches through one Rollout, for verl's V0 trainers.

`rollout.agent.agent_loop_manager_class=fsm_rollout.adapters.verl.FsmAgentLoopManager`. verl's own
worker makes a loop, a pydantic copy and three `tokenizer.pad` per trajectory, and one exception of
one of them ends its batch. What comes out has the same keys, shapes and dtypes.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc,untyped-decorator"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from msgspec.structs import replace
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopManager,
    AgentLoopWorker,
    _agent_loop_registry,
)
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from fsm_rollout.adapters.tensors import padded
from fsm_rollout.adapters.verl.export import (
    NO_REWARD,
    extra_fields,
    metrics_of,
    not_handed,
    row_of,
    stand_in,
)
from fsm_rollout.adapters.verl.loop import output_of
from fsm_rollout.adapters.verl.neutral import fill_neutral
from fsm_rollout.adapters.verl.player import Player, player_of
from fsm_rollout.adapters.verl.settings import settings_of
from fsm_rollout.adapters.verl.tracked import FACTS, facts, validation_columns
from fsm_rollout.arrays import FLOAT32_MAX
from fsm_rollout.errors import ConfigError, HandOverError
from fsm_rollout.failures import shown
from fsm_rollout.metrics import metrics_of as counted
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample

logger = logging.getLogger(__name__)

LOOP = "fsm_rollout.adapters.verl.FsmAgentLoop"
_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
_EXPERTS = "rollout_routed_experts"
_ALWAYS = ("extras", "reward_extra_info")
"""columns that there are, even when no row has something to say"""


@dataclass(slots=True)
class Row:
    """One row of a batch, before it is laid out."""

    request: Request
    sample: Sample
    extra: dict[str, Any]
    metrics: dict[str, Any]
    has_outcome: bool
    """False: a stand-in"""
    reward: float | None = None

    def stand_aside(self, sample: Sample, why: str) -> None:
        """Have the stand-in `sample` in its place."""
        self.sample, self.has_outcome = sample, False
        self.extra |= {"error": why, "is_stand_in": True}


class FsmAgentLoopWorker(AgentLoopWorker):
    """verl's worker, for rows whose agent is FsmAgentLoop; it plays them without making one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why = "it asks no teacher" if self.distillation_enabled else ""
        if hasattr(self.processor, "get_rope_index"):
            why = "it lays out one position per token, and the model wants M-RoPE's four"
        if why:
            raise ConfigError(
                f"FsmAgentLoopManager cannot be used here: {why}. Leave out "
                "rollout.agent.agent_loop_manager_class: verl's own manager plays FsmAgentLoop"
            )
        self._experts_shape = _experts_shape(self.rollout_config, self.model_config.hf_config)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Play every row of the batch, those of one `uid` as a group."""
        given = batch.non_tensor_batch
        agent = self.rollout_config.agent.default_agent_loop
        names = given.get("agent_name", [None] * len(batch))
        given["agent_name"] = objects([name or agent for name in names])
        columns = [{name: values[i] for name, values in given.items()} for i in range(len(batch))]
        players = {name: self.player(name) for name in dict.fromkeys(given["agent_name"])}
        for player in players.values():
            player.check_plays_alone()
        validate = bool(batch.meta_info.get("validate", False))
        does_sample = [validate or bool(row.pop("__do_sample__", True)) for row in columns]
        played: dict[int, Row] = {}

        async def play(numbers: list[int]) -> None:
            first = numbers[0]
            player = players[columns[first]["agent_name"]]
            params = self.sampling_params(validate=validate, does_sample=does_sample[first])
            requests = await player.play(columns[first], params, n=len(numbers))
            pairs = zip(numbers, requests, strict=True)
            rows = [self._row(player, request, columns[number]) for number, request in pairs]
            played.update(zip(numbers, await asyncio.gather(*rows), strict=True))

        try:
            async with asyncio.TaskGroup() as tasks:
                for numbers in _groups(columns, does_sample):
                    tasks.create_task(play(numbers))
        except BaseExceptionGroup as bugs:  # nothing that a row, a tool or a server did
            raise bugs.exceptions[0] from bugs
        # what a batch has must not depend on its rows: verl joins those of all workers
        has_rewards = self.reward_loop_worker_handles is not None or all(
            player.gives_rewards for player in players.values()
        )
        rows = [played[number] for number in range(len(batch))]
        return self._batch(rows, batch, has_rewards=has_rewards)

    def player(self, name: str) -> Player:
        """The player of the YAML entry of that name. ConfigError when it is none of ours."""
        entry = _agent_loop_registry.get(name, {})
        if entry.get("_target_") != LOOP:
            raise ConfigError(
                f"agent loop {name!r} is {entry.get('_target_')}, and this manager plays {LOOP} "
                "alone: have an entry of it in rollout.agent.agent_loop_config_path, and its name "
                "in rollout.agent.default_agent_loop or the column agent_name"
            )
        settings = settings_of(entry)
        return player_of(self.config, self.llm_client, self.tokenizer, self.tools, settings)

    def sampling_params(self, *, validate: bool, does_sample: bool) -> dict[str, Any]:
        """What verl's worker gives to a loop."""
        source = self.rollout_config.val_kwargs if validate else self.rollout_config
        return {name: getattr(source, name) for name in _GREEDY} if does_sample else dict(_GREEDY)

    async def _row(self, player: Player, request: Request, columns: dict[str, Any]) -> Row:
        sample, has_outcome = row_of(request, pad_id=player.pad_id)
        extra = extra_fields(request, sample, drafts=player.drafts, has_outcome=has_outcome)
        if player.gives_rewards:  # the same keys in each batch; see `fill_neutral`
            extra["reward_extra_info"] = {"score": None}
        row = Row(request, sample, extra, metrics_of(request), has_outcome)
        if not has_outcome:
            return row
        if player.gives_rewards and request.reward is not None:
            row.reward, row.extra["reward_extra_info"] = request.reward, {"score": request.reward}
        elif player.lacks_reward(request, columns):
            not_handed(sample, NO_REWARD)
            row.stand_aside(stand_in(sample, request, player.pad_id), NO_REWARD)
        elif self.reward_loop_worker_handles is not None:
            output = output_of(player, request, sample)
            try:
                row.reward = await self.score([output], columns)
            except Exception as error:  # of a reward function, in verl's process for it
                why = f"verl's reward loop: {shown(error)}"
                not_handed(sample, why, error)
                row.stand_aside(stand_in(sample, request, player.pad_id), why)
            else:
                row.metrics["compute_score"] = output.metrics.compute_score
                row.extra["reward_extra_info"] = output.extra_fields["reward_extra_info"]
        elif player.gives_rewards:
            why = "nobody rewards it: no tool that it has, and verl's reward loop is not there"
            not_handed(sample, why)
            row.stand_aside(stand_in(sample, request, player.pad_id), why)
        return row

    async def score(self, outputs: list[Any], columns: dict[str, Any]) -> float:
        """What verl's reward loop says of a request. Raises what that does, and for no number."""
        await self._compute_score(outputs, kwargs=columns)
        reward = outputs[-1].reward_score
        if reward is None or not abs(reward) <= FLOAT32_MAX:  # verl's tensor of it is float32
            raise HandOverError(f"the reward is {reward!r}, and must be a finite number")
        return float(reward)

    def _batch(self, rows: Sequence[Row], given: DataProto, *, has_rewards: bool) -> DataProto:
        """The rows as verl's worker lays them out."""
        samples = [row.sample for row in rows]
        known = [s.rollout_routed_experts for s in samples if s.rollout_routed_experts is not None]
        tensors = padded(
            samples,
            pad_id=self.tokenizer.pad_token_id or 0,
            prompt_length=self.rollout_config.prompt_length,
            response_length=self.rollout_config.response_length,
            rewards=False,
            log_probs=any(sample.rollout_log_probs is not None for sample in samples),
            columns=[_EXPERTS] if known else (),
        )
        tensors.pop(f"has_{_EXPERTS}", None)
        if known:
            self._experts_shape = known[0].shape[1:]
            tensors["routed_experts"] = tensors.pop(_EXPERTS).to(torch.int16)
        elif self._experts_shape is not None:  # nothing but stand-ins, this time
            shape = (*tensors["input_ids"].shape, *self._experts_shape)
            tensors["routed_experts"] = torch.zeros(shape, dtype=torch.int16)
        if has_rewards:
            tensors["rm_scores"] = scores = torch.zeros(tensors["responses"].shape)
            last = [sample.response_length - 1 for sample in samples]
            rewards = torch.tensor([row.reward or 0.0 for row in rows], dtype=torch.float32)
            scores[torch.arange(len(rows)), last] = rewards
        # verl hands the input's columns on only where rewards come later
        columns = dict(given.non_tensor_batch) if self.reward_loop_worker_handles is None else {}
        columns["__num_turns__"] = np.array([len(s.turns) + 1 for s in samples], np.int32)
        columns |= {
            name: objects([row.extra.get(name) for row in rows])
            for name in dict.fromkeys([*_ALWAYS, *(name for row in rows for name in row.extra)])
        }
        columns["raw_prompt"] = given.non_tensor_batch["raw_prompt"]
        columns["multi_modal_inputs"] = objects([{} for _ in rows])
        columns[FACTS] = objects([facts(row.request, reward=row.reward) for row in rows])
        return DataProto(
            batch=TensorDict(tensors, batch_size=len(rows)),
            non_tensor_batch=columns,
            meta_info={"metrics": [row.metrics for row in rows]},
        )


class FsmAgentLoopManager(AgentLoopManager):
    """verl's manager over FsmAgentLoopWorkers. DataProto in, DataProto out, row by row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(FsmAgentLoopWorker)
        super().__init__(*args, **kwargs)
        self._reward_keys: dict[str, None] = {}

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One row for each of `prompts`.

        verl logs what `timing` says as `timing_s/...`, in training alone; of an evaluation the
        columns of `reward_extra_keys`. Raises HandOverError when no row that is to be trained has
        an outcome.
        """
        started = time.monotonic()
        output = await super().generate_sequences(prompts)
        columns = output.non_tensor_batch
        groups = prompts.non_tensor_batch.get("uid", np.arange(len(prompts)))
        pairs = zip(columns.pop(FACTS), groups, strict=True)
        played = [replace(one, group=group) for one, group in pairs]
        output.meta_info["timing"] |= counted(played, seconds=time.monotonic() - started)
        trains = not prompts.meta_info.get("validate", False)
        if columns["is_stand_in"].all():
            why = ", ".join(sorted(set(columns["error"].tolist()))[:3])
            what = f"none of {len(output)} rows has an outcome"
            if trains:
                raise HandOverError(
                    f"{what}, and verl's loss of a batch without a trained token is 0 / 0. They "
                    f"say: {why}"
                )
            logger.error("evaluation: %s; their reward reads 0. They say: %s", what, why)
        keys = fill_neutral(output.batch, columns, groups, trains=trains)
        if not trains:
            # verl joins the batches of an evaluation, and one may have no outcome at all
            self._reward_keys |= dict.fromkeys(keys)
            for name in self._reward_keys.keys() - keys:
                columns[name] = objects([None] * len(output))
            keys = list(self._reward_keys)
            told = validation_columns(played, groups, most=self.rollout_config.val_kwargs.n)
            columns.update(told)
            keys += told
        if "rm_scores" in output.batch:
            output.meta_info["reward_extra_keys"] = keys
        return output


def _groups(columns: Sequence[dict[str, Any]], does_sample: Sequence[bool]) -> list[list[int]]:
    """The numbers of rows that are samples of one prompt: the same `uid`, and the same to play."""
    groups: defaultdict[tuple[Any, bool], list[list[int]]] = defaultdict(list)
    for number, row in enumerate(columns):
        known = groups[row.get("uid", number), does_sample[number]]
        for numbers in known:
            if _is_same(columns[numbers[0]], row):
                numbers.append(number)
                break
        else:
            known.append([number])
    return [numbers for known in groups.values() for numbers in known]


def _experts_shape(rollout: Any, model: Any) -> tuple[int, ...] | None:
    """(layers, k) of the experts that servers report; None: of none, or it is not known yet.

    A worker must know before it has seen some: verl joins its rows with those of other workers.
    """
    text = model.get_text_config()
    names = "num_hidden_layers", "num_experts_per_tok"
    shape = tuple(int(getattr(text, name, None) or 0) for name in names)
    return shape if rollout.enable_rollout_routing_replay and all(shape) else None


def _is_same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("raw_prompt", "tools_kwargs", "agent_name", "extra_info", "reward_model")
    try:
        return all(bool(row.get(name) == other.get(name)) for name in names)
    except Exception:  # arrays or tensors in them: rather played apart than taken for one
        return False


def objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """An array of objects, whatever they are."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array

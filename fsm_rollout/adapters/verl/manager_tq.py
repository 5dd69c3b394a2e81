"""FsmAgentLoopManagerTQ: whole groups through one Rollout, for verl's V1 trainer (TransferQueue).

`rollout.agent.agent_loop_manager_class=fsm_rollout.adapters.verl.FsmAgentLoopManagerTQ`. A prompt
is put as running, its samples as `{uid}_{session}_{index}`, then the prompt as finished; as failure
where none of its sessions has an outcome. A session that has none is not there, as V1 allows.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc,no-any-return"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, ClassVar

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from fsm_rollout.adapters.handover import trained
from fsm_rollout.adapters.verl.export import (
    NO_REWARD,
    extra_fields,
    metrics_of,
    not_handed,
    rows_of,
)
from fsm_rollout.adapters.verl.loop import output_of
from fsm_rollout.adapters.verl.manager import FsmAgentLoopWorker
from fsm_rollout.adapters.verl.player import Player
from fsm_rollout.adapters.verl.tracked import facts, validated
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.metrics import Facts, named
from fsm_rollout.metrics import metrics_of as counted
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample

logger = logging.getLogger(__name__)

_MOST = 65_536
"""requests that a worker tells of when nobody asked it for long; about 1 kB each"""


class FsmAgentLoopWorkerTQ(FsmAgentLoopWorker):
    """Plays prompts in the background; every one of them ends as finished or as failure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tq.init()
        self.background_tasks: set[asyncio.Task[None]] = set()
        self._played: deque[Facts] = deque(maxlen=_MOST)

    async def generate_sequences(self, batch: TensorDict) -> None:
        """Start to play every prompt of the batch, and return.

        Raises ConfigError, before the first, for what none could be played with.
        """
        validate = batch.pop("validate", False)
        validate = bool(getattr(validate, "data", validate))
        prompts = [
            {name: _at(value, number) for name, value in batch.items()}
            for number in range(len(batch))
        ]
        default = self.rollout_config.agent.default_agent_loop
        for columns in prompts:
            columns["agent_name"] = columns.get("agent_name") or default
        for name in {columns["agent_name"]: 0 for columns in prompts}:
            self.player(name)
        for columns in prompts:
            task = asyncio.create_task(self._run_prompt(columns, validate=validate))
            self.background_tasks.add(task)
            task.add_done_callback(self.background_tasks.discard)

    async def _run_prompt(self, columns: dict[str, Any], *, validate: bool) -> None:
        uid, partition = columns["uid"], "val" if validate else "train"
        status = "failure"
        try:
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
            if await self._play(columns, partition, validate=validate):
                status = "finished"
        except Exception as error:
            log_failure(logger, f"prompt {uid}", "the prompt", f"failed: {describe(error)}", error)
        finally:
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _play(self, columns: dict[str, Any], partition: str, *, validate: bool) -> int:
        """Play the sessions of a prompt and put their samples; how many there are."""
        source = self.rollout_config.val_kwargs if validate else self.rollout_config
        n = int(columns.pop("__rollout_n__", source.n))
        does_sample = validate or bool(columns.pop("__do_sample__", True))
        player = self.player(columns.pop("agent_name"))
        params = self.sampling_params(validate=validate, does_sample=does_sample)
        requests = await player.play(columns, params, n=n)
        sessions = await asyncio.gather(
            *(
                self._session(player, request, {**columns, "session_id": session}, validate)
                for session, request in enumerate(requests)
            )
        )
        played = [facts for facts, _ in sessions]
        rows = [row for _, rows in sessions for row in rows]
        if not validate:
            self._played += played
        elif rows:
            extra = rows[-1][1]["extra_fields"]
            extra["reward_extra_info"] = {**extra.get("reward_extra_info", {}), **validated(played)}
        if rows:
            keys, fields, tags = map(list, zip(*rows, strict=True))
            self._experts_shape = fill_experts(fields, self._experts_shape)
            await tq.async_kv_batch_put(
                keys=keys,
                fields=list_of_dict_to_tensordict(fields),
                tags=tags,
                partition_id=partition,
            )
        return len(rows)

    async def take_facts(self) -> list[Facts]:
        """The facts of what was played for training since the last call."""
        taken = list(self._played)
        self._played.clear()
        return taken

    async def _session(
        self, player: Player, request: Request, columns: dict[str, Any], validate: bool
    ) -> tuple[Facts, list[tuple[str, dict[str, Any], dict[str, Any]]]]:
        """The facts of a session, and (key, fields, tag) of each of its samples.

        There are none of one that has no outcome, or is in no baseline as nothing of it is trained.
        """
        samples = rows_of(request, pad_id=player.pad_id)
        metrics, reward = metrics_of(request), request.reward if player.gives_rewards else None
        told: dict[str, Any] = {} if reward is None else {"reward_extra_info": {"score": reward}}
        if not validate and all(row.remove_sample for row in request.rows):
            samples = []
        elif samples and player.lacks_reward(request, columns):
            not_handed(samples[-1], NO_REWARD)
            samples = []
        elif samples and reward is None and self.reward_loop_worker_handles is not None:
            outputs = [output_of(player, request, sample) for sample in samples]
            try:
                reward = await self.score(outputs, columns)
            except Exception as error:  # of a reward function, in verl's process for it
                not_handed(samples[-1], f"verl's reward loop: {shown(error)}", error)
                samples = []
            else:
                metrics["compute_score"] = outputs[-1].metrics.compute_score
                told["reward_extra_info"] = outputs[-1].extra_fields["reward_extra_info"]
        elif samples and reward is None and player.gives_rewards:
            not_handed(samples[-1], "nobody rewards it")
            samples = []
        rows = []
        for number, sample in enumerate(samples):
            extra = {**extra_fields(request, sample, drafts=player.drafts), **told}
            steps = {name: extra[name] for name in ("min_global_steps", "max_global_steps")}
            fields = {
                **_fields(sample, reward),
                "extra_fields": extra,
                "metrics": metrics,
                **columns,
            }
            length = sample.prompt_length
            tag = {
                "status": "success",
                "prompt_len": length,
                "response_len": sample.response_length,
                "seq_len": length + sample.response_length,
                "global_steps": columns["global_steps"],
                # verl makes an array of ints of them
                **{k: columns["global_steps"] if v is None else v for k, v in steps.items()},
            }
            rows.append((f"{columns['uid']}_{columns['session_id']}_{number}", fields, tag))
        return facts(request, group=columns["uid"], reward=reward), rows


def _fields(sample: Sample, reward: float | None) -> dict[str, Any]:
    """What verl's worker stores of one output: whole sequences, without padding."""
    input_ids = torch.tensor(sample.tokens, dtype=torch.int64)
    mask = torch.tensor(trained(sample), dtype=torch.int64)
    fields: dict[str, Any] = {
        "prompts": input_ids[: sample.prompt_length],
        "responses": input_ids[sample.prompt_length :],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "multi_modal_inputs": {},
        "num_turns": len(sample.turns) + 1,
    }
    if sample.rollout_log_probs is not None:
        fields["rollout_log_probs"] = torch.tensor(sample.rollout_log_probs)
    if (experts := sample.rollout_routed_experts) is not None:
        fields["routed_experts"] = torch.zeros(
            (len(input_ids), *experts.shape[1:]), dtype=torch.int16
        )
        fields["routed_experts"][: len(experts)] = torch.tensor(experts)
    if reward is not None:
        fields["rm_scores"] = torch.zeros(len(mask), dtype=torch.float32)
        fields["rm_scores"][-1] = reward
    return fields


def fill_experts(
    rows: list[dict[str, Any]], known: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Rows without a forwarded token get zeros where others have experts: verl stacks them.

    `known`: the shape of a token's, from the model or from rows before; returned with these rows'.
    """
    shapes = [row["routed_experts"].shape[1:] for row in rows if "routed_experts" in row]
    known = tuple(shapes[0]) if shapes else known
    for row in rows:
        if known is not None and "routed_experts" not in row:
            shape = (len(row["input_ids"]), *known)
            row["routed_experts"] = torch.zeros(shape, dtype=torch.int16)
    return known


def _at(column: Any, number: int) -> Any:
    """One row's value of a column of V1's batches."""
    if isinstance(column, NonTensorStack):
        return column[number].data
    return column.data if isinstance(column, NonTensorData) else column[number]


class FsmAgentLoopManagerTQ(AgentLoopManager):
    """verl's manager over FsmAgentLoopWorkerTQs; results go into the TransferQueue."""

    latest: ClassVar[FsmAgentLoopManagerTQ | None] = None
    """the one of this process, for our sampler, which verl tells of no manager"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(FsmAgentLoopWorkerTQ)
        super().__init__(*args, **kwargs)
        FsmAgentLoopManagerTQ.latest = self

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand the prompts to the workers, which go on by themselves."""
        chunks = prompts.chunk(len(self.agent_loop_workers))
        calls = [
            worker.generate_sequences.remote(chunk)
            for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]
        ray.get(calls)

    def metrics(self) -> dict[str, float]:
        """What ended in training since the last call, over all workers: for the tracker.

        Under our names, and under those that verl's V0 has for them. For a trainer of your own:
        `metrics.update(self.agent_loop_manager.metrics())`, once a step.
        """
        taken = ray.get([worker.take_facts.remote() for worker in self.agent_loop_workers])
        metrics = counted(one for played in taken for one in played)
        return named(metrics, "verl") | metrics

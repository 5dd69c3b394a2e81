"""A sampler for verl's V1 that tells its tracker what FsmAgentLoopManagerTQ played.

`trainer.v1.sampler.custom_sampler.path=pkg://fsm_rollout.adapters.verl.sampler` and
`...custom_sampler.name=sampler`. What a sampler returns beside the batch is all that V1 logs of a
rollout; it samples as verl's own does.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from fsm_rollout.adapters.verl.manager_tq import FsmAgentLoopManagerTQ
from fsm_rollout.errors import ConfigError


class _Tracked(ReplayBuffer):
    """Adds to the first batch of each step what was played since that of the step before.

    Once a step, since verl averages over the batches of a step, and a mean of counts is no count.
    """

    _step: int | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, Any]:
        manager = FsmAgentLoopManagerTQ.latest
        if manager is None:
            raise ConfigError(
                "the sampler of fsm_rollout tells what FsmAgentLoopManagerTQ played, and there is "
                "none: set actor_rollout_ref.rollout.agent.agent_loop_manager_class="
                "fsm_rollout.adapters.verl.FsmAgentLoopManagerTQ, or leave out custom_sampler"
            )
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id == "train" and global_steps != self._step:
            self._step = global_steps
            metrics = {**manager.metrics(), **metrics}
        return batch, metrics


class _TrackedAsync(_Tracked, ReplayBufferAsync):
    pass


def sampler(
    *, trainer_mode: str, sampler_kwargs: Any, refill_fn: Any = None, **kwargs: Any
) -> ReplayBuffer:
    """verl's sampler of this mode, tracked. `sampler_kwargs` are further arguments of it.

    Raises ConfigError where verl's config wants of its own sampler what it does not tell ours.
    """
    trainer = getattr(refill_fn, "__self__", None)  # a method of the trainer
    if trainer is not None:
        _check(trainer.config, sampler_kwargs)
    cls = _Tracked if trainer_mode == "sync" else _TrackedAsync
    return cls(
        trainer_mode=trainer_mode,
        sampler_kwargs=sampler_kwargs,
        refill_fn=refill_fn,
        **{**kwargs, **sampler_kwargs},
    )


def _check(config: Any, given: Any) -> None:
    filters = config.algorithm.get("filter_groups") or {}
    wanted = {
        "filter_groups_metric": filters.get("enable") and filters.get("metric"),
        "sync_refill_failed_groups": config.trainer.v1.sampler.get("sync_refill_failed_groups"),
    }
    for name, value in wanted.items():
        if value and name not in given:
            raise ConfigError(
                f"verl tells {name}={value} to its own sampler alone: repeat it as "
                f"+trainer.v1.sampler.sampler_kwargs.{name}={value}, in sync mode with "
                "gen_batch_size=1, train_batch_size and max_inflight_gen_batches"
            )

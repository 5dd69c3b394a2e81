"""What verl's own trainers log of a step and of an evaluation that our managers played.

V0's and V1's real `fit` run here, from the dataloader to verl's file logger, with real managers and
workers. Only the models are left out: critic_warmup keeps the actor from being updated.
"""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
from omegaconf import open_dict
from torch.utils.data import DataLoader, SequentialSampler
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.dataset.rl_dataset import collate_fn

from fsm_rollout.adapters.verl import FsmAgentLoopManager, FsmAgentLoopManagerTQ
from fsm_rollout.adapters.verl.sampler import sampler
from fsm_rollout.errors import ConfigError
from tests.real_verl.setting import EMPTY, TOKENIZER, Client, call, config, said

pytestmark = [
    pytest.mark.real_verl,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("cluster"),
]

RIGHT, DONE = said(call(answer="42")), said("It is 42.")
SCRIPTS = {"easy": [RIGHT, DONE], "hard": [RIGHT, RIGHT, RIGHT, DONE], "down": [EMPTY]}
PROMPTS = ["easy", "down", "hard", "easy"]
"""two of each: one worker plays 2 requests to their end, the other 4"""
N = 2


class ByPrompt(Client):
    """Answers by what is asked, whichever worker asks."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        if request_id not in self._turns:
            asked = TOKENIZER.decode(kwargs["prompt_ids"])
            [script] = [script for word, script in SCRIPTS.items() if word in asked]
            self._turns[request_id] = list(script)
        return await super().generate(request_id, **kwargs)


def dataset() -> Any:
    return [
        {
            "raw_prompt": [{"role": "user", "content": f"An {prompt} one"}],
            "data_source": "sums",
            "reward_model": {"ground_truth": "42"},
            "extra_info": {},
            "tools_kwargs": {"check": {"create_kwargs": {"truth": "42"}}},
            "index": number,
            "dummy": torch.zeros(1),
        }
        for number, prompt in enumerate(PROMPTS)
    ]


def settings(**overrides: Any) -> Any:
    made = config(n=N, val_kwargs__n=N, agent__num_workers=2, **overrides)
    with open_dict(made):
        made.data.train_batch_size = len(PROMPTS)
        made.data.val_batch_size = len(PROMPTS)
        made.data.dataloader_num_workers = 0
        made.trainer.logger = ["file"]
        made.trainer.total_training_steps = made.trainer.total_epochs = 2
        made.trainer.critic_warmup = 9  # no actor
        made.trainer.balance_batch = False
        made.trainer.test_freq, made.trainer.save_freq = 1, -1
        made.trainer.val_before_train = False
        made.algorithm.adv_estimator = "grpo"
        made.algorithm.rollout_correction = {"bypass_mode": True, "rollout_is": None}
        made.actor_rollout_ref.actor.ppo_mini_batch_size = len(PROMPTS)
    return made


class Nothing:
    """In the place of what moves weights: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("async_calls"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def logged(path: Path) -> list[dict[str, Any]]:
    """What the steps logged."""
    steps = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    assert len(steps) == 2
    return steps


def v0(made: Any, evaluated: Any = None) -> None:
    trainer = RayPPOTrainer(
        made,
        TOKENIZER,
        {Role.ActorRollout: None},
        SimpleNamespace(get_n_gpus=lambda: 1),
        train_dataset=dataset(),
        val_dataset=evaluated or dataset(),
        collate_fn=collate_fn,
        train_sampler=SequentialSampler(dataset()),
        device_name="cpu",
    )
    trainer.use_rm = False
    trainer.actor_rollout_wg = trainer.checkpoint_manager = trainer.llm_server_manager = Nothing()
    trainer.async_rollout_manager = FsmAgentLoopManager.create(config=made, llm_client=ByPrompt())
    trainer.fit()


def v1(made: Any) -> None:
    with open_dict(made):
        made.trainer.v1.sampler.custom_sampler.path = "pkg://fsm_rollout.adapters.verl.sampler"
        made.trainer.v1.sampler.custom_sampler.name = "sampler"
    trainer = PPOTrainerSync(made)
    trainer.tokenizer, trainer.global_steps = TOKENIZER, 0
    trainer.train_dataloader = trainer.val_dataloader = DataLoader(
        dataset(), batch_size=len(PROMPTS), collate_fn=collate_fn
    )
    trainer.train_dataloader_it = None
    trainer._init_dump_executor()
    trainer.steps_per_epoch, trainer.total_training_steps = 1, 2
    trainer.checkpoint_manager = Nothing()
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.fit(FsmAgentLoopManagerTQ.create(config=made, llm_client=ByPrompt()))


STEP = {
    "rollout/requests": 8,
    "rollout/groups": 4,
    "rollout/retries": 4,  # the server that is down is asked three times
    "rollout/abort_rate": 2 / 8,
    "rollout/abort/engine_abort": 2,
    "rollout/turns/mean": (2 * 2 + 2 * 4 + 2 * 2) / 6,  # the mean of both workers' means is 2.5
    "rollout/turns/p50": 2,
    "rollout/reward/mean": 0.75,
    "rollout/reward/zero_std_groups": 1.0,
    "tool/check/ok": 2 + 6 + 2,
    "tools/checked": 2 + 6 + 2,
    "tools/failure_rate": 0.0,
}
"""by hand, whoever played what"""


def test_v0_logs_a_step_and_an_evaluation(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    v0(settings())
    for found in logged(tmp_path / "log.jsonl"):
        ours = {name: found.get(f"timing_s/{name}") for name in STEP}
        assert ours == pytest.approx(STEP)
        assert found["timing_s/perf/tokens_per_s"] > 0
        assert found["timing_s/agent_loop/generate_sequences/mean"] == pytest.approx(
            found["timing_s/perf/generate_s/mean"]
        )
        assert found["tool_call_counts/mean"] == (2 * 1 + 2 * 3 + 2 * 1) / 8  # verl's, by row
        told = {name: found.get(f"val-aux/sums/{name}/mean@1") for name in VALIDATION}
        assert told == pytest.approx({**VALIDATION, "rollout/abort_rate": (0 + 0 + 0 + 1) / 4})
        assert found["val-aux/sums/perf/generate_s/mean@1"] > 0


def test_v0_evaluates_in_batches_of_which_one_has_no_outcome(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    made = settings()
    made.data.val_batch_size = 1
    v0(made, [dataset()[number] for number in (1, 0, 2, 3)])  # the one that is down is the first
    for found in logged(tmp_path / "log.jsonl"):
        assert found["val-aux/sums/rollout/abort_rate/mean@1"] == 1 / 4
        assert found["val-aux/sums/score/mean@2"] == 3 * 0.75 / 4


VALIDATION = {
    "rollout/abort_rate": 0.0,
    "rollout/truncated_ratio": 0.0,
    "rollout/tool_calls": (1 + 3 + 1) / 3,
    "rollout/invalid_calls": 0.0,
    "tools/failure_rate": 0.0,
}
"""over the prompts that came to an end"""


def test_v1_logs_a_step_and_an_evaluation(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    v1(settings())
    for found in logged(tmp_path / "log.jsonl"):
        assert {name: found.get(name) for name in STEP} == pytest.approx(STEP)
        assert found["perf/generate_s/p99"] > 0
        assert found["tool_call_counts/mean"] == (2 * 1 + 2 * 3 + 2 * 1) / 6
        assert found["num_turns/max"] == 8  # verl's own count stays, which is of messages
        told = {name: found.get(f"val-aux/sums/{name}/mean@1") for name in VALIDATION}
        assert told == pytest.approx(VALIDATION)


# -- the sampler of V1 -----------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "trainer_config": {},
    "max_off_policy_threshold": None,
    "max_off_policy_strategy": "drop",
    "sampler_kwargs": {},
}
"""what verl makes a sampler with"""


@pytest.mark.parametrize(
    ("mode", "base"), [("sync", ReplayBuffer), ("separate_async", ReplayBufferAsync)]
)
def test_a_step_of_several_batches_is_told_of_once(mode: str, base: Any, monkeypatch: Any) -> None:
    """verl averages what the batches of a step say, and a mean of counts would be no count."""
    counts = iter(range(1, 9))
    manager = SimpleNamespace(metrics=lambda: {"rollout/requests": float(next(counts))})
    monkeypatch.setattr(FsmAgentLoopManagerTQ, "latest", manager)
    monkeypatch.setattr(base, "sample", lambda *args: (args[1:], {"training/x": 1}))
    made = sampler(trainer_mode=mode, **OPTIONS)
    logs = []
    for step in (1, 2):
        made.sample(step, "val", 4)
        aggregator = MetricsAggregator()
        for _ in range(3):
            batch, metrics = made.sample(step, "train", 4)
            assert batch == (step, "train", 4)
            aggregator.add_step_metrics(metrics, sample_count=8)
        logs.append(aggregator.get_aggregated_metrics())
    assert [log["rollout/requests"] for log in logs] == [1, 2]
    assert [log["training/x"] for log in logs] == [1, 1]


def test_a_sampler_without_our_manager_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(FsmAgentLoopManagerTQ, "latest", None)
    with pytest.raises(ConfigError, match=r"agent_loop_manager_class=fsm_rollout\.adapters\.verl"):
        sampler(trainer_mode="sync", **OPTIONS).sample(1, "val", 4)


def test_what_verl_tells_its_own_sampler_alone_is_not_lost() -> None:
    trainer = SimpleNamespace(config=config())
    trainer.refill = MethodType(lambda self, count: count, trainer)
    assert isinstance(
        sampler(trainer_mode="sync", refill_fn=trainer.refill, **OPTIONS), ReplayBuffer
    )
    with open_dict(trainer.config):
        trainer.config.algorithm.filter_groups = {"enable": True, "metric": "acc"}
    with pytest.raises(ConfigError, match=r"sampler_kwargs\.filter_groups_metric=acc"):
        sampler(trainer_mode="sync", refill_fn=trainer.refill, **OPTIONS)
    given = {"filter_groups_metric": "acc", "train_batch_size": 4, "gen_batch_size": 1}
    made = sampler(
        trainer_mode="sync", refill_fn=trainer.refill, **{**OPTIONS, "sampler_kwargs": given}
    )
    assert (made.filter_groups_metric, made.train_batch_size) == ("acc", 4)

"""RolloutFunc in TRL's real GRPOTrainer: what is handed over, and what is trained."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo import arithmetic
from fsm_rollout.adapters.trl import RolloutFunc, rollouts
from fsm_rollout.adapters.trl.loop_thread import LoopThread
from fsm_rollout.adapters.trl.trainer import engine_of, misfits
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.batcher import Batcher
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.engines.vllm import VLLMEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits
from fsm_rollout.metrics import Alarm, metrics_of
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardPart
from fsm_rollout.testing.fake_engine import FakeEngine
from tests.trl_training import (
    TEMPERATURE,
    TOKENIZER,
    Roll,
    batch_of,
    gap,
    rows,
    scripted,
    table,
    taught_policy,
    trained,
    training,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


def test_gradient_steps_through_rollouts_with_a_tool(tmp_path: Path) -> None:
    versions: list[Any] = []
    calls: list[int] = []

    def note(request: Request) -> float:
        versions.append([version for version, _ in request.sample.weight_versions])
        calls.append(request.num_tool_calls)
        return request.num_tool_calls + request.sample.response_length / 100

    with training(RolloutFunc(tools=[Roll], reward=note), tmp_path, temperature=0.8) as trainer:
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        trainer.train()
        steps = trainer.state.log_history[:2]
        after = list(trainer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert any(calls)
    assert [step["reward"] for step in steps] == [step["rewards/reward/mean"] for step in steps]
    assert versions == [[0]] * 4 + [[1]] * 4  # the trainer's step


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8}, {"temperature": TEMPERATURE}, {"temperature": 1.1, "top_p": 0.9}],
)
def test_trl_recomputes_the_log_probs_that_it_was_handed(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    func = RolloutFunc(tools=[Roll])
    with training(func, tmp_path, **sampling) as trainer:
        batch = batch_of(trainer)
        assert gap(trainer, batch) < 1e-3
    masked = batch["completion_mask"].bool() & ~trained(batch)
    assert masked.any()  # a tool was called
    assert not batch["sampling_per_token_logps"][masked].any()


def test_a_shift_by_one_is_caught(tmp_path: Path) -> None:
    func = RolloutFunc(tools=[Roll])

    def mutant(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        handed = func(prompts, trainer)
        return handed | {"logprobs": [[*row[1:], 0.0] for row in handed["logprobs"]]}

    with training(mutant, tmp_path) as trainer:
        assert gap(trainer, batch_of(trainer)) > 1e-2
    func.close()


def test_an_ignored_temperature_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "params_of", lambda trainer: SamplingParams())
    with training(RolloutFunc(tools=[Roll]), tmp_path) as trainer:
        assert gap(trainer, batch_of(trainer)) > 1e-2


@pytest.mark.parametrize("forgets", [True, False])
def test_keys_and_values_of_old_weights_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, forgets: bool
) -> None:
    if not forgets:  # the mutant
        monkeypatch.setattr(TransformersEngine, "forget", lambda self, **_: None)
        monkeypatch.setattr(Batcher, "notice", lambda self: None)
    with training(RolloutFunc(tools=[Roll]), tmp_path, dataset=rows(1), num_generations=4) as t:
        batch_of(t)
        with torch.no_grad():
            for weight in t.model.parameters():
                weight.mul_(1.05)
        assert (gap(t, batch_of(t)) < 1e-3) is forgets


@pytest.mark.parametrize(
    ("loss", "level"),
    [
        *((name, "token") for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")),
        *(("vespo", "token"), ("luspo", "sequence"), ("grpo", "sequence")),  # the last is GSPO
    ],
)
def test_the_loss_has_no_gradient_at_tokens_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, level: str
) -> None:
    with training(
        RolloutFunc(tools=[Roll]), tmp_path, loss_type=loss, importance_sampling_level=level
    ) as trainer:
        batch = batch_of(trainer)
        trainer.current_gradient_accumulation_steps = 1
        batch["advantages"] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        near = batch["sampling_per_token_logps"] - 0.1 * torch.rand(batch["completion_ids"].shape)

        def gradient(log_probs: Any) -> Any:
            leaf = log_probs.clone().requires_grad_()
            monkeypatch.setattr(
                trainer,
                "_get_per_token_logps_and_entropies",
                lambda *_, **__: (leaf, torch.ones_like(leaf), None),
            )
            trainer._compute_loss(trainer.model, batch).backward()
            return leaf.grad

        found = gradient(near)
        assert torch.equal(found != 0, trained(batch))
        assert torch.equal(found, gradient(torch.where(trained(batch), near, -4.0)))
    assert not trained(batch).all()


@pytest.mark.real_model
@pytest.mark.timeout(180)
def test_a_real_model_agrees_with_trl(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fsm_rollout.testing.smollm2 import smollm2_dir

    try:
        path = smollm2_dir()
    except ConfigError as error:
        pytest.skip(str(error))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    func = RolloutFunc(
        tools=["calculator"],
        chat_template="hermes",
        reward=arithmetic.reward,
        limits=Limits(max_context=1_024, max_new_tokens=48, max_turns=2),
    )
    [problem] = arithmetic.rows(1, seed=0, tool=True)
    with training(
        func,
        tmp_path,
        dataset=[{"prompt": problem.prompt, "label": problem.label}],
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(path),
        per_device_train_batch_size=2,
        temperature=0.7,
    ) as trainer:
        batch = batch_of(trainer)
        assert gap(trainer, batch) < 1e-3
    assert (batch["completion_mask"].bool() & ~trained(batch)).any()  # it called the calculator


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_example_takes_a_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.trl_grpo", "--steps", "1", "--generations", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^step   1  reward [01]\.\d\d  calls .* s$", done.stdout, re.MULTILINE)


RANK = """
import sys
from pathlib import Path
from fsm_rollout.adapters.trl import RolloutFunc
from tests.trl_training import Roll, rows, training

played = []

def note(request):
    played.append(request.index)
    return request.num_tool_calls + request.sample.response_length / 100

func = RolloutFunc(tools=[Roll], reward=note)
options = {"dataset": rows(4), "per_device_train_batch_size": 2, "num_generations": 4}
with training(func, Path(sys.argv[1]), temperature=0.8, **options) as trainer:
    trainer.train()
    weights = float(sum(weight.sum() for weight in trainer.model.parameters()))
    print("rank", trainer.accelerator.process_index, sorted(played), weights)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_share_a_group_and_no_index(tmp_path: Path) -> None:
    script, root = tmp_path / "rank.py", Path(__file__).parents[1]
    script.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    indices = [line.partition("]")[0] for line in ranks]
    assert indices == ["rank 0 [0, 2, 4, 6", "rank 1 [1, 3, 5, 7"]
    assert len({line.rpartition(" ")[2] for line in ranks}) == 1  # the same weights


def test_evaluation_plays_the_rows_of_its_own_dataset(tmp_path: Path) -> None:
    labels: list[Any] = []

    def note(request: Request) -> float:
        labels.append(request.label)
        return 1.0

    func = RolloutFunc(reward=note, engine=scripted(["hi"]))
    with training(
        func,
        tmp_path,
        dataset=rows(2, label=lambda n: f"train {n}"),
        trainer_kwargs={"eval_dataset": table(rows(2, label=lambda n: f"eval {n}"))},
        per_device_eval_batch_size=4,
    ) as trainer:
        trainer.model.eval()
        assert trainer.evaluate()["eval_reward"] == 1.0
        trainer.model.train()
        batch_of(trainer)
    assert sorted(labels) == [f"{split} {n}" for split in ("eval", "train") for n in (0, 0, 1, 1)]


def test_it_plays_where_an_event_loop_runs_already_and_leaves_the_model_as_it_was(
    tmp_path: Path,
) -> None:
    model: Any = taught_policy()
    seen: list[bool] = []

    def look(_: Request) -> float:
        seen.append(any(module.training for module in model.modules()))
        return 1.0

    async def notebook(trainer: Any) -> dict[str, torch.Tensor]:
        return batch_of(trainer)

    with training(RolloutFunc(tools=[Roll], reward=look), tmp_path, model=model) as trainer:
        model.model.norm.eval()
        modes = [module.training for module in model.modules()]
        assert trained(asyncio.run(notebook(trainer))).any()
        assert [module.training for module in model.modules()] == modes
    assert seen == [False] * 4
    assert True in modes
    assert False in modes


def test_a_server_plays_over_one_connection_pool_from_batch_to_batch(tmp_path: Path) -> None:
    thread, server = LoopThread("server"), FakeEngine(tokenizer=TOKENIZER)
    thread.run(server.__aenter__())
    try:
        func = RolloutFunc(
            engine=VLLMEngine(server.url, route="completions"), reward=lambda request: 1.0
        )
        with training(func, tmp_path, temperature=1.0) as trainer:
            for _ in range(2):
                assert trained(batch_of(trainer)).any(1).all()
    finally:
        thread.run(server.__aexit__(None, None, None))
        thread.close()


def test_the_trainers_own_vllm_server_is_the_default(tmp_path: Path) -> None:
    with training(RolloutFunc(), tmp_path) as trainer:
        trainer.args.use_vllm, trainer.args.vllm_mode = True, "server"
        trainer.args.vllm_server_host, trainer.args.vllm_server_port = "10.0.0.1", 8001
        engine: Any = engine_of(trainer)
        assert isinstance(engine, VLLMEngine)
        assert [endpoint.url for endpoint in engine.endpoints] == ["http://10.0.0.1:8001"]
        trainer.args.vllm_mode = "colocate"
        assert ["vllm_mode is 'colocate'" in why for why in misfits(trainer, engine=None)] == [True]


def test_requests_go_on_counting_after_a_resume(tmp_path: Path) -> None:
    indices: list[int] = []

    def note(request: Request) -> float:
        indices.append(request.index)
        return 1.0

    func = RolloutFunc(reward=note, engine=scripted(["hi"]))
    with training(func, tmp_path) as trainer:
        trainer.state.global_step = 10
        batch_of(trainer)
    assert sorted(indices) == [40, 41, 42, 43]  # as many as ten steps played


def test_a_second_trainer_does_not_keep_the_engine_of_the_first(tmp_path: Path) -> None:
    def engines() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "transformers-engine"]

    func, before = RolloutFunc(tools=[Roll], reward=lambda request: 1.0), engines()
    with training(func, tmp_path) as first, training(func, tmp_path) as second:
        batch_of(first)
        batch_of(second)
        assert len(set(engines()).difference(before)) == 1


def test_metrics_of_the_batch_reach_the_trainers_log(tmp_path: Path) -> None:
    alarm = Alarm(default=0.1)

    def metrics(requests: Sequence[Request]) -> dict[str, float]:
        found = metrics_of(requests)
        return found | alarm(found)

    func = RolloutFunc(engine=scripted(["hi"]), reward=lambda _: 1.0, metrics=metrics)
    with training(func, tmp_path, max_steps=1) as trainer:
        trainer.train()
        logs = trainer.state.log_history[0]
    assert (logs["rollout/turns/mean"], logs["rollout/requests"]) == (1.0, 4.0)
    assert (logs["rollout/abort/alarm"], logs["rollout/reward_part/reward/mean"]) == (0.0, 1.0)


def test_groups_with_equal_prompts_are_two_groups(tmp_path: Path) -> None:
    groups: list[int] = []

    def note(request: Request) -> float:
        groups.append(request.group_index)
        return 1.0

    func = RolloutFunc(engine=scripted(["hi"]), reward=note)
    with training(func, tmp_path, dataset=rows(1) * 2) as trainer:
        batch_of(trainer)
    assert sorted(groups) == [0, 0, 1, 1]


def test_what_no_request_is_to_blame_for_ends_the_run(tmp_path: Path) -> None:
    part = RewardPart(lambda requests: [1.0] * len(requests), group=True)
    func = RolloutFunc(engine=scripted(["hi"]), reward=part)
    with (
        training(func, tmp_path) as trainer,
        pytest.raises(ConfigError, match=r"the reward .* is a group's"),
    ):
        batch_of(trainer)

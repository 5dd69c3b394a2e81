"""RolloutFunc in TRL's real GRPOTrainer: what is handed over, what is refused, what is trained."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import logging
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsm_rollout.adapters.trl import RolloutFunc, reward, rollouts, usable_only
from fsm_rollout.adapters.trl.loop_thread import LoopThread
from fsm_rollout.adapters.trl.trainer import engine_of, misfits
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import Answer, Asked, Reply
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.engines.vllm import VLLMEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.machine import Machine, Transition
from fsm_rollout.states.table import Event
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
DEAD = EngineError("the server is on fire", reason=StopReason.ENGINE_ERROR, final=True)


def index_of(asked: Asked) -> int:
    """Of the request that asks."""
    return int(asked.session_id.rpartition("-")[2])


# -- the real thing --------------------------------------------------------------------------------


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
    with training(RolloutFunc(tools=[Roll]), tmp_path, dataset=rows(1), num_generations=4) as t:
        batch_of(t)
        with torch.no_grad():
            for weight in t.model.parameters():
                weight.mul_(1.05)
        assert (gap(t, batch_of(t)) < 1e-3) is forgets


def test_the_loss_has_no_gradient_at_tokens_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(RolloutFunc(tools=[Roll]), tmp_path) as trainer:
        batch = batch_of(trainer)
        leaf = torch.randn(batch["completion_ids"].shape, requires_grad=True)
        ones = torch.ones_like(leaf)
        monkeypatch.setattr(
            trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, ones, None)
        )
        trainer.current_gradient_accumulation_steps = 1
        batch["advantages"] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        trainer._compute_loss(trainer.model, batch).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad != 0, trained(batch))
    assert not trained(batch).all()


@pytest.mark.real_model
def test_a_real_model_agrees_with_trl(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fsm_rollout.testing.smollm2 import smollm2_dir

    try:
        path = smollm2_dir()
    except ConfigError as error:
        pytest.skip(str(error))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    func = RolloutFunc(limits=Limits(max_context=1_024, max_new_tokens=24))
    with training(
        func,
        tmp_path,
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(path),
        reward_funcs=usable_only(lambda completions, **_: [0.0] * len(completions)),
        per_device_train_batch_size=2,
        temperature=0.7,
    ) as trainer:
        batch = batch_of(trainer)
        assert trained(batch).sum() > 20
        assert gap(trainer, batch) < 1e-3


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


def test_metrics_of_the_batch_reach_the_trainers_log(tmp_path: Path) -> None:
    def metrics(requests: Sequence[Request]) -> dict[str, float]:
        return {"rollout/turns": sum(r.num_turns for r in requests) / len(requests)}

    func = RolloutFunc(engine=scripted(["hi"]), reward=lambda _: 1.0, metrics=metrics)
    with training(func, tmp_path, max_steps=1) as trainer:
        trainer.train()
        logs = trainer.state.log_history[0]
    assert (logs["rollout/turns"], logs["reward_parts/reward"]) == (1.0, 1.0)


def test_what_no_request_is_to_blame_for_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: Any) -> None:
        raise ConfigError("a reward that needs whole groups")

    monkeypatch.setattr(Rollout, "run", run)
    with (
        training(RolloutFunc(engine=scripted(["hi"])), tmp_path) as trainer,
        pytest.raises(ConfigError, match="a reward that needs whole groups"),
    ):
        batch_of(trainer)


# -- what must not be trained on -------------------------------------------------------------------


def graded(answer: Any, *, rewards: dict[int, float | None], **options: Any) -> RolloutFunc:
    return RolloutFunc(
        engine=scripted(answer),
        reward=lambda request: rewards[request.index],
        limits=Limits(max_context=1_024, max_attempts=1),
        **options,
    )


def grads(trainer: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return [weight.grad.clone() for weight in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("loss_type", "share"), [("dapo", 1.0), ("bnpo", 1.0), ("grpo", 0.75), ("dr_grpo", 0.75)]
)
def test_an_aborted_sample_trains_nothing_and_is_in_no_baseline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss_type: str, share: float
) -> None:
    """`share`: TRL's mean over rows counts the empty row too, in these two losses."""
    texts = {0: "right", 1: "wrong", 2: "no matter", 3: "right too"}

    def with_a_fault(asked: Asked) -> Answer:
        return DEAD if index_of(asked) == 2 else texts[index_of(asked)]

    def without_it(asked: Asked) -> Answer:
        return texts[{0: 0, 1: 1, 2: 3}[index_of(asked)]]

    common: dict[str, Any] = {"dataset": rows(1), "loss_type": loss_type}
    four = graded(with_a_fault, rewards={0: 1.0, 1: 0.0, 3: 0.5})
    with (
        caplog.at_level(logging.WARNING, "fsm_rollout"),
        training(four, tmp_path, num_generations=4, **common) as trainer,
    ):
        batch = batch_of(trainer)
        found = grads(trainer, batch)
    three = graded(without_it, rewards={0: 1.0, 1: 0.0, 2: 0.5})
    with training(
        three, tmp_path, num_generations=3, per_device_train_batch_size=3, **common
    ) as trainer:
        whole = batch_of(trainer)
        expected = grads(trainer, whole)
    assert batch["advantages"][2] == 0
    torch.testing.assert_close(batch["advantages"][[0, 1, 3]], whole["advantages"])
    assert trained(batch)[2].sum() == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, share * other, atol=1e-6, rtol=1e-4)
    assert "1 of 4 samples are left out: request 2: it is aborted (engine_error)" in caplog.text
    assert "the server is on fire" in caplog.text


def test_a_whole_batch_of_refused_samples_changes_no_weight(tmp_path: Path) -> None:
    with training(graded(lambda _: DEAD, rewards={}), tmp_path, max_steps=1) as trainer:
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        trainer.train()
        assert all(map(torch.equal, before, trainer.model.parameters()))


def no_log_probs(_: Asked) -> Answer:
    return Reply(TOKENIZER.encode("hi"), log_probs=None)


def one_log_prob_short(_: Asked) -> Answer:
    return Reply([65, 66], log_probs=[-1.0])


def nan(_: Asked) -> Answer:
    return Reply([65, 66], log_probs=[-1.0, math.nan])


def hi(_: Asked) -> Answer:
    return "hi"


def nothing(_: Asked) -> Answer:
    return Reply([])


@pytest.mark.parametrize(
    ("answer", "rewarded", "why"),
    [
        (no_log_probs, 1.0, "aborted (missing_log_probs)"),
        (one_log_prob_short, 1.0, "aborted (bad_reply)"),
        (nan, 1.0, "aborted (bad_reply)"),
        (hi, None, "its reward is None, which is not 0"),
        (nothing, 1.0, "nothing of it is to be trained"),
    ],
)
def test_a_fault_costs_its_own_sample(
    tmp_path: Path, answer: Any, rewarded: float | None, why: str
) -> None:
    def fails_once(asked: Asked) -> Answer:
        return answer(asked) if index_of(asked) == 1 else "hi"

    kept: dict[str, Any] = {}

    def see(env_reward: list[float | None], **columns: Any) -> list[float | None]:
        kept.update(columns, env_reward=env_reward)
        return env_reward

    func = graded(fails_once, rewards={0: 1.0, 1: rewarded, 2: 0.0, 3: 1.0})
    with training(func, tmp_path, reward_funcs=[reward, usable_only(see)]) as trainer:
        batch = batch_of(trainer)
    assert [bool(refused) for refused in kept["refused"]] == [False, True, False, False]
    assert why in kept["refused"][1]
    assert kept["env_reward"] == [1.0, None, 0.0, 1.0]
    assert [int(row.sum()) for row in trained(batch)] == [3, 0, 3, 3]
    assert [len(ids) for ids in kept["completion_ids"]] == [3, 1, 3, 3]


def test_a_listener_that_raises_costs_its_sample(tmp_path: Path) -> None:
    def raises_once(done: Transition) -> None:
        if done.request.index == 1:
            raise KeyError("mine")

    func = RolloutFunc(engine=scripted(["hi"]), reward=lambda _: 1.0, listeners=[raises_once])
    with training(func, tmp_path) as trainer:
        refused = func([rows(1)[0]["prompt"]] * 3, trainer)["refused"]
    assert [bool(why) for why in refused] == [False, True, False]
    assert "it was not played to its end: KeyError('mine')" in refused[1]


def test_forks_do_not_fit_into_one_row(tmp_path: Path) -> None:
    request = Request("q", limits=Limits())
    func = graded(["hi"], rewards={0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
    with training(func, tmp_path) as trainer:
        handed = func([rows(1)[0]["prompt"]] * 2, trainer)
    assert handed["refused"] == ["", ""]
    request = fork_of_two()
    [why] = rollouts.handed([request], pad_id=0)["refused"]
    assert why == (
        "it has 2 samples, and GRPOTrainer takes one row per prompt: train them with "
        "AsyncGRPOTrainer and RolloutWorker"
    )


def fork_of_two() -> Request:
    machine, request = Machine(), Request("q")
    request.set_prompt([1, 2])
    machine.fire(Event.GENERATE, request)
    request.append_response_tokens([3, 4], [-1.0, -1.0], meta_info={"finish_reason": "stop"})
    request.fork([1, 2, 9])
    request.append_response_tokens([5], [-1.0], meta_info={"finish_reason": "stop"})
    machine.settle(Event.COMPLETE, request, StopReason.STOP)
    request.reward = 1.0
    request.seal()
    return request


def test_truncated_samples_may_be_masked_and_keep_their_reward(tmp_path: Path) -> None:
    def long_once(asked: Asked) -> Answer:
        return "much too long" if index_of(asked) == 0 else "hi"

    rewards: dict[int, float | None] = {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
    func = graded(long_once, rewards=rewards, mask_truncated=True)
    with training(func, tmp_path, max_completion_length=8) as trainer:
        batch = batch_of(trainer)
    assert [int(row.sum()) for row in trained(batch)] == [0, 3, 3, 3]
    assert batch["advantages"].tolist() == pytest.approx(
        [-0.7070, 0.7070, -0.7070, 0.7070], abs=1e-3
    )


# -- what TRL takes without a word -----------------------------------------------------------------

PROMPT_IDS, IDS, LOG_PROBS, MASK = [5, 6], [65, 66, 258], [-1.0, 0.0, -1.0], [1, 0, 1]
WHOLE: dict[str, Any] = {
    "prompt_ids": [PROMPT_IDS] * 4,
    "completion_ids": [IDS] * 4,
    "logprobs": [LOG_PROBS] * 4,
    "env_mask": [MASK] * 4,
    "env_reward": [0.0, 1.0] * 2,
}


@pytest.mark.parametrize(
    ("broken", "trains"),
    [
        ({}, [2, 2, 2, 2]),
        ({"logprobs": [LOG_PROBS[:2], *WHOLE["logprobs"][1:]]}, [2, 2, 2, 2]),  # padded with 0.0
        ({"env_mask": [MASK[:2], *WHOLE["env_mask"][1:]]}, [2, 2, 2, 2]),  # padded with 1
        ({"env_mask": [[1, 0], *WHOLE["env_mask"][1:]]}, [2, 2, 2, 2]),
        ({"logprobs": None}, [2, 2, 2, 2]),
        ({"logprobs": [[math.nan] * 3] * 4}, [2, 2, 2, 2]),
        ({"env_mask": None}, [3, 3, 3, 3]),  # the environment's tokens too
    ],
)
def test_why_we_look_trl_takes_it_without_a_word(
    tmp_path: Path, broken: dict[str, Any], trains: list[int]
) -> None:
    given = {key: value for key, value in (WHOLE | broken).items() if key != "env_mask"}
    if (mask := (WHOLE | broken)["env_mask"]) is not None:
        given["env_mask"] = mask

    def func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return given

    with training(func, tmp_path, reward_funcs=lambda env_reward, **_: env_reward) as trainer:
        batch = batch_of(trainer)
    mask_of_loss = batch["completion_mask"] * batch.get("tool_mask", 1)
    assert mask_of_loss.sum(1).tolist() == trains


# -- trainers and rows that don't fit --------------------------------------------------------------


def own_reward(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1: it changes what is sampled"),
        ({"min_p": 0.1}, "min_p is 0.1"),
        ({"generation_kwargs": {"typical_p": 0.9}}, "generation_kwargs is"),
        ({"mask_truncated_completions": True}, "use RolloutFunc\\(mask_truncated=True\\)"),
        ({"reward_funcs": own_reward}, "the reward function own_reward would score rows of"),
        ({"dataset": rows(2, status=str)}, "train_dataset has the columns status"),
        ({"dataset": rows(2, image=str)}, "rollouts are of text only"),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused_before_anything_is_played(
    tmp_path: Path, args: dict[str, Any], message: str
) -> None:
    func = RolloutFunc(tools=[Roll])
    with training(func, tmp_path, **args) as trainer, pytest.raises(ConfigError, match=message):
        func([row["prompt"] for row in rows(2)], trainer)


def test_tools_are_given_to_one_of_the_two(tmp_path: Path) -> None:
    def roll() -> str:
        """Roll."""
        return "6"

    func = RolloutFunc()
    with training(func, tmp_path) as trainer:
        trainer.tools = [roll]
        with pytest.raises(ConfigError, match="never read env_mask"):
            func([rows(1)[0]["prompt"]], trainer)


def test_a_response_longer_than_the_trainer_expects_is_refused(tmp_path: Path) -> None:
    func = RolloutFunc(limits=Limits(max_response=200))
    with (
        training(func, tmp_path) as trainer,
        pytest.raises(
            ConfigError, match="max_response is 200, the trainer's max_completion_length"
        ),
    ):
        func([rows(1)[0]["prompt"]], trainer)


@pytest.mark.parametrize("use_async", [False, True])
def test_reward_functions_of_ones_own_leave_refused_samples_out(*, use_async: bool) -> None:
    async def later(completions: list[str], **_: Any) -> list[float]:
        return own_reward(completions)

    function = usable_only(later if use_async else own_reward)
    scores = function(completions=["a", "b"], refused=["", "aborted"])
    assert (asyncio.run(scores) if use_async else scores) == [1.0, None]
    assert function.__name__ == ("later" if use_async else "own_reward")

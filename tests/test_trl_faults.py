"""What TRL's real GRPOTrainer would take without a word, and RolloutFunc refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import torch

from fsm_rollout.adapters.trl import RolloutFunc, reward, rollouts, usable_only
from fsm_rollout.engines.scripted import Answer, Asked, Reply
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Machine, Transition
from fsm_rollout.states.table import Event
from tests.trl_training import (
    TOKENIZER,
    Roll,
    batch_of,
    rows,
    scripted,
    trained,
    training,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
DEAD = EngineError("the server is on fire", reason=StopReason.ENGINE_ERROR, final=True)


def index_of(asked: Asked) -> int:
    """Of the request that asks."""
    return int(asked.session_id.rpartition("-")[2])


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


@pytest.mark.parametrize("hands_on", [True, False])
def test_a_trainer_that_would_drop_what_rollouts_earn_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, hands_on: bool
) -> None:
    own = usable_only(lambda completions, **_: [0.0] * len(completions))
    functions = [own, *[reward] * hands_on]
    func = RolloutFunc(engine=scripted(["done"]), tools=[Roll])
    with (
        caplog.at_level(logging.WARNING, "fsm_rollout"),
        training(func, tmp_path, reward_funcs=functions) as trainer,
    ):
        batch_of(trainer)
    assert ("add it to reward_funcs" in caplog.text) is not hands_on

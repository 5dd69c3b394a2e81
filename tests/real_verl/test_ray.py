"""verl's managers with ray on the CPU: V0 with DataProto, V1 with the TransferQueue.

One ray session for all; the servers are a scripted client, everything else is verl's own.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils

from fsm_rollout.adapters.verl import FsmAgentLoopManager, FsmAgentLoopManagerTQ
from fsm_rollout.adapters.verl.manager_tq import fill_experts
from fsm_rollout.errors import ConfigError, HandOverError
from tests.real_verl.setting import (
    EMPTY,
    PAD,
    PROMPT,
    RESPONSE,
    Client,
    call,
    config,
    rows,
    said,
)

pytestmark = [
    pytest.mark.real_verl,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("cluster"),
]

RIGHT, DONE = said(call(answer="42")), said("It is 42.")
WRONG = said(call(answer="41"))
STEP = 5
DEADLINE_S = 240


class Silent(Client):
    """A server that never answers."""

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        await asyncio.sleep(3600)


# -- V0 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manager_cls", [AgentLoopManager, FsmAgentLoopManager])
def test_v0_one_row_per_input_over_two_workers(manager_cls: Any) -> None:
    settings = config(agent__num_workers=2)
    manager = manager_cls.create(config=settings, llm_client=Client([RIGHT, DONE]))
    out = manager.generate_sequences(rows(4, uid=["a", "a", "b", "b"]))
    assert len(out) == 4
    assert out.batch["responses"].shape == (4, RESPONSE)
    assert out.batch["prompts"].shape == (4, PROMPT)
    assert out.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert out.non_tensor_batch["status"].tolist() == ["completed"] * 4
    assert len({*out.non_tensor_batch["sample_id"]}) == 4
    assert out.batch["rm_scores"].sum(-1).tolist() == [0.75] * 4
    assert out.non_tensor_batch["score"].tolist() == [0.75] * 4
    assert out.meta_info["reward_extra_keys"] == ["score"]
    assert out.meta_info["timing"]["agent_loop/generate_sequences/max"] > 0


def test_v0_a_row_without_an_outcome_earns_what_its_group_does() -> None:
    manager = FsmAgentLoopManager.create(
        config=config(entry={"reward": "tests.real_verl.parts:length"}),
        llm_client=Client([said("four")], [said("a longer one")], [EMPTY], [DONE]),
    )
    out = manager.generate_sequences(rows(4, uid=["a", "a", "a", "b"]))
    scores = out.batch["rm_scores"].sum(-1)
    [aborted] = out.non_tensor_batch["is_stand_in"].nonzero()[0].tolist()
    group = [i for i in range(3) if i != aborted]
    assert scores[aborted] == scores[group].mean()
    assert out.non_tensor_batch["score"][aborted] == scores[aborted]
    assert not out.batch["response_mask"][aborted].any()
    assert out.batch["responses"][aborted, 0] == PAD
    # verl's own baseline and losses are what they would be without that row
    mask, kept = out.batch["response_mask"], [i for i in range(4) if i != aborted]
    uids = out.non_tensor_batch["uid"]
    with_it, _ = compute_grpo_outcome_advantage(
        out.batch["rm_scores"], mask, uids, norm_adv_by_std_in_grpo=False
    )
    without, _ = compute_grpo_outcome_advantage(
        out.batch["rm_scores"][kept], mask[kept], uids[kept], norm_adv_by_std_in_grpo=False
    )
    assert torch.allclose(with_it[kept], without)
    losses = torch.rand(mask.shape)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        whole = agg_loss(losses, mask, mode)
        assert torch.allclose(whole, agg_loss(losses[kept], mask[kept], mode))


def test_v0_a_row_that_is_set_aside_is_in_no_baseline_but_in_evaluations() -> None:
    parts = {"agent": "tests.real_verl.parts:set_aside", "reward": "tests.real_verl.parts:length"}
    for validate in False, True:
        manager = FsmAgentLoopManager.create(
            config=config(entry=parts), llm_client=Client([said("no")], [said("yes")], [DONE])
        )
        batch = rows(3, uid=["a", "a", "a"])
        batch.meta_info["validate"] = validate
        out = manager.generate_sequences(batch)
        mask, scores = out.batch["response_mask"], out.batch["rm_scores"].sum(-1)
        [aside] = (~mask.any(-1)).nonzero()[:, 0].tolist()
        group = [i for i in range(3) if i != aside]
        assert not out.non_tensor_batch["is_stand_in"].any()
        length = float(out.batch["attention_mask"][aside, PROMPT:].sum())
        assert scores[aside] == (length if validate else scores[group].mean())
        assert (out.batch["rm_scores"][aside] != 0).sum() == 1


def test_v0_a_batch_without_any_outcome_is_refused() -> None:
    manager = FsmAgentLoopManager.create(config=config(), llm_client=Client([EMPTY]))
    with pytest.raises(HandOverError, match=r"none of 2 rows has an outcome.*the engine aborted"):
        manager.generate_sequences(rows(2))
    batch = rows(1)
    batch.meta_info["validate"] = True  # in small batches, one bad row may be a whole one
    assert manager.generate_sequences(batch).non_tensor_batch["is_stand_in"].all()


# -- V1 --------------------------------------------------------------------------------------------


def stored(
    manager_cls: Any, settings: Any, client: Client, uids: list[str], partition: str = "train"
) -> tuple[dict[str, dict[str, Any]], Any]:
    """The tags of all keys of these prompts once they have ended, and their trajectories."""
    manager = manager_cls.create(config=settings, llm_client=client)
    batch = rows(len(uids)).non_tensor_batch
    columns = {name: batch[name] for name in ("raw_prompt", "index", "tools_kwargs")}
    columns |= {"data_source": batch["data_source"], "uid": np.array(uids, dtype=object)}
    prompts = tensordict_utils.get_tensordict(columns)
    tensordict_utils.assign_non_tensor_data(prompts, "global_steps", STEP)
    if partition == "val":
        tensordict_utils.assign_non_tensor_data(prompts, "validate", True)
    tag = {"is_prompt": True, "status": "pending", "global_steps": STEP}
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=[dict(tag) for _ in uids])
    manager.generate_sequences(prompts)
    deadline = time.monotonic() + DEADLINE_S
    tags: dict[str, Any] = {}
    while not tags or any(tags[uid]["status"] in ("pending", "running") for uid in uids):
        assert time.monotonic() < deadline, tags
        time.sleep(0.2)
        tags = {k: t for k, t in tq.kv_list()[partition].items() if k.split("_")[0] in uids}
    keys = sorted(key for key in tags if "_" in key)
    data = tq.kv_batch_get(keys=keys, partition_id=partition) if keys else None
    tq.kv_clear(keys=list(tags), partition_id=partition)
    return tags, data


def test_v1_our_manager_stores_what_verls_stores() -> None:
    settings = config(n=2)
    tags, data = zip(
        *(
            stored(cls, settings, Client([RIGHT, DONE], [RIGHT, RIGHT, DONE]), [uid])
            for cls, uid in ((AgentLoopManagerTQ, "v"), (FsmAgentLoopManagerTQ, "o"))
        ),
        strict=True,
    )
    verls, ours = data
    assert {*ours.keys()} == {*verls.keys()}
    for name in {*verls.keys()}:
        theirs, mine = verls[name], ours[name]
        assert type(mine) is type(theirs), name
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype, name
            pairs = zip(mine.unbind(), theirs.unbind(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
        else:
            assert len(mine) == len(theirs), name
    for prefix, tag in zip("vo", tags, strict=True):
        assert {*tag} == {prefix, f"{prefix}_0_0", f"{prefix}_1_0"}
        assert tag[prefix]["status"] == "finished"
    assert tags[0]["v_0_0"] == tags[1]["o_0_0"]
    extra = next(iter(ours["extra_fields"]))
    assert extra["status"] == "completed"
    assert extra["turn_scores"] == [1.0, None]
    assert extra["reward_extra_info"] == {"score": 0.75}
    assert {*extra} == {*next(iter(verls["extra_fields"]))}


@pytest.mark.parametrize("manager_cls", [AgentLoopManagerTQ, FsmAgentLoopManagerTQ])
def test_v1_all_samples_of_a_session_have_its_reward(manager_cls: Any) -> None:
    parts = {
        "agent": "tests.real_verl.parts:summarises",
        "reward": "tests.real_verl.parts:length",
    }
    uid = f"m{manager_cls.__name__}"
    client = Client([said("a long answer"), said("short")])
    tags, data = stored(manager_cls, config(entry=parts, n=1), client, [uid])
    assert {*tags} == {uid, f"{uid}_0_0", f"{uid}_0_1"}
    rewards = [row.tolist() for row in data["rm_scores"].unbind()]
    assert [sum(row) for row in rewards] == [len("short") + 1] * 2
    assert all(mask.all() for mask in data["response_mask"].unbind())


@pytest.mark.parametrize("manager_cls", [AgentLoopManagerTQ, FsmAgentLoopManagerTQ])
def test_v1_a_session_without_an_outcome_is_not_there(manager_cls: Any) -> None:
    uid = f"s{manager_cls.__name__}"
    tags, data = stored(manager_cls, config(n=3), Client([DONE], [EMPTY], [RIGHT, DONE]), [uid])
    assert tags[uid]["status"] == "finished"
    assert len(tags) == 1 + 2
    assert all(mask.any() for mask in data["response_mask"].unbind())
    assert [tags[key]["min_global_steps"] for key in tags if "_" in key] == [3, 3]


def test_v1_a_session_that_is_set_aside_is_not_there_but_in_evaluations() -> None:
    parts = {"agent": "tests.real_verl.parts:set_aside", "reward": "tests.real_verl.parts:length"}
    for partition, there in ("train", 2), ("val", 3):
        settings = config(entry=parts, n=3, val_kwargs__n=3)
        client = Client([said("no")], [said("yes")], [DONE])
        tags, data = stored(FsmAgentLoopManagerTQ, settings, client, [partition], partition)
        assert tags[partition]["status"] == "finished"
        assert len(data["response_mask"].unbind()) == there


@pytest.mark.parametrize(
    ("manager_cls", "partition"), [(AgentLoopManagerTQ, "train"), (FsmAgentLoopManagerTQ, "val")]
)
def test_v1_an_outcome_without_a_token_has_a_step_for_verls_metrics(
    manager_cls: Any, partition: str
) -> None:
    """In training our manager leaves it out: nothing of it is trained."""
    uid = f"t{manager_cls.__name__}"
    settings = config(entry={"limits": {"request_timeout_s": 0.2}}, n=1)
    tags, data = stored(manager_cls, settings, Silent(), [uid], partition)
    assert not data["response_mask"][0].any()
    steps = [tags[f"{uid}_0_0"][f"{end}_global_steps"] for end in ("min", "max")]
    assert steps == [STEP, STEP]


def test_v1_a_prompt_of_which_nothing_came_is_a_failure_and_alone() -> None:
    client = Client([EMPTY], [DONE])
    tags, _ = stored(FsmAgentLoopManagerTQ, config(n=1), client, ["bad", "good"], "val")
    statuses = {tags["bad"]["status"], tags["good"]["status"]}
    assert statuses == {"failure", "finished"}
    assert len(tags) == 3


def test_v1_what_cannot_run_says_so_before_it_starts() -> None:
    client = Client([DONE])
    with pytest.raises(ConfigError, match="did you mean 'limits'"):
        stored(FsmAgentLoopManagerTQ, config(entry={"limit": {}}, n=1), client, ["never"])
    tq.kv_clear(keys=["never"], partition_id="train")


def test_v1_a_reward_that_is_none_costs_one_session() -> None:
    client = Client([said("no")], [said("a long answer")])
    parts = {"reward": "tests.real_verl.parts:long_enough"}
    tags, data = stored(FsmAgentLoopManagerTQ, config(entry=parts, n=2), client, ["none"])
    assert tags["none"]["status"] == "finished"
    assert len(tags) == 1 + 1
    assert [row.sum().item() for row in data["rm_scores"].unbind()] == [1.0]


def test_v1_a_session_without_a_token_has_experts_where_its_siblings_have_some() -> None:
    rows = [
        {
            "input_ids": torch.arange(n),
            **({"routed_experts": torch.ones(n, 2, 1, dtype=torch.int16)} if n > 3 else {}),
        }
        for n in (3, 5)
    ]
    fill_experts(rows)
    stacked = tensordict_utils.list_of_dict_to_tensordict(rows)["routed_experts"]
    assert [tuple(row.shape) for row in stacked.unbind()] == [(3, 2, 1), (5, 2, 1)]
    alone = [{"input_ids": torch.arange(3)}]  # of a prompt of which no session has a token
    assert fill_experts(alone, (2, 1)) == (2, 1)
    assert alone[0]["routed_experts"].shape == (3, 2, 1)
    assert fill_experts(rows, None) == (2, 1)
    assert fill_experts([{"input_ids": torch.arange(3)}]) is None

"""verl's real AgentLoopWorker over FsmAgentLoop, and FsmAgentLoopWorker, without ray.

Beside them verl's own ToolAgentLoop gets the same script: what it makes of a fault stands in the
tests, so that one sees when verl mends it. `make verl` runs them in verl's environment.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from omegaconf import open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

from fsm_rollout.adapters.verl.manager import FsmAgentLoopWorker
from fsm_rollout.adapters.verl.player import WATCHED
from fsm_rollout.errors import ConfigError, HandOverError
from tests.real_verl.setting import (
    EMPTY,
    PAD,
    PROMPT,
    RESPONSE,
    TOKENIZER,
    Client,
    call,
    config,
    played,
    rows,
    said,
)
from tests.real_verl.tools import EVENTS

pytestmark = [pytest.mark.real_verl, pytest.mark.timeout(300)]

WAYS = pytest.mark.parametrize("worker", [AgentLoopWorker, FsmAgentLoopWorker])
RIGHT, DONE = said(call(answer="42")), said("It is 42.")


def verls_own(client: Client, batch: DataProto, **overrides: Any) -> DataProto:
    """What verl's own ToolAgentLoop makes of it."""
    return played(AgentLoopWorker, config(agent="tool_agent", **overrides), client, batch)


def response(out: DataProto, row: int = 0) -> list[int]:
    count = int(out.batch["attention_mask"][row, out.batch["prompts"].shape[1] :].sum())
    found: list[int] = out.batch["responses"][row, :count].tolist()
    return found


def text(out: DataProto, row: int = 0) -> str:
    return text_of(response(out, row))


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode([number for number in ids if number != PAD]))


def column(out: DataProto, name: str) -> list[Any]:
    values: list[Any] = out.non_tensor_batch[name].tolist()
    return values


def is_stand_in(out: DataProto, row: int = 0) -> bool:
    """Nothing in the row is trained, and it says so."""
    mask, log_probs = out.batch["response_mask"][row], out.batch["rollout_log_probs"][row]
    assert column(out, "is_stand_in")[row] == (response(out, row) == [PAD])
    return not mask.any() and not log_probs.any() and response(out, row) == [PAD]


# -- the same where verl is right ------------------------------------------------------------------


@WAYS
def test_a_sound_trajectory_is_what_verls_own_loop_makes_of_it(worker: Any) -> None:
    batch = rows(3)
    verls = verls_own(Client([RIGHT, DONE]), batch)
    ours = played(worker, config(), Client([RIGHT, DONE]), rows(3))
    for name, tensor in verls.batch.items():
        assert ours.batch[name].dtype == tensor.dtype, name
        assert torch.equal(ours.batch[name], tensor), name
    assert {*ours.batch.keys()} == {*verls.batch.keys()} | {"rm_scores"}  # calc_reward, at last
    names = {*verls.non_tensor_batch} - {"global_steps"}
    assert names <= {*ours.non_tensor_batch}
    for name in names - {"agent_name", "turn_scores"}:
        assert column(ours, name) == column(verls, name), name
    assert column(ours, "turn_scores") == [[1.0, None]] * 3  # verl's are always empty
    assert {*ours.meta_info["metrics"][0]} == {*verls.meta_info["metrics"][0]}


@WAYS
def test_rows_carry_columns_status_and_rewards(worker: Any) -> None:
    out = played(worker, config(), Client([RIGHT, DONE]), rows(2, uid=["a", "a"]))
    assert column(out, "status") == ["completed"] * 2
    assert column(out, "stop_reason") == ["stop"] * 2
    assert len({*column(out, "sample_id")}) == 2
    assert column(out, "data_source") == ["sums"] * 2
    assert column(out, "tool_rewards") == [[1.0]] * 2
    assert column(out, "tool_metrics")[0]["checked"] == 1
    assert column(out, "reward_parts") == [{"tool/check": 0.75}] * 2
    assert column(out, "turn_spans")[0][0] == (0, len(RIGHT.token_ids))
    assert [column(out, f"{end}_global_steps") for end in ("min", "max")] == [[3, 3], [3, 3]]
    last = len(response(out)) - 1
    assert out.batch["rm_scores"].nonzero().tolist() == [[0, last], [1, last]]
    assert out.batch["rm_scores"].sum(-1).tolist() == [0.75, 0.75]


@WAYS
def test_a_tool_of_verl_lives_as_long_as_its_trajectory(worker: Any) -> None:
    hooks = {
        "create_kwargs": {"truth": "42"},
        "execute_kwargs": {"seed": 1},
        "calc_reward_kwargs": {"scale": 2},
        "release_kwargs": None,  # a parquet file's way to say nothing
    }
    kwargs = {"check": hooks, "another": None}
    script = [RIGHT, said(call(answer="raise")), DONE]
    EVENTS.clear()
    verls_own(Client(script), rows(1, tools_kwargs=kwargs))
    assert [event[0] for event in EVENTS] == ["create", "execute", "release"] * 2
    EVENTS.clear()
    out = played(worker, config(), Client(script), rows(1, tools_kwargs=kwargs))
    names, ids = zip(*(event[:2] for event in EVENTS), strict=True)
    assert names == ("create", "execute", "execute", "calc_reward", "release")
    assert len({*ids}) == 1
    assert EVENTS[0][2] == {"truth": "42", "create_kwargs": {"truth": "42"}}
    assert EVENTS[1][2:] == ({"answer": "42"}, {"seed": 1, "execute_kwargs": {"seed": 1}})
    assert EVENTS[3][2] == {"scale": 2, "calc_reward_kwargs": {"scale": 2}}
    assert "the sandbox is gone" in text(out)


@WAYS
def test_tools_of_the_entry_stand_beside_verls(worker: Any) -> None:
    entry = {"tools": ["gsm8k", "calculator"], "limits": {"max_turns": 3}}
    kwargs = {
        "check": {"create_kwargs": {"truth": "42"}},
        "check_answer": {"create_kwargs": {"ground_truth": "42"}},
    }
    script = [said(call("calculator", expression="6 * 7")), said(call("check_answer", answer="42"))]
    settings = config(entry=entry, prompt_length=4 * PROMPT)
    out = played(worker, settings, Client([*script, DONE]), rows(1, tools_kwargs=kwargs))
    assert "correct" in text(out)
    assert column(out, "reward_parts") == [{"tool/check_answer": 1.0, "tool/check": 0.75}]
    assert column(out, "num_tool_calls") == [2]


@WAYS
def test_a_row_may_have_some_of_the_tools(worker: Any) -> None:
    client = Client([said(call("plain", answer="42")), DONE])
    batch = rows(1, extra_info={"tool_selection": ["check"]})
    out = played(worker, config(tools="both"), client, batch)
    assert "unknown tool" in text(out)
    prompt = TOKENIZER.decode(client.asked[0]["prompt_ids"])
    assert '"check"' in prompt
    assert '"plain"' not in prompt


# -- faults, side by side --------------------------------------------------------------------------


@WAYS
def test_an_empty_generation_is_tried_again_and_then_stands_aside(worker: Any) -> None:
    verls = verls_own(Client([EMPTY]), rows(1))
    mask = verls.batch["response_mask"][0]
    prompt = verls.batch["prompts"][0][verls.batch["attention_mask"][0, :PROMPT].bool()]
    assert response(verls) == prompt.tolist()  # verl trains on the prompt,
    assert mask[: len(prompt)].tolist() == [PAD] * len(prompt)  # each token 256-fold
    out = played(worker, config(), Client([EMPTY, DONE], [EMPTY]), rows(2))
    assert column(out, "status") == ["completed", "aborted"]
    assert column(out, "stop_reason") == ["stop", "engine_abort"]
    assert column(out, "attempts") == [2, 3]
    assert text(out, 0) == "It is 42.<|im_end|>"
    assert is_stand_in(out, 1)


@WAYS
def test_missing_log_probs_are_never_moved_to_other_tokens(worker: Any) -> None:
    silent = said(call(answer="42"), log_probs=None)
    verls = verls_own(Client([silent, DONE]), rows(1))
    at = verls.batch["rollout_log_probs"][0].nonzero().flatten()
    assert not set(at.tolist()) & set(range(len(response(verls)) - len(DONE.token_ids), RESPONSE))
    out = played(worker, config(), Client([silent]), rows(1))
    assert column(out, "stop_reason") == ["missing_log_probs"]
    assert is_stand_in(out)


@WAYS
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (said("It is 42.", log_probs=None), "missing_log_probs"),
        (said("It is 42.", log_probs=[-0.5]), "bad_reply"),
        (said("It is 42.", log_probs=[float("nan")] * 10), "bad_reply"),
        (said("It is 42.", log_probs=[0.5] * 10), "bad_reply"),
        (RuntimeError("the server is gone"), "engine_error"),
    ],
)
def test_one_bad_trajectory_costs_one_row(worker: Any, last: Any, reason: str) -> None:
    bad = [RIGHT, last, RIGHT, last, RIGHT, last]
    scripts = [RIGHT, DONE], bad, [RIGHT, DONE]
    out = played(worker, config(), Client(*scripts), rows(3))
    assert column(out, "status") == ["completed", "aborted", "completed"]
    assert column(out, "stop_reason")[1] == reason
    assert is_stand_in(out, 1)
    assert out.batch["response_mask"][0].any()
    assert out.batch["response_mask"][2].any()


@pytest.mark.parametrize(
    "last", [said("It is 42.", log_probs=None), RuntimeError("the server is gone")]
)
def test_verls_own_loop_loses_the_batch(last: Any) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        verls_own(Client([RIGHT, DONE], [RIGHT, last], [RIGHT, DONE]), rows(3))


def test_verls_own_loop_trains_on_nan() -> None:
    out = verls_own(Client([said("It is 42.", log_probs=[float("nan")] * 10)]), rows(1))
    assert out.batch["rollout_log_probs"].isnan().any()


@WAYS
def test_a_tool_turn_that_fits_exactly_is_kept(worker: Any) -> None:
    whole = played(worker, config(), Client([RIGHT, DONE]), rows(1))
    exact = len(response(whole)) - len(DONE.token_ids)
    verls = verls_own(Client([RIGHT, DONE]), rows(1), response_length=exact)
    assert len(response(verls)) == len(RIGHT.token_ids)  # the tool's answer was dropped
    out = played(worker, config(response_length=exact), Client([RIGHT, DONE]), rows(1))
    assert response(out) == response(whole)[:exact]
    assert column(out, "stop_reason") == ["max_response"]
    cut = played(worker, config(response_length=exact - 1), Client([RIGHT, DONE]), rows(1))
    assert response(cut) == response(whole)[: exact - 1]
    assert column(cut, "stop_reason") == ["observation_overflow"]


@WAYS
def test_an_overlong_prompt_is_refused_and_never_cut(worker: Any) -> None:
    verls = verls_own(Client([DONE]), rows(1), prompt_length=64)
    assert verls.batch["attention_mask"][0, :64].all()  # its head, the tools, is gone
    client = Client([DONE])
    out = played(worker, config(prompt_length=64), client, rows(1))
    assert column(out, "stop_reason") == ["prompt_overflow"]
    assert "allowed are 64" in column(out, "error")[0]
    assert out.batch["prompts"][0].tolist() == [PAD] * 64
    assert is_stand_in(out)
    assert not client.asked


@WAYS
def test_a_call_in_reasoning_is_not_executed(worker: Any) -> None:
    thinks = said(f"<think>maybe {call(answer='42')}</think>It is 42.")
    EVENTS.clear()
    verls_own(Client([thinks, DONE]), rows(1))
    assert any(event[0] == "execute" for event in EVENTS)
    EVENTS.clear()
    out = played(worker, config(), Client([thinks, DONE]), rows(1))
    assert not any(event[0] == "execute" for event in EVENTS)
    assert column(out, "num_tool_calls") == [0]


@WAYS
def test_a_tool_that_hangs_is_told_to_the_model(worker: Any) -> None:
    hangs = said(call(answer="hang"))
    settings = config(entry={"limits": {"tool_timeout_s": 0.2}})
    out = played(worker, settings, Client([hangs, DONE]), rows(1))
    assert column(out, "status") == ["completed"]
    assert "timed out" in text(out)
    assert column(out, "tool_metrics")[0]["tool_timeouts"] == 1


def test_verls_own_loop_waits_for_a_tool_that_hangs() -> None:
    async def play() -> None:
        worker = AgentLoopWorker(config(agent="tool_agent"), Client([said(call(answer="hang"))]))
        await asyncio.wait_for(worker.generate_sequences(rows(1)), 1)

    with pytest.raises(TimeoutError):
        asyncio.run(play())


@WAYS
def test_a_turn_that_the_server_cut_is_truncated(worker: Any) -> None:
    cut = said("x" * RESPONSE, stop="length")
    out = played(
        worker, config(), Client([cut.model_copy(update={"stop_reason": "completed"})]), rows(1)
    )
    assert column(out, "status") == ["truncated"]
    assert column(out, "stop_reason") == ["length"]


@WAYS
def test_each_turn_asks_for_what_is_left(worker: Any) -> None:
    client = Client([RIGHT, DONE])
    out = played(worker, config(), client, rows(1))
    first, second = client.asked
    assert first["sampling_params"]["max_tokens"] == RESPONSE
    used = len(response(out)) - len(DONE.token_ids)
    assert second["sampling_params"]["max_tokens"] == RESPONSE - used
    assert first["request_id"] == second["request_id"]


@WAYS
def test_a_tools_answer_is_cut_as_the_config_says(worker: Any) -> None:
    settings = config(
        multi_turn__max_tool_response_length=20, multi_turn__tool_response_truncate_side="right"
    )
    out = played(worker, settings, Client([said(call(answer="long")), DONE]), rows(1))
    assert f"{'x' * 20}[truncated]" in text(out)
    assert "x" * 21 not in text(out)


@WAYS
def test_a_row_that_cannot_be_played_says_why(worker: Any) -> None:
    kwargs = [{"check": {"create_kwargs": {"truth": "42"}}}, {"chekc": {"create_kwargs": {}}}]
    out = played(worker, config(), Client([DONE]), rows(2, tools_kwargs=kwargs))
    assert column(out, "status") == ["completed", "aborted"]
    assert "did you mean `check`?" in column(out, "error")[1]
    assert is_stand_in(out, 1)


@WAYS
@pytest.mark.parametrize(
    ("column_name", "value", "why"),
    [
        ("tools_kwargs", "{}", "tools_kwargs must hold an object, got str"),
        ("extra_info", "{}", "extra_info must hold an object, got str"),
        ("extra_info", {"tool_selection": "check"}, "must be a list of names"),
        ("extra_info", {"tool_selection": 1}, "must be a list of names"),
        ("extra_info", {"lock": threading.Lock()}, "cannot pickle"),
        ("priority", "high", "invalid literal"),
    ],
)
def test_a_column_of_another_type_costs_its_row(
    worker: Any, column_name: str, value: Any, why: str
) -> None:
    good = {"tools_kwargs": {"check": {"create_kwargs": {}}}, "extra_info": {}, "priority": 1}
    batch = rows(2, **{column_name: [value, good[column_name]]})
    out = played(worker, config(), Client([DONE]), batch)
    assert column(out, "is_stand_in") == [True, False]
    assert why in column(out, "error")[0]


def test_models_that_want_other_positions_are_left_to_verls_manager() -> None:
    class Mrope(AgentLoopWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            self.distillation_enabled, self.processor = False, SimpleNamespace(get_rope_index=print)

    class Worker(FsmAgentLoopWorker, Mrope):
        pass

    with pytest.raises(ConfigError, match="M-RoPE"):
        Worker()


def test_v0_has_no_place_for_several_samples_of_a_request() -> None:
    settings = config(entry={"agent": "tests.real_verl.parts:summarises"})
    why = "has 2 samples, and verl's V0 takes one row"
    with pytest.raises(HandOverError, match=why):  # verl's manager takes a batch of nothing
        played(AgentLoopWorker, settings, Client([DONE]), rows(1))
    out = played(FsmAgentLoopWorker, settings, Client([DONE], [EMPTY]), rows(2))
    assert column(out, "is_stand_in") == [True, True]
    assert why in column(out, "error")[0]


@WAYS
def test_workers_agree_on_columns_whatever_came_of_their_rows(worker: Any) -> None:
    settings = config()
    for first, second in (([EMPTY], [RIGHT, DONE]), ([RIGHT, DONE], [EMPTY])):
        outs = [played(worker, settings, Client(script), rows(1)) for script in (first, second)]
        assert len(DataProto.concat(outs)) == 2


@WAYS
def test_a_row_that_cannot_be_played_fits_an_evaluation_without_log_probs(worker: Any) -> None:
    kwargs = [{"another": {}}, {"check": {"create_kwargs": {"truth": "42"}}}]
    batch = rows(2, tools_kwargs=kwargs)
    batch.meta_info["validate"] = True
    settings = config(val_kwargs__top_p=0.9)
    out = played(worker, settings, Client([RIGHT, DONE]), batch)
    assert "rollout_log_probs" not in out.batch
    assert column(out, "is_stand_in") == [True, False]


@WAYS
def test_a_group_is_compared_only_where_it_is_whole(worker: Any) -> None:
    settings = config(entry={"reward": "tests.real_verl.parts:RELATIVE"})
    with pytest.raises(Exception, match=r"is a group's.*FsmAgentLoopManagerTQ"):  # hydra wraps it
        played(worker, settings, Client([DONE]), rows(2, uid=["a", "a"]))


def test_what_cannot_run_says_so_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean 'limits'"):
        played(FsmAgentLoopWorker, config(entry={"limit": {}}), Client([DONE]), rows(1))
    with pytest.raises(ConfigError, match="reward 'nowhere:f' is not an importable"):
        played(FsmAgentLoopWorker, config(entry={"reward": "nowhere:f"}), Client([DONE]), rows(1))
    with pytest.raises(ConfigError, match="top_p=1"):
        played(FsmAgentLoopWorker, config(top_p=0.9), Client([DONE]), rows(1))
    with pytest.raises(ConfigError, match=r"plays fsm_rollout\.adapters\.verl\.FsmAgentLoop alone"):
        played(FsmAgentLoopWorker, config(agent="tool_agent"), Client([DONE]), rows(1))


# -- rewards ---------------------------------------------------------------------------------------


class Judge:
    """In the place of verl's reward loop workers: what was asked is kept."""

    def __init__(self, *scores: Any) -> None:
        self.scores, self.asked = list(scores), list[DataProto]()
        self.compute_score = self

    async def remote(self, data: DataProto) -> dict[str, Any]:
        self.asked.append(data)
        score = self.scores.pop(0)
        if isinstance(score, Exception):
            raise score
        return {"reward_score": score, "reward_extra_info": {"acc": score in (1.0, 2.0)}}


def judged(
    worker_cls: Any, judge: Judge, settings: Any, client: Any, batch: DataProto
) -> DataProto:
    async def play() -> Any:
        worker = worker_cls(settings, llm_client=client, reward_loop_worker_handles=[judge])
        return await worker.generate_sequences(batch)

    out: DataProto = asyncio.run(play())
    return out


@WAYS
def test_without_a_reward_of_ours_verls_loop_is_asked(worker: Any) -> None:
    judge = Judge(1.0)
    plain = said(call("plain", answer="42"))
    out = judged(
        worker, judge, config(tools="plain"), Client([plain, DONE]), rows(1, tools_kwargs={})
    )
    assert out.batch["rm_scores"].sum(-1).tolist() == [1.0]
    assert column(out, "reward_extra_info") == [{"acc": True}]
    [data] = judge.asked
    told = data.non_tensor_batch["tool_extra_fields"][0]
    assert told["turn_scores"] == [0.0, None]
    assert told["status"] == "completed"
    assert data.non_tensor_batch["reward_model"][0] == {"ground_truth": "42"}


@WAYS
@pytest.mark.parametrize(("entry", "reward"), [({}, 0.75), ({"reward": "verl"}, -1.0)])
def test_who_rewards_is_the_entrys_choice(worker: Any, entry: Any, reward: float) -> None:
    judge = Judge(-1.0)
    out = judged(worker, judge, config(entry=entry), Client([RIGHT, DONE]), rows(1))
    assert out.batch["rm_scores"].sum(-1).tolist() == [reward]
    assert len(judge.asked) == (reward < 0)
    assert column(out, "reward_parts") == [{"tool/check": 0.75}]


@WAYS
def test_verls_loop_does_not_stand_in_for_a_reward_of_ours_that_is_none(worker: Any) -> None:
    judge = Judge(0.0)
    settings = config(entry={"reward": "tests.real_verl.parts:long_enough"})
    client = Client([said("a long answer")], [said("no")])
    out = judged(worker, judge, settings, client, rows(2))
    aside = column(out, "is_stand_in").index(True)
    assert is_stand_in(out, aside)
    assert "None, which is not 0" in column(out, "error")[aside]
    assert sorted(out.batch["rm_scores"].sum(-1).tolist()) == [0.0, 1.0]
    assert not judge.asked


def test_a_row_whose_tools_say_nothing_is_verls_loops() -> None:
    """verl's own worker wants the same reward_extra_info of all rows, and loses such a batch."""
    judge = Judge(-1.0)
    batch = rows(2, extra_info=[{"tool_selection": ["plain"]}, {"tool_selection": ["check"]}])
    kwargs = {"create_kwargs": {"truth": "42"}}
    batch.non_tensor_batch["tools_kwargs"][:] = [{"plain": kwargs}, {"check": kwargs}]
    script = [said(call(answer="42")), DONE]
    out = judged(FsmAgentLoopWorker, judge, config(tools="both"), Client(script), batch)
    assert out.batch["rm_scores"].sum(-1).tolist() == [-1.0, 0.75]
    assert len(judge.asked) == 1


def test_a_reward_that_cannot_be_computed_costs_one_row() -> None:
    judge = Judge(1.0, RuntimeError("no sandbox"), float("nan"), 1e39, 1.0)  # no float32
    settings = config(tools="plain")
    out = judged(FsmAgentLoopWorker, judge, settings, Client([DONE]), rows(5, tools_kwargs={}))
    aside = np.flatnonzero(column(out, "is_stand_in")).tolist()
    assert [is_stand_in(out, row) for row in aside] == [True, True, True]
    assert sorted(out.batch["rm_scores"].sum(-1).tolist()) == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_reward_that_is_none_costs_one_row() -> None:
    settings = config(entry={"reward": "tests.real_verl.parts:long_enough"})
    client = Client([said("a long answer")], [said("no")])
    out = played(FsmAgentLoopWorker, settings, client, rows(2))
    aside = column(out, "is_stand_in").index(True)
    assert is_stand_in(out, aside)
    assert "None, which is not 0" in column(out, "error")[aside]
    assert sorted(out.batch["rm_scores"].sum(-1).tolist()) == [0.0, 1.0]


# -- what a trainer asks for -----------------------------------------------------------------------


def test_greedy_rows_and_evaluations_are_sampled_as_verl_samples_them() -> None:
    client = Client([DONE])
    batch = rows(2, __do_sample__=[True, False], uid=["a", "a"])
    played(FsmAgentLoopWorker, config(temperature=0.7), client, batch)
    assert [asked["sampling_params"]["temperature"] for asked in client.asked] == [0.7, 0.0]
    client = Client([DONE])
    batch = rows(1)
    batch.meta_info["validate"] = True
    settings = config(val_kwargs__temperature=0.6, val_kwargs__top_p=0.9)
    out = played(FsmAgentLoopWorker, settings, client, batch)
    [asked] = client.asked
    assert asked["sampling_params"]["top_p"] == 0.9
    assert not asked["sampling_params"]["logprobs"]  # they are not the policy's under top-p
    assert "rollout_log_probs" not in out.batch
    assert column(out, "status") == ["completed"]


@WAYS
def test_priority_and_versions_go_through(worker: Any) -> None:
    client = Client([said("It is 42.", min_global_steps=4, max_global_steps=6)])
    out = played(worker, config(), client, rows(2, priority=[7, 8]))
    assert sorted(asked["priority"] for asked in client.asked) == [7, 8]
    assert column(out, "min_global_steps") == [4, 4]
    assert column(out, "max_global_steps") == [6, 6]


@WAYS
def test_routed_experts_stand_beside_their_tokens(worker: Any) -> None:
    client = Client([RIGHT, DONE])
    first = played(worker, config(), client, rows(1))
    lengths = [len(asked["prompt_ids"]) for asked in client.asked]
    script, total = [], 0
    for length, reply in zip(lengths, (RIGHT, DONE), strict=True):
        total = length + len(reply.token_ids) - 1
        experts = np.arange(total * 2, dtype=np.int32).reshape(total, 2, 1) % 100
        script.append(reply.model_copy(update={"routed_experts": experts}))
    out = played(worker, config(), Client(script), rows(1))
    experts = out.batch["routed_experts"]
    assert experts.dtype == torch.int16
    assert experts.shape == (1, PROMPT + RESPONSE, 2, 1)
    start = PROMPT - lengths[0]
    assert torch.equal(
        experts[0, start : start + total].int(), torch.tensor(script[1].routed_experts)
    )
    assert not experts[0, :start].any()
    assert not experts[0, start + total :].any()
    assert torch.equal(out.batch["input_ids"], first.batch["input_ids"])


@WAYS
def test_verl_counts_drafted_tokens_as_it_does_with_its_own_loop(worker: Any) -> None:
    names = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
    told: dict[str, Any] = dict(zip(names, (8, 6, 2), strict=True))
    script = [said(call(answer="42"), **told), said("It is 42.", **told)]

    def counted(out: DataProto) -> dict[str, float]:
        found: dict[str, float] = compute_spec_decode_metrics(
            *(out.non_tensor_batch.get(name) for name in names)
        )
        return found

    settings = config()
    assert counted(played(worker, settings, Client(script), rows(2))) == {}
    settings = config()
    settings.actor_rollout_ref.model.mtp.enable = True
    settings.actor_rollout_ref.model.mtp.enable_rollout = True
    assert counted(played(worker, settings, Client(script), rows(2))) == {
        "rollout/spec_accept_rate": 0.75,
        "rollout/spec_accept_length": 4.0,
    }
    out = played(worker, settings, Client(script, [EMPTY]), rows(2))
    assert counted(out)["rollout/spec_accept_rate"] == 0.75 / 2  # verl's rule for rows without


@WAYS
def test_too_many_aborted_requests_of_a_worker_are_an_alarm(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(entry={"max_abort_rate": 0.4})
    played(worker, settings, Client([EMPTY]), rows(WATCHED - 1))
    assert "abort rate alarm" not in caplog.text
    played(worker, settings, Client([EMPTY]), rows(WATCHED))
    assert "100.0% of 64 requests (64) were aborted for engine_abort" in caplog.text


def test_a_batch_of_stand_ins_alone_has_experts_like_the_one_before() -> None:
    client = Client([DONE])
    played(FsmAgentLoopWorker, config(), client, rows(1))
    total = len(client.asked[0]["prompt_ids"]) + len(DONE.token_ids) - 1
    experts = np.ones((total, 2, 1), dtype=np.int32)
    replies = Client([DONE.model_copy(update={"routed_experts": experts})], [EMPTY])

    async def play() -> list[Any]:
        worker = FsmAgentLoopWorker(config(), llm_client=replies)
        return [await worker.generate_sequences(rows(1)) for _ in range(2)]

    outs = asyncio.run(play())
    assert column(outs[1], "is_stand_in") == [True]
    both = DataProto.concat(outs).batch["routed_experts"]
    assert [bool(row.any()) for row in both] == [True, False]


def test_a_worker_that_never_saw_experts_has_some_like_the_others() -> None:
    """verl joins the rows of all workers, and one may have nothing but stand-ins in its first."""
    settings = config(enable_rollout_routing_replay=True)
    with open_dict(settings):
        settings.actor_rollout_ref.model.override_config.num_experts_per_tok = 1
    client = Client([DONE])
    outs = [played(FsmAgentLoopWorker, settings, client, rows(1))]
    total = len(client.asked[0]["prompt_ids"]) + len(DONE.token_ids) - 1
    experts = np.ones((total, 2, 1), dtype=np.int32)
    outs += [
        played(FsmAgentLoopWorker, settings, Client([answer]), rows(1))
        for answer in (EMPTY, DONE.model_copy(update={"routed_experts": experts}))
    ]
    both = DataProto.concat(outs).batch["routed_experts"]
    assert [bool(row.any()) for row in both] == [False, False, True]


def test_rows_of_one_uid_that_are_not_alike_are_played_apart() -> None:
    prompts = np.empty(3, dtype=object)
    prompts[:] = [[{"role": "user", "content": text}] for text in ("one", "two", "one")]
    batch = rows(3, uid=["a"] * 3)
    batch.non_tensor_batch["raw_prompt"] = prompts
    out = played(FsmAgentLoopWorker, config(), Client([DONE]), batch)
    said_to = [text_of(ids) for ids in out.batch["prompts"].tolist()]
    assert [text.split("user\n")[1][:3] for text in said_to] == ["one", "two", "one"]

"""slime's samples through the real loop, engine and HTTP; only the server and slime are stand-ins.

What slime's trainer makes of them is `slime_stub.consume`, which knows nothing of ours.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fsm_rollout.adapters import slime
from fsm_rollout.adapters.slime import player as players
from fsm_rollout.adapters.slime.config import SlimeConfig, limits_of
from fsm_rollout.agent import Context
from fsm_rollout.errors import ConfigError, HandOverError, ToolError
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardPart, Rewards
from fsm_rollout.testing.fake_engine import FakeEngine, FakeRouter, Latency, LogNormal, Rule, faults
from fsm_rollout.tools.base import Tool
from tests.playing import CALL, TOKENIZER, ids
from tests.slime_stub import (
    GenerateState,
    MilesSample,
    SlimeSample,
    Status,
    consume,
    install,
    slime_args,
)

SCRIPT = [f"Let me see. {CALL}", "It says hi."]
PARAMS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 500,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
TOOLS = {"tools": ["tests.playing:Echo"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    players._PLAYERS.clear()


class Slow(Tool):
    """Takes its time."""

    name = "echo"
    released = 0
    started: asyncio.Event

    async def execute(self, text: str) -> str:
        """text: what to say"""
        Slow.started.set()
        await asyncio.sleep(0.2)
        return text

    def release(self) -> None:
        Slow.released += 1


class Counts(Tool):
    """Counts its calls, so that one that is new can be told from one that went on."""

    name = "echo"
    opened = released = 0

    def create(self) -> None:
        Counts.opened += 1
        self.calls = 0

    def execute(self, text: str) -> str:
        """text: what to say"""
        self.calls += 1
        return f"call {self.calls}"

    def calc_reward(self) -> float:
        return float(self.calls)

    def release(self) -> None:
        Counts.released += 1


class Silent(Counts):
    """Has nothing to say about this one."""

    name = "echo"

    def calc_reward(self) -> None:  # type: ignore[override]
        return None


class Broken(Tool):
    """Cannot be opened."""

    name = "echo"
    required = True

    def create(self) -> None:
        raise RuntimeError("no sandbox")

    def execute(self, text: str) -> str:
        """text: what to say"""
        raise ToolError("never")


def half(request: Request) -> float:
    return 0.5


def no_score(request: Request) -> float | None:
    return None


def explode(request: Request) -> float:
    raise ValueError("boom")


OF_A_GROUP = Rewards({"rank": RewardPart(lambda requests: [0.0] * len(requests), group=True)})
WEIGHTED = Rewards({"half": half, "tool/echo": 2.0})


async def their_rm(args: Any, sample: Any) -> float:
    return 7.0


def args_for(fake: Any, checkpoint: str, **given: Any) -> Any:
    given.setdefault("fsm_rollout", TOOLS)
    where = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": fake.port}
    return slime_args(hf_checkpoint=checkpoint, **where, **given)


def sample_of(prompt: Any = "hello", **given: Any) -> Any:
    if prompt == "hello":
        prompt = [{"role": "user", "content": "hello"}]
    return SlimeSample(index=3, group_index=1, prompt=prompt, session_id="a-session", **given)


def play(
    checkpoint: str,
    *rules: Rule,
    script: Sequence[Any] = SCRIPT,
    sample: Any = None,
    params: Any = None,
    evaluation: bool = False,
    fake: FakeEngine | None = None,
    **given: Any,
) -> tuple[Any, FakeEngine, Any]:
    """One sample through `generate`; what came back, the server, and slime's args."""
    fake = fake or FakeEngine(script, tokenizer=TOKENIZER, faults=rules)
    sample = sample_of() if sample is None else sample

    async def main() -> tuple[Any, Any]:
        async with fake:
            args = args_for(fake, checkpoint, **given)
            return args, await slime.generate(args, sample, params or PARAMS, evaluation)

    args, played = asyncio.run(main())
    return played, fake, args


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens))


# -- a finished sample -----------------------------------------------------------------------------


def test_a_rollout_of_two_turns_and_a_tool_is_one_sample_that_slime_can_train(
    checkpoint: str,
) -> None:
    sample, fake, args = play(checkpoint, sample=sample_of(label="hi", metadata={"x": 1}))
    assert (sample.status, sample.reward, sample.index, sample.rollout_id) == (
        Status.COMPLETED,
        0.25,
        3,
        3,
    )
    [row] = consume(args, [sample])
    first, second = fake.generations()
    prompt = first.ids
    assert sample.tokens[: len(sample.tokens) - sample.response_length] == prompt
    assert sample.response == text_of(sample.tokens[len(prompt) :])
    said = [
        token
        for token, on in zip(sample.tokens[len(prompt) :], sample.loss_mask, strict=True)
        if on
    ]
    assert said == ids(SCRIPT[0]) + ids(SCRIPT[1])
    observed = sample.tokens[len(prompt) + len(ids(SCRIPT[0])) : len(second.ids)]
    assert "<hi>" in text_of(observed)
    assert second.ids == sample.tokens[: len(second.ids)]
    assert sum(value == 0.0 for value in sample.rollout_log_probs) == len(observed)
    assert all(value < 0 for value in row["trained"].values())
    assert sample.weight_versions == ["default", "default"]
    assert sample.non_generation_time > 0
    told = sample.metadata["fsm_rollout"]
    assert (told["stop_reason"], told["num_turns"], told["num_tool_calls"]) == ("stop", 2, 1)
    assert sample.metadata["x"] == 1
    assert sample.prefix_cache_info.total_prompt_tokens == len(prompt) + len(second.ids)
    assert sample.spec_info.completion_token_num == len(said)


def test_miles_gets_the_same_sample_by_its_fields(checkpoint: str) -> None:
    theirs = sample_of()
    prompt = [{"role": "user", "content": "hello"}]
    miles = MilesSample(index=3, group_index=1, prompt=prompt, routing_key="a-session")
    theirs, _, args = play(checkpoint, sample=theirs)
    miles, fake, _ = play(checkpoint, sample=miles)
    assert {seen.session for seen in fake.generations()} == {"a-session"}
    for name in ("tokens", "loss_mask", "rollout_log_probs", "response", "reward", "status"):
        assert getattr(miles, name) == getattr(theirs, name), name
    assert not hasattr(miles, "session_id")
    assert consume(args, [miles]) == consume(args, [theirs])


def test_the_session_key_goes_with_every_turn_and_an_evaluation_gets_one(checkpoint: str) -> None:
    _, fake, _ = play(checkpoint)
    assert [seen.session for seen in fake.generations()] == ["a-session"] * 2
    sample = sample_of()
    sample.session_id = None
    sample, fake, _ = play(checkpoint, sample=sample, evaluation=True)
    assert sample.session_id
    assert [seen.session for seen in fake.generations()] == [sample.session_id] * 2


def test_behind_a_router_the_workers_get_it(checkpoint: str) -> None:
    async def main() -> Any:
        fake = FakeEngine(SCRIPT, tokenizer=TOKENIZER)
        async with fake, FakeRouter([fake.url]) as router:
            return await slime.generate(args_for(router, checkpoint), sample_of(), PARAMS)

    assert asyncio.run(main()).status is Status.COMPLETED


def test_a_string_is_what_the_model_reads_and_messages_are_rendered(checkpoint: str) -> None:
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    _, fake, _ = play(checkpoint, sample=sample_of(rendered), script=["Hi."])
    assert fake.generations()[0].ids == TOKENIZER.encode(rendered, add_special_tokens=False)
    _, fake, _ = play(checkpoint, script=["Hi."])
    assert '"name": "echo"' in text_of(fake.generations()[0].ids)  # the tools are told


def test_a_rendered_prompt_that_does_not_tell_the_tools_is_warned_of_once(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    play(checkpoint, sample=sample_of("Say hello:"), script=["Hi."])
    assert [r.message for r in caplog.records if "names none of the tools (echo)" in r.message]
    caplog.clear()
    play(checkpoint, sample=sample_of("You may call echo:"), script=["Hi."])
    play(checkpoint, sample=sample_of("Say hello:"), script=["Hi."], fsm_rollout={})
    assert caplog.records == []


def test_a_template_file_lies_beside_the_yaml(checkpoint: str, tmp_path: Path) -> None:
    source = str(TOKENIZER.chat_template).replace("<|im_start|>assistant", "<|im_start|>model")
    (tmp_path / "chat.jinja").write_text(source)
    config = {"chat_template": "chat.jinja"}
    path = str(tmp_path / "fsm.yaml")
    _, fake, _ = play(checkpoint, script=["Hi."], fsm_rollout=config, custom_config_path=path)
    assert text_of(fake.generations()[0].ids).endswith("<|im_start|>model\n")


def test_miles_names_a_template_in_a_flag_and_the_yaml_stands_above_it(
    checkpoint: str, tmp_path: Path
) -> None:
    for name in ("flag", "yaml"):
        said = str(TOKENIZER.chat_template).replace("<|im_start|>assistant", f"<|im_start|>{name}")
        (tmp_path / name).write_text(said)
    flag, yaml = str(tmp_path / "flag"), str(tmp_path / "yaml")
    for config, end in (({}, "flag"), ({"chat_template": yaml}, "yaml")):
        _, fake, _ = play(checkpoint, script=["Hi."], fsm_rollout=config, chat_template_path=flag)
        assert text_of(fake.generations()[0].ids).endswith(f"<|im_start|>{end}\n")


def test_what_an_earlier_try_left_is_no_part_of_the_next(checkpoint: str) -> None:
    left = sample_of(
        status=Status.ABORTED,
        tokens=[1, 9, 9],
        response="??",
        response_length=2,
        loss_mask=[0, 0],
        rollout_log_probs=[-1.0, -1.0],
        weight_versions=["2", "4"],
        reward=3.0,
        rollout_routed_experts="stale",
        teacher_log_probs=[0.0, 0.0],
        non_generation_time=9.0,
    )
    left.prefix_cache_info.cached_tokens = 99
    sample, _, args = play(checkpoint, sample=left)
    fresh, _, _ = play(checkpoint)
    consume(args, [sample])
    assert sample.non_generation_time < 9
    sample.non_generation_time = fresh.non_generation_time
    for one in (sample, fresh):
        del one.metadata["fsm_rollout"]["metrics"]["tool/echo/seconds"]
    assert sample == fresh


def test_tokens_without_a_response_are_the_prompt(checkpoint: str) -> None:
    prompt = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
    _, fake, _ = play(checkpoint, sample=sample_of(tokens=list(prompt)), script=["Hi."])
    assert fake.generations()[0].ids == prompt


def test_a_prompt_of_tokens_alone_is_played_and_played_again(checkpoint: str) -> None:
    prompt = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)
    left = sample_of("", tokens=list(prompt))
    left, fake, _ = play(checkpoint, Rule(fault=faults.Abort()), sample=left, script=["Hi there."])
    assert (left.status, left.response_length > 0) == (Status.ABORTED, True)
    sample, again, args = play(checkpoint, sample=left, script=["Hi there."])
    assert fake.generations()[0].ids == again.generations()[0].ids == prompt
    assert sample.tokens == prompt + ids("Hi there.")
    consume(args, [sample])


def test_many_samples_at_once_share_one_engine(checkpoint: str) -> None:
    async def main() -> tuple[list[Any], Any, int]:
        async with FakeEngine(
            SCRIPT, tokenizer=TOKENIZER, latency=Latency(total_s=LogNormal(0.02))
        ) as f:
            args = args_for(f, checkpoint)
            samples = [
                SlimeSample(index=i, group_index=i // 8, prompt=sample_of().prompt)
                for i in range(64)
            ]
            played = await asyncio.gather(
                *(slime.generate(args, sample, PARAMS) for sample in samples)
            )
            return played, args, len(players._PLAYERS[asyncio.get_running_loop()])

    played, args, num_players = asyncio.run(main())
    assert num_players == 1
    assert [sample.index for sample in played] == list(range(64))
    assert len(consume(args, played)) == 64
    assert len({sample.session_id for sample in played}) == 64


def test_one_event_loop_after_another_and_new_args_each_time(checkpoint: str) -> None:
    for limit in (100, 3):
        sample, _, _ = play(
            checkpoint, params=PARAMS | {"max_new_tokens": limit}, script=["Hello."]
        )
        assert sample.response_length == min(limit, len(ids("Hello.")))
    assert len(players._PLAYERS) == 1  # those of closed loops are gone


# -- sampling and budgets --------------------------------------------------------------------------


def sent(fake: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(seen.body)["sampling_params"] for seen in fake.generations()]


def test_what_slime_asks_for_is_sent_and_its_mapping_is_not_changed(checkpoint: str) -> None:
    params = PARAMS | {
        "temperature": 0.7,
        "top_k": 20,
        "stop": ["</search>"],
        "stop_token_ids": [5],
        "max_new_tokens": 77,
    }
    before = json.dumps(params)
    _, fake, _ = play(checkpoint, params=params)
    assert json.dumps(params) == before
    for one in sent(fake):
        assert (one["temperature"], one["top_k"], one["stop"]) == (0.7, 20, ["</search>"])
        assert 5 in one["stop_token_ids"]
        assert one["no_stop_trim"]
    assert sent(fake)[0]["max_new_tokens"] == 77
    assert "stop" not in sent(play(checkpoint)[1])[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("min_new_tokens", 5),
        ("no_stop_trim", False),
        ("json_schema", "{}"),
        ("top_p", 0.0),
        ("temperature", "hot"),
    ],
)
def test_sampling_that_would_spoil_log_probs_is_refused_by_name(
    checkpoint: str, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=name):
        play(checkpoint, params=PARAMS | {name: value})


def test_a_turn_gets_what_the_context_leaves(checkpoint: str) -> None:
    """The default context is what the trainer's GPUs hold of one sample."""
    _, fake, _ = play(checkpoint)
    prompt, second = (len(seen.ids) for seen in fake.generations())
    cases: list[dict[str, Any]] = [
        {"context_parallel_size": 2, "max_tokens_per_gpu": (second + 5) // 2},
        {"rollout_max_context_len": (second + 5) // 2 * 2, "max_tokens_per_gpu": 10},
    ]
    for given in cases:
        room = (second + 5) // 2 * 2 - second
        sample, fake, args = play(checkpoint, **given)
        assert sent(fake)[-1]["max_new_tokens"] == room
        assert sample.status is Status.TRUNCATED
        assert len(sample.tokens) == second + room
        assert sample.reward == 0.25
        consume(args, [sample])
    sample, fake, _ = play(checkpoint, rollout_max_response_len=second - prompt + 3)
    assert [one["max_new_tokens"] for one in sent(fake)][-1] == 3
    assert sample.response_length == second - prompt + 3


@pytest.mark.parametrize("room", [0, 1, 4])
def test_an_observation_that_just_does_not_fit_is_cut_and_stays_aligned(
    checkpoint: str, room: int
) -> None:
    _, fake, _ = play(checkpoint)
    most = len(fake.generations()[0].ids) + len(ids(SCRIPT[0])) + room
    sample, fake, args = play(checkpoint, rollout_max_context_len=most)
    assert (sample.status, len(sample.tokens)) == (Status.TRUNCATED, most)
    assert sample.loss_mask[len(ids(SCRIPT[0])) :] == [0] * room
    assert len(fake.generations()) == 1
    consume(args, [sample])


def test_an_evaluation_has_its_own_limits_and_sampling(checkpoint: str) -> None:
    given: dict[str, Any] = {"rollout_max_context_len": 10_000, "rollout_max_response_len": 10}
    params = PARAMS | {"temperature": 0.0, "max_new_tokens": 400}
    sample, fake, _ = play(checkpoint, evaluation=True, params=params, **given)
    assert sample.status is Status.COMPLETED
    assert sent(fake)[0]["temperature"] == 0.0
    sample, _, _ = play(checkpoint, evaluation=True, params=params, eval_max_context_len=300)
    assert len(sample.tokens) <= 300


def test_where_each_budget_comes_from() -> None:
    def limits(given: dict[str, Any], evaluation: bool = False, **config: Any) -> Any:
        args = slime_args(rollout_max_response_len=1_000, **given)
        return limits_of(args, SlimeConfig(limits=config), 4_000, evaluation=evaluation)

    gpus = {"context_parallel_size": 4, "max_tokens_per_gpu": 500}
    both = {**gpus, "rollout_max_context_len": 3_000}
    evals = {**both, "eval_max_context_len": 9_000}
    assert limits(gpus).max_context == 2_000
    assert limits(both).max_context == 3_000
    assert limits(gpus, evaluation=True).max_context == 32_768 + 4_000  # it is not trained
    assert limits(both, evaluation=True).max_context == 3_000
    assert limits(evals, evaluation=True).max_context == 9_000
    assert limits({"rollout_max_prompt_len": 100}).max_context == 1_100
    assert limits({}).max_response == 1_000
    assert limits({}, evaluation=True).max_response == 4_000
    assert limits({}, max_new_tokens=10).max_new_tokens == 10
    assert limits({}, max_new_tokens=9_999).max_new_tokens == 4_000
    assert limits(both, max_context=50, max_response=40, turn_timeout_s=5).turn_timeout_s == 5.0


def test_the_limits_of_the_yaml_stand_above_slimes(checkpoint: str) -> None:
    config = {**TOOLS, "limits": {"max_turns": 1, "max_context": 5_000}}
    sample, fake, _ = play(checkpoint, fsm_rollout=config, rollout_max_context_len=50)
    assert sample.metadata["fsm_rollout"]["stop_reason"] == "max_turns"
    assert len(fake.generations()) == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tool": ["calculator"]}, "did you mean 'tools'"),
        ({"limits": {"max_turn": 3}}, "did you mean 'max_turns'"),
        ({"limits": {"max_turns": 0}}, "max_turns"),
        ({"limits": 3}, "limits"),
        ({"tools": ["calculater"]}, "calculator"),
        ({"reward": "tests.test_slime:nothing"}, "nothing"),
        ({"reward": "tests.test_slime:OF_A_GROUP"}, "--group-rm"),
        ("tools", "a mapping of tools"),
    ],
)
def test_a_mistake_in_the_yaml_is_an_error_that_says_what_was_meant(
    checkpoint: str, config: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        play(checkpoint, fsm_rollout=config)


def test_a_misspelt_mapping_is_not_taken_for_none(checkpoint: str) -> None:
    args = slime_args(
        hf_checkpoint=checkpoint, sglang_router_ip="x", sglang_router_port=1, fsm_rolout=TOOLS
    )
    with pytest.raises(ConfigError, match="did you mean 'fsm_rollout'"):
        asyncio.run(slime.generate(args, sample_of(), PARAMS))


# -- rewards ---------------------------------------------------------------------------------------


def test_who_scores(checkpoint: str) -> None:
    """The YAML's reward; else slime's reward model, if it has one; else the tools."""
    half_config = {**TOOLS, "reward": "tests.test_slime:half"}
    ours = "fsm_rollout.adapters.slime.reward"
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, 0.25),
        ({"fsm_rollout": half_config}, 0.5),
        ({"fsm_rollout": {**TOOLS, "reward": "tests.test_slime:WEIGHTED"}}, 1.0),
        ({"rm_type": "math"}, None),
        ({"custom_rm_path": "tests.test_slime.their_rm"}, None),
        ({"custom_rm_path": ours, "rm_type": "math"}, 0.25),
        ({"custom_rm_path": ours, "sample": sample_of(custom_rm_path=ours)}, 0.25),  # evaluation
        ({"fsm_rollout": half_config, "rm_type": "math"}, 0.5),
        ({"reward_key": "score"}, {"score": 0.25, "tool/echo": 0.25}),
    ]
    for given, reward in cases:
        sample, _, args = play(checkpoint, **given)
        assert sample.reward == reward, given
        if reward is not None:
            assert asyncio.run(slime.reward(args, sample)) == reward
    assert play(checkpoint, sample=sample_of(custom_rm_path="x.y"))[0].reward is None
    assert play(checkpoint, sample=sample_of(metadata={"rm_type": "f1"}))[0].reward is None


def test_a_reward_function_that_fails_costs_the_sample(checkpoint: str) -> None:
    for name, why in (("no_score", "reward is None"), ("explode", "boom")):
        config = {**TOOLS, "reward": f"tests.test_slime:{name}"}
        sample, _, args = play(checkpoint, fsm_rollout=config)
        harmless(sample, args, why)


def test_what_a_columnar_file_filled_in_is_absent(checkpoint: str) -> None:
    kwargs = {"echo": {"create_kwargs": None, "execute_kwargs": {"seed": None}}, "other": None}
    sample, _, _ = play(checkpoint, sample=sample_of(metadata={"tools_kwargs": kwargs}))
    assert sample.status is Status.COMPLETED


def test_metadata_that_is_none_is_empty_and_text_costs_the_sample(checkpoint: str) -> None:
    sample, _, _ = play(checkpoint, sample=sample_of(metadata=None))
    assert sample.status is Status.COMPLETED
    sample, _, args = play(checkpoint, sample=sample_of(metadata="easy"))
    harmless(sample, args, "its metadata is a str; --metadata-key names a column of mappings")


def test_a_tool_that_says_nothing_costs_its_sample(checkpoint: str) -> None:
    sample, _, args = play(checkpoint, fsm_rollout={"tools": ["tests.test_slime:Silent"]})
    assert sample.reward is None
    sample.reward = asyncio.run(slime.reward(args, sample))
    assert (sample.status, sample.remove_sample, sample.reward) == (Status.FAILED, True, 0.0)
    assert "no reward" in sample.metadata["fsm_rollout"]["error"]


def test_without_any_reward_slime_is_left_to_say_so_and_ours_says_what_to_do(
    checkpoint: str,
) -> None:
    sample, _, args = play(checkpoint, fsm_rollout=None, script=["Hi."])
    assert (sample.status, sample.reward) == (Status.COMPLETED, None)
    with pytest.raises(HandOverError, match="sample 3 has no reward: give the rollout one"):
        asyncio.run(slime.reward(args, sample))


# -- what goes wrong -------------------------------------------------------------------------------


def harmless(sample: Any, args: Any, why: str) -> None:
    """FAILED, told, and nothing in it is trained."""
    assert sample.status is Status.FAILED
    assert sample.remove_sample
    assert why in sample.metadata["fsm_rollout"]["error"]
    [row] = consume(args, [sample])
    assert row["trained"] == {}


def test_final_failures_are_failed_and_never_aborted(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "fsm_rollout")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (faults.Status(status=400, body="nonsense"), {}, "HTTP 400"),
        (faults.MissingLogProbs(), {}, "missing_log_probs"),
        (None, {"fsm_rollout": {"tools": ["tests.test_slime:Broken"]}}, "no sandbox"),
        (None, {"rollout_max_context_len": 20}, "max_context 20"),
        (None, {"sample": sample_of("")}, "prompt is empty"),
        (None, {"sample": sample_of(metadata={"tools_kwargs": {"ehco": {}}})}, "ehco"),
        (None, {"sample": sample_of(metadata={"lock": threading.Lock()})}, "pickle"),
        (None, {"sample": sample_of(multimodal_inputs={"images": ["x"]})}, "images"),
    ]
    for fault, given, why in cases:
        rules = () if fault is None else (Rule(fault=fault),)
        sample, fake, args = play(checkpoint, *rules, **given)
        harmless(sample, args, why)
        assert len(fake.generations()) <= 3


def test_a_fault_that_passes_costs_an_attempt_and_no_sample(checkpoint: str) -> None:
    sample, _, args = play(checkpoint, Rule(fault=faults.MissingLogProbs(), nth=2))
    assert (sample.status, sample.metadata["fsm_rollout"]["attempt"]) == (Status.COMPLETED, 2)
    consume(args, [sample])


def test_an_empty_reply_leaves_something_to_slice_and_nothing_to_train(checkpoint: str) -> None:
    """slime takes tokens[-0:], the whole sequence, for an empty response."""
    sample, _, args = play(checkpoint, Rule(fault=faults.Empty()))
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 1)
    assert sample.remove_sample
    [row] = consume(args, [sample])
    assert row["trained"] == {}


def test_without_a_server_or_model_a_sample_fails_and_slime_goes_on() -> None:
    """slime's own contract test calls it so."""

    class Args:
        partial_rollout = False

    sample = SlimeSample(index=0, prompt="prompt")
    played = asyncio.run(slime.generate(Args(), sample, {"temperature": 0.3}))
    assert played is sample
    assert (sample.status, sample.reward) == (Status.FAILED, 0.0)
    assert "hf_checkpoint" in sample.metadata["fsm_rollout"]["error"]


def test_top_p_that_the_server_does_not_report_fails_here_and_not_in_the_loss(
    checkpoint: str,
) -> None:
    sample, _, args = play(checkpoint, rollout_top_p=0.9, params=PARAMS | {"top_p": 0.9})
    harmless(sample, args, "top_p")


def test_top_p_is_replayed_and_observations_have_empty_spans(checkpoint: str) -> None:
    params = PARAMS | {"top_p": 0.9, "top_k": 50}
    sample, _, args = play(checkpoint, rollout_top_p=0.9, params=params)
    assert sample.status is Status.COMPLETED, sample.metadata
    consume(args, [sample])


# -- several samples ------------------------------------------------------------------------------


async def rewriting(ctx: Context) -> None:
    """Two turns, the second one behind a summary; and a sub-agent of its own."""
    turn = await ctx.generate()
    await ctx.call_tools(turn.calls)
    await ctx.spawn("a question of its own")
    await ctx.rewrite([{"role": "user", "content": "in short: hi"}])
    await ctx.generate()


AGENT = {"agent": "tests.test_slime:rewriting", "reward": "tests.test_slime:half"}


def test_a_rollout_of_several_samples_is_a_list_that_shares_its_rollout_id(
    checkpoint: str,
) -> None:
    given = sample_of(metadata={"mine": 1})
    played, fake, args = play(checkpoint, sample=given, script=["Hello."], fsm_rollout=AGENT)
    assert [type(one) for one in played] == [SlimeSample] * 3
    assert played[0] is given
    assert {one.rollout_id for one in played} == {3}
    assert {(one.index, one.group_index, one.reward) for one in played} == {(3, 1, 0.5)}
    assert {seen.session for seen in fake.generations()} >= {"a-session"}
    rows = consume(args, played)
    assert [len(row["trained"]) for row in rows] == [len(ids("Hello."))] * 3
    contexts = [text_of(one.tokens[: -one.response_length]) for one in played]
    assert ["in short" in context for context in contexts] == [False, True, False]
    assert ["of its own" in context for context in contexts] == [False, False, True]
    for one in played:
        assert one.metadata["mine"] == 1


def test_once_a_rollout_was_a_list_all_are_but_what_is_played_again(checkpoint: str) -> None:
    """slime's own loop flattens a whole batch by the shape of its first."""
    rules = [
        Rule(fault=faults.Status(status=400), session="fails"),
        Rule(fault=faults.Abort(), session="aborts"),
    ]

    async def main() -> list[Any]:
        async with FakeEngine(["Hello."], tokenizer=TOKENIZER, faults=rules) as fake:
            args, played = args_for(fake, checkpoint, fsm_rollout=AGENT), []
            for session in ("fails", "good", "fails", "aborts"):
                sample = sample_of()
                sample.session_id = session
                played.append(await slime.generate(args, sample, PARAMS))
            return played

    first, good, failed, aborted = asyncio.run(main())
    assert (first.status, len(good), aborted.status) == (Status.FAILED, 3, Status.ABORTED)
    assert [one.status for one in failed] == [Status.FAILED]


def test_with_an_agent_an_aborted_sample_starts_over(checkpoint: str) -> None:
    abort = Rule(fault=faults.Abort(), nth=3)

    async def main() -> tuple[Any, Any]:
        async with FakeEngine(["Hello."], tokenizer=TOKENIZER, faults=[abort]) as fake:
            args = args_for(fake, checkpoint, fsm_rollout=AGENT, partial_rollout=True)
            first = await slime.generate(args, sample_of(), PARAMS)
            assert (first.status, first.reward) == (Status.ABORTED, None)
            return args, await slime.generate(args, first, PARAMS)

    args, played = asyncio.run(main())
    assert len(consume(args, played)) == 3


# -- aborts ----------------------------------------------------------------------------------------

ABORT = Rule(fault=faults.Abort(), nth=2)


def test_an_aborted_turn_keeps_its_tokens_and_waits_for_slime(checkpoint: str) -> None:
    for partial in (False, True):
        sample, fake, _ = play(checkpoint, ABORT, partial_rollout=partial)
        assert (sample.status, sample.reward) == (Status.ABORTED, None)
        length = sample.response_length
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == length
        assert sample.tokens[: len(fake.generations()[1].ids)] == fake.generations()[1].ids
        assert len(sample.tokens) > len(fake.generations()[1].ids)
        assert sample.response
        assert len(fake.generations()) == 2


async def twice(
    checkpoint: str, between: Callable[[Any], Any] = lambda sample: sample, **given: Any
) -> tuple[Any, FakeEngine, Any, Any]:
    """The same sample a second time, after the abort of its second turn."""
    config = {"tools": ["tests.test_slime:Counts"]}
    Counts.opened = Counts.released = 0
    async with FakeEngine(SCRIPT, tokenizer=TOKENIZER, faults=[ABORT]) as fake:
        args = args_for(fake, checkpoint, fsm_rollout=config, **given)
        sample = await slime.generate(args, sample_of(), PARAMS)
        first = list(sample.tokens)
        sample = between(sample)
        played = await slime.generate(args, sample, PARAMS)
        return played, fake, args, first


def test_partial_rollout_goes_on_in_the_middle_of_a_turn_with_its_tools(checkpoint: str) -> None:
    sample, fake, args, first = asyncio.run(twice(checkpoint, partial_rollout=True))
    assert (sample.status, sample.reward) == (Status.COMPLETED, 1.0)
    assert (Counts.opened, Counts.released) == (1, 1)
    assert sample.tokens[: len(first)] == first
    assert fake.generations()[2].ids == first
    assert sample.response.endswith("It says hi.<|im_end|>")
    assert sum(sample.loss_mask) == len(ids(SCRIPT[0]) + ids(SCRIPT[1]))
    consume(args, [sample])


def test_mask_offpolicy_trains_only_what_is_new(checkpoint: str) -> None:
    def mask(sample: Any) -> Any:
        sample.loss_mask = [0] * sample.response_length
        return sample

    sample, _, args, first = asyncio.run(twice(checkpoint, mask, partial_rollout=True))
    start = len(sample.tokens) - sample.response_length
    assert sample.loss_mask[: len(first) - start] == [0] * (len(first) - start)
    assert set(sample.loss_mask[len(first) - start :]) == {1}
    assert min(consume(args, [sample])[0]["trained"]) == len(first)


def test_a_sample_that_went_on_under_new_weights_names_both_versions(checkpoint: str) -> None:
    async def main() -> Any:
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER, faults=[ABORT]) as fake:
            args = args_for(fake, checkpoint, partial_rollout=True)
            sample = await slime.generate(args, sample_of(), PARAMS)
            engine = players.player_of(args).engine
            await engine.call("/update_weight_version", {"new_version": "2"})
            return await slime.generate(args, sample, PARAMS)

    assert asyncio.run(main()).weight_versions == ["default", "default", "2"]


def test_what_cannot_go_on_starts_from_nothing(checkpoint: str) -> None:
    def edited(sample: Any) -> Any:
        sample.tokens[-1] += 1
        return sample

    for given, between in (
        ({"partial_rollout": False}, lambda sample: sample),
        ({"partial_rollout": True}, edited),
    ):
        sample, fake, args, _ = asyncio.run(twice(checkpoint, between, **given))
        assert (sample.status, sample.reward) == (Status.COMPLETED, 1.0)
        assert (Counts.opened, Counts.released) == (2, 2)
        assert fake.generations()[2].ids == fake.generations()[0].ids
        assert sample.weight_versions == ["default", "default"]
        consume(args, [sample])


def test_a_sample_that_slime_drops_lets_go_of_its_tools(checkpoint: str) -> None:
    async def main() -> None:
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER, faults=[ABORT]) as fake:
            config = {"tools": ["tests.test_slime:Counts"]}
            args = args_for(fake, checkpoint, fsm_rollout=config, partial_rollout=True)
            Counts.released = 0
            sample = await slime.generate(args, sample_of(), PARAMS)
            assert Counts.released == 0
            del sample
            gc.collect()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if Counts.released:
                    return
            raise AssertionError("its tools live on")

    asyncio.run(main())


def test_no_turn_begins_once_slime_ends_its_step(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = install(monkeypatch)

    async def main() -> tuple[Any, FakeEngine]:
        Slow.started = asyncio.Event()
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER) as fake:
            config = {"tools": ["tests.test_slime:Slow"]}
            args = args_for(fake, checkpoint, fsm_rollout=config)
            playing = asyncio.create_task(slime.generate(args, sample_of(), PARAMS))
            await Slow.started.wait()
            GenerateState(args).aborted = True
            return await playing, fake

    sample, fake = asyncio.run(main())
    loop.close()
    assert sample.status is Status.ABORTED
    assert len(fake.generations()) == 1
    assert sample.metadata["fsm_rollout"]["stop_reason"] == "paused"


def test_a_cancel_releases_the_tools_and_leaves_a_sample_that_can_be_played_again(
    checkpoint: str,
) -> None:
    async def main() -> Any:
        Slow.started, Slow.released = asyncio.Event(), 0
        async with FakeEngine(SCRIPT, tokenizer=TOKENIZER) as fake:
            config = {"tools": ["tests.test_slime:Slow"]}
            args = args_for(fake, checkpoint, fsm_rollout=config)
            sample = sample_of()
            playing = asyncio.create_task(slime.generate(args, sample, PARAMS))
            await Slow.started.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert (sample.status, Slow.released) == (Status.ABORTED, 1)
            return await slime.generate(args, sample, PARAMS)

    assert asyncio.run(main()).status is Status.COMPLETED


def test_the_example_of_the_docs_is_a_config(checkpoint: str) -> None:
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).parents[1] / "examples/slime/fsm.yaml"
    config = yaml.safe_load(path.read_text())
    sample, _, _ = play(checkpoint, script=["It is 4."], **config)
    assert sample.status in (Status.COMPLETED, Status.FAILED)

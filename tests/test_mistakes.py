"""What a newcomer gets wrong is said before anything starts, with the remedy."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import fsm_rollout
from fsm_rollout.agent import Context
from fsm_rollout.codec.messages import checked_messages
from fsm_rollout.config import load_config
from fsm_rollout.dataset import checked_rows, read_rows
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.fake_engine import FakeEngine, Rule, faults
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset

TOKENIZER = tiny_tokenizer()


class Echo(Tool):
    """Say it again."""

    def execute(self, text: str) -> str:
        return text


class Made(Echo):
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


class Misspelt(Echo):
    def calc_rewards(self) -> float:
        return 1.0


class Own(Echo):
    """Whose own methods resemble hooks, beside those hooks or with an underscore."""

    def _creates(self) -> None: ...

    def calc_reward(self) -> float:
        return self.calc_rewards()

    def calc_rewards(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "contents": "x"}, "message 0 has no 'content': it has role, contents"),
        ({"role": "tool"}, "message 0 has no 'content': it has role"),
        ({"role": "assistant", "tool_calls": []}, "message 0 has no 'content'"),
    ],
)
def test_a_message_without_content_is_not_taken_for_an_empty_one(
    message: dict[str, Any], said: str
) -> None:
    rollout = Rollout(ScriptedEngine(["a"], tokenizer=TOKENIZER), TOKENIZER)
    with pytest.raises(ConfigError, match=f"row 1: {said}"):
        fsm_rollout.run(rollout.generate([{"prompt": [message]}]))


def test_a_message_may_say_that_it_is_empty() -> None:
    call = {"function": {"name": "echo", "arguments": {}}}
    checked = checked_messages(
        [
            {"role": "user", "content": ""},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": None},
        ]
    )
    assert [message["content"] for message in checked] == ["", "", ""]


def test_an_answer_left_in_a_row_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    asked = [{"role": "user", "content": "6 * 7?"}]
    answered = [*asked, {"role": "assistant", "content": "42"}]
    checked_rows([{"prompt": asked}, {"prompt": answered}, {"prompt": answered}], Toolset([]))
    [record] = caplog.records
    assert record.getMessage().startswith("row 2: the prompt ends with a message of the assistant")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Made, r"__init__ is called without arguments: .*'config'; .* goes to `create`"),
        (Misspelt, r"has a method 'calc_rewards' and no 'calc_reward': .* else '_calc_rewards'"),
        (Echo(), r"Echo\(\.\.\.\) is an object; give its class"),
        ("no_such:Tool", r"No module named 'no_such'; modules are looked for in /"),
    ],
)
def test_a_tool_that_no_request_could_use_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Toolset([given])


def test_methods_of_a_tool_may_resemble_hooks_that_it_has() -> None:
    assert Toolset([Own]).classes == {"own": Own}


def test_parts_of_a_rollout_of_a_wrong_kind_are_named() -> None:
    with pytest.raises(ConfigError, match=r"AutoTokenizer\.from_pretrained\('Qwen/x'\)"):
        Rollout(ScriptedEngine(["a"]), "Qwen/x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="put it into a list"):
        ScriptedEngine("It is 42.", tokenizer=TOKENIZER)
    rollout = Rollout(ScriptedEngine(["a"], tokenizer=TOKENIZER), TOKENIZER)
    with pytest.raises(ConfigError, match=r"run takes a coroutine, `run\(rollout\.generate"):
        fsm_rollout.run(rollout.generate)  # type: ignore[arg-type]


def test_a_sub_agent_takes_no_dict_for_limits_and_the_agent_is_not_run_again() -> None:
    async def agent(ctx: Context) -> None:
        await ctx.generate()
        await ctx.spawn("part", limits={"max_turns": 2})  # type: ignore[arg-type]

    rollout = Rollout(ScriptedEngine(["a"], tokenizer=TOKENIZER), TOKENIZER, agent=agent)
    [group] = fsm_rollout.run(rollout.generate(["q"]))
    [request] = group.requests
    assert (request.stop_reason, request.attempt) == (StopReason.AGENT_ERROR, 1)
    assert "limits must be Limits(...), got {'max_turns': 2}" in request.error


@pytest.mark.parametrize("prompt", [["x"], [], 3, [{"role": "user", "contents": "x"}]])
def test_a_sub_agent_with_no_proper_prompt_is_the_agents_mistake(prompt: Any) -> None:
    async def agent(ctx: Context) -> None:
        await ctx.generate()
        await ctx.spawn(prompt)

    rollout = Rollout(ScriptedEngine(["a"], tokenizer=TOKENIZER), TOKENIZER, agent=agent)
    [group] = fsm_rollout.run(rollout.generate(["q"]))
    [request] = group.requests
    assert (request.stop_reason, request.attempt) == (StopReason.AGENT_ERROR, 1)
    assert "message" in request.error
    assert not request.children


def test_a_file_of_rows_that_is_no_jsonl_is_told_how(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: it is a list of rows; give each row a"):
        read_rows(path)
    path.write_text(json.dumps({"prompt": "a"}, indent=1))
    with pytest.raises(ConfigError, match="each line is one JSON object"):
        read_rows(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: calculator", "tools: expected `list`, got `text`"),
        ("limits: {max_turns: few}", "limits.max_turns: expected `int`, got `text`"),
        ("reward: 3", "reward: expected `text | mapping | null`, got `int`"),
        ("engine: {type: sglang, urls: 'http://h:1'}", "engine.urls: expected `list`, got `text`"),
        ("engine: {replies: [a]}", "engine: required, and missing: the key `type`"),
    ],
)
def test_a_wrong_type_in_a_config_is_told_in_the_words_of_yaml(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    rest = {"rows": "rows: r.jsonl", "engine": "engine: {type: scripted, replies: [a]}"}
    lines = [line for key, line in rest.items() if not text.startswith(key)]
    path.write_text("\n".join([*lines, text]))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: {said}"


def started(*rules: Rule, **options: Any) -> str:
    """What comes of a run's start against a server with these faults."""

    async def main() -> str:
        async with FakeEngine(tokenizer=TOKENIZER, faults=rules) as fake:
            engine = SGLangEngine(fake.url, **options)
            params = SamplingParams(temperature=0.6)
            try:
                await Rollout(engine, TOKENIZER, params=params).start()
            except (ConfigError, EngineError) as error:
                return f"{type(error).__name__}: {error}".replace(fake.url, "URL")
            finally:
                await engine.close()
            return engine.log_prob_kind

    return asyncio.run(main())


def test_one_reply_without_log_probs_does_not_keep_a_run_from_starting() -> None:
    assert started(Rule(fault=faults.MissingLogProbs(), nth=[2, 5])) == "scaled"


def test_a_server_without_log_probs_is_named_when_it_is_probed() -> None:
    said = started(Rule(fault=faults.MissingLogProbs()))
    assert said.startswith("EngineError: URL, asked which log-probs it reports: ")
    assert "without the log-probs that were asked for" in said


def test_a_kind_that_the_config_says_is_not_told_as_if_the_server_had_said_it() -> None:
    said = started(log_prob_kind="raw")
    assert said.startswith("ConfigError: as log_prob_kind='raw' says, the engine reports raw ")


def test_a_client_that_cuts_a_stream_is_no_bug_of_the_fake_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def cut(response: web.StreamResponse, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    async def main() -> None:
        async with FakeEngine(tokenizer=TOKENIZER) as fake, aiohttp.ClientSession() as session:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}, "stream": True}
            with monkeypatch.context() as patch:
                patch.setattr(web.StreamResponse, "write", cut)
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(f"{fake.url}/generate", json=body) as reply:
                        await reply.read()
            assert [seen.outcome for seen in fake.generations()] == ["disconnected"]

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

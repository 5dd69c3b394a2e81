"""Tools of sub-agents: some of their parent's, or others, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsm_rollout
from fsm_rollout.agent import Context
from fsm_rollout.codec import Codec
from fsm_rollout.codec.template import ChatTemplate
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits, Status
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset, ToolSpec
from tests.playing import CALL, TOKENIZER, ids, said_by_tools

CREATED: list[tuple[str, str]] = []


class Echo(Tool):
    """Say it again."""

    def create(self, mark: str = "-") -> None:
        CREATED.append(("echo", mark))

    def execute(self, text: str) -> str:
        """text: what to say"""
        return f"<{text}>"


class Judge(Tool):
    """Judge it."""

    def create(self, truth: str) -> None:
        CREATED.append(("judge", truth))

    def execute(self) -> str:
        return "right"


def louder(text: str) -> str:
    """Say it loudly.

    text: what to say
    """
    return text.upper()


ROW = {
    "prompt": "hello",
    "tools_kwargs": {
        "echo": {"create_kwargs": {"mark": "row"}},
        "judge": {"create_kwargs": {"truth": "42"}},
    },
}


def spawning(*spawns: dict[str, Any], script: Sequence[str]) -> tuple[Request, ScriptedEngine]:
    """A request whose agent spawns these, one after the other, behind a turn of its own."""

    async def lead(ctx: Context) -> None:
        await ctx.generate()
        for fields in spawns:
            await ctx.spawn("part", **fields)

    CREATED.clear()
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    limits = Limits(max_attempts=1)
    rollout = Rollout(engine, TOKENIZER, tools=[Echo, Judge], agent=lead, limits=limits)
    [group] = fsm_rollout.run(rollout.generate([ROW]))
    return group.requests[0], engine


@pytest.mark.parametrize(
    ("tools", "created", "said"),
    [
        (None, [("echo", "row"), ("judge", "42")], ["<hi>"]),
        (["echo"], [("echo", "row")], ["<hi>"]),
        (["judge"], [("judge", "42")], ["unknown tool 'echo' (tools: judge)"]),
        ([louder], [], ["unknown tool 'echo' (tools: louder)"]),
        (["echo", louder], [("echo", "row")], ["<hi>"]),
        ([], [], []),
    ],
)
def test_a_sub_agent_is_told_of_its_tools_and_has_no_others(
    tools: Sequence[ToolSpec] | None,
    created: list[tuple[str, str]],
    said: list[str],
) -> None:
    fields = {"tools": tools, "tools_kwargs": ROW["tools_kwargs"]}
    request, engine = spawning(fields, script=[CALL, "done"])
    [child] = request.children
    assert (child.status, said_by_tools(child)) == (Status.COMPLETED, said)
    assert sorted(CREATED[2:]) == created  # behind those of its parent
    schemas = [Rollout(engine, TOKENIZER, tools=[t]).tools.schemas[0] for t in (Echo, Judge)]
    names = ["echo", "judge"] if tools is None else tools
    wanted = [schemas[["echo", "judge"].index(n)] for n in names if isinstance(n, str)]
    if louder in names:
        wanted += Rollout(engine, TOKENIZER, tools=[louder]).tools.schemas
    prompt = child.sample.tokens[: child.sample.prompt_length].tolist()
    assert prompt == Codec(TOKENIZER, tools=wanted).prompt("part")


def test_one_set_of_tools_is_proved_once_however_many_sub_agents_have_it() -> None:
    codec = Codec(TOKENIZER, tools=[json.loads(json.dumps(echo_schema()))])
    first = codec.with_tools([])
    assert codec.with_tools([]) is first
    assert asyncio.run(codec.with_tools_async([])) is first
    assert first.prompt("a") == Codec(TOKENIZER).prompt("a") != codec.prompt("a")
    assert codec.prompt("a") == first.with_tools(codec.tools).prompt("a")


def echo_schema() -> dict[str, Any]:
    engine = ScriptedEngine([], tokenizer=TOKENIZER)
    return Rollout(engine, TOKENIZER, tools=[Echo]).tools.schemas[0]


def test_a_sub_agent_of_a_sub_agent_chooses_among_the_tools_of_that() -> None:
    async def inner(ctx: Context) -> None:
        await ctx.generate()
        with pytest.raises(ConfigError, match=r"no tool 'judge' to choose .*\(tools: echo\)"):
            await ctx.spawn("part", tools=["judge"])
        grandchild = await ctx.spawn("part", tools=["echo"])
        assert said_by_tools(grandchild) == ["<hi>"]

    request, _ = spawning({"tools": ["echo"], "agent": inner}, script=[CALL, "done"])
    assert (request.error, request.children[0].error) == ("", "")
    assert len(request.children[0].children) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": "echo"}, "spawn: tools: tools must be a list, got 'echo'"),
        ({"tools": ["ecko"]}, "no tool 'ecko' to choose, did you mean .echo."),
        ({"tools": ["os:system"]}, r"no tool 'os:system' to choose .*as a class or function"),
        ({"tools": [3]}, "spawn: tools: 3 is not a tool"),
        ({"tools": ["echo", "echo"]}, "two tools are called 'echo'"),
        ({"tools": ["judge"]}, r"spawn: tools_kwargs\['judge'\].create_kwargs: missing"),
        ({"tools": ["echo"], "tools_kwargs": {"nope": {}}}, "names no tool of this run: 'nope'"),
        ({"tools": ["echo"], "tools_kwargs": [1]}, "tools_kwargs must be an object, got list"),
    ],
)
def test_tools_that_do_not_fit_are_refused_before_anything_is_made(
    fields: dict[str, Any], why: str
) -> None:
    async def lead(ctx: Context) -> None:
        await ctx.generate()
        with pytest.raises(ConfigError, match=why):
            await ctx.spawn("part", **fields)
        assert ctx.request.children == []

    engine = ScriptedEngine(["done"], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Echo, Judge], agent=lead)
    [group] = fsm_rollout.run(rollout.generate([ROW]))
    assert (group.requests[0].status, group.requests[0].error) == (Status.COMPLETED, "")


def test_a_warning_of_the_model_or_the_template_is_for_all_sets_of_tools(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignores_tools = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    schemas = [Toolset([spec]).schemas for spec in (Echo, Judge, louder)]
    codec = Codec(tiny_tokenizer(ignores_tools), tools=schemas[0])
    broken = ids("<tool_call>{oops}</tool_call>")
    for tools in schemas:
        other = codec.with_tools(tools)
        for _ in range(20):
            other.parse(broken, finish="stop", call_id="call")
    told = [message.partition(",")[0] for message in caplog.messages]
    assert told == [
        "the chat template ignores tools",
        "parser 'hermes' reads no tool call of this model",
    ]


def test_a_codec_that_is_being_made_holds_up_no_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(TOKENIZER)
    is_making, may_go_on = threading.Event(), threading.Event()
    with_tools = ChatTemplate.with_tools

    def slow(self: ChatTemplate, tools: Any) -> ChatTemplate:
        is_making.set()
        assert may_go_on.wait(200)
        return with_tools(self, tools)

    monkeypatch.setattr(ChatTemplate, "with_tools", slow)
    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(codec.with_tools, [])
        assert is_making.wait(200)
        user = [{"role": "user", "content": "u"}] * 2  # a sequence that nobody has seen yet
        try:
            assert threads.submit(codec.delta, None, user).result(100)
        finally:
            may_go_on.set()
        assert making.result(100).tools == ()

"""verl's tools by duck-typed ones: no verl here; tests/real_verl has the real classes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import ToolResponse
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.verl import to_response, verl_tool
from tests.playing import TOKENIZER

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "description": "a number"}},
    "required": ["x"],
}


def schema(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "Double it.", "parameters": PARAMETERS}
    return {"type": "function", "function": function}


class Base:
    """What verl's BaseTool is to a trajectory."""

    def __init__(self, name: str = "double") -> None:
        self.tool_schema, self.name = schema(name), name
        self.events: list[tuple[Any, ...]] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.events.append(("create", kwargs))
        return "i1", SimpleNamespace(text=None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.events.append(("execute", instance_id, parameters, kwargs))
        return SimpleNamespace(text=str(2 * parameters["x"]), image=None), None, {"n": 1, "w": "no"}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append(("release", instance_id, kwargs))


class Rewarding(Base):
    """With a reward, and the hooks of verl's older tools: kwargs one by one, in part not async."""

    async def create(self, instance_id: str | None = None, truth: int = 0, **kwargs: Any) -> Any:
        self.events.append(("create", truth))
        return "i2", None

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.events.append(("calc_reward", instance_id))
        return 0.5

    def release(self, instance_id: str) -> None:  # type: ignore[override]
        self.events.append(("release", instance_id))


def play(*tools: Any, calls: int = 1, **row: Any) -> Request:
    [name] = [tool.name for tool in tools]
    call = f'<tool_call>{{"name": "{name}", "arguments": {{"x": 21}}}}</tool_call>'
    engine = ScriptedEngine([call] * calls + ["done"], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=tools)
    request = rollout.request({"prompt": "hi", **row})
    asyncio.run(rollout.run(request))
    assert request.sample.columns.num_trained
    return request


def test_one_instance_per_trajectory_and_every_hook_its_kwargs() -> None:
    base = Base()
    kwargs = {"create_kwargs": {"truth": 42}, "execute_kwargs": {"seed": 1}}
    request = play(verl_tool(base), calls=2, tools_kwargs={"double": kwargs})
    assert base.events == [
        ("create", {"truth": 42, "create_kwargs": {"truth": 42}}),
        ("execute", "i1", {"x": 21}, {"seed": 1, "execute_kwargs": {"seed": 1}}),
        ("execute", "i1", {"x": 21}, {"seed": 1, "execute_kwargs": {"seed": 1}}),
        ("release", "i1", {"release_kwargs": {}}),
    ]
    assert "42" in str(request.sample.response)
    assert request.metrics["n"] == 2
    assert request.reward is None  # it has no calc_reward, which is not 0.0


@pytest.mark.parametrize("name", ["truth", "execute_kwargs", "instance_id", "parameters"])
def test_the_model_cannot_give_what_is_the_rows(name: str) -> None:
    base = Base()
    call = {"name": "double", "arguments": {"x": 21, name: {"truth": 1}}}
    script = [f"<tool_call>{json.dumps(call)}</tool_call>", "done"]
    rollout = Rollout(
        ScriptedEngine(script, tokenizer=TOKENIZER), TOKENIZER, tools=[verl_tool(base)]
    )
    request = rollout.request("hi")
    asyncio.run(rollout.run(request))
    assert f"unknown parameter `{name}`" in request.sample.messages[-2]["content"]
    assert [event[0] for event in base.events] == ["create", "release"]


def test_older_tools_get_their_kwargs_by_name() -> None:
    base = Rewarding()
    request = play(verl_tool(base), tools_kwargs={"double": {"create_kwargs": {"truth": 42}}})
    assert [event[:2] for event in base.events] == [
        ("create", 42),
        ("execute", "i2"),
        ("calc_reward", "i2"),
        ("release", "i2"),
    ]
    assert request.reward == 0.5


def test_the_model_sees_verls_schema() -> None:
    assert Toolset([verl_tool(Base())]).schemas == [schema("double")]


@pytest.mark.parametrize("is_async", [True, False])
def test_function_tools(is_async: bool) -> None:
    def double(x: int) -> Any:
        return {"twice": 2 * x}, 1.0, {"n": 1}

    async def double_later(x: int) -> Any:
        return {"twice": 2 * x}, 1.0, {"n": 1}

    function = double_later if is_async else double
    request = play(
        verl_tool(SimpleNamespace(name="double", fn=function, tool_schema=schema("double")))
    )
    assert '{"twice": 42}' in str(request.sample.response)
    assert request.sample.turns[0].reward == 1.0
    assert request.metrics["n"] == 1


@pytest.mark.parametrize(
    ("value", "response"),
    [
        ("text", ToolResponse("text")),
        ({"a": "é"}, ToolResponse('{"a": "é"}')),
        (7, ToolResponse("7")),
        ((SimpleNamespace(text=None, image=["i"], video=["v"]),), ToolResponse(images=("i", "v"))),
        (("text", None, None), ToolResponse("text")),
        (("text", 0, {"n": float("inf"), "t": True}), ToolResponse("text", reward=0.0)),
    ],
)
def test_what_a_tool_of_verl_returns(value: Any, response: ToolResponse) -> None:
    assert to_response(value) == response


def test_what_is_no_tool_of_verl() -> None:
    with pytest.raises(TypeError, match="got 4 values"):
        to_response((1, 2, 3, 4))
    with pytest.raises(ConfigError, match="no `tool_schema`"):
        verl_tool(object())
    with pytest.raises(ConfigError, match="no method 'create'"):
        verl_tool(SimpleNamespace(tool_schema=schema("x")))

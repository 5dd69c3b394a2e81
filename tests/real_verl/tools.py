"""Tools as verl's users write them; `EVENTS` tells what was called with what."""

# mypy: disable-error-code="import-not-found,import-untyped,misc"
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

EVENTS: list[tuple[Any, ...]] = []


class Check(BaseTool):
    """Compares an answer with the truth of its row; the reward is that of the best one."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        created: Any = await super().create(instance_id, **kwargs)
        EVENTS.append(("create", created[0], kwargs))
        self.truths = {**getattr(self, "truths", {}), created[0]: kwargs["create_kwargs"]}
        return created

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        kwargs.pop("agent_data", None)
        EVENTS.append(("execute", instance_id, parameters, kwargs))
        answer = parameters.get("answer")
        if answer == "raise":
            raise RuntimeError("the sandbox is gone")
        if answer == "hang":
            await asyncio.sleep(3600)
        if answer == "long":
            return ToolResponse(text="x" * 200), None, None
        is_right = answer == self.truths[instance_id].get("truth")
        return ToolResponse(text=f"right: {is_right}"), float(is_right), {"checked": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        EVENTS.append(("calc_reward", instance_id, kwargs))
        return 0.75

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        EVENTS.append(("release", instance_id, kwargs))


class Plain(Check):
    """Without a reward of its own."""

    calc_reward = BaseTool.calc_reward


def schema(name: str) -> dict[str, Any]:
    """The schema of either, for verl's tool YAML."""
    answer = {"type": "string", "description": "the number you propose"}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Check an answer.",
            "parameters": {
                "type": "object",
                "properties": {"answer": answer},
                "required": ["answer"],
            },
        },
    }

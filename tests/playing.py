"""One request through the real loop, codec, parser and tool session; only the model is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fsm_rollout.engines.scripted import Answer, ScriptedEngine
from fsm_rollout.errors import ToolError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool

TOKENIZER = tiny_tokenizer()
CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'


class Echo(Tool):
    """Say it again."""

    rewarded = 0

    def execute(self, text: str) -> str:
        """text: what to say"""
        return f"<{text}>"

    def calc_reward(self) -> float:
        Echo.rewarded += 1
        return 0.25


def ids(text: str) -> list[int]:
    found: Any = TOKENIZER.encode(text, add_special_tokens=False)
    eos: Any = TOKENIZER.eos_token_id
    return [*found, eos]


def play(
    script: Sequence[Answer] | Callable[[Any], Answer],
    *,
    tools: Sequence[Any] = (Echo,),
    prompt: str = "hello",
    **kwargs: Any,
) -> tuple[Request, ScriptedEngine]:
    """One request through `Loop.run`; its invariants hold, whatever happened."""
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    limits = kwargs.pop(
        "limits", Limits(max_context=4_096, tool_timeout_s=1.0, release_timeout_s=1.0)
    )
    rollout = Rollout(engine, TOKENIZER, tools=tools, limits=limits, **kwargs)
    request = Request(prompt, limits=limits)
    asyncio.run(rollout.run(request))
    assert request.is_done
    assert request.is_sealed
    assert not [v for sample in request.samples for v in violations(sample)]
    return request, engine


def said_by_tools(request: Request) -> list[str]:
    return [m["content"] for m in request.sample.messages if m["role"] == "tool"]


async def swallow() -> None:
    try:
        await asyncio.sleep(600)
    except BaseException:
        await asyncio.sleep(600)


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def fail() -> None:
    raise ValueError("boom")


async def refuse() -> None:
    raise ToolError("not today")

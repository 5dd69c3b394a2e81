"""Two-digit arithmetic: the rows of the demo, their few-shot prompts, the reward."""

from __future__ import annotations

import random
import re
from typing import Any

from fsm_rollout import Request
from fsm_rollout.dataset import PromptRow

SHOTS = (("51 - 99", -48), ("23 + 61", 84), ("14 * 12", 168))
SYSTEM = "Answer with the result after ####."
USE_TOOL = "Use the calculator for every question. Then write the result after ####."


def problems(count: int, seed: int) -> list[tuple[str, int]]:
    """`count` expressions with their values."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(count):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        sign = draw.choice("+-*")
        drawn.append((f"{a} {sign} {b}", {"+": a + b, "-": a - b, "*": a * b}[sign]))
    return drawn


def rows(count: int, seed: int, *, tool: bool) -> list[PromptRow]:
    """The same problems with a tool round trip in every shot, or with none."""
    system = {"role": "system", "content": USE_TOOL if tool else SYSTEM}
    shots = [message for shot in SHOTS for message in _shot(*shot, tool=tool)]
    return [
        PromptRow(
            prompt=[system, *shots, _question(expression)],
            label=value,
        )
        for expression, value in problems(count, seed)
    ]


def reward(request: Request) -> float:
    """1.0 when the last model turn ends with `#### <the right number>`, else 0.0."""
    said = [m["content"] for m in request.sample.messages if m["role"] == "assistant" and m["span"]]
    found = re.findall(r"####\s*(-?\d+)", said[-1]) if said else []
    return float(bool(found) and int(found[-1]) == request.label)


def _question(expression: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {expression}?"}


def _shot(expression: str, value: int, *, tool: bool) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": f"#### {value}"}
    if not tool:
        return [_question(expression), answer]
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        _question(expression),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": str(value)},
        answer,
    ]

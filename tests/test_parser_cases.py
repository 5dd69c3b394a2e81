"""The handed parser cases, through the parsers that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.parsers import Parsed, get_parser

CASE_FILE = Path(__file__).parent / "cases/parser.jsonl"
CASES = [json.loads(line) for line in CASE_FILE.read_text(encoding="utf-8").split("\n") if line]
# Formats whose parsers are still to come; their cases wait here.
TO_COME = {
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "gpt-oss",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
}
# Cases whose policy leaves a choice: "items" is the expectation itself, a number an accepted
# alternative. Nothing inside a body is repaired (the model is told, so that it learns the format);
# what is unambiguous around or beside it is accepted.
CHOICES: dict[str, tuple[str | int, str]] = {
    "par-005": ("items", "single quotes are Python, not JSON"),
    "par-008": ("items", "arguments in a string are not an object"),
    "par-009": ("items", "`parameters` can only mean `arguments`"),
    "par-023": ("items", "a body holds one call"),
    "par-027": ("items", "NaN is not JSON; the code says so exactly"),
    "par-029": ("items", "nesting is bounded; the code says so exactly"),
    "par-031": ("items", "a raw newline in a string has one reading"),
    "par-033": (0, "a repeated opener leaves the body intact, and its call with it"),
    "par-036": ("items", "U+FFFD in its place would be another argument than the model's"),
    "par-038": ("items", "a fence is not JSON"),
    "par-041": ("items", "a brace that is missing could belong in several places"),
}


def items_of(parsed: Parsed) -> list[dict[str, Any]]:
    return [
        {"type": "call", "name": call.name, "arguments": call.arguments}
        if call.error is None
        else {"type": "error", "name": call.name, "error": call.error}
        for call in parsed.calls
    ]


def chosen_items(case: dict[str, Any]) -> list[dict[str, Any]]:
    choice, _ = CHOICES.get(case["id"], ("items", ""))
    expected = case["expected"]
    items: list[dict[str, Any]] = (
        expected["items"]
        if choice == "items"
        else expected["accepted_alternatives"][choice]["items"]
    )
    return items


def squeezed(text: str) -> str:
    return " ".join(text.split())


HERMES = [case for case in CASES if case["input"]["format"] == "hermes"]


@pytest.mark.parametrize("case", HERMES, ids=lambda case: f"{case['id']}: {case['title']}")
def test_a_handed_case_gives_its_items_and_keeps_its_text(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    parsed = get_parser(given["format"]).parse(
        given["text"], finish=given["finish_reason"], tools=given["tools"]
    )
    got, wanted = items_of(parsed), chosen_items(case)
    assert len(got) == len(wanted)
    for item, want in zip(got, wanted, strict=True):
        assert item == item | want
    assert squeezed(parsed.content) == squeezed(expected["content"])
    assert expected.get("reasoning_contains", "") in parsed.reasoning
    if wanted == expected["items"]:
        executable = [call for call in parsed.calls if call.error is None]
        assert len(executable) == expected["executable_calls"]


def test_the_choices_are_made_for_exactly_the_cases_that_leave_one() -> None:
    open_cases = {case["id"] for case in HERMES if "accepted_alternatives" in case["expected"]}
    assert open_cases == set(CHOICES)


def test_every_handed_case_has_a_parser_or_is_named_as_to_come() -> None:
    assert {case["input"]["format"] for case in CASES} == {"hermes"} | TO_COME

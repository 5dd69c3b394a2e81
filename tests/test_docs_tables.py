"""What the pages under docs/ list is what the code has: names, defaults, reasons, options."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fsm_rollout
from fsm_rollout import config, errors
from fsm_rollout.adapters.slime.config import SlimeConfig
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.http import HttpSettings
from fsm_rollout.invariants import INVARIANTS
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.states import guards
from fsm_rollout.states.diagram import markdown
from fsm_rollout.tools.base import ToolResponse
from fsm_rollout.tools.result import COUNTERS, CallResult
from fsm_rollout.turn import ToolCall

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = "\n".join(path.read_text() for path in ROOT.glob("fsm_rollout/**/*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
YES = {True: "yes", False: "no"}


def shown(page: str, head: str) -> list[list[str]]:
    """The cells of the page's table whose first column is called `head`, without backticks."""
    _, _, table = (DOCS / page).read_text().partition(f"| {head} |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]


def fields_of(struct: type[msgspec.Struct]) -> list[list[str]]:
    """Name and default of each field."""
    return [[field.name, default_of(field)] for field in msgspec.structs.fields(struct)]


def default_of(field: Any) -> str:
    if field.required:
        return "required"
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(default, msgspec.Struct):
        return "see below"
    return "empty" if default in ([], (), {}) else str(default)


def what_it_spends(outcome: Any) -> str:
    result = CallResult(ToolCall(""), ToolResponse(), outcome)
    if result.executed:
        return "max_tool_calls"
    return "max_invalid_calls" if result.is_invalid else "neither"


TABLES: dict[tuple[str, str], list[list[str]]] = {
    ("explanation/states.md", "stop reason"): [
        [reason, reason.status.name, YES[reason.retryable], YES[reason.resumable]]
        for reason in StopReason
    ],
    ("explanation/states.md", "guard"): [
        [guard.__name__, str(guard.__doc__)]
        for guard in guards.REFUSALS
        if guard.__module__ == guards.__name__  # others may declare their own
    ],
    ("explanation/invariants.md", "invariant"): [[code] for code in INVARIANTS],
    ("explanation/tools.md", "outcome"): [
        [name, what_it_spends(name), COUNTERS.get(name, "none")] for name in ("ok", *COUNTERS)
    ],
    ("reference/limits.md", "limit"): fields_of(Limits),
    ("reference/config.md", "key"): fields_of(config.RunConfig),
    ("reference/config.md", "transformers key"): fields_of(config.TransformersConfig),
    ("reference/config.md", "sglang key"): fields_of(config.SGLangConfig),
    ("reference/config.md", "vllm key"): fields_of(config.VLLMConfig),
    ("reference/config.md", "scripted key"): fields_of(config.ScriptedConfig),
    ("reference/config.md", "reward key"): fields_of(config.RewardConfig),
    ("reference/config.md", "sampling key"): fields_of(SamplingParams),
    ("how-to/use-inference-servers.md", "setting"): fields_of(HttpSettings),
    ("how-to/train-with-slime.md", "fsm_rollout key"): fields_of(SlimeConfig),
    ("reference/api.md", "name"): [[name] for name in sorted(fsm_rollout.__all__, key=str.lower)],
    ("reference/errors.md", "error"): [
        [name, str(error.__base__ and error.__base__.__name__)]
        for name, error in inspect.getmembers(errors, inspect.isclass)
    ],
    ("reference/compatibility.md", "package"): [
        dependency.split(">=") for dependency in PROJECT["dependencies"]
    ],
}


@pytest.mark.parametrize(("page", "head"), TABLES)
def test_a_table_lists_what_the_code_has(page: str, head: str) -> None:
    expected = TABLES[page, head]
    assert [row[: len(expected[0])] for row in shown(page, head)] == expected


def test_the_table_of_events_is_the_one_that_the_machine_is_made_from() -> None:
    assert markdown() in (DOCS / "explanation/states.md").read_text()


def test_every_code_of_an_invariant_error_is_explained() -> None:
    codes = {"missing_log_probs", *re.findall(r'"(R3\.[\w.]+)"', SOURCE)}
    page = (DOCS / "explanation/invariants.md").read_text()
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_the_reasons_of_a_template_error_are_those_of_the_code() -> None:
    reasons = [
        row[0].removesuffix(" …") for row in shown("how-to/use-your-chat-template.md", "why")
    ]
    assert reasons
    assert [reason for reason in reasons if reason not in SOURCE] == []


def test_every_command_and_option_is_explained() -> None:
    command = import_module("typer.main").get_command(import_module("fsm_rollout.cli").app)
    page = (DOCS / "reference/cli.md").read_text()
    for name, subcommand in command.commands.items():
        assert f"fsm-rollout {name} " in page
        options = [p.name for p in subcommand.params if p.param_type_name == "option"]
        spelled = [option.replace("_", "-") for option in options]
        assert [option for option in spelled if f"`--{option}" not in page] == []

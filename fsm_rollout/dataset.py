"""Rows in, samples out: the JSONL at both ends of a run, checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.sample import Sample
from fsm_rollout.tools.registry import Toolset


class PromptRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request starts from. `tools_kwargs` names registered tools only."""

    prompt: str | list[dict[str, Any]]
    """messages, or a string that stands for one user message"""
    label: Any = None
    """what a reward function compares with"""
    metadata: dict[str, Any] = {}
    tools_kwargs: dict[str, dict[str, dict[str, Any]]] = {}
    """`{tool: {create_kwargs | execute_kwargs | calc_reward_kwargs | release_kwargs: {...}}}`"""


def read_rows(path: Path) -> list[PromptRow]:
    """The rows of a JSONL file. ConfigError names file, line and field."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a JSONL file of rows {_FIELDS}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows")
    return rows


def checked_rows(
    rows: Iterable[PromptRow | Mapping[str, Any] | str], tools: Toolset
) -> list[PromptRow]:
    """Typed rows whose tool kwargs fit the tools. ConfigError names the row, counted from 1."""
    checked = []
    for number, given in enumerate(rows, 1):
        try:
            row = given if isinstance(given, PromptRow) else _row(given)
            if not row.prompt:
                raise ConfigError("the prompt is empty")
            tools.check_row(row.tools_kwargs)
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error
        checked.append(row)
    return checked


def _row(given: Any) -> PromptRow:
    if isinstance(given, str):
        given = {"prompt": given}
    if isinstance(given, Mapping) and "prompt" not in given:
        raise ConfigError(f"no prompt in it: it has {', '.join(map(str, given)) or 'no fields'}")
    try:
        return msgspec.convert(given, PromptRow)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}; a row is {_FIELDS}") from error


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """One line per sample, `Sample.to_dict`; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # the standard library's JSON: a call may hold integers of any size, a column may hold NaN
    lines = [json.dumps(sample.to_dict()) + "\n" for sample in samples]
    path.write_text("".join(lines), encoding="ascii")
    return len(lines)


def read_samples(path: Path) -> list[Sample]:
    """The samples of `write_samples`, not judged. ConfigError names file, line and field."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the samples that `fsm-rollout run` wrote")
    samples = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            samples.append(Sample.from_dict(json.loads(line)))
        except (json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return samples


_FIELDS = "{" + ", ".join(PromptRow.__struct_fields__) + "}"

"""Rows in, samples out: the JSONL at both ends of a run, checked before anything starts."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.failures import log_failure
from fsm_rollout.invariants import check
from fsm_rollout.sample import Sample
from fsm_rollout.tools.registry import Toolset

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PromptRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request starts from. `tools_kwargs` names registered tools only."""

    prompt: str | list[dict[str, Any]]
    """messages, or a string that stands for one user message"""
    id: str = ""
    """your own id of the row, which its samples carry as `row_id`: no two rows may share one"""
    label: Any = None
    """what a reward function compares with"""
    metadata: dict[str, Any] = {}
    tools_kwargs: dict[str, dict[str, dict[str, Any]]] = {}
    """`{tool: {create_kwargs | execute_kwargs | calc_reward_kwargs | release_kwargs: {...}}}`"""
    where: str = ""
    """what messages about the row call it; default: file and line, or `row 3`"""


# -- in --------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[PromptRow]:
    """The rows of a JSONL file. ConfigError names file, line and field."""
    rows = _read_lines(path, lambda line: _row(_json(line, **_STRICT)), wanted=f"rows {_FIELDS}")
    if not rows:
        raise ConfigError(f"{path}: no rows; give one {_FIELDS} a line")
    for number, row in rows.items():
        row.where = row.where or f"{path}:{number}"
    return list(rows.values())


def present(tools_kwargs: Any, *, depth: int = 3) -> Any:
    """`{tool: {hook_kwargs: {...}}}` without None, with which columnar files fill absent keys."""
    if not depth or not isinstance(tools_kwargs, Mapping):
        return tools_kwargs
    held = {name: value for name, value in tools_kwargs.items() if value is not None}
    return {name: present(value, depth=depth - 1) for name, value in held.items()}


def checked_rows(
    rows: Iterable[PromptRow | Mapping[str, Any] | str], tools: Toolset
) -> list[PromptRow]:
    """Typed rows whose tool kwargs fit the tools. ConfigError says where the row stands."""
    checked: list[PromptRow] = []
    where_of: dict[str, str] = {}
    for number, given in enumerate(rows, 1):
        where = f"row {number}"
        try:
            row = given if isinstance(given, PromptRow) else _row(given)
            where = row.where or where
            if not row.prompt:
                raise ConfigError("the prompt is empty")
            tools.check_row(row.tools_kwargs)
            _warn_of_an_answer(row.prompt, where)
            if row.id and where_of.setdefault(row.id, where) != where:
                raise ConfigError(f"id {row.id!r} is that of {where_of[row.id]} too; rename one")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        checked.append(msgspec.structs.replace(row, where=where))
    return checked


def _warn_of_an_answer(prompt: object, where: str) -> None:
    """It may be meant, but is more often an answer that was left in the data."""
    last = prompt[-1] if isinstance(prompt, list) else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        how = "ends with a message of the assistant, and the policy answers behind that"
        log_failure(logger, where, "the prompt", how, level=logging.WARNING)


def _row(given: Any) -> PromptRow:
    if isinstance(given, str):
        given = {"prompt": given}
    if isinstance(given, list):
        if any(isinstance(item, Mapping) and "prompt" in item for item in given):
            raise ConfigError("it is a list of rows; give each row a line of its own")
        raise ConfigError('it is a list; messages are the prompt of a row: {"prompt": [...]}')
    if isinstance(given, Mapping) and "prompt" not in given:
        raise ConfigError(f"no prompt in it: it has {', '.join(map(str, given)) or 'no fields'}")
    if isinstance(given, Mapping):  # a table gives every row the fields of every other
        held = {name: v for name, v in given.items() if v is not None or name == "prompt"}
        given = {n: present(v, depth=2) if n == "tools_kwargs" else v for n, v in held.items()}
    try:
        return msgspec.convert(given, PromptRow)
    except ValueError as error:  # msgspec's own, or half a character where it wants no text
        raise ConfigError(f"{error}; a row is {_FIELDS}") from error


def read_samples(path: Path) -> list[Sample]:
    """The samples of `write_samples`, not judged. ConfigError names file, line and field."""
    return list(numbered_samples(path).values())


def numbered_samples(path: Path) -> dict[int, Sample]:
    """The same by line, counted from 1."""
    wanted = "the samples that `fsm-rollout run` wrote"
    return _read_lines(path, lambda line: Sample.from_dict(_json(line)), wanted=wanted)


def read_file(path: Path, *, wanted: str) -> bytes:
    """The bytes of an input. ConfigError says why there are none, and what was `wanted`."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = str(getattr(error, "strerror", None) or error).lower()
        raise ConfigError(f"{path}: {why}; give a file of {wanted}") from error


def _read_lines(path: Path, parse: Callable[[bytes], T], *, wanted: str) -> dict[int, T]:
    """What each line that is not blank says, by its number. ConfigError names file and line."""
    found = {}
    lines = read_file(path, wanted=wanted).split(b"\n")  # alone: JSON may hold U+2028 and U+0085
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found[number] = parse(line)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        except RecursionError as error:
            raise ConfigError(
                f"{path}:{number}: nested too deeply to be read; flatten it"
            ) from error
    return found


def _json(line: bytes, **hooks: Any) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}; each line is one JSON object") from error
    except ValueError as error:  # not finite, or of more digits than Python reads
        why = str(error).partition(";")[0]
        raise ConfigError(f"{why}; write a string or null in its place") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number, and not JSON")
    return number


_FIELDS = "{" + ", ".join(PromptRow.__struct_fields__) + "}"
_STRICT: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite}


# -- out -------------------------------------------------------------------------------------------


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """One line per sample, `Sample.to_dict`; returns how many. The file appears when it is whole.

    Raises ConfigError when `path` cannot be written, InvariantError for a sample that breaks one,
    TypeError for what JSON cannot hold.
    """
    count = 0
    with samples_file(path) as file:
        for sample in samples:
            file.write(sample_line(sample))
            count += 1
    return count


def sample_line(sample: Sample) -> str:
    """The sample as one line of JSON. InvariantError when it breaks one: it is never handed on."""
    check(sample)
    # the standard library's JSON: a call may hold integers of any size, a column may hold NaN
    return json.dumps(sample.to_dict()) + "\n"


@contextmanager
def samples_file(path: Path) -> Iterator[TextIO]:
    """A file that becomes `path` when the block ends; it vanishes if that raises or writes nothing.

    It lies beside `path`, so that a path that cannot be written is a ConfigError at once.
    """
    try:
        path = path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        file = draft.open("w", encoding="ascii")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link to itself
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: samples cannot be written there: {why}") from error
    try:
        with file:
            yield file
        if draft.stat().st_size:
            draft.replace(path)
        else:
            draft.unlink()
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

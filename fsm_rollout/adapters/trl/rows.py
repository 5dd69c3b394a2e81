"""Rows: what a dataset says beside its prompts. TRL hands a rollout function the prompts alone.

A prompt is looked up by its content, so two rows with equal prompts must be equal. A field of its
own in a message tells them apart: templates don't render `{"role": ..., "content": ..., "id": 7}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import msgspec

from fsm_rollout.dataset import PromptRow, checked_rows
from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.registry import Toolset

RowSource: TypeAlias = Sequence[Mapping[str, Any]]
"""a list of rows, or a `datasets.Dataset`, whose rows are read when they are needed"""

_OWN = ("prompt", "id", "label", "tools_kwargs", "metadata")


class Played(NamedTuple):
    """A row for the loop, and the columns that it was made of."""

    row: PromptRow
    columns: Mapping[str, Any]


class Rows:
    """The rows of some sources by their prompts. `sources`: by the names that messages use.

    Every row is read and checked once, at the start; later only the one that is played. Raises
    ConfigError that names the row: one that does not fit the tools, or two with equal prompts that
    differ elsewhere, since TRL could not say which of them it wants.
    """

    def __init__(self, sources: Mapping[str, RowSource], tools: Toolset) -> None:
        self._sources = dict(sources)
        self._found: dict[bytes, tuple[str, int, bytes]] = {}  # prompt: its row, the other columns
        for name, source in self._sources.items():
            for number, row in enumerate(source):
                checked_rows([prompt_row(row, where=f"{name}, row {number}")], tools)
                self._add(name, number, row)

    def __getitem__(self, prompt: Any) -> Played:
        """The row with this prompt. Raises ConfigError when there is none."""
        try:
            name, number, _ = self._found[_digest(prompt)]
        except KeyError:
            known = ", ".join(self._sources) or "no source"
            raise ConfigError(
                f"no row of {known} has the prompt {_short(prompt)}: give RolloutFunc the rows "
                "that the trainer plays, as `rows`"
            ) from None
        columns = self._sources[name][number]
        return Played(prompt_row(columns, where=f"{name}, row {number}"), columns)

    def _add(self, name: str, number: int, row: Mapping[str, Any]) -> None:
        rest = _digest({column: value for column, value in row.items() if column != "prompt"})
        first = self._found.setdefault(_digest(row["prompt"]), (name, number, rest))
        if first[2] != rest:
            other = self._sources[first[0]][first[1]]
            differ = [key for key in row if _digest(row[key]) != _digest(other.get(key))]
            raise ConfigError(
                f"{name}, row {number} has the prompt of {first[0]}, row {first[1]}, and another "
                f"{' and '.join(differ) or 'set of columns'}: TRL hands over prompts alone, so one "
                "of the two would be played for both. Tell them apart by a field of the last "
                f"message, which templates don't render: {{'role': 'user', 'content': ..., "
                f"'id': {number}}}"
            )


def prompt_row(row: Mapping[str, Any], *, where: str) -> PromptRow:
    """A row of the dataset as the loop wants it. Columns that it does not know are metadata.

    `tools_kwargs` may be JSON text. In it None is the same as absent, since columnar files fill
    absent keys with None. Raises ConfigError.
    """
    if not row.get("prompt"):
        raise ConfigError(f"{where}: it has no prompt")
    kwargs = row.get("tools_kwargs") or {}
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
        fields = {
            "prompt": row["prompt"],
            "id": "" if row.get("id") is None else str(row["id"]),
            "label": row.get("label"),
            "tools_kwargs": _without_none(kwargs),
            "metadata": {key: value for key, value in row.items() if key not in _OWN}
            | dict(row.get("metadata") or {}),
            "where": where,
        }
        return msgspec.convert(fields, PromptRow)
    except (TypeError, ValueError) as error:  # JSON's and msgspec's own are ValueErrors
        raise ConfigError(
            f"{where}: {error}; columns are prompt, id, label, tools_kwargs, metadata, and "
            "any other for the reward function"
        ) from error


def _digest(value: Any) -> bytes:
    text = msgspec.json.encode(_without_none(value), enc_hook=repr, order="sorted")
    return blake2b(text, digest_size=16).digest()


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _short(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 200 else f"{text[:199]}…"

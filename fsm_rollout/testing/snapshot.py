"""Snapshot: every field of a request, down to the bytes of its columns, as one comparable value.

Taken by reflection, so that a new field cannot be forgotten.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from operator import attrgetter
from typing import Any

from fsm_rollout.columns import Columns
from fsm_rollout.replay_columns import ReplayColumns
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.turn import Turn

_REQUEST = attrgetter(*(f.name for f in fields(Request) if f.name != "samples"))
_APART = ("turns", "columns", "request")
_SAMPLE = attrgetter(*(f.name for f in fields(Sample) if f.name not in _APART))
_TURN = attrgetter(*(f.name for f in fields(Turn)))
_COLUMNS = attrgetter(*Columns.__slots__)
_REPLAY = attrgetter(*ReplayColumns.__slots__)


def snapshot(request: Request) -> tuple[Any, ...]:
    """Equal before and after an operation if and only if that changed nothing."""
    return (
        *map(_still, _REQUEST(request)),
        *(part for sample in request.samples for part in sample_snapshot(sample)),
    )


def sample_snapshot(sample: Sample) -> tuple[Any, ...]:
    """The same of one sample."""
    return (
        *map(_still, _SAMPLE(sample)),
        sample.request is None,
        *map(_still, _COLUMNS(sample.columns)),
        *(tuple(map(_still, _TURN(turn))) for turn in sample.turns),
    )


def _still(value: Any) -> Any:
    match value:
        case array():
            return value.typecode, value.tobytes()
        case bytearray():
            return bytes(value)
        case ReplayColumns():
            return tuple(map(_still, _REPLAY(value)))
        case list():
            return tuple(value)
        case dict():
            return tuple((key, _still(entry)) for key, entry in value.items())
        case _:
            return value

"""Tracked: what verl's trackers are told of what was played, beside what verl counts itself.

Facts of requests come from the workers; here they are counted once, over all of them. The doors
into verl's log are the managers' (V0: `meta_info["timing"]`) and the sampler's (V1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.metrics import Facts, facts_of, metrics_of
from fsm_rollout.request import Request

FACTS = "fsm_facts"
"""the column in which V0's workers send them"""

VALIDATED = (
    "rollout/abort_rate",
    "rollout/truncated_ratio",
    "rollout/tool_calls/mean",
    "rollout/invalid_calls",
    "tools/failure_rate",
    "perf/generate_s/mean",
    "perf/tool_s/mean",
)
"""what an evaluation logs as `val-aux/<data source>/<name>/mean@1`, without a `/mean` of ours"""


def facts(request: Request, *, group: Any = None, reward: float | None = None) -> Facts:
    """The facts of a request with the reward that verl was given, whoever gave it."""
    return msgspec.structs.replace(facts_of(request), group=group, reward=reward)


def validated(played: Iterable[Facts]) -> dict[str, float | None]:
    """What an evaluation says of the samples of one prompt; the same keys each time.

    verl takes the mean over prompts, and would draw 1000 times from several values of a prompt: so
    it gets one, and None for the other samples.
    """
    metrics = metrics_of(played)
    return {name.removesuffix("/mean"): metrics.get(name) for name in VALIDATED}


def validation_columns(
    played: Sequence[Facts], groups: Iterable[Any], *, most: int
) -> dict[str, npt.NDArray[Any]]:
    """The columns of a batch: for each group what is `validated`, in its first row.

    A group has `most` rows: verl fills a batch up with copies of its first ones, and cuts them off.
    """
    rows: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        rows.setdefault(group, []).append(number)
    columns: dict[str, npt.NDArray[Any]] = {}
    for numbers in rows.values():
        for name, value in validated(played[number] for number in numbers[:most]).items():
            column = columns.setdefault(name, np.full(len(played), None, dtype=object))
            column[numbers[0]] = value
    return columns

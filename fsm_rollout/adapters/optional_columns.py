"""Optional columns: what some samples have beside tokens, mask and log-probs, laid out like these.

`tensors` calls it. A batch may mix samples with and without: `has_<name>` says which have it, and
nothing is decided by the first. Everything keeps its meaning when rows of a batch are selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsm_rollout.adapters.handover import trained
from fsm_rollout.adapters.layout import Layout
from fsm_rollout.columns import Column
from fsm_rollout.errors import ConfigError, HandOverError
from fsm_rollout.replay import WeightVersion
from fsm_rollout.sample import Sample

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Values: TypeAlias = list[npt.NDArray[Any] | None]
"""one per sample; None: it has none"""


def optional_columns(layout: Layout, names: Iterable[str]) -> Arrays:
    """Each column of `names` and its `has_<name>`, bool [B].

    HandOverError: no sample has such a column, or samples disagree about what it is.
    """
    if isinstance(names, str):
        raise ConfigError(f"columns must be a list of names, got {names!r}; give [{names!r}]")
    arrays: Arrays = {}
    for name in names:
        build = _DERIVED.get(name)
        has, columns = build(layout) if build else _declared(layout, name)
        arrays |= columns
        arrays[f"has_{name}"] = np.array(has, np.bool_)
    return arrays


def _declared(layout: Layout, name: str) -> tuple[list[bool], Arrays]:
    column: Column | None = None
    for sample in layout.rows:
        found = sample.columns.declared.get(name)
        if column is not None and found is not None and found != column:
            raise HandOverError(
                f"sample {sample.sample_id} has {found}, an earlier one {column}: "
                "a batch has one declaration per column"
            )
        column = column or found
    if column is None:
        raise _nobody_has(layout, name)
    values: Values = [
        s.columns.extra(name) if name in s.columns.declared else None for s in layout.rows
    ]
    filled = layout.column(column.per, values, column.dtype, column.fill)
    return [value is not None for value in values], {name: filled}


def _nobody_has(layout: Layout, name: str) -> HandOverError:
    declared = {known for sample in layout.rows for known in sample.columns.declared}
    return HandOverError(
        f"no sample has a column {name!r}; declared are {', '.join(sorted(declared)) or 'none'}, "
        f"and known are {', '.join(_DERIVED)}"
    )


def _routed_experts(layout: Layout) -> tuple[list[bool], Arrays]:
    """[.., layers, k] over T in the engine's dtype; 0 for tokens that were never forwarded."""
    name = "rollout_routed_experts"
    rows = [sample.rollout_routed_experts for sample in layout.rows]
    tails = {held.shape[1:] for held in rows if held is not None}
    if not tails:
        raise _nobody_has(layout, name)
    if len(tails) > 1:
        raise HandOverError(f"experts of several shapes (layers, k) in one batch: {sorted(tails)}")
    [tail] = tails
    dtype = np.result_type(*{held.dtype for held in rows if held is not None})
    filled = layout.column("T", [0] * len(rows), dtype, tail=tail)
    flat = filled.reshape(-1, *tail)
    for start, held in zip(layout.starts["T"], rows, strict=True):
        if held is not None:
            flat[start : start + len(held)] = held
    return [held is not None for held in rows], {name: filled}


def _top_p(layout: Layout) -> tuple[list[bool], Arrays]:
    """ids int32 [K] of the whole batch; offsets int64, one row of them more than R has columns.

    The ids of token (b, r) are `ids[offsets[b, r] : offsets[b, r + 1]]`; packed, of token n
    `ids[offsets[n] : offsets[n + 1]]`. int64, since those of a batch may outgrow int32.
    """
    name = "rollout_top_p_token_ids"
    ids = [sample.rollout_top_p_token_ids for sample in layout.rows]
    if all(kept is None for kept in ids):
        raise _nobody_has(layout, name)
    sizes: Values = [
        None if offsets is None else np.diff(offsets)
        for offsets in (sample.rollout_top_p_token_offsets for sample in layout.rows)
    ]
    shape = layout.shape["R"]
    flat = np.zeros(prod(shape) + 1, np.int64)
    np.cumsum(layout.column("R", sizes, np.int64).reshape(-1), out=flat[1:])
    firsts = shape[-1] * np.arange(prod(shape[:-1]))
    offsets = flat[firsts[:, None] + np.arange(shape[-1] + 1)].reshape(*shape[:-1], shape[-1] + 1)
    every = np.concatenate([kept for kept in ids if kept is not None])
    return [kept is not None for kept in ids], {name: every, "rollout_top_p_token_offsets": offsets}


def _turns(layout: Layout) -> tuple[list[bool], Arrays]:
    """int32 over R: the number of the turn that a token belongs to; -1 beside the responses."""
    values: Values = [
        _repeated(range(len(s.turns)), [turn.stop - turn.start for turn in s.turns])
        for s in layout.rows
    ]
    return [True] * len(values), {"turns": layout.column("R", values, np.int32, -1)}


def _turn_rewards(layout: Layout) -> tuple[list[bool], Arrays]:
    """float32 over R: a turn's reward on its last trained token, 0.0 elsewhere."""
    values: Values = []
    for sample in layout.rows:
        rewards = np.zeros(sample.response_length, np.float32)
        for at, reward in placed_turn_rewards(sample):
            rewards[at] = reward
        values.append(rewards)
    has = [any(turn.reward is not None for turn in sample.turns) for sample in layout.rows]
    return has, {"turn_rewards": layout.column("R", values, np.float32)}


def _temperatures(layout: Layout) -> tuple[list[bool], Arrays]:
    """float32 over R: what the logits of a sampled token were divided by, 1.0 elsewhere.

    A sample has them when each of its sampled tokens does.
    """
    values: Values = []
    for sample in layout.rows:
        turns = [turn for turn in sample.turns if turn.num_sampled]
        known = np.ones(sample.response_length, np.float32)
        for turn in turns:
            known[turn.start : turn.stop] = 1.0 if turn.temperature is None else turn.temperature
        known[sample.sampled == 0] = 1.0
        is_whole = all(turn.temperature is not None for turn in turns)
        values.append(known if is_whole else None)
    filled = layout.column("R", values, np.float32, 1.0)
    return [value is not None for value in values], {"temperatures": filled}


def _weight_versions(layout: Layout) -> tuple[list[bool], Arrays]:
    """int64 over R: which weights sampled a token; -1 where none did, or the engine did not say.

    A sample has them when none of its runs is of an unknown version.
    """
    values: Values = []
    for sample in layout.rows:
        versions = np.full(sample.response_length, -1, np.int64)
        versions[sample.sampled == 1] = _repeated(
            [_whole(sample, version) for version, _ in sample.weight_versions],
            [count for _, count in sample.weight_versions],
        )
        values.append(versions)
    has = [all(version is not None for version, _ in s.weight_versions) for s in layout.rows]
    return has, {"weight_versions": layout.column("R", values, np.int64, -1)}


def _whole(sample: Sample, version: WeightVersion) -> int:
    try:
        number = -1 if version is None else int(version)
    except ValueError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise HandOverError(
            f"sample {sample.sample_id} has weight version {version!r}, which is no whole number "
            "of 64 bits: read its runs from `sample.weight_versions`"
        )
    return number


def _repeated(values: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.repeat(np.array(values, np.int64), np.array(counts, np.int64))


_DERIVED: dict[str, Callable[[Layout], tuple[list[bool], Arrays]]] = {
    "rollout_routed_experts": _routed_experts,
    "rollout_top_p_token_ids": _top_p,
    "turns": _turns,
    "turn_rewards": _turn_rewards,
    "temperatures": _temperatures,
    "weight_versions": _weight_versions,
}


def placed_turn_rewards(sample: Sample) -> list[tuple[int, float]]:
    """(response position, reward) of each turn with a reward and a trained token to put it on."""
    mask, placed = trained(sample), []
    for turn in sample.turns:
        if turn.reward is not None:
            at = mask[turn.start : turn.stop].nonzero()[0]
            if len(at):
                placed.append((turn.start + int(at[-1]), turn.reward))
    return placed

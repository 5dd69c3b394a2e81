"""Tensors: finished samples as one batch, padded or packed, under verl's names.

For training loops of your own, and for adapters. Every sample is asked for at `handover`, so what
a batch holds keeps the invariants: mask 1 only where the policy sampled, log-probs 0.0 elsewhere.
The log-prob at a position is that of the token there: it belongs to the logits one before.

How other trainers want it: `conventions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from fsm_rollout.adapters.handover import require, trained
from fsm_rollout.adapters.layout import Layout, Packed, Padded
from fsm_rollout.adapters.optional_columns import optional_columns, placed_turn_rewards
from fsm_rollout.errors import ConfigError
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    import torch


def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The memory of `array` as a tensor, without a copy: `tensor(sample.tokens)`.

    torch knows no read-only tensors: that of a sealed sample is its record, so don't write into it.
    """
    import torch

    shared = array.view()
    if not shared.flags.writeable:  # torch would warn; the buffer under a sealed view allows it
        shared.flags.writeable = True
    return torch.from_numpy(shared)


def padded(
    samples: Iterable[Sample],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    multiple_of: int = 1,
    rewards: bool = True,
    log_probs: bool = True,
    turn_rewards: bool = False,
    columns: Iterable[str] = (),
) -> dict[str, torch.Tensor]:
    """B samples as a batch of P prompt columns, padded on the left, and R response columns.

    | name | shape and dtype | |
    |---|---|---|
    | prompts, responses | int64 [B, P], [B, R] | the two parts of `input_ids` |
    | input_ids | int64 [B, P + R] | `pad_id` beside the tokens |
    | attention_mask | int64 [B, P + R] | 1 on tokens |
    | position_ids | int64 [B, P + R] | cumsum(attention_mask) - 1, at least 0 |
    | response_mask | int64 [B, R] | 1 where the policy is trained |
    | rollout_log_probs | float32 [B, R] | 0.0 where not sampled; `log_probs=False`: absent |
    | rm_scores | float32 [B, R] | the reward on the last token; `rewards=False`: absent |

    P and R are those of the longest, rounded up to `multiple_of`, unless `prompt_length` and
    `response_length` fix them. Of a fork whose prompt is longer than that, the rest stands at the
    start of its response: context that is not trained, like an observation. A row with
    `remove_sample` stays in its place with mask 0.

    turn_rewards: a turn's reward stands on the last trained token of the turn, and what is then
    missing to the sample's reward on the last trained token of all. A row always sums up to
    `sample.reward`: what the turns earned is in it or taken from it, never added to it.

    columns: names of further ones, each with `has_<name>`, bool [B], as a batch may mix samples
    with and without. Declared columns, [B, P + R] or [B, R] with their fill, and
    | name | shape and dtype | |
    |---|---|---|
    | turns | int32 [B, R] | the number of a token's turn; -1 on padding |
    | turn_rewards | float32 [B, R] | on the turn's last trained token, 0.0 elsewhere |
    | temperatures | float32 [B, R] | of sampled tokens; 1.0 elsewhere |
    | weight_versions | int64 [B, R] | of sampled tokens; -1 unknown, and elsewhere |
    | rollout_routed_experts | [B, P + R, layers, k] | 0 for tokens that were never forwarded |
    | rollout_top_p_token_ids | int32 [K] | what top-p kept, one token behind the other |
    | rollout_top_p_token_offsets | int64 [B, R + 1] | with the ids: where each token's start |

    Raises HandOverError that names each sample that must not be trained on or does not fit, and
    ConfigError for arguments that make no batch.
    """
    if not isinstance(pad_id, SupportsIndex):
        raise ConfigError(f"pad_id is {pad_id!r}: give any token id, padding is never looked at")
    for name, number, least in (
        ("multiple_of", multiple_of, 1),
        ("prompt_length", prompt_length, 0),
        ("response_length", response_length, 0),
    ):
        if number is not None and (not isinstance(number, SupportsIndex) or number < least):
            raise ConfigError(f"{name} must be a whole number >= {least}, got {number!r}")
    rows = require(samples, rewards=rewards, log_probs=log_probs)
    layout = Padded(
        rows,
        prompt_length=prompt_length,
        response_length=response_length,
        multiple_of=multiple_of,
    )
    input_ids = layout.column("T", [s.tokens for s in rows], np.int64, pad_id)
    width = layout.prompt_length
    batch: dict[str, npt.NDArray[Any]] = {
        "prompts": input_ids[:, :width].copy(),
        "responses": input_ids[:, width:].copy(),
        "input_ids": input_ids,
        "attention_mask": layout.column("T", [1] * len(rows), np.int64),
        "position_ids": layout.positions(),
        "response_mask": layout.column("R", map(trained, rows), np.int64),
    }
    if log_probs:
        given = [sample.rollout_log_probs for sample in rows]
        batch["rollout_log_probs"] = layout.column("R", given, np.float32)
    if rewards:
        batch["rm_scores"] = _scores(layout, turn_rewards=turn_rewards)
    return _with_columns(batch, layout, columns)


def packed(
    samples: Iterable[Sample],
    *,
    rewards: bool = True,
    log_probs: bool = True,
    columns: Iterable[str] = (),
) -> dict[str, torch.Tensor]:
    """All samples as one long row of N tokens, prompts and responses, without padding.

    | name | shape and dtype | |
    |---|---|---|
    | input_ids | int64 [N] | |
    | cu_seqlens | int32 [B + 1] | where samples start, as flash-attn's varlen kernels want it |
    | position_ids | int64 [N] | from 0 in each sample |
    | loss_mask | int64 [N] | 1 where the policy is trained; 0 on prompts |
    | rollout_log_probs | float32 [N] | 0.0 where not sampled; `log_probs=False`: absent |
    | rewards | float32 [B] | `rewards=False`: absent |

    `torch.nested.nested_tensor_from_jagged(batch["input_ids"], batch["cu_seqlens"])` is a jagged
    [B, *] tensor over the same memory. `columns` are those of `padded`, over N.

    Raises HandOverError that names each sample that must not be trained on.
    """
    rows = require(samples, rewards=rewards, log_probs=log_probs)
    layout = Packed(rows)
    batch: dict[str, npt.NDArray[Any]] = {
        "input_ids": layout.column("T", [s.tokens for s in rows], np.int64),
        "cu_seqlens": layout.ends.astype(np.int32),
        "position_ids": layout.positions(),
        "loss_mask": layout.column("R", map(trained, rows), np.int64),
    }
    if log_probs:
        given = [sample.rollout_log_probs for sample in rows]
        batch["rollout_log_probs"] = layout.column("R", given, np.float32)
    if rewards:
        batch["rewards"] = np.array([sample.reward for sample in rows], np.float32)
    return _with_columns(batch, layout, columns)


def _with_columns(
    batch: dict[str, npt.NDArray[Any]], layout: Layout, columns: Iterable[str]
) -> dict[str, torch.Tensor]:
    more = optional_columns(layout, columns)
    if taken := batch.keys() & more.keys():
        raise ConfigError(f"a batch has {', '.join(sorted(taken))} already: rename the column")
    return {name: tensor(values) for name, values in (batch | more).items()}


def _scores(layout: Layout, *, turn_rewards: bool) -> npt.NDArray[np.float32]:
    """float32 [B, R]: each reward where it stands; a sample without a response has no place."""
    scores = layout.column("R", [None] * len(layout.rows), np.float32)
    flat = scores.reshape(-1)
    for sample, start, count in zip(
        layout.rows, layout.starts["R"], layout.counts["R"], strict=True
    ):
        left, last = sample.reward or 0.0, start + count - 1
        if turn_rewards:
            places = trained(sample).nonzero()[0]
            last = start + int(places[-1]) if len(places) else last
            for at, reward in placed_turn_rewards(sample):
                flat[start + at] += reward
                left -= reward
        if count:
            flat[last] += left
    return scores

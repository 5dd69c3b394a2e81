"""Tensors: finished samples as one batch, padded or packed, under verl's names.

For training loops of your own, and for adapters. Every sample is asked for at `handover`, so what
a batch holds keeps the invariants: mask 1 only where the policy sampled, log-probs 0.0 elsewhere.
The log-prob at a position is that of the token there: it belongs to the logits one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.adapters.handover import require
from fsm_rollout.errors import HandOverError
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    import torch


def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The memory of `array` as a tensor, without a copy: `tensor(sample.tokens)`.

    torch knows no read-only tensors: one of a sealed sample is its record, so don't write into it.
    """
    import torch

    shared = array.view()
    if array.base is not None and not array.flags.writeable:
        shared.flags.writeable = True  # else torch warns; the buffer under a sealed view allows it
    return torch.from_numpy(shared)


def trained(sample: Sample) -> npt.NDArray[np.uint8]:
    """uint8 [R]: the loss mask as a trainer must have it, all 0 when `remove_sample` says so."""
    mask = sample.loss_mask
    return np.zeros_like(mask) if sample.remove_sample else mask


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
) -> dict[str, torch.Tensor]:
    """B samples as a batch of P prompt columns, padded on the left, and R response columns.

    | name | shape and dtype | |
    |---|---|---|
    | prompts, responses | int64 [B, P], [B, R] | the two parts of `input_ids` |
    | input_ids | int64 [B, P + R] | `pad_id` beside the tokens |
    | attention_mask | int64 [B, P + R] | 1 on tokens |
    | position_ids | int64 [B, P + R] | from 0 at the first token; padding repeats its neighbour |
    | response_mask | int64 [B, R] | 1 where the policy is trained |
    | rollout_log_probs | float32 [B, R] | 0.0 where not sampled; `log_probs=False`: absent |
    | rm_scores | float32 [B, R] | the reward on the last token; `rewards=False`: absent |

    P and R are those of the longest, rounded up to `multiple_of`, unless `prompt_length` and
    `response_length` fix them.

    turn_rewards: each turn's reward stands on the last trained token of the turn, and what then is
    missing to the sample's reward on the last trained token of all: a row always sums up to
    `sample.reward`, so that no reward is counted twice.

    Raises HandOverError that names each sample that must not be trained on or does not fit.
    """
    rows = require(samples, rewards=rewards, log_probs=log_probs)
    P = _width(rows, "prompt_length", prompt_length, multiple_of)
    R = _width(rows, "response_length", response_length, multiple_of)
    shape = len(rows), P + R
    input_ids, attention_mask, position_ids = (np.empty(shape, np.int64) for _ in range(3))
    response_mask = np.empty((len(rows), R), np.int64)
    scores = np.zeros((len(rows), R), np.float32)
    sampled_at = np.empty((len(rows), R), np.float32)
    count = np.arange(P + R)
    for row, sample in enumerate(rows):
        start, response = P - sample.prompt_length, sample.response_length
        stop = P + response
        _put(input_ids[row], start, sample.tokens, pad_id, pad_id)
        _put(attention_mask[row], start, 1, 0, 0, stop)
        last = max(stop - start - 1, 0)
        _put(position_ids[row], start, count[: stop - start], 0, last)
        _put(response_mask[row], 0, trained(sample), 0, 0)
        if sample.rollout_log_probs is not None and log_probs:
            _put(sampled_at[row], 0, sample.rollout_log_probs, 0, 0)
        if rewards and sample.reward is not None:
            _score(scores[row], sample, turn_rewards=turn_rewards)
    batch: dict[str, npt.NDArray[Any]] = {
        "prompts": input_ids[:, :P].copy(),
        "responses": input_ids[:, P:].copy(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": response_mask,
    }
    if log_probs:
        batch["rollout_log_probs"] = sampled_at
    if rewards:
        batch["rm_scores"] = scores
    return {name: tensor(values) for name, values in batch.items()}


def packed(
    samples: Iterable[Sample], *, rewards: bool = True, log_probs: bool = True
) -> dict[str, torch.Tensor]:
    """All samples as one long row of N tokens, prompts and responses, without padding.

    | name | shape and dtype | |
    |---|---|---|
    | input_ids | int64 [N] | |
    | cu_seqlens | int32 [B + 1] | where samples start, as flash-attn's varlen kernels want it |
    | position_ids | int64 [N] | from 0 in each sample |
    | loss_mask | int64 [N] | 1 where the policy is trained; 0 on prompts |
    | rollout_log_probs | float32 [N] | 0.0 where nothing was sampled; `log_probs=False`: absent |
    | rewards | float32 [B] | `rewards=False`: absent |

    Raises HandOverError that names each sample that must not be trained on.
    """
    rows = require(samples, rewards=rewards, log_probs=log_probs)
    lengths = [len(sample.tokens) for sample in rows]
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    total = int(ends[-1])
    if total > np.iinfo(np.int32).max:
        raise HandOverError(f"{total} tokens in one row, cu_seqlens is int32: pack fewer samples")
    input_ids, position_ids = np.empty(total, np.int64), np.empty(total, np.int64)
    loss_mask, sampled_at = np.empty(total, np.int64), np.empty(total, np.float32)
    count = np.arange(max(lengths, default=0))
    for sample, start, stop in zip(rows, ends, ends[1:], strict=False):
        input_ids[start:stop] = sample.tokens
        position_ids[start:stop] = count[: stop - start]
        _put(loss_mask[start:stop], sample.prompt_length, trained(sample), 0, 0)
        if sample.rollout_log_probs is not None and log_probs:
            _put(sampled_at[start:stop], sample.prompt_length, sample.rollout_log_probs, 0, 0)
    batch: dict[str, npt.NDArray[Any]] = {
        "input_ids": input_ids,
        "cu_seqlens": ends.astype(np.int32),
        "position_ids": position_ids,
        "loss_mask": loss_mask,
    }
    if log_probs:
        batch["rollout_log_probs"] = sampled_at
    if rewards:
        batch["rewards"] = np.array([sample.reward for sample in rows], np.float32)
    return {name: tensor(values) for name, values in batch.items()}


def _width(rows: list[Sample], name: str, fixed: int | None, multiple_of: int) -> int:
    lengths = [getattr(sample, name) for sample in rows]
    longest = max(lengths, default=0)
    if fixed is None:
        return -(-longest // multiple_of) * multiple_of
    if longest > fixed:
        long = [
            f"sample {sample.sample_id or sample.index} has {length}"
            for sample, length in zip(rows, lengths, strict=True)
            if length > fixed
        ]
        shown = ", ".join(long[:3]) + (f" and {len(long) - 3} more" if len(long) > 3 else "")
        raise HandOverError(
            f"{name}={fixed} is too short: {shown}. Widen it, or narrow the limits of the rollout"
        )
    return fixed


def _put(
    row: npt.NDArray[Any],
    start: int,
    values: npt.NDArray[Any] | int,
    before: int,
    after: int,
    stop: int | None = None,
) -> None:
    stop = start + len(values) if isinstance(values, np.ndarray) else stop
    row[:start], row[start:stop], row[stop:] = before, values, after


def _score(scores: npt.NDArray[np.float32], sample: Sample, *, turn_rewards: bool) -> None:
    """Write the sample's reward into its row of zeros."""
    reward, last = sample.reward or 0.0, sample.response_length - 1
    if turn_rewards:
        mask = trained(sample)
        for turn in sample.turns:
            at = mask[turn.start : turn.stop].nonzero()[0]
            if turn.reward is not None and len(at):
                scores[turn.start + at[-1]] += turn.reward
                reward -= turn.reward
        last = int(mask.nonzero()[0][-1]) if mask.any() else last
    if last >= 0:
        scores[last] += reward

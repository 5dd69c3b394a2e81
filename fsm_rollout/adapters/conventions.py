"""Conventions: how trainers want tokens, mask and log-probs of a sample, as data.

For a trainer without an adapter of its own: `laid_out(samples, CONVENTIONS["SkyRL"])`. They differ
in names, in whether the prompt counts, in what stands on tokens that are not trained, and in the
shift. Read from the code and documentation of the versions named in docs/reference/conventions.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from fsm_rollout.adapters.handover import require, trained
from fsm_rollout.sample import Sample


class Convention(NamedTuple):
    """Names, and what stands on tokens that are not trained."""

    ids: str
    mask: str
    log_probs: str
    over: Literal["T", "R"]
    """tokens that mask and log-probs cover: prompt and response, or the response"""
    untrained_mask: Literal[0, -100] = 0
    """-100: trained tokens carry their id instead of 1, as labels do"""
    untrained_log_prob: float = 0.0
    prompt: str = ""
    """the prompt's ids have this name, and `ids` are those of the response; empty: `ids` are all"""
    targets: str = ""
    """the shift is made already: `ids` lack the last token; these, mask and log-probs the first"""


CONVENTIONS = {
    "verl": Convention("responses", "response_mask", "rollout_log_probs", "R", prompt="prompts"),
    "slime": Convention("tokens", "loss_mask", "rollout_log_probs", "R"),
    "TRL": Convention("completion_ids", "env_mask", "logprobs", "R", prompt="prompt_ids"),
    "TRL async": Convention("input_ids", "completion_mask", "old_log_probs", "T"),
    "AReaL": Convention("input_ids", "loss_mask", "logprobs", "T"),
    "SkyRL": Convention(
        "response_ids", "loss_masks", "rollout_logprobs", "R", prompt="prompt_token_ids"
    ),
    "prime-rl": Convention("token_ids", "mask", "logprobs", "T"),
    "ART": Convention(
        "token_ids", "assistant_mask", "logprobs", "T", untrained_log_prob=float("nan")
    ),
    "Atropos": Convention(
        "tokens", "masks", "inference_logprobs", "T", untrained_mask=-100, untrained_log_prob=1.0
    ),
    "tinker": Convention("model_input", "mask", "logprobs", "T", targets="target_tokens"),
}


def laid_out(
    samples: Iterable[Sample], convention: Convention, *, rewards: bool = True
) -> list[dict[str, list[Any]]]:
    """Each sample as lists under the convention's names. Rewards and groups are yours to add.

    Raises HandOverError that names each sample that must not be trained on.
    """
    return [_row(sample, convention) for sample in require(samples, rewards=rewards)]


def _row(sample: Sample, convention: Convention) -> dict[str, list[Any]]:
    ids, start, is_trained = sample.tokens, sample.prompt_length, trained(sample) == 1
    given, untrained = sample.rollout_log_probs, convention.untrained_mask
    assert given is not None  # `require` refused the others
    tokens, shift = ids.tolist(), int(bool(convention.targets))
    before, first = (0, 0) if convention.over == "R" else (start, shift)
    marked = np.where(is_trained, 1 if untrained == 0 else ids[start:], untrained)
    mask = [untrained] * before + marked.tolist()
    known = np.where(is_trained, given, np.float32(convention.untrained_log_prob))
    log_probs = [convention.untrained_log_prob] * before + known.tolist()
    row = {
        convention.ids: tokens[start if convention.prompt else 0 : len(tokens) - shift],
        convention.mask: mask[first:],
        convention.log_probs: log_probs[first:],
    }
    if convention.prompt:
        row[convention.prompt] = tokens[:start]
    if convention.targets:
        row[convention.targets] = tokens[1:]
    return row

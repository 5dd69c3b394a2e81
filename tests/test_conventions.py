"""The field's conventions: samples go in and come back, and the page lists what the data say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given

from fsm_rollout.adapters.conventions import CONVENTIONS, Convention, laid_out
from fsm_rollout.errors import HandOverError
from fsm_rollout.sample import Sample
from tests.finished import Plain, batches
from tests.test_docs_tables import shown


def test_the_page_lists_the_conventions() -> None:
    assert shown("reference/conventions.md", "trainer") == [
        [
            trainer,
            c.prompt or "in `ids",
            c.ids,
            c.mask,
            c.over,
            str(c.untrained_mask),
            c.log_probs,
            str(c.untrained_log_prob),
            str(int(bool(c.targets))),
        ]
        for trainer, c in CONVENTIONS.items()
    ]


@given(batches())
def test_samples_go_into_every_convention_and_back(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    if not all(s.rollout_log_probs is not None for s in samples):
        with pytest.raises(HandOverError, match="log-probs"):
            laid_out(samples, CONVENTIONS["slime"])
        return
    for name, convention in CONVENTIONS.items():
        for row, plain in zip(laid_out(samples, convention), plains, strict=True):
            if convention.targets and not (plain.prompt and plain.response):
                continue  # what nothing precedes cannot be predicted: the shift drops it
            prompt, ids, mask, log_probs = from_row(name, row, len(plain.prompt))
            assert prompt + ids == [token.id for token in plain.tokens], name
            assert mask == plain.trained, name
            trained = [t.log_prob for t, m in zip(plain.response, mask, strict=True) if m]
            assert [p for p, m in zip(log_probs, mask, strict=True) if m] == trained, name
            assert all(
                is_fill(convention, p) for p, m in zip(log_probs, mask, strict=True) if not m
            )


def is_fill(convention: Convention, value: float) -> bool:
    fill = convention.untrained_log_prob
    return value == fill or (math.isnan(value) and math.isnan(fill))


PLAIN = {
    "verl": ("prompts", "responses", "response_mask", "rollout_log_probs"),
    "TRL": ("prompt_ids", "completion_ids", "env_mask", "logprobs"),
    "SkyRL": ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"),
    "TRL async": ("", "input_ids", "completion_mask", "old_log_probs"),
    "AReaL": ("", "input_ids", "loss_mask", "logprobs"),
    "prime-rl": ("", "token_ids", "mask", "logprobs"),
    "ART": ("", "token_ids", "assistant_mask", "logprobs"),
}


def from_row(name: str, row: dict[str, Any], start: int) -> tuple[Any, Any, Any, Any]:
    """Prompt and response ids, mask and log-probs of the response, as the trainer reads them."""
    match name:
        case "slime":
            ids = row["tokens"]
            return ids[:start], ids[start:], row["loss_mask"], row["rollout_log_probs"]
        case "Atropos":
            ids, labels = row["tokens"], row["masks"]
            assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
            mask = [int(label != -100) for label in labels]
            return ids[:start], ids[start:], mask[start:], row["inference_logprobs"][start:]
        case "tinker":
            inputs, targets, at = row["model_input"], row["target_tokens"], start - 1
            assert inputs[1:] == targets[:-1]
            assert len(row["mask"]) == len(row["logprobs"]) == len(targets)
            ids = inputs[:1] + targets
            return ids[:start], ids[start:], row["mask"][at:], row["logprobs"][at:]
    prompt, *parts = PLAIN[name]
    ids, mask, log_probs = (row[key] for key in parts)
    if prompt:
        return row[prompt], ids, mask, log_probs
    assert len(ids) == len(mask) == len(log_probs)
    assert not any(mask[:start])
    return ids[:start], ids[start:], mask[start:], log_probs[start:]

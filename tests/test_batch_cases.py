"""The handed `batch` cases, each with all that it requires."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.adapters.advantages import (
    group_advantages,
    importance_ratios,
    masked_mean,
    rollout_mask_sums,
)
from fsm_rollout.adapters.handover import require, sift
from fsm_rollout.adapters.tensors import packed, padded
from fsm_rollout.dataset import checked_rows
from fsm_rollout.errors import ConfigError, HandOverError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset

torch = pytest.importorskip("torch")

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parent / "cases" / "batch.jsonl").read_text().splitlines()
    )
}


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its input and what is expected."""
    return CASES[name]["input"], CASES[name]["expected"]


def finished(
    prompt: list[int],
    response: list[int],
    *,
    log_probs: list[float] | None = None,
    reward: float = 1.0,
    index: int = 0,
    group_index: int = 0,
) -> Sample:
    request = Request(index=index, group_index=group_index, limits=Limits(max_context=64))
    request.set_prompt(prompt)
    machine = Machine()
    machine.fire(Event.GENERATE, request)
    log_probs = log_probs or [-1.0] * len(response)
    request.append_response_tokens(response, log_probs, meta_info={"finish_reason": "stop"})
    machine.fire(Event.COMPLETE, request, StopReason.STOP)
    request.reward = reward
    request.seal()
    return request.sample


def test_bat_001_ragged_to_padded() -> None:
    given, expected = case("bat-001")
    samples = [
        finished(sample["prompt"], sample["response"], index=n)
        for n, sample in enumerate(given["samples"])
    ]
    made = padded(samples, pad_id=given["pad_id"])
    for name in "input_ids", "attention_mask", "position_ids", "response_mask":
        assert made[name].tolist() == expected[name], name
    cumulated = made["attention_mask"].cumsum(-1).sub(1).clamp(min=0)
    assert made["position_ids"].equal(cumulated)
    for sample, positions in zip(samples, made["position_ids"], strict=True):
        assert positions.max() == len(sample.tokens) - 1


@pytest.mark.parametrize("scale", [True, False])
def test_bat_002_groups_by_their_index_not_by_the_prompts_tokens(scale: bool) -> None:
    given, expected = case("bat-002")
    samples = [
        finished(group["prompt"], [5, 9], reward=reward, index=10 * at + n, group_index=at)
        for at, group in enumerate(given["groups"].values())
        for n, reward in enumerate(group["rewards"])
    ]
    advantages = iter(group_advantages(samples, scale=scale))
    for name, group in given["groups"].items():
        assert [next(advantages) for _ in group["rewards"]] == expected["advantages"][name]


def test_bat_004_duplicate_sample_ids() -> None:
    given, expected = case("bat-004")
    assert expected["raises"] == "DuplicateSampleId"
    with pytest.raises(ConfigError, match="id 'a'"):  # at submit
        checked_rows([{"prompt": name, "id": name} for name in given["ids"]], Toolset([]))
    sample, twin = (finished([1], [5]) for _ in given["ids"])
    twin.sample_id = sample.sample_id = given["ids"][0]
    with pytest.raises(HandOverError, match="sample a: its sample_id came before"):  # at the end
        require([sample, twin])
    good, refused = sift([sample, twin])
    assert (good, [bad.sample for bad in refused]) == ([sample], [twin])


def test_bat_005_a_rejected_row_is_in_no_baseline() -> None:
    given, expected = case("bat-005")
    lengths = given["response_mask_sums"]
    samples = [
        finished([1], [5] * length, reward=reward, index=n)
        for n, (reward, length) in enumerate(zip(given["rewards"], lengths, strict=True))
    ]
    assert rollout_mask_sums(samples) == lengths
    usable = [n for n, sample in enumerate(samples) if not sample.remove_sample]
    assert usable == expected["baseline_over"]  # the flag travels with the row
    advantages = group_advantages(samples, scale=False)
    for n in usable:
        assert given["rewards"][n] - advantages[n] == expected["mean"]
    assert advantages[2] == 0.0


def test_bat_007_a_mask_without_a_one() -> None:
    given, expected = case("bat-007")
    mask, losses = torch.tensor(given["loss_mask"]), torch.tensor([1.0, 2.0, float("nan")])
    losses.requires_grad_()
    mean = masked_mean(losses, mask)
    assert mean.item() == expected["mean_loss"]
    [gradient] = torch.autograd.grad(mean, losses)
    assert gradient.tolist() == [0.0, 0.0, 0.0]
    assert expected["no_division_by_zero"]
    assert expected["excluded_from_kl_metric"]
    kl = torch.tensor([[3.0, 3.0, 3.0], [1.0, 2.0, 9.0]])
    both = torch.stack([mask, torch.tensor([1, 1, 0])])
    assert masked_mean(kl, both).item() == 1.5


def test_bat_009_rows_are_built_once() -> None:
    given, expected = case("bat-009")
    samples = [finished([1], [5], index=n) for n in range(given["responses"])]
    assert {len(values) for values in padded(samples, pad_id=0).values()} == {expected["rows"]}
    assert len(packed(samples)["rewards"]) == expected["rows"]
    with pytest.raises(HandOverError, match="2 of 4 samples"):
        padded(samples + samples, pad_id=0)


def test_bat_010_a_response_of_no_tokens() -> None:
    given, expected = case("bat-010")
    empty = finished([1, 2], [5] * given["response_length"])
    assert "kept with zero mask, flagged" in expected["row"]
    assert empty.remove_sample
    assert expected["tensor_shapes_consistent"]
    for samples, width in ([empty], 0), ([empty, finished([1], [5, 9], index=1)], 2):
        made = padded(samples, pad_id=0)
        for name in "responses", "response_mask", "rollout_log_probs", "rm_scores":
            assert made[name].shape == (len(samples), width), name
        for name in "input_ids", "attention_mask", "position_ids":
            assert made[name].shape == (len(samples), 2 + width), name
        assert made["response_mask"][0].sum() == 0
    assert packed([empty])["loss_mask"].tolist() == [0, 0]  # no mask on the prompt


def test_bat_012_masked_tokens_have_a_ratio_of_one() -> None:
    given, expected = case("bat-012")
    mask = torch.tensor(given["mask"])
    sampled_at, log_probs = torch.tensor(given["rollout_lp"]), torch.tensor(given["train_lp"])
    log_probs.requires_grad_()
    ratios = importance_ratios(log_probs, sampled_at, mask)
    assert ratios.tolist() == [1.0, 1.0]
    assert expected["loss_uses_only_masked_in"]
    [gradient] = torch.autograd.grad(masked_mean(-ratios, mask), log_probs)
    assert gradient.tolist() == [-1.0, 0.0]
    assert expected["metrics_exclude_masked"]
    assert masked_mean(sampled_at - log_probs, mask).item() == 0.0


def test_every_case_is_driven() -> None:
    named = {name[5:12].replace("_", "-") for name in globals() if name.startswith("test_bat_")}
    assert named == CASES.keys()

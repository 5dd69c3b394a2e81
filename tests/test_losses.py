"""The losses of the field see trained tokens and nothing else, whatever stands on the others.

Which tokens are trained is known from how the samples were played, not from the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.adapters.advantages import importance_ratios, masked_mean, rollout_mask_sums
from fsm_rollout.adapters.tensors import packed, padded
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from tests.finished import Plain, Play, Turn, batches, play

torch = pytest.importorskip("torch")

Tensor = Any
EOS = 2


class Batch(NamedTuple):
    """What a loss needs. Token tensors are [B, R]."""

    mask: Tensor
    advantages: Tensor
    """[B, 1]"""
    sums: Tensor
    """[B]: trained tokens of the row's rollout"""
    rollouts: int


def token_mean(losses: Tensor, batch: Batch) -> Tensor:
    """verl; bnpo in TRL."""
    return (losses * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def seq_mean_token_sum(losses: Tensor, batch: Batch) -> Tensor:
    """verl: a row without trained tokens does not count; luspo in TRL: it does."""
    rows = (batch.mask.sum(-1) > 0).sum().clamp(min=1)
    return (losses * batch.mask).sum(-1).sum() / rows


def seq_mean_token_mean(losses: Tensor, batch: Batch) -> Tensor:
    """grpo in TRL; verl, which leaves empty rows out as above."""
    return ((losses * batch.mask).sum(-1) / batch.mask.sum(-1).clamp(min=1)).mean()


def rollout_sum(losses: Tensor, batch: Batch) -> Tensor:
    """slime: a rollout counts once, in however many rows it is."""
    return ((losses * batch.mask).sum(-1) / batch.sums.clamp(min=1)).sum() / batch.rollouts


def dapo(losses: Tensor, batch: Batch) -> Tensor:
    """TRL: over the tokens of all processes."""
    return (losses * batch.mask).sum() / 1000


def dr_grpo(losses: Tensor, batch: Batch) -> Tensor:
    """TRL: over a constant length; seq-mean-token-sum-norm in verl."""
    return (losses * batch.mask).sum() / (len(losses) * 64)


def ours(losses: Tensor, batch: Batch) -> Tensor:
    return masked_mean(losses, batch.mask)


AGGREGATIONS = (
    token_mean,
    seq_mean_token_sum,
    seq_mean_token_mean,
    rollout_sum,
    dapo,
    dr_grpo,
    ours,
)


def gradient(
    aggregate: Callable[[Tensor, Batch], Tensor],
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    batch: Batch,
    *,
    level: str,
) -> Tensor:
    """Of a clipped policy loss with ratios per token or per sequence, by `log_probs`."""
    log_probs = log_probs.clone().requires_grad_()
    log_ratios = log_probs - rollout_log_probs
    if level == "sequence":  # GSPO
        tokens = batch.mask.sum(-1, keepdim=True).clamp(min=1)
        mean = (log_ratios * batch.mask).sum(-1, keepdim=True) / tokens
        log_ratios = mean.expand_as(log_ratios)
    ratios = torch.exp(log_ratios)
    clipped = ratios.clamp(0.8, 1.2)
    losses = -torch.minimum(ratios * batch.advantages, clipped * batch.advantages)
    [found] = torch.autograd.grad(aggregate(losses, batch), log_probs)
    return found


def trained_of(plains: list[Plain], shape: tuple[int, ...], width: int | None = None) -> Tensor:
    """bool [B, R]: what may have a gradient, from how it was played.

    `width`: what a prompt has beyond it stands at the start of the response.
    """
    trained = torch.zeros(shape, dtype=torch.bool)
    for row, plain in enumerate(plains):
        start = 0 if width is None else max(len(plain.prompt) - width, 0)
        stop = start + len(plain.response)
        trained[row, start:stop] = torch.tensor(plain.trained, dtype=torch.bool)
    return trained


with_log_probs = batches().filter(lambda batch: batch[0][0].rollout_log_probs is not None)


@given(with_log_probs, st.booleans(), st.integers(0, 2**31))
def test_no_loss_has_a_gradient_from_a_token_that_is_not_trained(
    batch: tuple[list[Sample], list[Plain]], narrow: bool, seed: int
) -> None:
    """`narrow`: what a fork inherits stands in its response, where a loss would see it."""
    samples, plains = batch
    width = max([s.prompt_length for s in samples if not s.is_fork], default=0) if narrow else None
    made = padded(samples, pad_id=0, prompt_length=width)
    chance = torch.Generator().manual_seed(seed)
    given = Batch(
        mask=made["response_mask"].double(),
        advantages=torch.tensor([[1.0 + n] for n in range(len(samples))], dtype=torch.float64),
        sums=torch.tensor(rollout_mask_sums(samples), dtype=torch.float64),
        rollouts=len({sample.rollout_id for sample in samples}),
    )
    sampled_at = made["rollout_log_probs"].double()
    noise = torch.rand(sampled_at.shape, generator=chance, dtype=torch.float64)
    log_probs = sampled_at + (noise - 0.5) / 10
    trained = trained_of(plains, sampled_at.shape, width)
    shock = torch.where(trained, 0.0, 8 * noise - 4)
    for aggregate, level in product(AGGREGATIONS, ("token", "sequence")):
        before = gradient(aggregate, log_probs, sampled_at, given, level=level)
        after = gradient(aggregate, log_probs + shock, sampled_at - shock, given, level=level)
        assert torch.equal(before, after), aggregate.__name__
        assert torch.equal(before != 0, trained), aggregate.__name__


@given(with_log_probs, st.integers(0, 2**31))
def test_a_packed_row_has_no_gradient_from_prompts_and_forked_prefixes(
    batch: tuple[list[Sample], list[Plain]], seed: int
) -> None:
    samples, plains = batch
    made, chance = packed(samples), torch.Generator().manual_seed(seed)
    sampled_at, mask = made["rollout_log_probs"].double(), made["loss_mask"]
    noise = torch.rand(sampled_at.shape, generator=chance, dtype=torch.float64)
    trained = torch.tensor(
        [is_trained for p in plains for is_trained in [0] * len(p.prompt) + p.trained]
    ).bool()
    shock = torch.where(trained, 0.0, float("nan"))  # even what is no number at all

    def gradient_at(shock: Tensor) -> Tensor:
        log_probs = (sampled_at + noise / 10 + shock).requires_grad_()
        loss = masked_mean(importance_ratios(log_probs, sampled_at, mask), mask)
        [found] = torch.autograd.grad(loss, log_probs)
        return found

    before = gradient_at(torch.zeros_like(sampled_at))
    assert torch.equal(before, gradient_at(shock))
    assert torch.equal(before != 0, trained)


def test_each_sampled_token_of_a_forked_rollout_is_trained_once() -> None:
    plan = Play(turns=(Turn(tokens=3), Turn("observation", tokens=2, fork=True), Turn(tokens=4)))
    samples, _ = play(plan)
    made = packed(samples)
    ids = made["input_ids"][made["loss_mask"].bool()].tolist()
    assert len(samples) == 2
    assert len(ids) == len(set(ids)) == 7
    assert rollout_mask_sums(samples) == [7, 7]


# -- a mask found by searching for the end-of-sequence token -----------------------------------


def mask_by_eos(ids: list[int], which: str = "first") -> list[int]:
    """What trainers do that are told no mask: train up to an end-of-sequence token."""
    if EOS not in ids:
        return [1] * len(ids)
    at = ids.index(EOS) if which == "first" else len(ids) - 1 - ids[::-1].index(EOS)
    return [int(n <= at) for n in range(len(ids))]


def conversation(*turns: list[int]) -> Sample:
    """Model turns and observations in turn."""
    request = Request(limits=Limits(max_context=1024))
    request.set_prompt([1])
    machine = Machine()
    machine.fire(Event.GENERATE, request)
    for number, ids in enumerate(turns):
        if number % 2:
            request.append_response_tokens(ids, trainable=False)
        else:
            finish = {"finish_reason": "stop" if ids[-1:] == [EOS] else "length"}
            request.append_response_tokens(ids, [-1.0] * len(ids), meta_info=finish)
    machine.fire(Event.TRUNCATE, request, StopReason.MAX_TURNS)
    request.reward = 1.0
    request.seal()
    return request.sample


@given(st.lists(st.integers(3, 9), min_size=1), st.booleans(), st.integers(0, 3))
def test_in_a_single_turn_a_mask_by_eos_search_and_ours_agree(
    ids: list[int], ends: bool, padding: int
) -> None:
    sample = conversation(ids + [EOS] * ends)
    width = sample.response_length + padding
    made = padded([sample], pad_id=EOS, response_length=width)  # pad and end are often one id
    found = mask_by_eos(made["responses"][0].tolist())
    if not ends and padding:  # a reply cut by length: the search takes the first pad for its end
        assert found[sample.response_length] == 1
        found[sample.response_length] = 0
    assert made["response_mask"][0].tolist() == found


def test_in_several_turns_no_mask_by_eos_search_can_be_right() -> None:
    sample = conversation([5, EOS], [7, 7, EOS, 7], [6, EOS])  # a tool result has one of its own
    made = padded([sample], pad_id=0)
    ids = made["responses"][0].tolist()
    assert made["response_mask"][0].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert mask_by_eos(ids, "first") == [1, 1, 0, 0, 0, 0, 0, 0]  # the last turn is never trained
    assert mask_by_eos(ids, "last") == [1, 1, 1, 1, 1, 1, 1, 1]  # the tool's words are trained

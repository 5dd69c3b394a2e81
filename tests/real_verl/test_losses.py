"""verl's own policy losses and aggregations see trained tokens and nothing else.

`tests/test_losses.py` has the same for losses that are written out there.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from fsm_rollout.adapters.tensors import padded
from fsm_rollout.sample import Sample
from tests.finished import Plain, batches
from tests.test_losses import trained_of

pytestmark = [pytest.mark.real_verl, pytest.mark.timeout(300)]

LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "cispo")
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
CONFIG = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@given(
    batch=batches().filter(lambda batch: batch[0][0].rollout_log_probs is not None),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=10, suppress_health_check=SLOW)
def test_a_masked_tokens_log_prob_moves_no_gradient(
    name: str, mode: str, batch: tuple[list[Sample], list[Plain]], seed: int
) -> None:
    samples, plains = batch
    made, chance = padded(samples, pad_id=0), torch.Generator().manual_seed(seed)
    mask, old = made["response_mask"].bool(), made["rollout_log_probs"]
    trained = trained_of(plains, old.shape)
    assert torch.equal(mask, trained)
    noise = torch.rand(old.shape, generator=chance)
    advantages = (1.0 + torch.arange(len(samples)))[:, None].expand_as(old)

    def gradient(log_probs: Any, old: Any) -> Any:
        leaf = log_probs.clone().requires_grad_()
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=leaf,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mode,
            config=CONFIG,
        )
        return torch.autograd.grad(loss, leaf)[0]

    if not trained.any():
        return  # verl's mean over nothing is 0 / 0: the managers refuse such a batch
    shock = torch.where(trained, 0.0, 8 * noise - 4)
    before = gradient(old + (noise - 0.5) / 10, old)
    after = gradient(old + (noise - 0.5) / 10 + shock, old - shock)
    assert torch.equal(before, after)
    assert not before[~trained].any()

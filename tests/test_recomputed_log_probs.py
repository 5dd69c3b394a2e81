"""What a trainer recomputes from a batch, with a forward pass of its own, is what was sampled.

A real model, several turns at several temperatures, a tool's tokens in between, a fork. The usual
mistakes are planted, and seen.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fsm_rollout.adapters.advantages import masked_mean  # noqa: E402
from fsm_rollout.adapters.tensors import packed, padded  # noqa: E402
from fsm_rollout.engines.base import SamplingParams  # noqa: E402
from fsm_rollout.engines.transformers import TransformersEngine  # noqa: E402
from fsm_rollout.limits import Limits, StopReason  # noqa: E402
from fsm_rollout.request import Request  # noqa: E402
from fsm_rollout.sample import Sample  # noqa: E402
from fsm_rollout.states.machine import Machine  # noqa: E402
from fsm_rollout.states.table import Event  # noqa: E402
from tests.tiny_llama import NEVER, ids, plain_logits, serve, tiny_llama  # noqa: E402

PAD = 0


async def rollout(engine: TransformersEngine, index: int) -> list[Sample]:
    """Three turns, hotter each time; the third in a fork that dropped the first observation."""
    request = Request(index=index, limits=Limits(max_context=128))
    request.set_prompt(ids(index, 3 + index))
    machine = Machine()
    machine.fire(Event.GENERATE, request)
    for number, temperature in enumerate((0.5, 1.0, 1.5)):
        if number == 2:
            request.fork(request.sample.tokens[:-3])
        params = SamplingParams(temperature=temperature, seed=index, **NEVER)
        generation = await engine.generate(
            request.sample.columns, 4 + index, params, request_id="r", session_id=str(index)
        )
        meta = {"finish_reason": "stop", "temperature": temperature}
        request.append_response_tokens(generation.token_ids, generation.log_probs, meta_info=meta)
        request.append_response_tokens(ids(100 + index, 3), trainable=False)
    machine.fire(Event.TRUNCATE, request, StopReason.MAX_TURNS)
    request.reward = 1.0
    request.seal()
    return request.rows


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    async def play(engine: TransformersEngine) -> list[Sample]:
        return [sample for index in range(3) for sample in await rollout(engine, index)]

    found = serve(play)
    assert len(found) == 6
    return found


def gap(
    batch: dict[str, Any], *, shift: int = 1, temperatures: Any = None, **without: Any
) -> float:
    """The mean distance between recomputed and handed log-probs of trained tokens."""
    R = batch["responses"].shape[1]
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.inference_mode():
        logits = tiny_llama()(**(given | without)).logits
    logits = logits.roll(shift, dims=1)[:, -R:]
    heat = batch["temperatures"] if temperatures is None else temperatures
    log_probs = (logits / heat[..., None]).log_softmax(-1)
    log_probs = log_probs.gather(-1, batch["responses"][..., None])[..., 0]
    return masked_mean(
        (log_probs - batch["rollout_log_probs"]).abs(), batch["response_mask"]
    ).item()


@pytest.mark.parametrize("prompt_length", [None, 6, 24])
def test_a_padded_batch_gives_the_log_probs_that_were_sampled(
    samples: list[Sample], prompt_length: int | None
) -> None:
    """A fork's context may stand in its response: it makes no difference."""
    batch = padded(samples, pad_id=PAD, prompt_length=prompt_length, columns=["temperatures"])
    assert batch["response_mask"].sum() == sum(3 * (4 + index) for index in range(3))
    assert gap(batch) < 1e-3


def test_the_usual_mistakes_are_seen(samples: list[Sample]) -> None:
    batch = padded(samples, pad_id=PAD, columns=["temperatures"])
    assert gap(batch, shift=0) > 1
    assert gap(batch, shift=2) > 1
    assert gap(batch, temperatures=torch.ones_like(batch["temperatures"])) > 0.1
    everything = torch.ones_like(batch["attention_mask"])
    assert gap(batch, attention_mask=everything) > 0.01  # padding is looked at
    moved = batch | {"rollout_log_probs": batch["rollout_log_probs"].roll(1, dims=1)}
    assert gap(moved) > 1


def test_a_packed_batch_gives_the_log_probs_that_were_sampled(samples: list[Sample]) -> None:
    batch = packed(samples, columns=["temperatures"])
    jagged = {
        name: torch.nested.nested_tensor_from_jagged(batch[name], batch["cu_seqlens"]).unbind()
        for name in ("input_ids", "temperatures", "rollout_log_probs", "loss_mask")
    }
    for tokens, heat, sampled_at, mask in zip(*jagged.values(), strict=True):
        logits = plain_logits(tokens.tolist())[:-1] / heat[1:, None]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert masked_mean((log_probs - sampled_at[1:]).abs(), mask[1:]).item() < 1e-3
        assert mask[0] == 0

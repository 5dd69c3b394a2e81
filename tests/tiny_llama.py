"""A random Llama of two layers, its plain forward pass, and how tests drive an engine over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.engines.transformers import TransformersEngine

VOCABULARY = 300
CONTEXT = 128
END_OF_TURN = (7, 8)
NEVER: dict[str, Any] = {"stop_token_ids": (VOCABULARY + 1,)}  # no sampled id ends the turn

T = TypeVar("T")


@cache
def tiny_llama() -> PreTrainedModel:
    """Weights large enough for log-probs that differ by nats."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        eos_token_id=list(END_OF_TURN),
        pad_token_id=0,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.eval()
    return model


def plain_logits(ids: Sequence[int], model: PreTrainedModel | None = None) -> torch.Tensor:
    """Float32 logits [len(ids), vocabulary] of one forward pass without cache, batch or engine."""
    with torch.inference_mode():
        output: Any = (model or tiny_llama())(input_ids=torch.tensor([ids]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def plain_log_probs(
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    temperature: float = 1.0,
    model: PreTrainedModel | None = None,
) -> list[float]:
    """log_softmax(logits / temperature) of each sampled token."""
    logits = plain_logits([*prompt, *reply], model)[len(prompt) - 1 : -1]
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    return [float(log_probs[at, token]) for at, token in enumerate(reply)]


def assert_log_probs_are_plain(
    prompt: Sequence[int], generation: Generation, temperature: float = 1.0
) -> None:
    assert generation.log_probs is not None
    expected = plain_log_probs(prompt, sampled(generation), temperature=temperature)
    np.testing.assert_allclose(generation.log_probs, expected, atol=1e-4, rtol=0)


def columns(ids: Sequence[int]) -> Columns:
    return Columns(list(ids))


def ids(seed: int, length: int) -> list[int]:
    """A prompt without end-of-turn ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(10, VOCABULARY, length)]


def sampled(generation: Generation) -> list[int]:
    return [int(token) for token in generation.token_ids]


async def ask(
    engine: TransformersEngine,
    prompt: Sequence[int],
    max_new_tokens: int = 12,
    *,
    request: str = "r",
    session: str | None = None,
    **params: Any,
) -> Generation:
    return await engine.generate(
        columns(prompt),
        max_new_tokens,
        SamplingParams(**params),
        request_id=request,
        session_id=session or request,
    )


def serve(use: Callable[[TransformersEngine], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run `use(engine)` on a fresh engine over the tiny model, and close it."""

    async def run() -> T:
        engine = TransformersEngine(options.pop("model", tiny_llama()), **options)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@contextmanager
def watched(work: Callable[[list[int]], None] = lambda ids: None) -> Iterator[list[list[int]]]:
    """The ids of every forward pass of the tiny model; `work(ids)` runs before each."""
    passes: list[list[int]] = []

    def hook(_: Any, args: tuple[torch.Tensor]) -> None:
        passes.append(args[0].flatten().tolist())
        work(passes[-1])

    handle = tiny_llama().get_input_embeddings().register_forward_pre_hook(hook)
    try:
        yield passes
    finally:
        handle.remove()

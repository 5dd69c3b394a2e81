"""TransformersEngine: tokens and log-probs against plain passes, batching, reuse, models."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import asyncio
import copy
import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
)

from fsm_rollout.engines.base import Generation, SamplingParams
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.smollm2 import smollm2_dir
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.tiny_llama import (
    CONTEXT,
    END_OF_TURN,
    NEVER,
    VOCABULARY,
    ask,
    assert_log_probs_are_plain,
    columns,
    ids,
    plain_log_probs,
    plain_logits,
    sampled,
    serve,
    tiny_llama,
    watched,
)


def test_log_probs_are_those_before_the_filters_for_every_temperature_in_one_batch() -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 0.7, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.0},
    ]

    async def use(engine: TransformersEngine) -> list[Generation]:
        return await asyncio.gather(
            *(
                ask(engine, ids(i, 5 + 7 * i), request=f"{i}", seed=i, **params, **NEVER)
                for i, params in enumerate(asked)
            )
        )

    for i, generation in enumerate(serve(use)):
        assert generation.log_prob_kind == "scaled"
        assert generation.prompt_tokens == 5 + 7 * i
        assert_log_probs_are_plain(ids(i, 5 + 7 * i), generation, asked[i]["temperature"])


def test_temperature_zero_is_greedy() -> None:
    prompt = ids(1, 20)
    found = sampled(serve(lambda engine: ask(engine, prompt, temperature=0.0, **NEVER)))
    logits = plain_logits([*prompt, *found])[len(prompt) - 1 : -1]
    assert found == logits.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    async def one(engine: TransformersEngine, seed: int | None) -> list[int]:
        prompt = ids(seed or 0, 9)
        return sampled(await ask(engine, prompt, request=f"{seed}", seed=seed, top_p=0.9, **NEVER))

    async def crowd(engine: TransformersEngine) -> list[list[int]]:
        return await asyncio.gather(*(one(engine, seed) for seed in range(1, 9)))

    alone = [serve(partial(one, seed=seed)) for seed in range(1, 9)]
    assert serve(crowd, max_batch=3, prefill_tokens=4) == alone
    assert serve(crowd) == alone
    assert serve(partial(one, seed=None)) != serve(partial(one, seed=None))


def test_a_turn_ends_with_any_of_its_stop_ids_and_keeps_it() -> None:
    prompt = ids(2, 10)
    free = sampled(serve(lambda engine: ask(engine, prompt, 40, seed=5, **NEVER)))

    async def use(engine: TransformersEngine) -> list[Generation]:
        stops = [(299, free[6]), (free[3], 299)]
        return [await ask(engine, prompt, 40, seed=5, stop_token_ids=stop) for stop in stops]

    for generation in serve(use):
        found = sampled(generation)
        assert found == free[: len(found)]
        assert generation.finish == "stop"
        assert generation.matched == found[-1]
        assert found[-1] not in found[:-1]


def test_without_stop_ids_every_end_of_turn_id_of_the_model_counts() -> None:
    async def use(engine: TransformersEngine) -> list[Generation]:
        requests = (ask(engine, ids(i, 6), 100, request=f"{i}", seed=i) for i in range(60))
        return await asyncio.gather(*requests)

    ends = {reply.matched for reply in serve(use) if reply.finish == "stop"}
    assert ends == set(END_OF_TURN)


@given(budget=st.integers(1, 30), length=st.integers(1, CONTEXT - 1))
@settings(max_examples=10)
def test_a_turn_never_exceeds_its_budget_or_the_context(budget: int, length: int) -> None:
    reply = serve(lambda engine: ask(engine, ids(0, length), budget, seed=0, **NEVER))
    assert len(reply.token_ids) == min(budget, CONTEXT - length)
    assert reply.finish == "length"
    assert reply.matched is None


REQUEST = st.tuples(
    st.lists(st.sampled_from([3, 20, 35]), min_size=1, max_size=3),  # lengths of shared pieces
    st.integers(1, 9),  # budget
    st.sampled_from(["run", "run", "run", "abort", "cancel"]),
    st.sampled_from("abc"),  # session
    st.sampled_from([0.0, 0.7, 1.0]),
)


@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    max_batch=st.integers(1, 4),
    prefill_tokens=st.sampled_from([1, 5, 512]),
    cache_tokens=st.sampled_from([0, 60, 10_000]),
)
@settings(max_examples=20)
def test_whatever_is_shared_kept_aborted_or_cancelled_every_log_prob_is_plain(
    requests: list[tuple[list[int], int, str, str, float]],
    max_batch: int,
    prefill_tokens: int,
    cache_tokens: int,
) -> None:
    async def one(engine: TransformersEngine, number: int) -> None:
        pieces, budget, fate, session, temperature = requests[number]
        prompt = [token for at, size in enumerate(pieces) for token in ids(at, size)]
        how: dict[str, Any] = {"request": f"{number}", "session": session}
        how["temperature"] = temperature
        task = asyncio.create_task(ask(engine, prompt, budget, seed=number, **how, **NEVER))
        await asyncio.sleep(0.0005 * number)
        if fate == "cancel":
            task.cancel()
            await asyncio.wait([task])
            return
        if fate == "abort":
            await engine.abort(f"{number}")
        replies.append((prompt, await task, temperature))
        assert len(replies[-1][1].token_ids) == budget or replies[-1][1].finish == "abort" == fate

    async def use(engine: TransformersEngine) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(len(requests))))

    replies: list[tuple[list[int], Generation, float]] = []
    options = {"prefill_tokens": prefill_tokens, "cache_tokens": cache_tokens}
    serve(use, max_batch=max_batch, **options)
    for prompt, reply, temperature in replies:
        assert_log_probs_are_plain(prompt, reply, temperature)


def test_the_next_turn_of_a_session_computes_its_new_tokens_only() -> None:
    prompt, observation = ids(3, 50), ids(4, 10)

    async def use(engine: TransformersEngine) -> tuple[list[int], Generation]:
        first = await ask(engine, prompt, 8, session="s", seed=1, temperature=0.7, **NEVER)
        history = [*prompt, *sampled(first), *observation]
        passes.clear()
        return history, await ask(engine, history, 8, session="s", seed=2, **NEVER)

    with watched() as passes:
        history, second = serve(use)
    assert passes[0] == history[-11:]  # the last sampled token was not needed before
    assert_log_probs_are_plain(history, second)


def test_a_prompt_that_many_share_is_computed_once() -> None:
    shared = ids(5, 80)

    async def use(engine: TransformersEngine) -> list[Generation]:
        prompts = [[*shared, *ids(100 + i, 4)] for i in range(8)]
        asked = (ask(engine, p, 2, request=f"{i}", seed=i) for i, p in enumerate(prompts))
        return await asyncio.gather(*asked)

    with watched() as passes:
        serve(use)
    computed = sum(len(tokens) for tokens in passes[4:])  # the first four prove the model
    assert computed == len(shared) + 8 * 4 + 8


def test_without_a_cache_nothing_is_kept() -> None:
    async def use(engine: TransformersEngine) -> None:
        for _ in range(2):
            await ask(engine, ids(6, 30), 1, session="s")

    with watched() as passes:
        serve(use, cache_tokens=0)
    assert [len(tokens) for tokens in passes[-2:]] == [30, 30]


def test_after_forget_nothing_of_the_old_weights_is_used_and_tokens_carry_the_version() -> None:
    model, prompt = copy.deepcopy(tiny_llama()), ids(3, 50)

    async def use(engine: TransformersEngine) -> tuple[Generation, list[int], Generation]:
        first = await ask(engine, prompt, 8, session="s", seed=1, **NEVER)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        engine.forget(weight_version="step-1")
        history = [*prompt, *sampled(first)]
        return first, history, await ask(engine, history, 8, session="s", seed=2, **NEVER)

    first, history, second = serve(use, model=model)
    expected = plain_log_probs(history, sampled(second), model=model)
    assert second.log_probs is not None
    assert second.log_probs.tolist() == pytest.approx(expected, abs=1e-4)
    assert (first.weight_versions, second.weight_versions) == ((), (("step-1", 8),))


def test_weights_that_changed_without_forget_are_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, prompt = copy.deepcopy(tiny_llama()), ids(3, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    async def use(engine: TransformersEngine) -> tuple[list[int], Generation]:
        await ask(engine, prompt, 1, session="before", seed=1)
        first = await ask(engine, prompt, 8, session="s", seed=1, **NEVER)
        assert not caplog.records
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 0.01)
        optimizer.step()
        history = [*prompt, *sampled(first)]
        return history, await ask(engine, history, 8, session="s", seed=2, **NEVER)

    history, second = serve(use, model=model)
    expected = plain_log_probs(history, sampled(second), model=model)
    assert second.log_probs is not None
    assert second.log_probs.tolist() == pytest.approx(expected, abs=1e-4)
    assert "call `engine.forget(weight_version=...)`" in caplog.text


def test_forget_ends_what_runs_with_what_it_has() -> None:
    running, told = threading.Event(), threading.Event()

    def hold(_: list[int]) -> None:
        running.set()
        told.wait()

    async def use(engine: TransformersEngine) -> list[Generation]:
        asked = [ask(engine, ids(i, 6), 9, request=f"{i}", seed=i, **NEVER) for i in range(3)]
        tasks = [asyncio.create_task(coroutine) for coroutine in asked]
        with watched(hold):
            await asyncio.to_thread(running.wait)
            engine.forget(weight_version=1)
            told.set()
            replies = await asyncio.gather(*tasks)
        return [*replies, await ask(engine, ids(9, 6), 2, **NEVER)]

    *ended, after = serve(use, max_batch=2)  # the third waits for its turn
    assert [(reply.finish, reply.weight_versions) for reply in ended] == [("abort", ())] * 3
    assert [len(reply.token_ids) for reply in ended] in ([1, 1, 0], [1, 0, 0])
    for i, reply in enumerate(ended):
        assert_log_probs_are_plain(ids(i, 6), reply)
    assert after.weight_versions == ((1, 2),)


def tiny(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}


def test_a_sliding_window_is_respected_and_a_model_without_stop_ids_runs_to_its_budget() -> None:
    config = MistralConfig(
        **SIZES, sliding_window=8, max_position_embeddings=CONTEXT, eos_token_id=None
    )
    model, prompt = tiny(config), ids(11, 40)
    reply = serve(lambda engine: ask(engine, prompt, 20), model=model, prefill_tokens=16)
    assert (len(reply.token_ids), reply.finish) == (20, "length")
    assert reply.log_probs is not None
    expected = plain_log_probs(prompt, sampled(reply), model=model)
    assert reply.log_probs.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_model_that_cannot_be_batched_exactly_is_refused_at_construction() -> None:
    capped = tiny(Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=5.0))
    with pytest.raises(ConfigError, match="softcap"):
        TransformersEngine(capped)
    recurrent = tiny(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ConfigError, match="cannot batch MambaForCausalLM"):
        TransformersEngine(recurrent)
    mixing: Any = tiny(MistralConfig(**SIZES))
    mixing.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: args[0] + args[0].roll(1, 1)
    )
    with pytest.raises(ConfigError, match="differ from the model's own forward pass"):
        TransformersEngine(mixing)


def test_the_worker_uses_the_number_of_threads_asked_for() -> None:
    seen: set[int] = set()
    before = torch.get_num_threads()
    try:
        with watched(lambda _: seen.add(torch.get_num_threads())):
            serve(lambda engine: ask(engine, ids(0, 5), 1), num_threads=before + 1)
    finally:
        torch.set_num_threads(before)
    assert seen == {before + 1}


def test_a_loaded_model_is_left_with_its_own_attention() -> None:
    before = tiny_llama().config._attn_implementation
    serve(lambda engine: ask(engine, ids(0, 5)))
    assert tiny_llama().config._attn_implementation == before == "sdpa"


def test_a_model_is_loaded_from_a_directory_in_the_dtype_asked_for(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    reply = serve(lambda engine: ask(engine, ids(0, 9), **NEVER), model=tmp_path)
    assert_log_probs_are_plain(ids(0, 9), reply)
    half = serve(
        lambda engine: ask(engine, ids(0, 9), top_k=1, **NEVER),
        model=str(tmp_path),
        dtype="bfloat16",
    )
    assert half.log_probs is not None
    expected = plain_log_probs(ids(0, 9), sampled(half))
    assert 1e-4 < abs(half.log_probs - expected).max() < 1.0
    with pytest.raises(ConfigError, match="cannot load 'no-such-directory'"):
        TransformersEngine("no-such-directory")
    with pytest.raises(ConfigError, match="max_batch must be >= 1"):
        TransformersEngine(tiny_llama(), max_batch=0)


@pytest.mark.real_model
def test_a_real_model_batched_over_turns_agrees_with_its_plain_forward_pass() -> None:
    try:
        directory = smollm2_dir()
    except ConfigError as missing:
        pytest.skip(str(missing))
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    texts = [f"<|im_start|>user\n{a} + 8?<|im_end|>\n<|im_start|>assistant\n" for a in "37"]
    params = SamplingParams(temperature=0.7, top_p=0.95)

    async def play(engine: TransformersEngine, number: int) -> list[tuple[list[int], Generation]]:
        history: list[int] = tokenizer.encode(texts[number])
        replies = []
        for turn in range(2):
            reply = await engine.generate(
                columns(history),
                12,
                msgspec.structs.replace(params, seed=number),
                request_id=f"{number}-{turn}",
                session_id=f"{number}",
            )
            replies.append((list(history), reply))
            history += [*sampled(reply), *tokenizer.encode(texts[number])]
        return replies

    async def use(engine: TransformersEngine) -> list[list[tuple[list[int], Generation]]]:
        return await asyncio.gather(*(play(engine, number) for number in range(2)))

    for history, reply in itertools.chain(*serve(use, model=model)):
        assert reply.log_probs is not None
        expected = plain_log_probs(history, sampled(reply), temperature=0.7, model=model)
        assert reply.log_probs.tolist() == pytest.approx(expected, abs=1e-3)
        assert reply.finish == "length" or reply.matched == tokenizer.eos_token_id


def test_no_run_starts_with_a_closed_engine() -> None:
    async def main() -> None:
        engine = TransformersEngine(tiny_llama())
        rollout = Rollout(engine, tiny_tokenizer())
        await engine.close()
        with pytest.raises(ConfigError, match="TransformersEngine of this rollout was closed"):
            await rollout.generate(["x"])

    asyncio.run(main())

"""The tiny model of train_tiny, and the supervised warm-up that teaches it to speak at all.

Random exploration would not find a well-formed call of six tokens, nor would a few thousand rewards
teach attention to copy a word. So the warm-up shows conversations in the right format. Half of them
guess at once, the others call the tool. In its first half they are careful: they open the box that
was asked for and repeat what they saw. In its second half they draw either at random half of the
time, until the model does so too. That is left for the reward to teach: to call, to open that box,
to repeat what is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from examples.train_tiny.boxes import BOXES, CALL, NOTHING, QUESTIONS, SECRETS
from fsm_rollout.codec import Codec

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CARE = 0.5
"""how often a call of the second half opens the right box, and an answer repeats what was seen"""


def tiny_llama(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A random Llama of 100,000 weights. Wide initial ones let attention learn within seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    end: Any = tokenizer.eos_token_id
    padding: Any = tokenizer.pad_token_id
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    return LlamaForCausalLM(config)


def warm_up(
    model: LlamaForCausalLM, codec: Codec, *, seed: int, steps: int, batch_size: int = 64
) -> None:
    """Train `model` on conversations of the right format, on what the assistant says in them."""
    draw, conversation = random.Random(seed), _conversations(codec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for step in range(steps):
        care = 1.0 if step < steps // 2 else CARE
        batch = [conversation(draw, care) for _ in range(batch_size)]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in batch])
        said = torch.tensor([row + [False] * (width - len(row)) for _, row in batch])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits[said[:, 1:]], ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decay.step()


def _conversations(codec: Codec) -> Callable[[random.Random, float], tuple[list[int], list[bool]]]:
    prompt, text = cache(codec.prompt), cache(codec.vocabulary.encode)
    (end,) = codec.stop_ids

    @cache
    def result(content: str) -> list[int]:
        message = {"role": "tool", "name": "open_box", "tool_call_id": "", "content": content}
        return codec.delta(end, [message])

    def conversation(draw: random.Random, care: float) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them the assistant says."""
        asked, answer = draw.choice(BOXES), draw.choice(SECRETS)
        spans = [(prompt(draw.choice(QUESTIONS).format(asked)), False)]
        if draw.random() < 0.5:
            opened = asked if draw.random() < care else draw.choice(BOXES)
            found = draw.choice(SECRETS) if opened == asked or draw.random() < 0.5 else NOTHING
            if found != NOTHING and draw.random() < care:
                answer = found
            spans += [([*text(CALL.format(opened)), end], True), (result(found), False)]
        spans += [([*text(answer), end], True)]
        ids = [token for span, _ in spans for token in span]
        return ids, [said for span, said in spans for _ in span]

    return conversation

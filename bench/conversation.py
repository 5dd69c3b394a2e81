"""Conversation: what every client of bench/turn.py plays, the same tokens and the same bytes.

A prompt of `context` tokens, then turns of 256 sampled tokens. Each but the last ends in a tool
call, which is answered by an observation of 200 tokens. The tokenizer is the real Qwen BPE.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.server import Script
from fsm_rollout.codec import Codec
from tests.qwen import qwen_tokenizer

SAMPLED = 256
"""tokens of a model turn"""
OBSERVED = 200
"""tokens of a tool's answer, without what the template puts around it"""
TURNS = 5
VARIANTS = 8
"""different replies to the same turn: one text alone would sit in every cache"""

_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lazy foxes"}}\n</tool_call>'
_TEXT = (
    "the quick brown fox jumps over lazy dogs while computing f(x) = x**2 + 3*x - 7; so we check: "
    "return value, because naïve results of gradient descent don't converge in 1024 steps — next, "
    "look up `np.float32` rounding (see section 4.2) and compare it to what the paper's table says"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The ids of one conversation. P = context, N = SAMPLED."""

    prompt: list[int]  # [P]
    sampled: list[list[list[int]]]  # [TURNS][VARIANTS][N]
    observation: str
    """what the tool answers"""
    before: list[int]
    observed: list[int]  # [OBSERVED]
    after: list[int]
    """before + observed + after: the observation as the chat template puts it"""
    texts: list[list[str]]
    """what `sampled` says"""

    @property
    def delta(self) -> list[int]:
        """All the ids that an observation adds."""
        return self.before + self.observed + self.after

    def script(self) -> Script:
        """SGLang's replies; turns are told apart by the length of the ids."""
        script: Script = []
        sent = list(self.prompt)
        for turn, replies in enumerate(self.sampled):
            # What a turn adds is longer than the rest of a body, so half of it tells them apart.
            least = len(_items(sent)) - len(_items(self.sampled[0][0])) // 2 if turn else 0
            said = zip(replies, self.texts[turn], strict=True)
            script.append((least, [sglang_reply(*one, prompt=len(sent)) for one in said]))
            sent += replies[0] + self.delta
        return script


def conversation(context: int, codec: Codec, *, turns: int = TURNS) -> Conversation:
    """A conversation whose first engine call sends `context` tokens."""
    chance = random.Random(context)
    tokenizer = codec.tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    plain = [i for i in range(codec.vocab_size) if i not in codec.control_ids]
    observation = next(_texts(tokenizer, random.Random(0), OBSERVED))  # of every context the same
    messages = [
        {"role": "tool", "name": "search", "tool_call_id": "call_1_0", "content": observation}
    ]
    (stop,) = encode("<|im_end|>")
    delta = codec.delta(stop, messages)
    observed = encode(observation)
    at = next(i for i in range(len(delta)) if delta[i : i + len(observed)] == observed)
    sampled = []
    for turn in range(turns):
        end = "So it is 42." if turn == turns - 1 else _CALL
        tail = [*encode(end), stop]
        texts = _texts(tokenizer, chance, SAMPLED - len(tail))
        sampled.append([encode(next(texts)) + tail for _ in range(VARIANTS)])
    return Conversation(
        prompt=chance.choices(plain, k=context),
        sampled=sampled,
        observation=observation,
        before=delta[:at],
        observed=observed,
        after=delta[at + len(observed) :],
        texts=[[str(tokenizer.decode(ids)) for ids in replies] for replies in sampled],
    )


def qwen(template: str = "qwen2_5") -> Any:
    """The tokenizer with a chat template of tests/templates."""
    return qwen_tokenizer(template)


def sglang_reply(ids: list[int], text: str, *, prompt: int) -> bytes:
    """The body of an SGLang server's answer, log-probs included."""
    chance = random.Random(ids[0])
    log_probs = [(-chance.expovariate(2.0), i, None) for i in ids]
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": prompt,
        "weight_version": "1",
        "total_retractions": 0,
        "completion_tokens": len(ids),
        "cached_tokens": prompt - 1,
        "e2e_latency": 0.1,
        "output_token_logprobs": log_probs,
    }
    return msgspec.json.encode({"text": text, "output_ids": ids, "meta_info": meta})


def _items(ids: list[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]


def _texts(tokenizer: Any, chance: random.Random, count: int) -> Iterator[str]:
    """Texts of exactly `count` tokens that encode to what they were decoded from."""
    while True:
        words = " ".join(chance.choices(_TEXT.split(), k=count))
        ids = tokenizer.encode(words, add_special_tokens=False)[:count]
        text = tokenizer.decode(ids)
        if tokenizer.encode(text, add_special_tokens=False) == ids:
            yield text

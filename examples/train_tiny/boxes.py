"""The task of train_tiny: what is in the box? One has to look, and looking takes a tool.

Its rows, tool and reward, and a tokenizer of 293 ids in which a call is six tokens. What is in a
box is drawn anew for each row, so nothing can be learned by heart.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from fsm_rollout import Request, Tool
from fsm_rollout.dataset import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOXES = ("red", "blue", "green", "white", "black", "brown", "pink", "gold")
SECRETS = ("apple", "pear", "plum", "lemon", "grape", "fig", "nut", "date")
QUESTIONS = (
    "What is in the {} box?",
    "Look into the {} box.",
    "Say what the {} box holds.",
    "The {} box, please.",
)
NOTHING = "nothing"
CALL = '<tool_call>{{"name": "open_box", "arguments": {{"box": "{}"}}}}</tool_call>'
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""


class OpenBox(Tool):
    """Look into a box."""

    blocking = False

    def create(self, box: str, secret: str) -> None:
        self.box, self.secret = box, secret

    def execute(self, box: str) -> str:
        """box: the colour of the box to open"""
        return self.secret if box == self.box else NOTHING


class EmptyBox(OpenBox):
    """A control: it can be called like OpenBox, but never tells anything."""

    name = "open_box"

    def execute(self, box: str) -> str:
        """box: the colour of the box to open"""
        return NOTHING


async def reward(request: Request) -> float:
    """1.0 when the last thing said is what the box holds, else 0.0."""
    last = request.sample.messages[-1]
    return float(last["role"] == "assistant" and last["content"] == request.label)


def rows(count: int, seed: int, *, held_out: bool = False) -> list[PromptRow]:
    """`count` rows. A quarter of all pairs of question and box is held out of the training."""
    draw = random.Random(f"{seed} {held_out}")
    pairs = [
        (question, box)
        for number, question in enumerate(QUESTIONS)
        for other, box in enumerate(BOXES)
        if held_out == ((number - other) % len(QUESTIONS) == 0)
    ]
    drawn = []
    for _ in range(count):
        (question, box), secret = draw.choice(pairs), draw.choice(SECRETS)
        kwargs = {"open_box": {"create_kwargs": {"box": box, "secret": secret}}}
        drawn.append(PromptRow(prompt=question.format(box), label=secret, tools_kwargs=kwargs))
    return drawn


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, ChatML's control tokens, and each piece of text that this task uses as one token."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import ByteLevel as Bytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    roles = [f"{role}\n" for role in ("system", "user", "assistant", "tool")]
    texts = [part for text in (*QUESTIONS, CALL[11:-12].format("{}")) for part in text.split("{}")]
    pieces = sorted({*filter(None, texts), *roles, *BOXES, *SECRETS, NOTHING, OpenBox.name})
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = ["".join(part for part, _ in to_bytes.pre_tokenize_str(piece)) for piece in pieces]
    ids = {symbol: number for number, symbol in enumerate([*sorted(ByteLevel.alphabet()), *spelt])}
    tokenizer = Tokenizer(BPE(ids, [], ignore_merges=True))
    pattern = Regex("|".join(map(re.escape, sorted(pieces, key=len, reverse=True))))
    tokenizer.pre_tokenizer = Sequence([Split(pattern, "isolated"), to_bytes])
    tokenizer.decoder = Bytes()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )

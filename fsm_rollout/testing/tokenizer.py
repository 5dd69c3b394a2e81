"""tiny_tokenizer: a real Hugging Face tokenizer made in code, for docs and tests without downloads.

Byte-level BPE without merges: a token is a byte. It has ChatML's control tokens, the tags of hermes
tool calls, and the chat template `hermes` that the package ships.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.codec.template import shipped_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of 265 ids: 256 bytes, then `SPECIAL`, then `TAGS`; eos is `<|im_end|>`.

    `chat_template` is the text of a template; None: the shipped `hermes`.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template or shipped_template("hermes"),
    )

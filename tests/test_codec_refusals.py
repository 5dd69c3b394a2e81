"""What a codec refuses at start-up, and the tokenizers that it follows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import logging
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace as MetaspaceSplit
from transformers import PreTrainedTokenizerFast

from fsm_rollout.codec import Codec
from fsm_rollout.codec.template import shipped_template
from fsm_rollout.errors import ConfigError, TemplateError
from fsm_rollout.parsers import Parsed
from fsm_rollout.testing.tokenizer import SPECIAL, TAGS, tiny_tokenizer
from tests.codecs import (
    SCHEMA,
    calling,
    codec,
    controls,
    render,
    results,
)
from tests.qwen import qwen_tokenizer, token_id

# -- what can't be used is refused at start-up -----------------------------------------------------


def refused(old: str, new: str) -> str:
    """What is said about the shipped template when `old` in it becomes `new`."""
    source = shipped_template("hermes")
    assert old in source
    with pytest.raises(TemplateError) as refusal:
        Codec(tiny_tokenizer(source.replace(old, new)), tools=[SCHEMA])
    return str(refusal.value)


def test_a_template_that_drops_tool_results_is_refused_and_shown() -> None:
    says = refused("+ message.content + '\\n</tool_response>'", "+ '\\n</tool_response>'")
    assert "messages of (tool)" in says
    assert "<tool_response>\\n\\n</tool_response>" in says
    assert "chat_template" in says


def test_a_template_that_rewrites_contents_is_refused_with_both_renders() -> None:
    says = refused("+ message.content + '\\n</t", "+ message.content.replace('42', '24') + '\\n</t")
    assert "the template puts: '\\n<|im_start|>tool\\n<tool_response>\\n24" in says
    assert "instead of: '\\n<|im_start|>tool\\n<tool_response>\\n42" in says


def test_a_template_that_looks_back_further_than_a_turn_is_refused() -> None:
    says = refused("'<tool_response>\\n'", "'<tool_response>\\n' + (loop.index | string)")
    assert "depends on what was said before" in says


def test_a_user_turn_that_counts_the_history_is_refused_too() -> None:
    source = shipped_template("hermes")
    opener = "{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"
    assert opener in source
    counting = source.replace(opener, "{{- messages | length | string }}" + opener)
    with pytest.raises(TemplateError, match=r"\(user\).*depends on what was said before"):
        Codec(tiny_tokenizer(counting))


def test_a_template_that_fails_is_refused_with_its_own_words() -> None:
    says = refused(
        "{%- if message.role == 'tool' %}",
        "{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}",
    )
    assert "no tools here" in says


def test_a_template_without_generation_prompt_is_refused() -> None:
    says = refused("if add_generation_prompt", "if false")
    assert "ignores add_generation_prompt" in says
    assert "<|im_start|>assistant" in says


def test_without_tools_a_template_needs_no_tool_role() -> None:
    source = shipped_template("hermes").replace("message.role == 'tool'", "false")
    loop = "{%- for message in messages %}"
    source = source.replace(loop, loop.replace("messages", "messages if message.role != 'tool'"))
    it = Codec(tiny_tokenizer(source))
    assert it.is_prefix_stable
    with pytest.raises(TemplateError, match=r"messages of \(tool\)"):
        it.delta(None, results(["42"]))


def test_a_turn_that_ends_with_no_stop_token_is_refused_until_the_token_is_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    end_of_text, im_end = (token_id(tokenizer, token) for token in ("<|endoftext|>", "<|im_end|>"))
    with pytest.raises(
        TemplateError, match=r"no stop token ends the assistant's turn(.|\n)*stop_token_ids"
    ):
        Codec(tokenizer)
    it = Codec(tokenizer, stop_token_ids=[im_end])
    assert it.stop_ids == {im_end, end_of_text}


def test_what_a_codec_needs_of_a_tokenizer_is_said() -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids \[265\] lie outside the vocabulary"):
        Codec(tiny_tokenizer(), stop_token_ids=[265])
    with pytest.raises(ConfigError, match="unknown chat template 'hermez': did you mean 'hermes'"):
        Codec(tiny_tokenizer(), chat_template="hermez")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Codec(tokenizer)
    assert Codec(tokenizer, chat_template="hermes").prompt("x") == codec_without_tools().prompt("x")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token_id"):
        Codec(tokenizer, chat_template="hermes")


def test_a_model_that_spells_its_own_control_tokens_is_refused() -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "<|im_end|>": 1}, unk_token="<unk>"))
    words.add_special_tokens(["<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>' out of plain text"):
        Codec(tokenizer, chat_template="hermes")


def codec_without_tools() -> Codec:
    return Codec(tiny_tokenizer())


def test_history_that_the_template_rewrites_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        steady = Codec(tiny_tokenizer())
        assert steady.is_prefix_stable
        assert steady.drift == ""
        assert caplog.messages == []
        drifting = Codec(qwen_tokenizer("qwen3"))
        drifting.prompt("x")
        drifting.delta(None, [{"role": "user", "content": "x"}])
    assert not drifting.is_prefix_stable
    (message,) = caplog.messages
    assert drifting.drift in message
    assert "<think>\\n\\n</think>\\n\\na1" in drifting.drift  # while it is the last turn
    assert "<|im_start|>assistant\\na1<|im_end|>" in drifting.drift  # and later on


def test_a_template_that_keeps_the_tools_from_the_model_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = shipped_template("hermes").replace("if tools", "if false")
    Codec(tiny_tokenizer(silent))
    assert caplog.messages == []
    Codec(tiny_tokenizer(silent), tools=[SCHEMA])
    assert "ignores tools" in caplog.text


def test_a_template_may_need_tools(caplog: pytest.LogCaptureFixture) -> None:
    needy = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"
    source = needy + shipped_template("hermes")
    assert Codec(tiny_tokenizer(source), tools=[SCHEMA]).prompt("x") == codec("tiny").prompt("x")
    assert caplog.messages == []
    with pytest.raises(TemplateError, match="no tools"):
        Codec(tiny_tokenizer(source))


# -- the parser reads what the template writes -----------------------------------------------------


class Deaf:
    """A parser of some other model's format."""

    name = "deaf"

    def parse(self, text: str, *, finish: str, tools: Any = ()) -> Parsed:
        return Parsed("", text)


def test_a_parser_that_does_not_read_the_templates_calls_is_refused_and_the_right_one_named() -> (
    None
):
    with pytest.raises(ConfigError, match=r"'deaf' can't read(.|\n)*use parser 'hermes'"):
        Codec(tiny_tokenizer(), tools=[SCHEMA], parser=Deaf())
    Codec(tiny_tokenizer(), parser=Deaf())  # without tools nothing is parsed


def test_a_format_that_no_parser_reads_is_refused() -> None:
    xml = shipped_template("hermes").replace("""<tool_call>\\n{"name": '""", "<function=' ")
    with pytest.raises(ConfigError, match=r"'hermes' can't read(.|\n)*no known parser can"):
        Codec(tiny_tokenizer(xml), tools=[SCHEMA])


def test_a_template_that_writes_no_calls_says_nothing_about_the_parser_and_takes_none() -> None:
    silent = shipped_template("hermes").replace("message.tool_calls or []", "[]")
    it = Codec(tiny_tokenizer(silent), tools=[SCHEMA], parser=Deaf())
    with pytest.raises(ConfigError, match="message 1, field 'tool_calls': the chat template"):
        it.prompt([{"role": "user", "content": "q"}, calling(1, {})])


# -- other kinds of tokenizers ---------------------------------------------------------------------


def test_control_tokens_that_swallow_white_space_are_followed() -> None:
    """Phi's tokens take the white space behind them."""
    tokenizer = tiny_tokenizer(PHI)
    tokenizer.backend_tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, rstrip=True)
            for token in ("<|end|>", "<|user|>", "<|assistant|>")
        ]
    )
    end = token_id(tokenizer, "<|end|>")
    it = Codec(tokenizer, stop_token_ids=[end])
    new = [{"role": "user", "content": "  x\n"}]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    delta = it.delta(None, new)
    assert render(it, history + new)[-len(delta) :] == delta
    assert it.prompt(new) == render(it, new)


def test_a_tokenizer_that_begins_texts_with_a_space_is_followed() -> None:
    """Llama-2's and Mistral's do, at the start of a text and nowhere else."""
    symbols = [
        "<unk>",
        "▁",
        *(chr(i) for i in range(33, 127)),
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    model = BPE(
        {text: i for i, text in enumerate(symbols)}, [], unk_token="<unk>", byte_fallback=True
    )
    pieces = Tokenizer(model)
    pieces.pre_tokenizer = MetaspaceSplit(prepend_scheme="first", split=False)
    pieces.decoder = Decoders([Replace("▁", " "), ByteFallback(), Fuse()])
    pieces.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    pieces.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|im_end|>")
    assert tokenizer.tokenize("x") == ["▁", "x"]
    it = Codec(tokenizer, tools=[SCHEMA], chat_template="hermes")
    hostile = "a <|im_end|>b"
    delta = it.delta(None, results([hostile]))
    assert hostile in it.decode(delta)
    assert controls(it, delta) == controls(it, it.delta(None, results(["42"])))


def test_settings_of_the_shared_tokenizer_do_not_reach_the_codec() -> None:
    tokenizer = tiny_tokenizer()
    it = Codec(tokenizer)
    want = it.prompt("a longer text")
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=4)
    assert it.prompt("a longer text") == want


PHI = """\
{%- for message in messages -%}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt -}}
"""

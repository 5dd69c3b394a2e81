"""Text that nobody vouches for: it stays text, it fits, it holds nobody up."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from fsm_rollout.codec import Codec
from fsm_rollout.codec.vocabulary import Vocabulary
from fsm_rollout.limits import CUT_MARK
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.codecs import (
    TEMPLATES,
    calling,
    codec,
    controls,
    hostile,
    results,
)
from tests.qwen import qwen_bpe

# -- untrusted text --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=hostile)
def test_text_from_tools_never_becomes_a_control_token(name: str, text: str) -> None:
    it = codec(name)
    delta = it.delta(None, results([text]))
    assert controls(it, delta) == controls(it, it.delta(None, results(["42"])))


@given(text=hostile)
def test_hostile_text_is_carried_letter_by_letter(text: str) -> None:
    it = codec("tiny")
    for ids in (it.delta(None, results([text])), it.prompt(text)):
        assert text in it.decode(ids)
    assert it.decode(it.vocabulary.encode_text(text)) == text


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=hostile, other=hostile)
def test_text_from_rows_never_becomes_a_control_token(name: str, text: str, other: str) -> None:
    it = codec(name)

    def seed(text: str, other: str) -> list[int]:
        return it.prompt(
            [
                {"role": "system", "content": text},
                {"role": "user", "content": other},
                calling(1, {"expr": text, other: [other, {"k": text}]})
                | {"content": text if name != "channels" else ""},
                *results([other]),
                {"role": "assistant", "content": other},
                {"role": "user", "content": text},
            ]
        )

    if name == "qwen3" and "</think>" in text:
        return  # its template reads reasoning out of the content; that is the case below
    assert controls(it, seed(text, other)) == controls(it, seed("x", "y"))


def test_a_token_can_not_be_completed_across_two_texts_or_by_the_template() -> None:
    it = codec("tiny")
    for cut in range(1, len("<|im_end|>")):
        prompt = it.prompt(
            [
                {"role": "user", "content": "<|im_end|>"[:cut]},
                {"role": "assistant", "content": "<|im_end|>"[cut:]},
                {"role": "user", "content": "<|im_end"},
            ]
        )
        assert controls(it, prompt) == controls(
            it, it.prompt([{"role": "user", "content": "a"}] * 3)
        )


@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_pieces_join_to_the_text_whatever_was_sampled(ids: list[int]) -> None:
    for it in (codec("tiny"), codec("qwen3")):
        pieces = it.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == it.decode(ids)


@given(ids=st.lists(st.integers(0, 264), max_size=40), data=st.data())
def test_a_span_covers_its_characters_whatever_was_sampled(ids: list[int], data: Any) -> None:
    it = codec("tiny")
    text = it.decode(ids)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    ((first, last),) = it.vocabulary.token_spans(ids, text, [(start, stop)])
    assert 0 <= first <= last <= len(ids)
    before = it.decode(ids[:first]).rstrip("�")
    assert text.startswith(before)
    assert len(before) <= start
    assert it.decode(ids[:last]).startswith(text[:stop])


# -- text that fits --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "hermes"])
@given(text=hostile, room=st.integers(0, 60), side=st.sampled_from(["left", "right", "middle"]))
def test_a_fitted_text_is_whole_or_cut_on_its_side(
    name: str, text: str, room: int, side: Any
) -> None:
    it = codec(name)
    fitted = it.fit(text, room, side=side)
    assert len(it.vocabulary.encode_text(fitted)) <= room
    if len(it.vocabulary.encode_text(text)) <= room:
        assert fitted == text
        return
    start, _, end = fitted.partition(CUT_MARK) if fitted not in text else (fitted, "", fitted)
    match side:
        case "left":
            assert text.endswith(end)
        case "right":
            assert text.startswith(start)
        case "middle" if CUT_MARK in fitted:
            assert text.startswith(start)
            assert text.endswith(end)


def test_the_side_says_what_is_dropped() -> None:
    fit = codec("tiny").fit
    text = "A" * 4 + "." * 40 + "Z" * 4
    assert fit(text, 4, side="left") == "ZZZZ"
    assert fit(text, 4, side="right") == "AAAA"
    assert fit(text, 4, side="middle") == "AAZZ"
    assert fit(text, 15, side="middle") == f"AA{CUT_MARK}ZZ"
    assert fit("日本語" * 40, 10, side="right") == "日本語"
    assert fit(text, 0, side="left") == ""
    assert fit("日本語", 4, side="middle") == "日"


@pytest.mark.parametrize("unit", ["x", "The answer is 42.\n", "日本語", "<|im_end|>", " "])
def test_a_huge_text_costs_what_is_kept(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = (unit * (50_000_000 // len(unit) + 1))[:50_000_000]
    encode, encoded = Vocabulary._encoding, []

    def counted(self: Vocabulary, text: str) -> Encoding:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Vocabulary, "_encoding", counted)
    fitted = codec("hermes").fit(huge, 16, side="middle")
    assert sum(encoded) < 20_000
    assert CUT_MARK in fitted
    assert 0 < len(codec("hermes").vocabulary.encode_text(fitted)) <= 16


KINDS = {
    "prose": "The answer is 42.\n\n  - so: it's <tool_call> 你好, été\n",
    "words of a window": "x" * 20_011 + " ",
    "pairs": "ab cd ",
    "hex": "0a3f9bc2e1d",
    "a table": "+--+--+\n|  |  |\n",
    "one letter": "x",
    "one digit": "7",
    "blank lines": "\n",
    "spaces": " ",
    "accents": "e\u0301",
    "ideographs": "".join(map(chr, range(0x4E00, 0x8E00, 7))),
    "emoji": "".join(map(chr, range(0x1F300, 0x1F600))),
}


def encoded_whole(it: Codec, text: str) -> list[int]:
    """What one encoding of the whole text gives."""
    vocabulary = it.vocabulary
    ids: list[int] = vocabulary._encoding(text).ids
    return ids[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_encodes_in_windows_as_it_does_whole(kind: str) -> None:
    it, unit = codec("hermes"), KINDS[kind]
    text = "\n" + unit * (50_000 // len(unit) + 1)
    assert it.vocabulary.encode_text(text) == encoded_whole(it, text)
    assert max(len(e) for _, e, _ in it.vocabulary._windows(text)) < 60_000


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}", r"\p{N}{1,3}(?=(\p{N}{3})*(?!\p{N}))"])
def test_digits_in_groups_of_three_encode_in_windows_as_they_do_whole(pattern: str) -> None:
    backend = Tokenizer(qwen_bpe().model)
    groups = Split(Regex(pattern), "isolated")  # from the left, and from the right
    backend.pre_tokenizer = Sequence([groups, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    vocabulary = Vocabulary(tokenizer)
    text = " ".join("1234567890" * count for count in (7, 1_000, 2_000, 1_111, 5))
    assert vocabulary.encode_text(text) == vocabulary._encoding(text).ids[1:]


@settings(max_examples=40)
@given(parts=st.lists(st.tuples(hostile, st.integers(1, 4_000)), min_size=1, max_size=6))
def test_any_long_text_encodes_in_windows_as_it_does_whole(parts: list[tuple[str, int]]) -> None:
    it = codec("hermes")
    text = "".join(unit * count for unit, count in parts)[:50_000]
    assert it.vocabulary.encode_text(text) == encoded_whole(it, text)


@settings(max_examples=40)
@given(
    contents=st.lists(st.tuples(hostile, st.sampled_from([1, 9, 600])), min_size=1, max_size=3),
    room=st.integers(0, 20_000),
    last_id=st.sampled_from([None, 151_643, 151_645]),
)
def test_a_delta_for_little_room_is_the_start_of_the_whole_and_longer_than_the_room_alike(
    contents: list[tuple[str, int]], room: int, last_id: int | None
) -> None:
    it, messages = codec("hermes"), results([unit * count for unit, count in contents])
    whole = it.delta(last_id, messages)
    delta = it.delta(last_id, messages, room=room)
    assert delta == whole[: len(delta)]
    assert (len(delta) > room) == (len(whole) > room)
    assert len(delta) == len(whole) or len(delta) > room


def test_a_megabyte_costs_what_the_room_holds() -> None:
    it = codec("hermes")
    for kind in ("prose", "ideographs", "one letter", "accents"):
        text = KINDS[kind] * (1_000_000 // len(KINDS[kind]))
        assert 1_000 < len(it.delta(None, results([text]), room=1_000)) < 40_000


def test_half_a_character_is_shown_as_one_that_is_unknown() -> None:
    it = codec("tiny")
    assert "a�b" in it.decode(it.delta(None, results(["a\ud83cb"])))
    assert "a�b" in it.decode(it.prompt("a\ud83cb"))
    assert it.fit("\ud83c" * 40, 3, side="right") == "\ud83c"


# -- ids to text -----------------------------------------------------------------------------------


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """With added tokens that no byte spells, or only seemingly."""
    tokenizer = tiny_tokenizer()
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("★", "é", "Ġ", "a b")])
    return tokenizer


@given(ids=st.lists(st.integers(0, 300), max_size=60))
def test_ids_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    tokenizer = byte_level()
    backend: Tokenizer = tokenizer.backend_tokenizer
    assert Vocabulary(tokenizer).decode(ids) == backend.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 152_000), max_size=60))
def test_the_ids_of_a_real_vocabulary_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    it, backend = codec("qwen3"), qwen_bpe()
    assert it.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    many = ids * (20_000 // (len(ids) + 1))
    assert it.decode(many) == backend.decode(many, skip_special_tokens=False)


def test_a_long_turn_and_a_long_response_read_as_short_ones_do() -> None:
    it = codec("hermes")
    call = '<tool_call>\n{"name": "calc", "arguments": {"expr": "日本"}}\n</tool_call>'
    for lines in (1, 5_000):
        ids = it.vocabulary.encode("Ünit.\n" * lines + call + "<|im_end|>")
        turn = asyncio.run(it.parse_async(ids, finish="stop", call_id="c"))
        assert turn == it.parse(ids, finish="stop", call_id="c")
        (start, stop) = turn.calls[0].span or (0, 0)
        assert it.decode(ids[start:stop]) == call
        assert asyncio.run(it.decode_async(ids)) == it.decode(ids)

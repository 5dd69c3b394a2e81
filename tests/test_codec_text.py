"""Text that nobody vouches for: it stays text, it fits, it holds nobody up."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding

from fsm_rollout.codec.vocabulary import Vocabulary
from fsm_rollout.limits import CUT_MARK
from tests.codecs import (
    TEMPLATES,
    calling,
    codec,
    controls,
    hostile,
    results,
)

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


def test_a_long_text_encodes_in_chunks_as_it_does_whole() -> None:
    vocabulary = codec("hermes").vocabulary
    for unit in (
        "The answer is 42.\n\n  - so: it's <tool_call> 你好, été\n",
        "x" * 999 + " ",
        "ab cd ",
        "0a3f9bc2e1d",
        "+--+--+\n|  |  |\n",
    ):
        text = unit * (50_000 // len(unit))
        whole = vocabulary._plain.encode(vocabulary._anchor + text, add_special_tokens=False).ids
        assert vocabulary.encode_text(text) == whole[1:]
        assert max(map(len, vocabulary._chunks(text))) < 20_000


def test_a_megabyte_from_a_tool_does_not_stop_the_event_loop() -> None:
    text = "The result of the tool was 42, which is fine.\n" * 22_000
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def main() -> list[int]:
        ticking = asyncio.create_task(tick())
        ids = await codec("hermes").delta_async(None, results([text]))
        assert ticks > 20
        before = ticks
        assert len(await codec("hermes").fit_async(text, 100_000, side="left")) > 100_000
        assert ticks > before + 5
        ticking.cancel()
        return ids

    assert text in codec("hermes").decode(asyncio.run(main()))


def test_half_a_character_is_shown_as_one_that_is_unknown() -> None:
    it = codec("tiny")
    assert "a�b" in it.decode(it.delta(None, results(["a\ud83cb"])))
    assert "a�b" in it.decode(it.prompt("a\ud83cb"))
    assert it.fit("\ud83c" * 40, 3, side="right") == "\ud83c"

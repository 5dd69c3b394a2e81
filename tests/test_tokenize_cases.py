"""The handed cases of kind `tokenize`: sampled ids are kept, text yields no control token."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace as MetaspaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fsm_rollout.codec import Codec
from fsm_rollout.codec.vocabulary import Vocabulary
from fsm_rollout.engines.base import checked
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import Status
from fsm_rollout.sample import Sample
from tests.qwen import CHANNELS, qwen_tokenizer, token_id

FILE = Path(__file__).parent / "cases" / "tokenize.jsonl"
CASES = {case["id"]: case for case in map(json.loads, FILE.read_text().splitlines())}
TOOL = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}


def codec() -> Codec:
    return Codec(qwen_tokenizer("qwen3"), tools=[TOOL])


def sampled(ids: list[int]) -> Sample:
    """A sample whose whole response the model sampled."""
    sample = Sample()
    sample.set_prompt([9707])
    sample.append_response_tokens(ids, [-0.5] * len(ids))
    return sample


def is_kept(sample: Sample, ids: list[int]) -> bool:
    assert sample.rollout_log_probs is not None
    columns = sample.loss_mask.tolist(), sample.rollout_log_probs.tolist()
    return sample.tokens[1:].tolist() == ids and columns == ([1] * len(ids), [-0.5] * len(ids))


def content_ids(qwen: Codec, text: str) -> list[int]:
    """What the codec makes of the text, seen in a tool message and in a prompt alike."""
    result = {"role": "tool", "content": text, "name": "echo", "tool_call_id": "c"}
    delta = qwen.delta(None, [result])
    bare = qwen.delta(None, [result | {"content": ""}])
    seed = qwen.prompt([{"role": "user", "content": text}])
    for framed, empty in ((delta, bare), (seed, qwen.prompt(""))):
        controls = [i for i in framed if i in qwen.control_ids]
        assert controls == [i for i in empty if i in qwen.control_ids]
        assert text in qwen.decode(framed)
    return qwen.vocabulary.encode_text(text)


def the_sampled_of_two_spellings_is_kept(case: dict[str, Any]) -> None:
    given, qwen = case["input"], codec()
    assert qwen.decode(given["ids_a"]) == qwen.decode(given["ids_b"])
    assert qwen.decode(given["ids_a"]) == case["expected"]["both_decode_to"]
    assert qwen.vocabulary.encode_text(" Pantom") == case["expected"]["encode"]
    assert is_kept(sampled(given["ids_a"]), given["ids_a"])


def a_shorter_spelling_does_not_shift_the_mask(case: dict[str, Any]) -> None:
    ids, expected, qwen = case["input"]["sampled_ids"], case["expected"], codec()
    assert qwen.decode(ids) == expected["decode"]
    assert qwen.vocabulary.encode(expected["decode"]) == expected["re_encode"]
    assert qwen.parse(ids, finish="stop", call_id="t").text == expected["decode"]
    assert is_kept(sampled(ids), ids)


def special_tokens_in_tool_text_are_text(case: dict[str, Any]) -> None:
    ids = content_ids(codec(), case["input"]["tool_output"])
    assert ids == case["expected"]["ids"]
    assert set(ids).isdisjoint(case["expected"]["forbidden_ids_in_content"])


def added_tokens_in_tool_text_are_text(case: dict[str, Any]) -> None:
    qwen, text = codec(), case["input"]["tool_output"]
    naive = qwen.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert naive == case["expected"]["naive_result"]
    assert set(naive) - qwen.control_ids == {6257, 220}
    assert set(content_ids(qwen, text)).isdisjoint(qwen.control_ids)


def a_cut_inside_a_character_keeps_the_ids(case: dict[str, Any]) -> None:
    given, expected, qwen = case["input"], case["expected"], codec()
    sample = sampled(given["ids"])
    sample.truncate(given["budget"])
    assert is_kept(sample, expected["kept_ids"])
    text = qwen.decode(sample.columns.response_ids())
    assert text == expected["decoded"]
    assert qwen.vocabulary.encode_text(text) == expected["re_encode_of_decoded"]


def a_character_is_shown_when_it_is_complete(case: dict[str, Any]) -> None:
    ids, qwen = case["input"]["ids"], codec()
    assert qwen.decode(ids) == case["expected"]["decode_all"]
    assert all("�" not in qwen.pieces(ids)[i] for i in range(len(ids)))
    assert any(case["expected"]["decode_each_contains"] in qwen.decode([i]) for i in ids)
    assert "".join(qwen.pieces(ids)) == case["expected"]["decode_all"]
    assert "".join(qwen.pieces(ids[:-1])) == qwen.decode(ids[:-1])  # the end gives up what is left


def an_id_of_a_padding_row_is_out_of_vocabulary(case: dict[str, Any]) -> None:
    ids, qwen = case["input"]["sampled_ids"], codec()
    assert qwen.decode(ids) == "Hello world"
    assert qwen.vocab_size == 151_669 < case["input"]["embedding_rows"]
    with pytest.raises(EngineError, match="151700") as refused:
        checked(ids, [-0.5] * 3, "stop", max_new_tokens=8, vocab_size=qwen.vocab_size)
    assert refused.value.reason.status is Status.ABORTED


def the_first_token_of_the_template_is_there_once(case: dict[str, Any]) -> None:
    tokenizer = qwen_tokenizer.__wrapped__("channels", *CHANNELS, eos="<|return|>")
    bos = token_id(tokenizer, "<|startoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", bos)]
    )
    it = Codec(tokenizer, stop_token_ids=token_id(tokenizer, "<|end|>"))
    text = it.template.render([{"role": "user", "content": "x"}])
    assert tokenizer.encode(text)[:2] == [bos, bos]  # what a plain encode would do
    ids = it.prompt("x")
    assert ids.count(bos) == 1
    assert ids[0] == bos


def a_leading_space_survives(case: dict[str, Any]) -> None:
    """Metaspace decoders drop the first space of a text; pieces are cut from the whole text."""
    words = {"<unk>": 0, "▁so": 1, "▁any": 2}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = MetaspaceSplit()
    tokenizer.decoder = Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    assert vocabulary.decode([2]) == case["expected"]["decode_single"]
    assert vocabulary.pieces([1, 2]) == ["so", " any"]
    assert vocabulary.token_spans([1, 2], "so any", [(2, 6)]) == [(1, 2)]


def ids_come_from_encoding_the_text(case: dict[str, Any]) -> None:
    qwen, text = codec(), case["input"]["text"]
    assert content_ids(qwen, text) == case["expected"]["ids"]
    assert qwen.decode(case["expected"]["ids"]) == case["expected"]["round_trip"]


def cut_points_lie_behind_control_tokens(case: dict[str, Any]) -> None:
    encode = codec().vocabulary.encode
    left, right = case["input"]["left"], case["input"]["right"]
    assert encode(left) + encode(right) == encode(left + right) == case["expected"]["ids"]


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "tok-001": the_sampled_of_two_spellings_is_kept,
    "tok-002": a_shorter_spelling_does_not_shift_the_mask,
    "tok-003": special_tokens_in_tool_text_are_text,
    "tok-004": added_tokens_in_tool_text_are_text,
    "tok-005": a_cut_inside_a_character_keeps_the_ids,
    "tok-006": a_character_is_shown_when_it_is_complete,
    "tok-008": an_id_of_a_padding_row_is_out_of_vocabulary,
    "tok-010": the_first_token_of_the_template_is_there_once,
    "tok-012": a_leading_space_survives,
    "tok-013": ids_come_from_encoding_the_text,
    "tok-015": cut_points_lie_behind_control_tokens,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_tokenize_case_comes_out_as_expected(name: str) -> None:
    CHECKS[name](CASES[name])

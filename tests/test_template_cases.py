"""The handed cases of kind `template`: what templates put between turns, in real Qwen ids."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsm_rollout.codec import Codec
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.qwen import CHANNELS, qwen_tokenizer, rendered, token_id

FILE = Path(__file__).parent / "cases" / "template.jsonl"
CASES = {case["id"]: case for case in map(json.loads, FILE.read_text().splitlines())}
CALCULATOR = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}},
}
IM_END = 151645


def codec(template: str = "qwen3") -> Codec:
    return Codec(qwen_tokenizer(template), tools=[CALCULATOR], stop_token_ids=[151643])


def full_render(codec: Codec, messages: list[dict[str, Any]]) -> list[int]:
    """The ids that transformers itself makes of a whole conversation."""
    return rendered(codec.tokenizer, messages, tools=[CALCULATOR])


def newline_behind_the_turn_belongs_to_the_delta(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    qwen3 = codec()
    delta = qwen3.delta(given["prefix_last_id"], given["add_messages"])
    assert delta == expected["delta_ids"]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    full = full_render(qwen3, history + given["add_messages"])
    prefix, rest = full[: -len(delta)], full[-len(delta) :]
    assert rest == delta
    assert prefix[-1] == given["prefix_last_id"]
    assert qwen3.decode(prefix).endswith(f"a{given['prefix_ends_with']}")


def reasoning_of_earlier_turns_is_dropped_by_the_template_alone(case: dict[str, Any]) -> None:
    messages, qwen3 = case["input"]["messages"], codec()
    first = qwen3.template.render(messages[:2], opened=False)
    assert not qwen3.template.render(messages, opened=False).startswith(first)
    assert not qwen3.is_prefix_stable
    sampled = qwen3.vocabulary.encode("<think>\nr1\n</think>\n\na1<|im_end|>")
    tokens = qwen3.prompt(messages[:1]) + sampled + qwen3.delta(sampled[-1], messages[2:])
    assert "r1" in qwen3.decode(tokens)  # append-only: what was sampled stays
    assert "r1" not in qwen3.decode(qwen3.prompt(messages))


def every_delta_opens_the_next_turn(case: dict[str, Any]) -> None:
    chatml, messages = codec("qwen2_5"), case["input"]["messages"]
    assert chatml.decode(chatml.delta(IM_END, messages[2:])) == case["expected"]["delta_text"]


def tool_results_of_one_step_share_a_turn(case: dict[str, Any]) -> None:
    qwen3, expected = codec(), case["expected"]
    text = qwen3.decode(qwen3.delta(IM_END, case["input"]["add_messages"]))
    assert text == expected["delta_text"]
    assert expected["must_not_contain"] not in text


def a_default_system_text_stays_out_of_the_delta(case: dict[str, Any]) -> None:
    qwen, user = codec("qwen2_5"), case["input"]["add_messages"]
    assert "<|im_start|>system" in qwen.decode(qwen.prompt(user))
    assert "system" not in qwen.decode(qwen.delta(IM_END, user))


def a_prefix_holds_on_ids_not_on_text(case: dict[str, Any]) -> None:
    given, expected, qwen = case["input"], case["expected"], codec()
    encode = qwen.vocabulary.encode
    left, right = given["prefix_text"], given["next_text"]
    assert encode(left + right) == expected["joint_ids"]
    assert encode(left) + encode(right) == expected["concat_ids"]
    # The delta starts behind a control token, where joint and concatenated ids are the same.
    delta = qwen.delta(IM_END, [{"role": "user", "content": right}])
    assert encode("left<|im_end|>") + delta == encode("left<|im_end|>" + qwen.decode(delta))


def a_sampled_terminator_stays_as_it_was_sampled(case: dict[str, Any]) -> None:
    tokenizer = qwen_tokenizer("channels", *CHANNELS, eos="<|return|>")
    stops = [token_id(tokenizer, token) for token in ("<|end|>", "<|call|>")]
    harmony = Codec(tokenizer, stop_token_ids=stops)
    sampled = harmony.vocabulary.encode("<|channel|>final<|message|>a1<|return|>")
    delta = harmony.delta(sampled[-1], [{"role": "user", "content": case["input"]["then"]}])
    assert delta[0] == token_id(tokenizer, "<|start|>")  # nothing put behind <|return|>
    assert not harmony.is_prefix_stable
    assert "<|return|>" in harmony.drift
    assert "<|end|>" in harmony.drift


def the_probe_tells_that_history_is_rendered_otherwise(case: dict[str, Any]) -> None:
    messages, qwen3 = case["input"]["messages"], codec()
    last = qwen3.template.render(messages[:2], opened=False)
    assert not qwen3.template.render(messages, opened=False).startswith(last)
    assert not qwen3.is_prefix_stable
    assert "<think>" in qwen3.drift


def a_call_is_never_rebuilt_from_its_parse(case: dict[str, Any]) -> None:
    given, qwen3 = case["input"], codec()
    sampled = qwen3.vocabulary.encode(given["generated_text"] + "<|im_end|>")
    (call,) = qwen3.parse(sampled, finish="stop", call_id="t0").calls
    result = {"role": "tool", "content": "5", "name": call.name, "tool_call_id": call.id}
    tokens = qwen3.prompt("weather?") + sampled + qwen3.delta(sampled[-1], [result])
    text = qwen3.decode(tokens)
    assert given["generated_text"] in text
    assert given["parsed_then_rendered"] not in text


def no_content_is_no_text(case: dict[str, Any]) -> None:
    for seeded in (codec("qwen2_5"), codec("qwen3"), Codec(tiny_tokenizer())):
        text = seeded.decode(seeded.prompt(case["input"]["messages"]))
        assert "None" not in text
        assert text.endswith("y<|im_end|>\n<|im_start|>assistant\n")
        assert "None" not in seeded.decode(seeded.delta(None, [{"role": "user", "content": None}]))


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "tpl-001": newline_behind_the_turn_belongs_to_the_delta,
    "tpl-002": reasoning_of_earlier_turns_is_dropped_by_the_template_alone,
    "tpl-004": every_delta_opens_the_next_turn,
    "tpl-005": tool_results_of_one_step_share_a_turn,
    "tpl-006": a_default_system_text_stays_out_of_the_delta,
    "tpl-007": a_prefix_holds_on_ids_not_on_text,
    "tpl-009": a_sampled_terminator_stays_as_it_was_sampled,
    "tpl-011": the_probe_tells_that_history_is_rendered_otherwise,
    "tpl-012": a_call_is_never_rebuilt_from_its_parse,
    "tpl-014": no_content_is_no_text,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_template_case_comes_out_as_expected(name: str) -> None:
    CHECKS[name](CASES[name])

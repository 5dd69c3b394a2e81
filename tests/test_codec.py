"""The codec against transformers' own renders: prompts, deltas and parsed turns."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.codec import Codec
from fsm_rollout.codec.delta import MAX_MESSAGES, Delta, Field, _pieces, _sentinel
from fsm_rollout.codec.template import ChatTemplate, shipped_template
from fsm_rollout.errors import ConfigError, TemplateError
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.codecs import (
    MORE,
    SCHEMA,
    TEMPLATES,
    calling,
    codec,
    controls,
    plain,
    render,
    results,
)
from tests.qwen import qwen_tokenizer

# -- the delta is what the template puts -----------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@given(contents=st.lists(plain, min_size=1, max_size=3), said=plain, asks=st.booleans())
def test_what_was_sampled_and_the_delta_make_the_full_render(
    name: str, contents: list[str], said: str, asks: bool
) -> None:
    it = codec(name)
    new = results(contents) + [{"role": "user", "content": said}] * asks
    history = [{"role": "user", "content": "q"}, calling(len(contents), {"expr": "a1"})]
    full = render(it, history + new)
    delta = it.delta(full[-1], new)  # not a stop token: the turn is closed by the delta
    assert full[-len(delta) :] == delta
    assert delta[0] in it.stop_ids
    assert it.delta(delta[0], new) == delta[1:]


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=plain)
def test_a_user_may_follow_a_plain_turn(name: str, content: str) -> None:
    it = codec(name)
    new = [{"role": "user", "content": content}]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    delta = it.delta(None, new)
    assert render(it, history + new)[-len(delta) :] == delta


def test_a_stop_token_that_is_not_the_templates_own_stays_as_sampled() -> None:
    qwen = Codec(qwen_tokenizer("qwen2_5"), stop_token_ids=[151643])
    user = [{"role": "user", "content": "x"}]
    assert qwen.delta(151643, user) == qwen.delta(151645, user)


def test_a_sampled_role_marker_is_not_put_twice_and_a_wrong_one_is_followed_by_the_right_one() -> (
    None
):
    glm = codec("role_markers")
    observation, user = (glm.vocabulary.control[token] for token in ("<|observation|>", "<|user|>"))
    result = results(["42"])
    assert glm.delta(None, result)[0] == observation
    assert glm.delta(observation, result) == glm.delta(None, result)[1:]
    assert glm.delta(user, result) == glm.delta(None, result)


def test_the_delta_does_not_depend_on_the_tools() -> None:
    many = Codec(qwen_tokenizer("qwen3"), tools=[SCHEMA, *MORE])
    assert many.delta(151645, results(["42"])) == codec("qwen3").delta(151645, results(["42"]))


def test_a_delta_renders_nothing_once_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    it = codec("qwen3")
    want = it.delta(None, results(["a", "b"]))
    monkeypatch.setattr(it.tokenizer, "apply_chat_template", None)
    assert it.delta(None, results(["a", "b"])) == want


def test_a_sequence_of_roles_that_was_not_foreseen_is_proved_when_it_occurs() -> None:
    it, contents = codec("qwen3"), [str(i) for i in range(7)]
    new = [*results(contents), {"role": "user", "content": "and now?"}]
    history = [{"role": "user", "content": "q"}, calling(7, {})]
    delta = asyncio.run(it.delta_async(None, new))
    assert render(it, history + new)[-len(delta) :] == delta


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_more_than_a_hundred_messages_may_follow_a_turn(name: str) -> None:
    it, count = codec(name), 150
    new = results([str(i) for i in range(count)])
    history = [{"role": "user", "content": "q"}, calling(count, {})]
    delta = asyncio.run(it.delta_async(None, new))
    assert render(it, history + new)[-len(delta) :] == delta


def test_each_message_has_a_sentinel_of_its_own_and_too_many_are_refused() -> None:
    sentinels = [_sentinel("c", i) for i in range(MAX_MESSAGES)]
    assert {len(sentinel) for sentinel in sentinels} == {9}  # Mistral checks it
    pieces = list(_pieces("".join(sentinels), {}))
    assert pieces == [Field(i, "content") for i in range(MAX_MESSAGES)]
    with pytest.raises(TemplateError, match=r"3845 messages .* at most 3844 can"):
        codec("tiny").delta(None, results([""] * (MAX_MESSAGES + 1)))


def test_deltas_that_were_not_foreseen_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_rollout.codec.codec._LATER", 2)
    it = Codec(tiny_tokenizer(), tools=[SCHEMA])
    wanted = [it.delta(None, results([""] * count)) for count in range(1, 9)]
    compiled = []
    compile_ = Delta.__init__

    def counted(self: Delta, template: ChatTemplate, roles: tuple[str, ...]) -> None:
        compiled.append(len(roles))
        compile_(self, template, roles)

    monkeypatch.setattr(Delta, "__init__", counted)
    assert [it.delta(None, results([""] * count)) for count in (8, 7, 4, 1)] == [
        wanted[count - 1] for count in (8, 7, 4, 1)
    ]
    assert compiled == []  # the last two, and those of the start
    assert it.delta(None, results([""] * 5)) == wanted[4]
    assert compiled == [5]


@pytest.mark.parametrize("role", ["assistant", "critic"])
def test_only_what_is_not_sampled_can_follow_a_turn(role: str) -> None:
    with pytest.raises(ConfigError, match=f"role '{role}' can't follow"):
        codec("tiny").delta(None, [{"role": role, "content": "x"}])


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "hermes", "qwen2_5", "qwen3", "role_markers"])
@given(text=plain, other=plain)
def test_a_prompt_is_what_transformers_renders(name: str, text: str, other: str) -> None:
    it = codec(name)
    messages = [
        {"role": "system", "content": other},
        {"role": "user", "content": text},
        calling(2, {"expr": other}) | {"content": "Let me see."},
        *results([text, other]),
        {"role": "assistant", "content": other},
        {"role": "user", "content": text},
    ]
    assert it.prompt(messages) == render(it, messages)
    assert asyncio.run(it.prompt_async(messages)) == it.prompt(messages)


def test_reasoning_in_a_seed_turn_is_read_as_the_template_reads_it() -> None:
    for said in ("<think>\nr1\n</think>\n\na1", "<think>r1</think>a1", "r1</think>\n\na1"):
        turn = {"role": "assistant", "content": said}
        messages = [{"role": "user", "content": "u1"}, turn]
        assert codec("qwen3").prompt(messages) == render(codec("qwen3"), messages)
        messages.append({"role": "user", "content": "u2"})
        assert codec("qwen3").prompt(messages) == render(codec("qwen3"), messages)


def test_reasoning_that_the_template_does_not_read_is_text() -> None:
    turn = {"role": "assistant", "content": "<think>\nr1\n</think>\n\na1"}
    messages = [{"role": "user", "content": "u1"}, turn, {"role": "user", "content": "u2"}]
    for it in (codec("qwen2_5"), codec("tiny")):
        prompt = it.prompt(messages)
        assert turn["content"] in it.decode(prompt)
        messages[1] = turn | {"content": "x"}
        assert controls(it, prompt) == controls(it, it.prompt(messages))
        messages[1] = turn


def test_the_forms_that_rows_come_in_make_one_prompt() -> None:
    it = codec("tiny")
    assert it.prompt("hi") == it.prompt([{"role": "user", "content": "hi"}])
    assert it.prompt("hi") == it.prompt(
        [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"], "name": None}]
    )
    call = calling(1, {"expr": "1"})["tool_calls"][0]
    user = {"role": "user", "content": "q"}
    forms = [
        call,
        {"name": "calc", "arguments": {"expr": "1"}},
        {"function": {"name": "calc", "arguments": '{"expr": "1"}'}, "id": None},
    ]
    prompts = [
        it.prompt([user, {"role": "assistant", "content": None, "tool_calls": [form]}, user])
        for form in forms
    ]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_template_that_wants_arguments_as_json_text_gets_them() -> None:
    source = shipped_template("hermes").replace(
        "call.function.arguments if call.function.arguments is string else "
        "call.function.arguments | tojson",
        "'' + call.function.arguments",
    )
    it = Codec(tiny_tokenizer(source), tools=[SCHEMA])
    messages = [{"role": "user", "content": "q"}, calling(1, {"expr": "é"}), *results(["1"])]
    assert it.prompt(messages) == codec("tiny").prompt(messages)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        (None, "not NoneType"),
        ({"role": "user", "content": "x"}, "a list of messages, not dict"),
        (["x"], "message 0 must be a mapping, not str"),
        ([{"content": "x"}], "message 0, field 'role': None"),
        (
            [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}],
            "message 1, field 'role': 'bot' is not one of system",
        ),
        ([{"role": "user", "content": 7}], "message 0, field 'content': must be a str"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 0, field 'content': a part of type 'image_url'",
        ),
        (
            [{"role": "assistant", "tool_calls": "calc()"}],
            "message 0, field 'tool_calls' must be a list, not str",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            r"message 0, field 'tool_calls\[0\]': a call needs a function with a name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            r"'tool_calls\[0\]': arguments is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "arguments must be a JSON object",
        ),
    ],
)
def test_a_malformed_message_is_named_by_number_and_field(messages: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        codec("tiny").prompt(messages)


# -- what the model said ---------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "calc", "arguments": {"expr": "1+1 é🌦"}}\n</tool_call>'


@pytest.mark.parametrize("name", ["tiny", "hermes"])
@given(before=plain, between=plain)
def test_a_call_has_its_id_and_the_tokens_that_spell_it(
    name: str, before: str, between: str
) -> None:
    it = codec(name)
    ids = it.vocabulary.encode(before + CALL + between + CALL + "<|im_end|>")
    turn = it.parse(ids, finish="stop", call_id="t3")
    assert turn.text == it.decode(ids[:-1])
    assert [call.id for call in turn.calls] == ["t3_0", "t3_1"]
    for call in turn.calls:
        assert call.arguments == {"expr": "1+1 é🌦"}
        assert call.span
        assert it.decode(ids[slice(*call.span)]) == CALL


def test_a_turn_without_calls_keeps_its_text_and_loses_its_stop_token() -> None:
    it = codec("tiny")
    ids = it.vocabulary.encode("<think>\nhm\n</think>\nfour<|im_end|>")
    turn = it.parse(ids, finish="stop", call_id="t")
    assert turn.text == "<think>\nhm\n</think>\nfour"
    assert turn.reasoning.strip() == "hm"
    assert turn.content.strip() == "four"
    assert turn.calls == ()
    assert it.parse([], finish="stop", call_id="t").text == ""

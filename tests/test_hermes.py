"""hermes: the format as properties of rendered, cut and arbitrary turns."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsm_rollout.parsers import Parsed, Parser
from fsm_rollout.parsers.base import MAX_DEPTH
from fsm_rollout.parsers.hermes import Hermes
from fsm_rollout.turn import ToolCall

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F = ToolCall(name="f", arguments={"x": 1})
CODES = {
    *("invalid_json", "not_an_object", "args_not_object", "missing_name", "bad_name", "empty"),
    *("unterminated", "non_finite", "too_deep", "invalid_unicode", "call_in_open_reasoning"),
}


def parse(text: str, finish: str = "stop", *, generation_prompt: str = "") -> Parsed:
    parser: Parser = Hermes(generation_prompt=generation_prompt)
    return parser.parse(text, finish=finish)


def outcomes(parsed: Parsed) -> list[tuple[str, str | None]]:
    return [(call.name, call.error) for call in parsed.calls]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def call_with(value: str) -> str:
    return f'{{"name": "f", "arguments": {{"x": {value}}}}}'


# --- rendered turns ---------------------------------------------------------------------------


class Item(NamedTuple):
    """One piece of a turn: how it is written, and what must be read from it."""

    rendered: str
    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>"]
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))
strings = words | st.lists(words | st.sampled_from(TAGS)).map("".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | strings
values = st.recursive(
    scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)
spaces = st.text("\n\t ", max_size=3)


@st.composite
def texts(draw: st.DrawFn) -> Item:
    markup = st.sampled_from(["a < b", "<tool ", "</tool_call>", "<b>", '{"name": "f"}'])
    text = "".join(draw(st.lists(words | markup, max_size=4)))
    return Item(text, content=text)


@st.composite
def thoughts(draw: st.DrawFn) -> Item:
    drafts = st.sampled_from(
        [GOOD, "<tool_call>", "<think>", "use <tool_call> {'a': 1}</tool_call>"]
    )
    text = "".join(draw(st.lists(words | drafts, max_size=4)))
    return Item(f"<think>{text}</think>", reasoning=text)


@st.composite
def good_calls(draw: st.DrawFn) -> Item:
    name = draw(strings.filter(str.strip))
    arguments = draw(st.none() | st.dictionaries(strings, values, max_size=4))
    body: dict[str, Any] = {
        "name": name,
        draw(st.sampled_from(["arguments", "parameters"])): arguments,
    }
    if arguments is None and draw(st.booleans()):
        body = {"name": name}
    written = json.dumps(
        body, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2]))
    )
    if "\\\\" not in written and draw(st.booleans()):
        written = written.replace("\\n", "\n")  # raw newlines in strings
    opener = "".join(draw(st.lists(st.just("<tool_call>\n"), min_size=1, max_size=2)))
    rendered = f"{opener}{draw(spaces)}{written}{draw(spaces)}</tool_call>"
    return Item(rendered, call=ToolCall(name=name, arguments=arguments or {}))


MALFORMED = {
    "": ("", "empty"),
    "\n \n": ("", "empty"),
    "42": ("", "not_an_object"),
    "[]": ("", "not_an_object"),
    "null": ("", "not_an_object"),
    '"f"': ("", "not_an_object"),
    '[{"name": "f", "arguments": {}}]': ("", "not_an_object"),
    "{}": ("", "missing_name"),
    '{"arguments": {}}': ("", "missing_name"),
    '{"name": null}': ("", "missing_name"),
    '{"name": 7}': ("", "bad_name"),
    '{"name": ["f"]}': ("", "bad_name"),
    '{"name": " "}': ("", "bad_name"),
    '{"name": "f", "arguments": []}': ("f", "args_not_object"),
    '{"name": "f", "arguments": ""}': ("f", "args_not_object"),
    '{"name": "f", "arguments": false}': ("f", "args_not_object"),
    '{"name": "f", "arguments": "{}"}': ("f", "args_not_object"),
    call_with("NaN"): ("f", "non_finite"),
    call_with("[-Infinity]"): ("f", "non_finite"),
    call_with("1e999"): ("f", "non_finite"),
    call_with('"\\ud83d"'): ("f", "invalid_unicode"),
    '{"name": "f", "arguments": {"\\ude00": {}}}': ("f", "invalid_unicode"),
    call_with(nested(MAX_DEPTH)): ("f", "too_deep"),
    call_with(nested(100_000)): ("", "too_deep"),
    call_with("9" * 5_000): ("", "invalid_json"),
    call_with("1,"): ("", "invalid_json"),
    '{"name": "f", "arguments": {"x": 1}': ("", "invalid_json"),
    call_with("1}"): ("", "invalid_json"),
    call_with('"say "hi" to"'): ("", "invalid_json"),
    call_with('"5" tall"'): ("", "invalid_json"),
    call_with('"\\d+"'): ("", "invalid_json"),
    '{"name": "f", "arguments": {x: 1}}': ("", "invalid_json"),
    call_with("True"): ("", "invalid_json"),
    "{'name': 'f', 'arguments': {}}": ("", "invalid_json"),
    '{"name": "f"}\n{"name": "g"}': ("", "invalid_json"),
    '{"name": "f"}, {"name": "g"}': ("", "invalid_json"),
    '{"name": "f"} // done': ("", "invalid_json"),
    '```json\n{"name": "f"}\n```': ("", "invalid_json"),
    'f({"x": 1})': ("", "invalid_json"),
    "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>": ("", "invalid_json"),
}


def malformed(body: str) -> Item:
    name, error = MALFORMED[body]
    rendered = f"<tool_call>\n{body}\n</tool_call>"
    return Item(rendered, call=ToolCall(name=name, error=error, raw=rendered))


malformed_calls = st.sampled_from(list(MALFORMED)).map(malformed)
turns = st.lists(texts() | thoughts() | good_calls() | malformed_calls, max_size=6)


@given(turns, st.sampled_from(["", "<|im_end|>", "<|endoftext|>\n", None]))
def test_a_rendered_turn_is_read_back_item_by_item(items: list[Item], end: str | None) -> None:
    text = "".join(item.rendered for item in items)
    parsed = parse(text, "length") if end is None else parse(text + end)
    assert parsed.calls == tuple(item.call for item in items if item.call)
    assert parsed.content == "".join(item.content for item in items)
    assert parsed.reasoning == "".join(item.reasoning for item in items)
    rendered = [item.rendered for item in items if item.call]
    assert [text[start:stop] for start, stop in parsed.spans] == rendered


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: f"{len(body)}: {body[:50]}")
def test_a_malformed_call_has_its_code_and_hides_none_of_its_neighbours(body: str) -> None:
    item = malformed(body)
    parsed = parse(f"{GOOD}\n{item.rendered}\n{GOOD}")
    assert parsed.calls == (F, item.call, F)


@given(turns, st.data())
def test_a_cut_turn_gives_no_call_that_the_whole_turn_does_not_give(
    items: list[Item], data: st.DataObject
) -> None:
    text = "".join(item.rendered for item in items)
    whole = parse(text)
    cut = parse(text[: data.draw(st.integers(0, len(text)))], "length")
    complete = set(zip(map(repr, whole.calls), whole.spans, strict=True))
    for call, span in zip(cut.calls, cut.spans, strict=True):
        unfinished = call.error in ("unterminated", "call_in_open_reasoning")
        assert unfinished or (repr(call), span) in complete


@given(good_calls(), st.data())
def test_a_call_cut_anywhere_is_unterminated(item: Item, data: st.DataObject) -> None:
    end_tag = len(item.rendered) - len("</tool_call>")
    cut = data.draw(st.integers(len("<tool_call>"), end_tag + len("</tool_call>") - 1))
    parsed = parse("So: " + item.rendered[:cut], "length")
    assert outcomes(parsed) == [("", "unterminated")]
    assert parsed.content == "So: "
    assert parsed.calls[0].raw == item.rendered[:cut]


# --- arbitrary text ---------------------------------------------------------------------------

FRAGMENTS = [*TAGS, GOOD, GOOD + "\n", "\n<tool_call>\n", '{"name": "f", "arguments": {', "}}", '"']
FRAGMENTS += ["\\", "'", "\n", "[[[", "NaN", "\\ud800", "\ud800", "42", *MALFORMED]
soup = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)
finishes = st.sampled_from(["stop", "length", "abort", "repetition", "", "?"])
prompts = st.sampled_from(["", "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"])


@given(soup | st.text(), finishes, prompts)
def test_any_text_is_read_without_raising_and_nothing_unsound_is_handed_on(
    text: str, finish: str, prompt: str
) -> None:
    parsed = parse(text, finish, generation_prompt=prompt)
    assert len(parsed.calls) == len(parsed.spans)
    assert all(0 <= start < stop <= len(text) for start, stop in parsed.spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(parsed.spans))
    for call, (start, stop) in zip(parsed.calls, parsed.spans, strict=True):
        if call.error is None:
            json.dumps([call.name, call.arguments], allow_nan=False, ensure_ascii=False).encode()
            assert parse(text[start:stop]).calls == (call,)
        else:
            assert call.error in CODES
            assert call.arguments == {}
            assert call.raw == text[start:stop]


@given(soup.filter(lambda text: "think>" not in text), finishes)
def test_without_reasoning_content_and_calls_tile_the_text(text: str, finish: str) -> None:
    assume(finish != "stop" or not text.rstrip().endswith("<|im_end|>"))
    parsed = parse(text, finish)
    edges = [0, *(edge for span in parsed.spans for edge in span), len(text)]
    between = [text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    assert parsed.content == "".join(between)
    assert parsed.reasoning == ""


@given(soup, finishes)
def test_reasoning_that_the_prompt_opened_reads_like_reasoning_that_the_model_opened(
    text: str, finish: str
) -> None:
    by_prompt = parse(text, finish, generation_prompt="<|im_start|>assistant\n<think>")
    by_model = parse("<think>" + text, finish)
    shift = len("<think>")
    assert by_prompt.spans == tuple((start - shift, stop - shift) for start, stop in by_model.spans)
    assert (by_prompt.reasoning, by_prompt.content) == (by_model.reasoning, by_model.content)
    assert by_prompt.calls == by_model.calls


# --- where a call ends ------------------------------------------------------------------------


def test_a_finished_turn_needs_no_end_tag_and_a_cut_one_does() -> None:
    open_call = GOOD.removesuffix("</tool_call>")
    assert parse(open_call).calls == (F,)
    assert parse(open_call + "<|im_end|>").calls == (F,)
    assert outcomes(parse(open_call, "length")) == [("", "unterminated")]
    assert outcomes(parse(open_call, "abort")) == [("", "unterminated")]


def test_an_end_tag_behind_an_open_quote_ends_the_call_unless_the_turn_was_cut() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "1}}\n</tool_call>\nText.'
    assert outcomes(parse(text)) == [("", "invalid_json")]
    assert parse(text).content == "\nText."
    assert outcomes(parse(text, "length")) == [("", "unterminated")]


def test_complete_calls_of_a_cut_turn_stay_in_the_record() -> None:
    parsed = parse(f"{GOOD}\n{GOOD[:30]}", "length")
    assert outcomes(parsed) == [("f", None), ("", "unterminated")]


def test_the_next_opener_ends_a_complete_call() -> None:
    open_call = GOOD.removesuffix("</tool_call>")
    assert parse(open_call + GOOD).calls == (F, F)
    assert parse(open_call + GOOD, "length").calls == (F, F)


def test_text_behind_a_call_without_end_tag_is_not_guessed_away() -> None:
    assert outcomes(parse(GOOD.replace("</tool_call>", "I wait."))) == [("", "unterminated")]


def test_an_opener_at_the_start_of_a_line_ends_a_broken_call() -> None:
    parsed = parse(f'<tool_call>\n{{"name": "f", "arg\n{GOOD}')
    assert parsed.calls[1:] == (F,)
    assert outcomes(parsed)[0] == ("", "unterminated")


def test_an_opener_quoted_in_a_broken_call_does_not_start_a_call() -> None:
    inner = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    parsed = parse(
        f"<tool_call>{{'name': 'write', 'arguments': {{'text': '{inner}'}}}}</tool_call>"
    )
    assert outcomes(parsed) == [("", "invalid_json")]


def test_text_that_only_resembles_a_call_is_content() -> None:
    for text in ("a < b and <tool", "<tool_call", "</tool_call>", '{"name": "f", "arguments": {}}'):
        assert parse(text) == Parsed(reasoning="", content=text)


def test_a_raw_newline_in_a_string_is_a_newline() -> None:
    body = '{"name": "f", "arguments": {"code": "a\n\tb"}}'
    assert parse(f"<tool_call>{body}</tool_call>").calls[0].arguments == {"code": "a\n\tb"}


# --- reasoning --------------------------------------------------------------------------------


def test_a_draft_in_closed_reasoning_is_no_call() -> None:
    parsed = parse(f"<think>\nMaybe {GOOD} no.\n</think>\n\n{GOOD}")
    assert parsed.calls == (F,)
    assert parsed.reasoning == f"\nMaybe {GOOD} no.\n"
    assert parsed.content == "\n\n"


@pytest.mark.parametrize(
    "draft",
    ["none", GOOD, "I use <tool_call> now.", '<tool_call>\n{"name": "f"', GOOD + "\n" + GOOD[:-12]],
)
def test_a_lone_close_ends_the_reasoning_that_the_turn_began_with(draft: str) -> None:
    for prompt in ("", "<think>\n"):
        parsed = parse(f"{draft}\n</think>\n\n{GOOD}", generation_prompt=prompt)
        assert parsed.calls == (F,)
        assert parsed.reasoning == draft + "\n"


def test_a_close_in_a_string_of_a_call_is_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>'
    parsed = parse(call)
    assert parsed.calls[0].arguments == {"x": "</think>"}
    assert parsed.reasoning == ""


def test_a_close_after_closed_reasoning_is_content() -> None:
    parsed = parse(f"<think>a</think>b</think>{GOOD}")
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("a", "b</think>", (F,))


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_call_in_reasoning_that_is_never_closed_is_an_error_that_shows(finish: str) -> None:
    for parsed in (
        parse(f"<think>\nI call {GOOD}", finish),
        parse(f"I call {GOOD}", finish, generation_prompt="<|im_start|>assistant\n<think>\n"),
    ):
        assert outcomes(parsed) == [("f", "call_in_open_reasoning")]
        assert parsed.calls[0].raw == GOOD
        assert parsed.reasoning.endswith(f"I call {GOOD}")
        assert parsed.content == ""


def test_a_prompt_whose_reasoning_is_closed_again_leaves_none_open() -> None:
    parsed = parse(GOOD, generation_prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert parsed.calls == (F,)


# --- cost -------------------------------------------------------------------------------------


def cpu_seconds(text: str) -> float:
    started = time.process_time()
    parse(text)
    return time.process_time() - started


@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", "<tool_call>\n", "<tool_call> x\n", "<think>", "</think>", "</tool_call>"),
        *('<tool_call>{"', '<tool_call>\n{"a":"\n', '"', '\\"', "\\", "[", '{"a":', " ", "\n", "é"),
        *("<tool_call>{'a'}</tool_call>", '<tool_call>\n{"a" "</tool_call>\n', "<|im_end|>", GOOD),
        *("<think><tool_call>\n", "</think>\n<tool_call>\n[", "<", "1", "1,", "\\ud800"),
    ],
)
def test_a_mebibyte_of_anything_is_read_in_less_than_a_second(unit: str) -> None:
    for head in ("", '<think><tool_call>{"name": "f", "arguments": {"x": "'):
        text = head + unit * (2**20 // len(unit))
        assert any(
            cpu_seconds(text) < 1.0 for _ in range(3)
        )  # a busy machine may need a second try

"""The fake engine with a tokenizer: scripts, plans of turns, turns that go on after an abort."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import asyncio
from collections.abc import Sequence
from typing import Any

from fsm_rollout.parsers.hermes import Hermes
from fsm_rollout.testing.fake_engine import FakeEngine, LogNormal
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.wires import Heard, ask, client

TOKENIZER: Any = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
SCRIPT = ['<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>', "It is so."]


def prompt(*messages: tuple[str, str]) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: Any = TOKENIZER.encode(str(text), add_special_tokens=False)
    return list(ids)


def heard_from(ids: Sequence[int], *, wire: str = "sglang", **options: Any) -> Heard:
    async def once() -> Heard:
        async with FakeEngine(tokenizer=TOKENIZER, **options) as fake, client() as session:
            return await ask(session, fake.url, wire, ids, limit=200)

    return asyncio.run(once())


FIRST = prompt(("user", "Is it so?"))
SECOND = prompt(("user", "Is it so?"), ("assistant", SCRIPT[0]), ("tool", "yes"))
THIRD = prompt(("user", "?"), ("assistant", "a"), ("user", "?"), ("assistant", "b"), ("user", "?"))


def test_the_prompt_tells_which_turn_of_the_script_it_asks_for() -> None:
    for ids, text in zip((FIRST, SECOND), SCRIPT, strict=True):
        heard = heard_from(ids, script=SCRIPT)
        assert heard.ids == [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
        assert heard.finish == "stop"
        assert heard.completion_tokens == len(heard.log_probs or ())


def test_a_script_that_is_used_up_says_so() -> None:
    heard = heard_from(THIRD, script=SCRIPT)
    assert heard.status == 400
    assert "the script has 2 turns, the prompt asks for turn 3" in heard.text


@pytest.mark.parametrize("said", [1, 5, 20])
def test_a_turn_that_was_cut_off_goes_on_where_it_was(said: int) -> None:
    whole = heard_from(SECOND, script=SCRIPT)
    said = min(said, len(whole.ids) - 1)
    rest = heard_from([*SECOND, *whole.ids[:said]], script=SCRIPT)
    assert whole.ids[:said] + rest.ids == whole.ids
    assert whole.log_probs is not None
    assert rest.log_probs == whole.log_probs[said:]


def test_text_is_shown_where_there_is_a_tokenizer() -> None:
    assert '"text":"It is so.' in heard_from(SECOND, script=SCRIPT).text
    assert '"text":"It is so.' in heard_from(SECOND, wire="completions", script=SCRIPT).text


def test_a_plan_of_turns_calls_tools_and_then_answers() -> None:
    options: dict[str, Any] = {"tool_turns": 1, "tokens": LogNormal(120)}
    first = heard_from(FIRST, **options)
    parsed = Hermes().parse(TOKENIZER.decode(first.ids[:-1]), finish="stop")
    assert [call.name for call in parsed.calls] == ["calculator"]
    answer = heard_from(SECOND, **options)
    assert len(answer.ids) == 120
    assert "<tool_call>" not in TOKENIZER.decode(answer.ids)
    assert answer.ids[-1] == EOS
    assert TOKENIZER.decode(answer.ids[:-1]).isprintable()


def test_lengths_vary_as_they_are_told_to() -> None:
    lengths = {
        len(heard_from([*FIRST, n], tokens=LogNormal(30, 0.5), tool_turns=0).ids) for n in range(8)
    }
    assert len(lengths) > 3

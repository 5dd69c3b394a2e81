"""What TRL's prompts are looked up in, and any set of rollouts in TRL's dict."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from examples.gsm8k import rows as gsm8k
from fsm_rollout.adapters.trl.rollouts import handed
from fsm_rollout.adapters.trl.rows import Rows
from fsm_rollout.codec import Codec
from fsm_rollout.engines.base import Generation
from fsm_rollout.engines.scripted import Answer, Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from tests.trl_training import table

TOKENIZER = tiny_tokenizer()
CALL = '<tool_call>\n{"name": "check", "arguments": {"answer": "4"}}\n</tool_call>'


class Check(Tool):
    """Check."""

    blocking = False

    def create(self, truth: str | int = "", tries: int = 3) -> None:
        self.truth, self.tries = truth, tries

    def execute(self, answer: str) -> str:
        return "right" if answer == self.truth else "wrong"


TOOLS = Toolset([Check])
CODEC = Codec(TOKENIZER, tools=TOOLS.schemas)


def row(text: str, truth: Any = None, **fields: Any) -> dict[str, Any]:
    kwargs = {} if truth is None else {"check": {"create_kwargs": {"truth": truth}}}
    message = {"role": "user", "content": text, **fields}
    return {"prompt": [message], "tools_kwargs": kwargs}


def test_a_prompt_finds_the_columns_of_its_row() -> None:
    dataset = table(
        [row("2 + 2", "4") | {"label": 4, "source": "a"}, row("3 + 3", "6") | {"label": 6}]
    )
    found = Rows({"train_dataset": dataset}, TOOLS)[[{"role": "user", "content": "3 + 3"}]].row
    assert found.tools_kwargs == {"check": {"create_kwargs": {"truth": "6"}}}
    assert (found.label, found.metadata) == (6, {"source": None})
    assert found.where == "train_dataset, row 1"


def test_what_a_columnar_file_filled_in_is_absent() -> None:
    """Arrow gives every row the fields of every other, with None in them."""
    only_tries = {"check": {"create_kwargs": {"tries": 5}}}
    rows = [row("a", "4"), row("b") | {"tools_kwargs": only_tries}]
    found = Rows({"rows": table(rows)}, TOOLS)
    assert found[rows[1]["prompt"]].row.tools_kwargs == only_tries
    assert found[rows[0]["prompt"]].row.tools_kwargs == rows[0]["tools_kwargs"]


def test_tools_kwargs_may_be_json_text() -> None:
    """As a column whose values have several types must be."""
    texts = [row("a") | {"tools_kwargs": json.dumps(row("", t)["tools_kwargs"])} for t in ("4",)]
    found = Rows({"rows": table(texts)}, TOOLS)[texts[0]["prompt"]].row
    assert found.tools_kwargs == {"check": {"create_kwargs": {"truth": "4"}}}


def test_equal_prompts_with_other_kwargs_are_refused_or_told_apart() -> None:
    with pytest.raises(ConfigError, match="row 1 has the prompt of rows, row 0, and another tools"):
        Rows({"rows": [row("guess", "4"), row("guess", "6")]}, TOOLS)
    apart = [row("guess", "4", id=0), row("guess", "6", id=1)]
    found = Rows({"rows": table(apart)}, TOOLS)
    for given_row in apart:
        assert found[given_row["prompt"]].row.tools_kwargs == given_row["tools_kwargs"]
    Rows({"rows": [row("guess", "4"), row("guess", "4")]}, TOOLS)  # the same row twice is one


def test_a_question_without_an_answer_is_named_by_its_line(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    good = '{"question": "?", "answer": "#### 1,800"}'
    questions.write_text(good + "\n\n" + good + "\n")
    assert [row["label"] for row in gsm8k.rows(questions)] == ["1800", "1800"]
    for bad in ('{"question": "?"}', '{"question": "?", "answer": "none"}', "?", "[]"):
        questions.write_text(good + "\n" + bad + "\n")
        with pytest.raises(ConfigError, match=r"questions\.jsonl:2: .* a line of GSM8K is"):
            gsm8k.rows(questions)


def test_the_rows_of_gsm8k_fit_as_they_are_written_for_trl() -> None:
    given = gsm8k.rows(gsm8k.QUESTIONS, to="trl")
    found = Rows({"train_dataset": table(given)}, Toolset(["gsm8k"]))
    for one in given:
        assert found[one["prompt"]].row.label == one["label"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "hi"}], "rows, row 0: it has no prompt"),
        ([row("a"), row("b") | {"tools_kwargs": "{"}], "rows, row 1: Expecting"),
        ([row("a") | {"tools_kwargs": {"chek": {}}}], "did you mean `check`"),
        (
            [row("a") | {"tools_kwargs": {"check": {"create_kwargs": {"x": 1}}}}],
            "unknown parameter",
        ),
        ([row("a") | {"metadata": "x"}], "rows, row 0: "),
    ],
)
def test_a_row_that_does_not_fit_is_named_before_training(
    rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Rows({"rows": rows}, TOOLS)


def test_a_prompt_that_no_row_has_is_named() -> None:
    with pytest.raises(
        ConfigError, match="no row of rows has the prompt 'other': give RolloutFunc"
    ):
        Rows({"rows": [{"prompt": "one"}]}, TOOLS)["other"]


# -- any rollouts ----------------------------------------------------------------------------------

FAULTS = {
    "no log-probs": Reply([65], log_probs=None),
    "NaN": Reply([65, 66], log_probs=[-1.0, float("nan")]),
    "a log-prob short": Reply([65, 66], log_probs=[-1.0]),
    "an error": EngineError("dead", reason=StopReason.ENGINE_ERROR, final=True),
    "nothing": Reply([]),
    "cut": Reply([65, 66], finish="length"),
}
answers: st.SearchStrategy[Answer] = st.one_of(
    st.just(CALL),
    st.text(max_size=8),
    st.just("<tool_call>nonsense</tool_call>"),
    st.sampled_from(sorted(FAULTS)).map(FAULTS.__getitem__),
)
rollouts = st.lists(
    st.tuples(st.lists(answers, max_size=4), st.none() | st.floats(-2, 2)), min_size=1, max_size=5
)


class Witness(ScriptedEngine):
    """Notes what it answered, by request."""

    def __init__(self, scripts: list[list[Answer]]) -> None:
        self.answered: dict[int, list[tuple[list[int], list[int], list[float]]]] = {}
        sessions: dict[str, int] = {}

        def script(asked: Any) -> Answer:
            turn = sessions[asked.session_id] = sessions.get(asked.session_id, -1) + 1
            answers = scripts[int(asked.session_id.rpartition("-")[2])]
            return answers[turn] if turn < len(answers) else "end"

        super().__init__(script, tokenizer=TOKENIZER)

    async def generate(self, columns: Any, *args: Any, **kwargs: Any) -> Generation:
        before = columns.tokens.tolist()
        generation = await super().generate(columns, *args, **kwargs)
        index = int(kwargs["session_id"].rpartition("-")[2])
        assert generation.log_probs is not None
        self.answered.setdefault(index, []).append(
            (before, generation.token_ids.tolist(), generation.log_probs.tolist())
        )
        return generation


@given(rollouts=rollouts, mask_truncated=st.booleans())
def test_in_trls_dict_what_was_sampled_is_what_is_trained(
    rollouts: list[tuple[list[Answer], float | None]], *, mask_truncated: bool
) -> None:
    engine = Witness([script for script, _ in rollouts])
    rewards = [value for _, value in rollouts]
    rollout = Rollout(
        engine,
        codec=CODEC,
        tools=TOOLS,
        reward=lambda request: rewards[request.index],
        limits=Limits(max_context=1_024, max_response=300, max_turns=3, max_attempts=1),
    )

    async def play() -> list[Request]:
        requests = [rollout.request("q", index=n, group_index=0) for n in range(len(rewards))]
        return [await rollout.run(request) for request in requests]

    found = handed(asyncio.run(play()), pad_id=1, mask_truncated=mask_truncated)
    assert {len(values) for values in found.values()} == {len(rollouts)}
    for index in range(len(rollouts)):
        row = {key: values[index] for key, values in found.items()}
        assert len(row["prompt_ids"]) > 0
        assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"]) > 0
        if row["refused"]:
            assert row["env_mask"] == [0]
            assert row["env_reward"] is None
            continue
        assert row["env_reward"] == rewards[index]
        calls = engine.answered[index]
        before, last, _ = calls[-1]
        whole = [*row["prompt_ids"], *row["completion_ids"]]
        assert whole[: len(before) + len(last)] == [*before, *last]
        assert row["prompt_ids"] == calls[0][0]
        expected: dict[int, tuple[int, float]] = {}  # where it was sampled: token and log-prob
        for context, ids, log_probs in calls:
            start = len(context) - len(row["prompt_ids"])
            expected |= {start + n: pair for n, pair in enumerate(zip(ids, log_probs, strict=True))}
        is_masked = mask_truncated and row["status"] == "truncated"
        for n, (token, log_prob, mask) in enumerate(
            zip(row["completion_ids"], row["logprobs"], row["env_mask"], strict=True)
        ):
            assert mask == (n in expected and not is_masked)
            assert (token, log_prob) == expected.get(n, (token, 0.0))

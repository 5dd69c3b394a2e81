"""Rollout: rows in, groups out; bad input is named before anything starts."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import json
from pathlib import Path
from typing import Any

import fsm_rollout
from fsm_rollout.dataset import PromptRow, read_rows, read_samples, write_samples
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError, InvariantError, RolloutError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import samples_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.machine import Transition
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool

TOKENIZER = tiny_tokenizer()


class Check(Tool):
    """Check an answer."""

    def create(self, truth: str = "42") -> None:
        self.truth = truth

    def execute(self, answer: str) -> str:
        """answer: the answer"""
        return "right" if answer == self.truth else "wrong"


def scripted(*script: Any) -> ScriptedEngine:
    return ScriptedEngine(list(script), tokenizer=TOKENIZER)


def test_each_row_becomes_a_group_of_requests_with_equal_prompts_and_own_indices() -> None:
    rollout = Rollout(scripted("yes"), TOKENIZER)
    message = {"role": "user", "content": "b"}
    rows: list[Any] = ["a", {"prompt": [message], "label": 7, "metadata": {"k": 1}}]
    first, second = fsm_rollout.run(rollout.generate(rows, num_samples=3))
    assert [request.index for request in (*first.requests, *second.requests)] == list(range(6))
    assert [request.group_index for request in second.requests] == [1, 1, 1]
    assert {r.label for r in second.requests} == {7}
    assert second.samples[0].metadata == {"k": 1}
    assert len({r.sample.tokens[: r.sample.prompt_length].tobytes() for r in first.requests}) == 1
    assert all(r.status is Status.COMPLETED and r.is_sealed for r in first.requests)
    assert len(samples_of([first, second])) == 6


def test_an_aborted_request_is_in_its_group_but_not_among_its_samples() -> None:
    def script(asked: Asked) -> Any:
        return Reply([1], None) if asked.session_id.endswith("-1") else "yes"

    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    (group,) = fsm_rollout.run(Rollout(engine, TOKENIZER).generate(["a"], num_samples=3))
    assert [r.status for r in group.requests].count(Status.ABORTED) == 1
    assert group.requests[1].stop_reason is StopReason.MISSING_LOG_PROBS
    assert [sample.rollout_id for sample in group.samples] == [0, 2]
    assert len(group.rewards) == 3


def test_no_more_requests_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    def listen(transition: Transition) -> None:
        nonlocal running, most
        running += transition.dest is Status.GENERATING
        running -= transition.dest.is_terminal
        most = max(most, running)

    engine = ScriptedEngine(lambda _: Reply([1], [-1.0], delay_s=0.001))
    rollout = Rollout(engine, TOKENIZER, max_concurrent=3, listeners=[listen])
    fsm_rollout.run(rollout.generate(["a"] * 4, num_samples=4))
    assert most == 3


def test_one_slow_tool_does_not_hold_up_the_others() -> None:
    done: list[int] = []

    class Sleep(Tool):
        """Sleep."""

        async def execute(self, seconds: float) -> str:
            """seconds: how long"""
            if seconds:
                await others_are_done.wait()
            return ""

    others_are_done = asyncio.Event()

    def script(asked: Asked) -> str:
        if asked.request_id.endswith(".00000001"):
            seconds = 300 if asked.session_id.endswith("-0") else 0
            return (
                f'<tool_call>{{"name": "sleep", "arguments": {{"seconds": {seconds}}}}}</tool_call>'
            )
        return "done"

    def listen(transition: Transition) -> None:
        if transition.dest.is_terminal:
            done.append(transition.request.index)
            if len(done) == 19:
                others_are_done.set()

    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Sleep], listeners=[listen])
    fsm_rollout.run(rollout.generate(["a"] * 20))
    assert done[-1] == 0
    assert sorted(done) == list(range(20))


def test_a_bug_in_a_listener_reaches_the_caller_and_the_others_are_released() -> None:
    released: list[int] = []

    class Held(Tool):
        """Held until release."""

        async def execute(self, text: str) -> str:
            """text: anything"""
            await asyncio.sleep(600)
            return ""

        def release(self) -> None:
            released.append(1)

    def listen(transition: Transition) -> None:
        if transition.request.index == 3 and transition.dest is Status.TOOL_CALLING:
            raise ZeroDivisionError("a bug")

    call = '<tool_call>{"name": "held", "arguments": {"text": ""}}</tool_call>'
    rollout = Rollout(scripted(call), TOKENIZER, tools=[Held], listeners=[listen])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fsm_rollout.run(rollout.generate(["a"] * 5))
    assert len(released) == 5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, r"row 2: no prompt"),
        ({"question": "q", "answer": "a"}, r"row 2: no prompt in it: it has question, answer"),
        ("", r"row 2: the prompt is empty"),
        ({"prompt": []}, r"row 2: the prompt is empty"),
        ({"prompt": 3}, r"row 2: .*prompt"),
        ({"prompt": "x", "labels": 1}, r"row 2: .*labels.*label"),
        ([{"role": "user", "content": "x"}], r"row 2: it is a list; messages are the prompt"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, r"row 2: .*usr"),
        ({"prompt": "x", "tools_kwargs": {"chek": {}}}, r"row 2: .*chek.*check"),
        (
            {"prompt": "x", "tools_kwargs": {"check": {"create_kwargs": {"trut": "1"}}}},
            r"row 2: .*check.*create.*trut",
        ),
        (
            {"prompt": "x", "tools_kwargs": {"check": {"creat_kwargs": {}}}},
            r"row 2: .*creat_kwargs.*create_kwargs",
        ),
    ],
)
def test_a_bad_row_is_named_before_anything_starts(row: Any, said: str) -> None:
    engine = scripted("yes")
    rollout = Rollout(engine, TOKENIZER, tools=[Check])
    with pytest.raises(ConfigError, match=said):
        fsm_rollout.run(rollout.generate(["fine", row]))
    assert not engine.asked


def test_a_row_that_says_where_it_was_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "", "where": "train.parquet, row 7"}\n')
    rows = read_rows(path)
    assert [row.where for row in rows] == [f"{path}:1", "train.parquet, row 7"]
    for bad, said in (
        (rows[1], "train.parquet, row 7: the prompt is empty"),
        ({"prompt": [{"role": "usr", "content": ""}], "where": "here"}, "here: .*usr"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            fsm_rollout.run(Rollout(scripted("yes"), TOKENIZER).generate([rows[0], bad]))


def test_a_jsonl_file_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": }\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3: "):
        read_rows(path)
    path.write_text('{"prompt": "a"}\n{"prompts": "b"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: no prompt in it: it has prompts"):
        read_rows(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_rows(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_rows(tmp_path / "other.jsonl")
    path.write_text('{"prompt": "a", "label": 3}\n')
    assert read_rows(path) == [PromptRow(prompt="a", label=3, where=f"{path}:1")]


def test_samples_come_back_from_the_file_equal(tmp_path: Path) -> None:
    huge = 10**30
    arguments = f'{{"answer": "\\ud83d\\ude00", "n": {huge}}}'
    call = f'<tool_call>{{"name": "check", "arguments": {arguments}}}</tool_call>'
    rollout = Rollout(scripted(call, "done é"), TOKENIZER, tools=[Check])
    groups = fsm_rollout.run(rollout.generate(["aé"], num_samples=2))
    samples = samples_of(groups)
    path = tmp_path / "out" / "samples.jsonl"
    assert write_samples(path, samples) == 2
    back = read_samples(path)
    assert [json.dumps(s.to_dict()) for s in back] == [json.dumps(s.to_dict()) for s in samples]
    assert back[0].turns[0].calls[0].arguments["n"] == huge


def test_samples_that_cannot_be_written_leave_the_older_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("of yesterday")
    samples = samples_of(fsm_rollout.run(Rollout(scripted("yes"), TOKENIZER).generate(["a", "b"])))
    samples[1].extra["seen"] = object()
    with pytest.raises(TypeError):
        write_samples(path, samples)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["of yesterday"]
    with pytest.raises(ConfigError, match="samples cannot be written there"):
        write_samples(path / "below", samples)


def test_a_sample_file_names_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rollout = Rollout(scripted("yes"), TOKENIZER)
    write_samples(path, samples_of(fsm_rollout.run(rollout.generate(["a"]))))
    row = json.loads(path.read_text())
    for change, said in (
        ({"schema": 99}, "schema 99"),
        ({"tokens": ["x"]}, r"tokens"),
        ({"status": "nearly"}, r"status"),
        ({"surprise": 1}, r"surprise"),
    ):
        path.write_text(json.dumps(row) + "\n" + json.dumps(row | change))
        with pytest.raises(ConfigError, match=rf"samples\.jsonl:2: .*{said}"):
            read_samples(path)


def test_run_says_what_to_do_inside_a_running_loop() -> None:
    rollout = Rollout(scripted("yes"), TOKENIZER)

    async def notebook() -> None:
        with pytest.raises(RolloutError, match="await"):
            fsm_rollout.run(rollout.generate(["a"]))
        (group,) = await rollout.generate(["a"])
        assert group.is_done

    asyncio.run(notebook())


def test_what_is_no_engine_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="object is no engine: it has no method 'generate'"):
        Rollout(object(), TOKENIZER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limits": {"max_turns": 2}}, r"limits must be Limits\(\.\.\.\), got {'max_turns': 2}"),
        ({"params": {"top_p": 0.9}}, r"params must be SamplingParams\(\.\.\.\), got"),
        ({"tools": "calculator"}, "tools must be a list, got 'calculator'"),
        ({"tools": Check}, "tools must be a list, got .*Check"),
    ],
)
def test_an_option_of_another_type_is_named_at_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rollout(scripted("yes"), TOKENIZER, **given)
    if "tools" not in given:
        with pytest.raises(ConfigError, match=said):
            Rollout(scripted("yes"), TOKENIZER).variant(**given)


def test_a_rollout_wants_a_tokenizer_or_a_codec() -> None:
    with pytest.raises(ConfigError, match="tokenizer or a codec"):
        Rollout(scripted("yes"))


def test_an_unknown_parser_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"herms.*hermes"):
        Rollout(scripted("yes"), TOKENIZER, parser="herms")


@pytest.mark.parametrize(
    "limits",
    [
        {"max_prompt": 100, "max_response": 100, "max_context": 150},
        {"max_prompt": 200, "max_context": 150},
        {"max_turns": 0},
        {"max_new_tokens": -1},
        {"tool_timeout_s": 0},
        {"turn_timeout_s": float("nan")},
    ],
)
def test_limits_that_contradict_name_their_fields(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        Limits(**limits)
    assert all(name in str(raised.value) for name in limits)


def test_a_sample_that_was_broken_after_the_fact_is_withheld(tmp_path: Path) -> None:
    (group,) = fsm_rollout.run(Rollout(scripted("yes"), TOKENIZER).generate(["a"]))
    (sample,) = group.samples
    sample.turns[0].finish = "length"
    with pytest.raises(InvariantError, match=r"sample 0-0: .*stop"):
        write_samples(tmp_path / "samples.jsonl", [sample])
    assert not list(tmp_path.iterdir())


def test_a_variant_plays_with_other_budgets_and_sampling() -> None:
    engine = ScriptedEngine(["It is 4."], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, params=SamplingParams(temperature=0.7))
    [trained] = fsm_rollout.run(rollout.generate(["2 + 2?"]))
    short = rollout.variant(limits=Limits(max_new_tokens=2), params=SamplingParams(temperature=0.0))
    [evaluated] = fsm_rollout.run(short.generate(["2 + 2?"]))
    assert [g.samples[0].turns[0].temperature for g in (trained, evaluated)] == [0.7, 0.0]
    assert [g.samples[0].stop_reason for g in (trained, evaluated)] == ["stop", "length"]
    assert [g.samples[0].index for g in (trained, evaluated)] == [0, 1]
    assert short.codec is rollout.codec
    assert rollout.loop.params.temperature == 0.7


def test_a_request_of_a_row_is_played_as_its_own() -> None:
    engine = ScriptedEngine(["It is 4."], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER)
    row = {"prompt": "2 + 2?", "label": "4", "metadata": {"source": "sums"}}
    request = fsm_rollout.run(rollout.run(rollout.request(row, index=70, group_index=7)))
    assert (request.index, request.group_index, request.label) == (70, 7, "4")
    assert request.sample.metadata == {"source": "sums"}
    assert request.sample.metadata is not row["metadata"]
    with pytest.raises(ConfigError, match="no prompt in it"):
        rollout.request({"question": "2 + 2?"})


def test_an_id_that_two_rows_share_is_refused_and_one_of_its_own_is_carried() -> None:
    rollout = Rollout(ScriptedEngine(["4"], tokenizer=TOKENIZER), TOKENIZER)
    with pytest.raises(ConfigError, match="row 2: id 'a' is that of row 1 too"):
        fsm_rollout.run(rollout.generate([{"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}]))
    [group] = fsm_rollout.run(rollout.generate([{"id": "a", "prompt": "1"}], num_samples=2))
    assert [sample.row_id for sample in group.samples] == ["a", "a"]


def test_what_a_table_fills_with_none_is_absent_from_a_row() -> None:
    rollout = Rollout(ScriptedEngine(["4"], tokenizer=TOKENIZER), TOKENIZER, tools=[Check])
    kwargs = {"check": {"create_kwargs": {"truth": "4"}, "execute_kwargs": None}, "other": None}
    row = {"prompt": "2 + 2?", "id": None, "metadata": None, "label": None, "tools_kwargs": kwargs}
    [group] = fsm_rollout.run(rollout.generate([row]))
    assert group.requests[0].tools_kwargs == {"check": {"create_kwargs": {"truth": "4"}}}
    with pytest.raises(ConfigError, match="prompt"):
        fsm_rollout.run(rollout.generate([{"prompt": None}]))

"""The handed `config` cases, each with all that it requires, and variants that found faults.

POLICY says where a case is met in another way than its words suggest, and why.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import fsm_rollout
from fsm_rollout.codec import Codec
from fsm_rollout.config import load_config
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.limits import Limits, Status
from fsm_rollout.metrics import metrics_of
from fsm_rollout.parsers import get_parser
from fsm_rollout.parsers.hermes import Hermes
from fsm_rollout.request import Group
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import TAGS, tiny_tokenizer
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import ToolSession
from fsm_rollout.turn import ToolCall
from tests.plug_ins import XML, install_qwen3_coder
from tests.qwen import qwen_tokenizer

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parent / "cases" / "config.jsonl").read_text().splitlines()
    )
}
POLICY = {
    "cfg-003": "there is no option to strip: ids are decoded whole, servers are told to strip none",
    "cfg-004": "only parsers that are installed are suggested: here a plug-in, as none is built in",
    "cfg-006": "hermes arguments are JSON; formats of untyped text get the schemas, from a plug-in",
    "cfg-012": "the format that would parse is one of the parsers that are installed",
}
"""where we meet a case by other means"""


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its input and what is expected."""
    return CASES[name]["input"], CASES[name]["expected"]


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_qwen3_coder(tmp_path, monkeypatch)


class Bash(Tool):
    """Run a command."""

    def execute(self, command: str) -> str:
        """command: what to run"""
        return "README.md"


def played(texts: list[str], *, rows: int = 1, **options: Any) -> list[Group]:
    """`rows` requests of a model that says these texts, one a turn."""
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(texts, tokenizer=tokenizer)
    rollout = Rollout(engine, tokenizer, tools=[Bash], **options)
    return fsm_rollout.run(rollout.generate(["List the files."] * rows))


# -- limits ----------------------------------------------------------------------------------------


def test_cfg_001_limits_that_contradict() -> None:
    given, expected = case("cfg-001")
    assert expected["message_names_fields"]
    with pytest.raises(ConfigError) as caught:
        Limits(**given)
    named = expected["raises_or_warns"].replace("+", " ").replace(">", " ").split()
    assert all(f"{name} ({given[name]})" in str(caught.value) for name in named)


# -- parsers ---------------------------------------------------------------------------------------


def test_cfg_003_a_parser_sees_markers_that_are_special_tokens() -> None:
    given, expected = case("cfg-003")
    assert given["skip_special_tokens"]
    assert "specials kept" in expected["must"]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(TAGS)})
    codec = Codec(tokenizer, tools=Toolset([Bash]).schemas)
    sampled = codec.vocabulary.encode(
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|im_end|>'
    )
    assert "<tool_call>" not in tokenizer.decode(sampled, skip_special_tokens=True)
    (call,) = codec.parse(sampled, finish="stop", call_id="c").calls
    assert (call.name, call.arguments) == ("bash", {"command": "ls"})


def test_cfg_003_a_config_cannot_ask_for_stripped_text(tmp_path: Path) -> None:
    for where in ("", "sampling.", "engine."):
        values: dict[str, Any] = {"rows": "r", "engine": {"type": "sglang", "urls": ["http://a"]}}
        values["sampling"] = {}
        inner = values[where[:-1]] if where else values
        inner["skip_special_tokens"] = True
        (tmp_path / "config.yaml").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=f"unknown key '{where}skip_special_tokens'"):
            load_config(tmp_path / "config.yaml")


@pytest.mark.usefixtures("plug_in")
def test_cfg_004_an_unknown_parser() -> None:
    given, expected = case("cfg-004")
    assert expected["raises"] == ConfigError.__name__
    with pytest.raises(ConfigError, match=f"did you mean '{expected['suggests']}'"):
        get_parser(given["parser"])
    with pytest.raises(ConfigError, match=f"did you mean '{expected['suggests']}'"):
        Rollout(ScriptedEngine([]), tiny_tokenizer(), parser=given["parser"])


# -- tool schemas ----------------------------------------------------------------------------------


SCHEMAS: dict[str, dict[str, Any]] = {
    "as handed": CASES["cfg-006"]["input"],
    "with its definition": {**CASES["cfg-006"]["input"], "$defs": {"X": {"type": "string"}}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_cfg_006_a_json_schema_is_taken_as_it_is(name: str) -> None:
    _, expected = case("cfg-006")
    assert expected["accepted"]

    class Lookup(Tool):
        parameters = SCHEMAS[name]

        def execute(self, z: Any = None, r: Any = None) -> str:
            return json.dumps([z, r])

    tools = Toolset([Lookup])
    assert tools.schemas[0]["function"]["parameters"] == SCHEMAS[name]
    tokenizer = tiny_tokenizer()
    assert "lookup" in tokenizer.decode(Codec(tokenizer, tools=tools.schemas).prompt("x"))

    async def call() -> str:
        session = ToolSession(tools, limits=Limits())
        await session.open()
        [result] = await session.execute(
            [ToolCall("lookup", {"z": None, "r": "x1"}, "a")], allowed=1
        )
        await session.close()
        return result.response.text

    assert json.loads(asyncio.run(call())) == [None, "x1"]


@pytest.mark.usefixtures("plug_in")
def test_cfg_006_untyped_text_is_json_or_text() -> None:
    _, expected = case("cfg-006")
    assert expected["must"] == "typed parse falls back to JSON-or-text"
    said = "<function=f>\n<parameter=z>\nnull\n</parameter>\n<parameter=r>\nx1\n</parameter>\n"
    parsed = get_parser("qwen3_coder").parse(said + "</function>", finish="stop")
    assert parsed.calls[0].arguments == {"z": None, "r": "x1"}


# -- end-of-turn ids -------------------------------------------------------------------------------


def test_cfg_007_end_of_turn_ids_are_those_of_the_generation_config(tmp_path: Path) -> None:
    given, expected = case("cfg-007")
    tokenizer = qwen_tokenizer("qwen3")
    assert tokenizer.eos_token_id == given["tokenizer_eos"]
    stops = given["generation_config"]["eos_token_id"]
    assert sorted(Codec(tokenizer, stop_token_ids=stops).stop_ids) == expected["eos_ids"]
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(given["generation_config"]))
    loaded = type(tokenizer).from_pretrained(tmp_path)
    assert sorted(Codec(loaded).stop_ids) == expected["eos_ids"]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"eos_token_id": 256}, [256, 258]),
        ({"eos_token_id": [258]}, [258]),
        ({"eos_token_id": None}, [258]),
        ({}, [258]),
        ({"eos_token_id": [256, 9_999, -1]}, [256, 258]),  # of padding rows: never sampled
        ("no JSON", [258]),
        (None, [258]),
    ],
    ids=str,
)
def test_cfg_007_they_are_read_beside_the_tokenizer_whatever_the_engine(
    config: Any, wanted: list[int], tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "generation_config.json").write_text(text)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    engine = ScriptedEngine(["hello"], tokenizer=loaded)
    rollout = Rollout(engine, loaded)
    assert sorted(rollout.codec.stop_ids) == wanted
    fsm_rollout.run(rollout.generate(["x"]))
    assert list(engine.asked[0].params.stop_token_ids) == wanted  # and the server is told
    given = Rollout(engine, codec=Codec(loaded, stop_token_ids=[257]))
    assert sorted(given.codec.stop_ids) == [257, 258]  # who says it is believed


# -- a template that rewrites history --------------------------------------------------------------


def test_cfg_009_a_template_that_does_not_keep_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    given, expected = case("cfg-009")
    with caplog.at_level(logging.WARNING):
        codec = Codec(qwen_tokenizer(given["family"]), tools=Toolset([Bash]).schemas)
        for _ in range(3):
            history = codec.prompt("hello") + codec.vocabulary.encode(
                "<think>r</think>hi<|im_end|>"
            )
            delta = codec.delta(history[-1], [{"role": "user", "content": "and?"}])
            assert "<think>r</think>" in codec.decode(history + delta)  # append-only
    assert expected["default"] == "append-only mode, with a warning once"
    [message] = caplog.messages
    assert "non_prefix_preserving" in expected["probe"]
    assert "rewrites history" in message
    one, other = codec.drift.split("; while" if "; while" in codec.drift else "; when")
    assert one != other
    assert codec.drift in message


# -- the sync door from inside a loop --------------------------------------------------------------


def _hello() -> Coroutine[Any, Any, list[Group]]:
    tokenizer = tiny_tokenizer()
    return Rollout(ScriptedEngine(["hello"], tokenizer=tokenizer), tokenizer).generate(["x"])


@pytest.mark.parametrize("outer", ["asyncio", "uvloop"])
@pytest.mark.parametrize("tuned", [False, True])
def test_cfg_011_the_sync_call_from_a_running_loop(tuned: bool, outer: str) -> None:
    _, expected = case("cfg-011")
    assert expected["raises_clear_error_or_runs_in_thread"]
    assert not expected["hang"]

    async def notebook() -> list[Group]:
        with pytest.raises(RolloutError, match="use `await` in place of `run"):
            fsm_rollout.run(_hello(), tuned=tuned)
        return await asyncio.to_thread(lambda: fsm_rollout.run(_hello(), tuned=tuned))

    factory = None
    if outer == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        [group] = runner.run(asyncio.wait_for(notebook(), 60))
    assert group.samples[0].status is Status.COMPLETED


# -- a parser of another format --------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "reads no tool call" in message]


@pytest.mark.usefixtures("plug_in")
def test_cfg_012_the_parser_does_not_fit_the_model(caplog: pytest.LogCaptureFixture) -> None:
    given, expected = case("cfg-012")
    limits = Limits(max_turns=given["turns"], max_invalid_calls=given["turns"], max_context=60_000)
    [group] = played([given["model_emits"]] * given["turns"], limits=limits)
    [request] = group.requests
    turns = [turn for turn in request.sample.turns if turn.kind == "model"]
    assert len(turns) == given["turns"]
    calls = [call for turn in turns for call in turn.calls]
    assert sum(call.error is None for call in calls) == expected["parsed_calls"]
    assert "malformed_call_rate = 1.0" in expected["must"]
    assert metrics_of([group])["rollout/malformed_call_rate"] == 1.0
    assert "one loud warning naming the format that would parse (qwen3_coder)" in expected["must"]
    [message] = warnings(caplog)
    assert "parser 'hermes' reads no tool call of this model" in message
    assert "'qwen3_coder'" in message


WRITES_XML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
<function={{ c.function.name }}>
{% for name, value in c.function.arguments.items() %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.usefixtures("plug_in")
def test_cfg_012_the_probe_at_start_up_reads_back_what_the_template_writes() -> None:
    _, expected = case("cfg-012")
    assert "start-up probe renders a tool call with the template" in expected["must"]
    tools = Toolset([Bash]).schemas
    with pytest.raises(ConfigError, match="use parser 'qwen3_coder'"):
        Codec(tiny_tokenizer(WRITES_XML), tools=tools)
    Codec(tiny_tokenizer(WRITES_XML), tools=tools, parser="qwen3_coder")


GOOD = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
BAD = "<tool_call>{oops}</tool_call>"
BARE = XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(
    ("texts", "rate", "told"),
    [
        ([XML, "x"], 1.0, True),
        ([BARE], None, True),  # not even an attempt, as hermes sees it
        ([GOOD, XML, "x"], 0.5, False),  # the parser fits
        ([XML[:-30], "x"], 1.0, False),  # which nobody can read
        (["no call"], None, False),
        ([BAD, GOOD, "x"], 0.5, False),
    ],
    ids=["theirs", "no attempt", "ours first", "broken", "none", "bad, then good"],
)
def test_cfg_012_a_warning_comes_when_another_parser_reads_it(
    texts: list[str], rate: float | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    groups = played(texts, rows=3)
    assert metrics_of(groups).get("rollout/malformed_call_rate") == rate
    assert len(warnings(caplog)) == told


def test_cfg_012_calls_of_aborted_requests_count() -> None:
    [group] = played([BAD, GOOD, "x"], reward=lambda _: float("nan"))
    assert group.requests[0].status is Status.ABORTED
    assert metrics_of([group])["rollout/malformed_call_rate"] == 0.5


def test_cfg_012_without_another_parser_it_is_said_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    played([XML] * 4 + ["x"], rows=3)
    assert warnings(caplog) == []
    played([XML] * 4 + ["x"], rows=8)
    [message] = warnings(caplog)
    assert "no other parser that is installed reads them either" in message
    assert "<function=bash>" in message


# -- other parts that do not fit -------------------------------------------------------------------

TOKENIZER = tiny_tokenizer()
ENGINE = ScriptedEngine([], tokenizer=TOKENIZER)


def rollout(**options: Any) -> Rollout:
    return Rollout(**{"engine": ENGINE, "tokenizer": TOKENIZER, **options})


def with_codec(**options: Any) -> Rollout:
    return rollout(tokenizer=None, codec=Codec(TOKENIZER), **options)


def with_stop(*ids: Any) -> Rollout:
    return rollout(params=SamplingParams(stop_token_ids=ids))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a parser of no kind": (lambda: rollout(parser=5), "parser is 5; give a name"),
    "a parser's class": (lambda: rollout(parser=Hermes), "give a name, or an object"),
    "a parser beside a codec": (lambda: with_codec(parser="hermse"), "give them to Codec"),
    "a template beside a codec": (lambda: with_codec(chat_template="x"), "give them to Codec"),
    "a template that is no text": (lambda: rollout(chat_template=5), "chat_template is 5; give"),
    "a stop string alone": (lambda: SGLangEngine("http://a", stop="END"), "stop must be a list of"),
    "a codec's stop word": (
        lambda: Codec(TOKENIZER, stop_token_ids=cast(Any, ["a"])),
        "be ids, go",
    ),
    "an engine's class": (lambda: rollout(engine=ScriptedEngine), "ScriptedEngine is a class"),
    "half a request": (lambda: rollout(max_concurrent=1.5), "max_concurrent must be a whole num"),
    "a count as text": (lambda: rollout(max_concurrent="8"), "must be a whole number >= 1, got '8"),
    "no rows": (lambda: fsm_rollout.run(rollout().generate(cast(Any, None))), "a list of rows, go"),
    "samples as text": (
        lambda: fsm_rollout.run(rollout().generate([], num_samples=cast(Any, "2"))),
        "num_samples must be a whole number >= 1, got '2'",
    ),
    "temperature as text": (lambda: SamplingParams(temperature=cast(Any, "1")), "be a number"),
    "no temperature": (lambda: SamplingParams(temperature=cast(Any, None)), "be a number, got N"),
    "nearly greedy": (lambda: SamplingParams(temperature=0.005), "below 0.01.*0 is greedy"),
    "half a top_k": (lambda: SamplingParams(top_k=cast(Any, 1.5)), "top_k must be a whole number"),
    "top_p yes": (lambda: SamplingParams(top_p=True), "top_p must be a number, got True"),
    "a stop id alone": (lambda: SamplingParams(stop_token_ids=cast(Any, 5)), "a tuple of ids"),
    "a stop word": (lambda: with_stop("a"), "stop_token_ids must be a tuple of ids, got"),
    "a negative stop id": (lambda: with_stop(-1), "stop_token_ids must be a tuple of ids, got"),
    "a stop id of another model": (lambda: with_stop(9_999), r"\[9999\] lie outside the vocab"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_part_that_does_not_fit_is_named_before_anything_starts(mistake: str) -> None:
    make, why = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=why):
        make()


def test_every_case_is_driven() -> None:
    named = {name[5:12].replace("_", "-") for name in globals() if name.startswith("test_cfg_")}
    assert named == CASES.keys()
    assert POLICY.keys() <= CASES.keys()

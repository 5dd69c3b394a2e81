"""The registry of parsers: names, plug-ins, detection."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.parsers import Parsed, detect, get_parser
from fsm_rollout.parsers.hermes import Hermes
from tests.plug_ins import install_qwen3_coder

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def outcomes(parsed: Parsed) -> list[tuple[str, str | None]]:
    return [(call.name, call.error) for call in parsed.calls]


def test_a_parser_is_found_by_its_name() -> None:
    parser = get_parser("hermes", generation_prompt="<think>")
    assert parser.name == "hermes"
    assert outcomes(parser.parse(GOOD, finish="stop")) == [("f", "call_in_open_reasoning")]


@pytest.mark.parametrize("name", ["hermse", "Hermes", "hermes2"])
def test_an_unknown_name_suggests_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown parser '{name}': did you mean 'hermes'"):
        get_parser(name)


def test_a_far_off_name_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="unknown parser 'xyz': known are hermes"):
        get_parser("xyz")


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_qwen3_coder(tmp_path, monkeypatch)


@pytest.mark.usefixtures("plug_in")
def test_a_package_adds_a_parser_by_an_entry_point() -> None:
    parsed = get_parser("qwen3_coder").parse("<function=bash></function>", finish="stop")
    assert outcomes(parsed) == [("bash", None)]
    with pytest.raises(ConfigError, match="did you mean 'qwen3_coder'"):
        get_parser("qwen3coder")
    assert isinstance(get_parser("hermes"), Hermes)


@pytest.mark.usefixtures("plug_in")
def test_a_parser_that_cannot_be_loaded_says_why() -> None:
    with pytest.raises(ConfigError, match=r"'broken'.*plug_in_of_a_test:Missing.*AttributeError"):
        get_parser("broken")


@pytest.mark.usefixtures("plug_in")
def test_detect_names_the_parsers_that_find_a_call() -> None:
    xml = "<tool_call>\n<function=bash>\n</function>\n</tool_call>"
    assert outcomes(get_parser("hermes").parse(xml, finish="stop")) == [("", "invalid_json")]
    assert detect(xml) == ["qwen3_coder"]
    assert detect(GOOD) == ["hermes"]
    assert detect("plain text") == []

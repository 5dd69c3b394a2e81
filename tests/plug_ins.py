"""A parser of qwen3_coder's calls, as a package that somebody installs beside this one."""

from __future__ import annotations

from pathlib import Path

import pytest

XML = (
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
)

PARSER = """
import json
import re

from fsm_rollout.parsers import Parsed
from fsm_rollout.turn import ToolCall

CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
ARGUMENT = re.compile(r"<parameter=([^>]+)>\\n(.*?)\\n</parameter>", re.DOTALL)


class Xml:
    name = "qwen3_coder"

    def __init__(self, *, generation_prompt):
        pass

    def parse(self, text, *, finish, tools=()):
        found = list(CALL.finditer(text))
        calls = [ToolCall(m[1], {n: value(v) for n, v in ARGUMENT.findall(m[2])}) for m in found]
        return Parsed("", "" if calls else text, tuple(calls), tuple(m.span() for m in found))


def value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


class Raises(Xml):
    name = "raises"

    def parse(self, text, *, finish, tools=()):
        raise ZeroDivisionError
"""


def install_qwen3_coder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with entry points: good, broken, failing, and named as one of ours is."""
    (folder / "plug_in_of_a_test.py").write_text(PARSER)
    about = folder / "plug_in_of_a_test-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plug-in-of-a-test\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(
        "[fsm_rollout.parsers]\n"
        "qwen3_coder = plug_in_of_a_test:Xml\n"
        "hermes = plug_in_of_a_test:Xml\n"
        "broken = plug_in_of_a_test:Missing\n"
        "raises = plug_in_of_a_test:Raises\n"
    )
    monkeypatch.syspath_prepend(folder)

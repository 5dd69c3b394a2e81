"""The documentation cannot rot: its code runs and prints what it shows, its links lead somewhere.

The examples in docstrings run as doctests, in modules that are each imported for it.

The ```python fences of a page are one program, run from top to bottom in a process of its own, as
a reader would. What it prints stands in the page as `#> ` comments. A fence opened with
```python no-run is shown only; say in the text why.

A fence with title="name" is a file of that name. In a ```console fence, what follows `$ ` is run
beside the page's files, and must print what follows; `...` stands for anything.
"""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fsm_rollout
from fsm_rollout.adapters.slime.config import config_of
from fsm_rollout.adapters.verl.settings import settings_of
from fsm_rollout.config import load_config, read_yaml
from fsm_rollout.states.diagram import mermaid

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r' title="([\w.]+)"$')
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
KINDS = {"python", "python no-run", "bash", "console", "text", "json", "yaml", "toml", "mermaid"}
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FREELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path, info: str) -> list[re.Match[str]]:
    return [m for m in FENCE.finditer(page.read_text()) if m["info"].strip() == info]


def program(page: Path) -> str:
    """The page's Python with all else blank, so that a traceback names the page's own lines."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for fence in fences(page, "python"):
        first = text.count("\n", 0, fence.start("body"))
        body = fence["body"].splitlines()
        lines[first : first + len(body)] = body
    return "\n".join(lines)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def as_here(command: str) -> list[str]:
    """The command with this very Python; its programs need not be on the PATH."""
    name, *rest = shlex.split(command)
    is_installed = bool(entry_points(group="pytest11", name="fsm_rollout"))
    plug_in = [] if is_installed else ["-p", "fsm_rollout.testing.plugin"]
    start = {"python": [], "pytest": ["-m", "pytest", *plug_in]}
    return [sys.executable, *start.get(name, ["-m", name.replace("-", "_")]), *rest]


RUNNABLE = [page for page in PAGES if fences(page, "python")]
SESSIONS = [page for page in PAGES if fences(page, "console")]


@pytest.mark.parametrize("page", RUNNABLE, ids=page_name)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = program(page)
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(source)
    done = run([sys.executable, "-W", "error", str(script)], tmp_path)
    assert done.returncode == 0, f"{page_name(page)}\n{done.stderr}"
    shown = re.findall(r"^ *#>(?: (.*))?$", source, re.MULTILINE)
    assert [line.rstrip() for line in done.stdout.splitlines()] == [s.rstrip() for s in shown]


@pytest.mark.parametrize("page", SESSIONS, ids=page_name)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for fence in FENCE.finditer(page.read_text()):
        if title := TITLE.search(fence["info"]):
            (tmp_path / title[1]).write_text(fence["body"])
    for fence in fences(page, "console"):
        for command, shown in COMMAND.findall(fence["body"]):
            done = run(as_here(command), tmp_path)
            is_as_shown = doctest.OutputChecker().check_output(shown, done.stdout, FREELY)
            assert is_as_shown, f"{page_name(page)}: {command}\n{done.stdout}{done.stderr}"


MODULES = [module.name for module in pkgutil.walk_packages(fsm_rollout.__path__, "fsm_rollout.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported_and_its_examples_are_true(name: str) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        # absent where the core is tested, or outside of the environment of that trainer
        if error.name in {"tokenizers", "torch", "transformers", "ray", "verl"}:
            pytest.skip(f"needs {error.name}")
        raise
    assert doctest.testmod(module).failed == 0


def test_the_front_page_and_the_tutorials_have_code_that_runs() -> None:
    runnable = {page_name(page) for page in RUNNABLE}
    assert "README.md" in runnable
    assert any(name.startswith("docs/tutorials/") for name in runnable)


def test_every_fence_is_of_a_known_kind() -> None:
    for page in PAGES:
        infos = [fence["info"].strip() for fence in FENCE.finditer(page.read_text())]
        assert {TITLE.sub("", info) for info in infos} <= KINDS, page_name(page)


def test_every_config_that_is_shown_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text()):
            if fence["info"].startswith("yaml"):
                path.write_text(fence["body"])
                match page.stem:
                    case "train-with-slime":
                        config_of(Namespace(**read_yaml(path)))
                    case "train-with-verl":
                        [entry] = read_yaml(path)
                        settings_of(entry)
                    case _:
                        load_config(path)


def test_the_diagrams_in_the_pages_are_the_one_that_the_table_gives() -> None:
    drawn = [fence["body"] for page in PAGES for fence in fences(page, "mermaid")]
    diagrams = [body.strip() for body in drawn if body.startswith("stateDiagram")]
    assert diagrams
    assert set(diagrams) == {mermaid().strip()}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
            to = page.parent / target if target else page
            assert to.exists(), f"{page_name(page)} links to {target}"
            assert not anchor or anchor in anchors(to), f"{page_name(page)} links to #{anchor}"


def anchors(page: Path) -> set[str]:
    """What a `#` may name in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}

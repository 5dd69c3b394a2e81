"""The documentation cannot rot: its code runs and prints what it shows, its links lead somewhere.

The examples in docstrings run as doctests, in modules that are each imported for it.

The ```python fences of a page are one program, run from top to bottom in a process of its own, as
a reader would. What it prints stands in the page as `#> ` comments. A fence opened with
```python no-run is shown only; say in the text why.
"""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fsm_rollout
from fsm_rollout.states.diagram import mermaid

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"python", "python no-run", "bash", "console", "text", "json", "yaml", "toml", "mermaid"}
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")


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


RUNNABLE = [page for page in PAGES if fences(page, "python")]


@pytest.mark.parametrize("page", RUNNABLE, ids=page_name)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = program(page)
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(source)
    command = [sys.executable, "-W", "error", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{page_name(page)}\n{done.stderr}"
    shown = re.findall(r"^ *#>(?: (.*))?$", source, re.MULTILINE)
    assert [line.rstrip() for line in done.stdout.splitlines()] == [s.rstrip() for s in shown]


MODULES = [module.name for module in pkgutil.walk_packages(fsm_rollout.__path__, "fsm_rollout.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported_and_its_examples_are_true(name: str) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name in {"tokenizers", "torch", "transformers"}:  # absent where the core is tested
            pytest.skip(f"needs {error.name}")
        raise
    assert doctest.testmod(module).failed == 0


def test_the_front_page_and_the_tutorials_have_code_that_runs() -> None:
    runnable = {page_name(page) for page in RUNNABLE}
    assert "README.md" in runnable
    assert any(name.startswith("docs/tutorials/") for name in runnable)


def test_every_fence_is_of_a_known_kind() -> None:
    for page in PAGES:
        kinds = {fence["info"].strip() for fence in FENCE.finditer(page.read_text())}
        assert kinds <= KINDS, page_name(page)


def test_the_diagrams_in_the_pages_are_the_one_that_the_table_gives() -> None:
    drawn = [fence["body"] for page in PAGES for fence in fences(page, "mermaid")]
    diagrams = [body.strip() for body in drawn if body.startswith("stateDiagram")]
    assert diagrams
    assert set(diagrams) == {mermaid().strip()}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            assert (page.parent / target).exists(), f"{page_name(page)} links to {target}"

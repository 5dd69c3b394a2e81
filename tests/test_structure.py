"""The shape of the house: file lengths, links, forbidden calls, the public names, import costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

import fsm_rollout

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = Path(fsm_rollout.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("aiohttp", "torch", "transformers")
RUNS_TEXT = {"eval", "exec", "pickle", "marshal", "shelve", "dill", "cloudpickle", "torch.load"}
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def called_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {module_name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_every_module_says_what_it_is() -> None:
    sources = {module_name(path): path.read_text() for path in MODULES}
    silent = [name for name, text in sources.items() if not ast.get_docstring(ast.parse(text))]
    assert [name for name in silent if sources[name]] == []


def test_no_module_runs_text_or_unpickles() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        used = {*called_names(tree), *imported_modules(tree)}
        assert not used & (RUNS_TEXT | UNSAFE_YAML), module_name(path)


def test_no_module_imports_from_the_facade() -> None:
    for path in MODULES:
        assert "fsm_rollout" not in imported_modules(ast.parse(path.read_text())), path


@pytest.mark.parametrize("room", ["states", "tools"])
def test_the_doors_at_the_root_are_links_into_the_package(room: str) -> None:
    assert os.readlink(ROOT / room) == f"fsm_rollout/{room}"


def test_the_core_group_is_the_dependencies_without_torch_and_transformers() -> None:
    names = {re.split(r"[<>=]", spec)[0] for spec in PROJECT["project"]["dependencies"]}
    assert set(PROJECT["dependency-groups"]["core"]) == names - {"torch", "transformers"}


def test_checkers_and_python_see_the_same_public_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen_by_checkers = {
        node.module: {alias.name for alias in node.names}
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    loaded_lazily = {f"fsm_rollout.{m}": set(names) for m, names in fsm_rollout._NAMES.items()}
    assert seen_by_checkers == loaded_lazily
    assert set(fsm_rollout.__all__) == set().union({"__version__"}, *loaded_lazily.values())


@pytest.mark.parametrize("name", sorted(set(fsm_rollout.__all__) - {"__version__"}))
def test_a_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    if name == "TransformersEngine":
        pytest.importorskip("torch")
    value = getattr(fsm_rollout, name)
    assert name in dir(fsm_rollout)
    assert value.__module__.startswith("fsm_rollout.")
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "that is what dataclass writes by itself"


def test_the_version_is_the_one_of_the_project() -> None:
    assert fsm_rollout.__version__ == PROJECT["project"]["version"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "Smaple"
    with pytest.raises(AttributeError, match="'fsm_rollout' has no attribute 'Smaple'"):
        getattr(fsm_rollout, name)


def cpu_seconds(statement: str) -> float:
    """CPU seconds of a new Python that runs the statement: steadier than the wall clock."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize(
    ("statement", "budget_s"),
    [
        ("import fsm_rollout", 0.100),
        ("from fsm_rollout import Request, Sample, Tool", 0.250),
    ],
)
def test_an_import_is_cheap_and_loads_nothing_heavy(statement: str, budget_s: float) -> None:
    heavy = f"import sys; loaded = set({HEAVY}) & set(sys.modules); assert not loaded, loaded"
    bare, cost = [], []
    for _ in range(5):  # interleaved, so that a busy moment hits both
        bare.append(cpu_seconds("import sys"))
        cost.append(cpu_seconds(f"{statement}; {heavy}"))
    # The budget is stated for a machine on which bare Python takes 20 ms or less.
    slowness = max(1.0, min(bare) / 0.020)
    assert min(cost) - min(bare) <= budget_s * slowness, (min(cost), min(bare))

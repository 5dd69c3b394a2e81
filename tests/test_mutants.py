"""The planted bugs of tests/mutants still apply to the code; `make mutants` runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.run import copy_to

ROOT = Path(__file__).parents[1]
MUTANTS = sorted((ROOT / "tests/mutants").glob("*.patch"))


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_planted_bug_still_applies_and_says_what_it_is(patch: Path) -> None:
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
    assert not patch.read_text().startswith(("---", "diff"))


def test_the_property_tests_are_whole_in_their_copy(tmp_path: Path) -> None:
    """Else each of them ends as broken, and no bug is looked for."""
    copy_to(tmp_path)
    command = [sys.executable, "-m", "pytest", "tests/properties", "--collect-only", "-q"]
    pytest = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert pytest.returncode == 0, pytest.stdout + pytest.stderr


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 15

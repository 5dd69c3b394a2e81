"""The planted bugs of tests/mutants still apply to the code; `make mutants` runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MUTANTS = sorted((ROOT / "tests/mutants").glob("*.patch"))


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_planted_bug_still_applies_and_says_what_it_is(patch: Path) -> None:
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
    assert not patch.read_text().startswith(("---", "diff"))


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 15

"""Plants each bug of tests/mutants/*.patch in a copy of the code; property tests must see it.

    python tests/mutants/run.py [NAME ...] [--jobs 2]

A patch's first lines say what the bug is. The copy holds the package and tests/properties, nothing
else. Exits 1 when a bug survives, a patch does not apply, or the tests fail without any bug.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MUTANTS = sorted(Path(__file__).parent.glob("*.patch"))
TIMEOUT_S = 600.0


class Result(NamedTuple):
    name: str
    outcome: str
    seconds: float
    seen_by: str


def run(patch: Path | None) -> Result:
    """The property tests on a copy with the bug in it, or without any."""
    name, started = patch.stem if patch else "no bug", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        copy_to(copy)
        if patch is not None:
            applied = subprocess.run(["git", "apply", patch], cwd=copy, check=False)
            if applied.returncode:
                return Result(name, "does not apply", time.monotonic() - started, "")
        outcome, seen_by = test(copy)
    return Result(name, outcome, time.monotonic() - started, seen_by)


def copy_to(folder: Path) -> None:
    """What the property tests need, and nothing else."""
    kept = shutil.ignore_patterns("__pycache__")
    for part in ("fsm_rollout", "tests/properties"):
        shutil.copytree(ROOT / part, folder / part, ignore=kept)
    for part in ("tests/conftest.py", "tests/clock.py", "pyproject.toml"):
        shutil.copy(ROOT / part, folder / part)


def test(copy: Path) -> tuple[str, str]:
    """killed or survived, and the first test that failed."""
    path = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "pytest", "tests/properties", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command.append("--timeout=0")  # TIMEOUT_S is the only clock: a busy machine kills no mutant
    try:
        pytest = subprocess.run(
            [sys.executable, *command],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path, "HYPOTHESIS_PROFILE": "mutants"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed", f"no end within {TIMEOUT_S:.0f} s"
    if pytest.returncode > 1:  # neither passed nor failed: nothing was tested
        return "broken", pytest.stdout[-400:] + pytest.stderr[-400:]
    failed = [line for line in pytest.stdout.splitlines() if line.startswith("FAILED")]
    seen_by = failed[0].partition("::")[2].partition(" - ")[0] if failed else ""
    return ("killed" if pytest.returncode else "survived"), seen_by


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of the mutants to run; all without one")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [patch for patch in MUTANTS if not options.names or patch.stem in options.names]
    if not chosen:
        parser.error(f"no such mutant; there are {', '.join(patch.stem for patch in MUTANTS)}")
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, [None, *chosen]):
            results.append(result)
            print(
                f"{result.name:36}{result.outcome:16}{result.seconds:6.1f} s  {result.seen_by}",
                flush=True,
            )
    no_bug, *mutants = results
    killed = sum(result.outcome == "killed" for result in mutants)
    print(f"{killed} of {len(mutants)} planted bugs killed; without a bug: {no_bug.outcome}")
    return 0 if killed == len(mutants) and no_bug.outcome == "survived" else 1


if __name__ == "__main__":
    sys.exit(main())

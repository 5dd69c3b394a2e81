"""The long property run: a million effective steps through the machine, counted per edge and fault.

    python tests/properties/soak.py --json FILE [--steps 1000000] [--seed 0] [--jobs 2]

The operations, strategies and reference are those of `fsm_rollout.testing.machines`; in place of
Hypothesis' engine a seeded generator chooses, which is several times as fast and doesn't shrink: a
violation is printed with the operations of its request. Exits 1 on a violation or an untaken edge.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fsm_rollout.testing.faults import setups
from fsm_rollout.testing.machines import EDGE_NAMES, OPERATIONS
from fsm_rollout.testing.operations import Player

POOL = 1_000
"""values that are drawn once from each strategy"""
WEIGHTS = {"play": 12.0, "renew": 6.0, "give_up": 0.05, "reset": 0.3, "at_rest": 0.3, "tamper": 0.3}
"""how often an operation is chosen; 1 for all others"""


class Outcome(NamedTuple):
    """Of one process."""

    steps: int
    violations: list[str]
    coverage: Counter[tuple[str, str]]


def pool(strategy: st.SearchStrategy[Any], *, seed_with: int) -> list[Any]:
    """Up to POOL values of `strategy`, the same for the same seed."""
    values: list[Any] = []

    @seed(seed_with)
    @settings(
        max_examples=POOL,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(strategy)
    def draw(value: Any) -> None:
        values.append(value)

    draw()
    return values


def soak(steps: int, seed_with: int) -> Outcome:
    """One process: requests of up to 60 operations until `steps` were effective."""
    choose = random.Random(seed_with)
    starts = pool(setups, seed_with=seed_with)
    pools = {
        name: {key: pool(strategy, seed_with=seed_with) for key, strategy in strategies.items()}
        for name, (_, strategies) in OPERATIONS.items()
    }
    names, weights = list(OPERATIONS), [WEIGHTS.get(name, 1.0) for name in OPERATIONS]
    coverage: Counter[tuple[str, str]] = Counter()
    player, violations = Player((), coverage), list[str]()
    while player.steps < steps and len(violations) < 10:
        player.start(choose.choice(starts))
        story = [f"start {player.setup}"]
        try:
            for name in choose.choices(names, weights, k=60):
                operation, _ = OPERATIONS[name]
                arguments = {key: choose.choice(values) for key, values in pools[name].items()}
                story.append(f"{name} {arguments}")
                operation(player, **arguments)
                player.check()
        except Exception:
            violations.append("\n".join([*story, traceback.format_exc()]))
    return Outcome(player.steps, violations, coverage)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the counts")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started, share = time.monotonic(), -(-options.steps // options.jobs)
    seeds = range(options.seed, options.seed + options.jobs)
    with ProcessPoolExecutor(options.jobs) as processes:
        outcomes = list(processes.map(soak, [share] * options.jobs, seeds))
    coverage = sum((outcome.coverage for outcome in outcomes), Counter[tuple[str, str]]())
    violations = [story for outcome in outcomes for story in outcome.violations]
    untaken = sorted(EDGE_NAMES - {name for name, _ in coverage})
    counts: dict[str, dict[str, int]] = {}
    for (name, fault), count in sorted(coverage.items()):
        counts.setdefault(name, {})[fault] = count
    report = {
        "steps": sum(outcome.steps for outcome in outcomes),
        "seed": options.seed,
        "jobs": options.jobs,
        "seconds": round(time.monotonic() - started, 1),
        "violations": len(violations),
        "untaken_edges": untaken,
        "edges": {name: counts[name] for name in counts if name in EDGE_NAMES},
        "operations": {name: counts[name] for name in counts if name not in EDGE_NAMES},
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    for story in violations:
        print(story, file=sys.stderr)
    print({name: value for name, value in report.items() if name not in ("edges", "operations")})
    return 1 if violations or untaken else 0


if __name__ == "__main__":
    sys.exit(main())

"""`make soak` and what bench/ measures, in small: they run, and their JSON holds what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.testing.machines import EDGE_NAMES

ROOT = Path(__file__).parents[1]


def report_of(script: str, folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "report.json"
    command = [sys.executable, str(ROOT / script), "--json", str(path), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_a_short_soak_takes_every_edge_and_finds_nothing(tmp_path: Path) -> None:
    report = report_of("tests/properties/soak.py", tmp_path, "--steps", "10000", "--jobs", "1")
    assert report["steps"] >= 10_000
    assert (report["violations"], report["untaken_edges"]) == (0, [])
    assert set(report["edges"]) == EDGE_NAMES
    assert all(count > 0 for faults in report["edges"].values() for count in faults.values())


def test_a_short_bench_measures_four_ways_to_fire(tmp_path: Path) -> None:
    report = report_of("bench/fire.py", tmp_path, "--repeats", "3", "--fires", "1000")
    names = {"dict_us", "fire_us", "fire_listener_us", "stock_us"}
    assert all(report[name] > 0 for name in names)  # in which order, a busy machine may upset
    assert set(report["median"]) == names


def test_a_short_bench_compares_a_turn_with_a_bare_loop_and_httpx(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = report_of("bench/turn.py", tmp_path, "--quick", "--repeats", "1", "--in-flight", "8")
    rows = {(row["context"], row["observation"]): row for row in report["rows"]}
    assert set(rows) == set(product([1_024, 8_192], ["pre-encoded", "to-encode"]))
    for row in rows.values():
        assert all(row[f"{name}_us"] > 0 for name in ("aiohttp_floor", "ours", "httpx"))


def test_a_short_load_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    few = ("--requests", "24", "--turns", "2", "--quick", "--modes", "tuned")
    figures = report_of("bench/load.py", tmp_path, *few)["tuned"]
    assert (figures["requests"], figures["turns"]) == (24, 48)
    assert (figures["lost"], figures["violations"]) == (0, 0)
    assert figures["loop_lag_ms"]["p50"] <= figures["loop_lag_ms"]["max"]


def test_a_short_bench_compares_a_batch_with_memcpy_and_lists(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    few = ("--quick", "--repeats", "1", "--few", "2")
    report = report_of("bench/handover.py", tmp_path, *few)
    assert all(report["us"][name] > 0 for name in ("padded_memcpy", "padded", "lists"))
    assert set(report["ratio"]) == {"padded / memcpy", "packed / memcpy", "lists / padded"}

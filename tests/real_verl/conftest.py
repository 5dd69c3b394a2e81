"""One ray for the modules that play with verl's managers."""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A ray of our own, and the TransferQueue in it."""
    import ray
    import transfer_queue as tq

    from tests.real_verl.setting import config

    # ray kills workers when the machine is short of memory, whoever uses it: a test would hang
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    root = str(Path(__file__).parents[2])

    def find_tests() -> None:  # some package of verl's environment installs a `tests` of its own
        import sys
        import types

        sys.modules["tests"] = types.ModuleType("tests")
        sys.modules["tests"].__path__ = [f"{root}/tests"]

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        runtime_env={
            "env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            "worker_process_setup_hook": find_tests,
        },
    )
    tq.init(config().transfer_queue)
    yield
    tq.close()
    ray.shutdown()

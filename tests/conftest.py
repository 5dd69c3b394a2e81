"""What every test runs under: no network hub, one thread per process, a Hypothesis profile, short
collections of garbage, and event loops to which a machine that stalls is no time (tests/clock.py).

HYPOTHESIS_PROFILE picks `dev` (default), `ci` (default where CI is set; the same examples in every
run) or `deep`.
"""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
from hypothesis import Phase, settings

from fsm_rollout import failures
from tests.clock import Unhurried

# Before torch and huggingface_hub are imported; they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

asyncio.new_event_loop = asyncio.events.new_event_loop = Unhurried  # asyncio.run takes the latter

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("deep", max_examples=5_000, deadline=None)
# of tests/mutants/run.py, which asks whether a test fails and not for the smallest case
settings.register_profile(
    "mutants", max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_collection_finish() -> None:
    """Leave what is imported out of collections, which would take 0.2 s in the middle of a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_failure_was_logged() -> None:
    """What another test logged is not why this one logs less."""
    failures._failures.clear()

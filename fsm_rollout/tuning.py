"""Tuning: process-wide settings for thousands of requests in flight. Opt-in, restored afterwards.

Python's collector walks every live object again and again while requests are in flight: by default
that is near half the cost of a turn at 5,000 of them. uvloop, when it is installed, halves the rest
of what the event loop costs.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 50, 1_000)
"""young objects before a collection, and how many of those before older ones are walked"""


@contextmanager
def tuned_gc() -> Iterator[None]:
    """Collect rarely, and leave what exists now out of it; restored at the end."""
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not is_frozen:  # else whoever froze it keeps it
        gc.collect()
        gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop's event loop; None, for asyncio's own, where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

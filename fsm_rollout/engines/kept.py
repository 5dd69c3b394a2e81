"""Kept: computed sequences of ended turns, found by the longest prefix that a prompt shares.

The batcher owns it. In sorted order, whoever shares the longest prefix with a prompt stands next to
where the prompt would stand: it takes a binary search to find it, however many are kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fsm_rollout.engines.ragged import KeyValues

Ids = npt.NDArray[np.int32]


class Kept:
    """One sequence per session, `max_tokens` in all: what was put first is the first to go."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_session: OrderedDict[str, tuple[bytes, KeyValues]] = OrderedDict()
        self._in_order: list[tuple[bytes, str]] = []  # by bytes: any order of ids will do

    def __len__(self) -> int:
        return len(self._by_session)

    def __getitem__(self, session_id: str) -> KeyValues:
        return self._by_session[session_id][1]

    def put(self, session_id: str, ids: Ids, cache: KeyValues) -> None:
        """Keep the session's sequence `ids`, which `cache` holds, in place of an earlier one."""
        self.take(session_id)
        key = ids.tobytes()
        self._by_session[session_id] = key, cache
        insort(self._in_order, (key, session_id))
        self._num_tokens += len(ids)
        while self._num_tokens > self._max_tokens:
            self.take(next(iter(self._by_session)))

    def take(self, session_id: str) -> None:
        """Keep the session's sequence no longer, if there is one."""
        if session_id in self._by_session:
            key, _ = self._by_session.pop(session_id)
            del self._in_order[bisect_left(self._in_order, (key, session_id))]
            self._num_tokens -= len(key) // 4

    def clear(self) -> None:
        """Keep nothing."""
        self._by_session.clear()
        self._in_order.clear()
        self._num_tokens = 0

    def longest(self, ids: Ids, session_id: str) -> tuple[int, str | None]:
        """How many first `ids` a sequence has in common with them, at most, and whose that is.

        Of equals the session's own; None: nobody has the first.
        """
        key, shared, whose = ids.tobytes(), 0, None
        at = bisect_left(self._in_order, (key,))
        found = self._in_order[max(at - 1, 0) : at + 1]
        if session_id in self._by_session:
            found.insert(0, (self._by_session[session_id][0], session_id))
        for other, session in found:
            if (length := _common(key, other)) > shared:
                shared, whose = length, session
        return shared, whose


def common(left: Ids, right: Ids) -> int:
    """How many ids the two have in common from the start."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def _common(left: bytes, right: bytes) -> int:
    return common(np.frombuffer(left, np.int32), np.frombuffer(right, np.int32))

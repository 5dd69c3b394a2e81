"""Kept: what is found is the longest prefix of all, as a look at each of them finds it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.engines.kept import Kept

ID = st.sampled_from([0, 256, 2**31 - 1])  # their bytes are in another order than they are
IDS = st.lists(ID, max_size=5)
SESSION = st.sampled_from("abcd")


def int32(ids: list[int]) -> Any:
    return np.array(ids, np.int32)


def common(left: list[int], right: list[int]) -> int:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return size


@given(
    steps=st.lists(st.tuples(SESSION, IDS | IDS | st.none()), min_size=1, max_size=12),
    max_tokens=st.sampled_from([0, 7, 15, 1_000]),
    prompts=st.lists(IDS, min_size=4, max_size=4),
)
def test_the_longest_shared_prefix_is_found_whatever_was_put_taken_or_crowded_out(
    steps: list[tuple[str, list[int] | None]], max_tokens: int, prompts: list[list[int]]
) -> None:
    kept, plain = Kept(max_tokens), dict[str, list[int]]()  # the oldest first
    for session, ids in steps:
        plain.pop(session, None)
        if ids is None:
            kept.take(session)
            continue
        cache: Any = (session, ids)
        kept.put(session, int32(ids), cache)
        plain[session] = ids
        while sum(map(len, plain.values())) > max_tokens:
            del plain[next(iter(plain))]
        held: list[Any] = [kept[session] for session in plain]
        assert held == list(plain.items())
        assert len(kept) == len(plain)
    for prompt, asking in zip(prompts, "abcd", strict=True):
        shared = {session: common(prompt, ids) for session, ids in plain.items()}
        most = max(shared.values(), default=0)
        length, whose = kept.longest(int32(prompt), asking)
        assert length == most
        best: set[str | None] = {session for session, size in shared.items() if size == most > 0}
        assert whose == asking if asking in best else whose in (best or {None})
    kept.clear()
    assert (len(kept), kept.longest(int32([0]), "a")) == (0, (0, None))

"""Reply: what the fake engine says of one generation, in no wire's words yet. Faults spoil it here.

A fault of content is a change of this record: it shows on both wires and in all streaming modes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fsm_rollout.testing.fake_engine.schedule import Job


class Reply(msgspec.Struct, kw_only=True):
    """One generation. Its lists may differ in length once a fault has been at them."""

    rid: str
    prompt_tokens: int
    prompt_items: bytes
    """what an echo of the prompt shows, JSON array items"""
    limit: int
    """how many tokens were asked for"""
    streams: bool
    ids: list[int]
    log_probs: list[Any] | None  # [N], floats, or what a fault puts there; None: not asked for
    log_prob_ids: list[int] | None = None  # [N]; None: the same as ids
    finish: str | None
    matched: int | None = None
    abort_status: int | None = None
    """with finish abort: the HTTP status that the server blames"""
    was_waiting: bool = False
    """aborted before it ran"""
    completion_error: int = 0
    """added to every count of the ids"""
    version_change: tuple[str, float] | None = None
    """(new version, share of the ids before it)"""
    version: str = ""
    """of the weights, now"""
    spans: list[dict[str, Any]] = []
    """runs {version, start, end} that tile the ids so far, as both wires spell them"""

    @property
    def ids_of_log_probs(self) -> list[int]:
        return self.ids if self.log_prob_ids is None else self.log_prob_ids

    def cut(self, count: int) -> None:
        """Aborted with `count` ids out."""
        self.ids = self.ids[:count]
        if self.log_probs is not None:
            self.log_probs = self.log_probs[:count]
        if self.log_prob_ids is not None:
            self.log_prob_ids = self.log_prob_ids[:count]
        self.finish, self.matched = "abort", None

    def set_versions(self, job: Job, version: str, count: int) -> None:
        """Which weights made the first `count` ids, when the server has `version` by now."""
        changes = [*job.changes, (version, count)]
        if self.version_change is not None:
            version, share = self.version_change
            changes = [(changes[0][0], int(share * len(self.ids))), (version, count)]
        self.version, self.spans, start = version, [], 0
        for name, end in changes:
            end = min(end, count)
            if end > start:
                self.spans.append({"version": name, "start": start, "end": end})
                start = end

"""Schedule: the generations that run on one fake engine. Their tokens appear evenly over time.

The ids of a job are known when it starts; how many of them are out is a matter of the clock. So an
abort in the middle returns what was out, a pause stops the clock, and no timer runs per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Literal

import msgspec

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.fake_engine.answers import LogNormal

PauseMode = Literal["abort", "wait", "freeze"]


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a generation takes: `total_s`, plus `per_token_s`. Tokens come evenly over that."""

    total_s: LogNormal = LogNormal(0.0)
    per_token_s: float = 0.0
    chunk_tokens: int = 1
    """a stream tells so many tokens per event"""

    def __post_init__(self) -> None:
        if self.per_token_s < 0 or self.chunk_tokens < 1:
            raise ConfigError(f"per_token_s must be >= 0 and chunk_tokens >= 1, got {self}")

    def seconds(self, num_tokens: int, seed: int) -> float:
        return self.total_s.draw(f"latency {seed}") + self.per_token_s * num_tokens


class Job:
    """One generation: `num_tokens` ids over `seconds`, after `lead_s`. Made by `Schedule.start`."""

    __slots__ = (
        "_left",
        "_schedule",
        "_since",
        "_waker",
        "changes",
        "is_aborted",
        "lead_s",
        "num_tokens",
        "rid",
        "seconds",
        "was_waiting",
    )

    def __init__(
        self, schedule: Schedule, rid: str, num_tokens: int, seconds: float, lead_s: float
    ) -> None:
        self.rid, self.num_tokens = rid, num_tokens
        self.seconds, self.lead_s = seconds, lead_s
        self.is_aborted = False
        self.was_waiting = False
        """aborted before it ran"""
        self.changes: list[tuple[str, int]] = []
        """(old weight version, tokens that were out when it changed)"""
        self._schedule = schedule
        self._since: float | None = None  # on the schedule's clock; None: not started
        self._waker: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._since is not None

    @property
    def out(self) -> int:
        """How many ids are out."""
        if self.is_aborted:
            return self.num_tokens
        if self._since is None:
            return 0
        passed = self._schedule.now() - self._since - self.lead_s
        if passed < 0:
            return 0
        if passed >= self.seconds:
            return self.num_tokens
        return int(passed / self.seconds * self.num_tokens + 1e-6)

    async def until(self, count: int) -> None:
        """Wait until `count` ids are out, or it is aborted."""
        schedule = self._schedule
        share = count / self.num_tokens if self.num_tokens else 1.0
        while not self.is_aborted:
            if self._since is None and not schedule.is_holding:
                self._since = schedule.now()
                schedule.num_running += 1
            left = None
            if self._since is not None and not schedule.is_frozen:
                left = self._since + self.lead_s + share * self.seconds - schedule.now()
                if left <= 0:
                    return
            await self._sleep(left)

    def wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def abort(self) -> None:
        if not self.is_aborted:
            self.num_tokens = self.out
            self.was_waiting = self._since is None
            self.is_aborted = True
            self.wake()

    async def _sleep(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waker = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._waker
        finally:
            self._waker = None
            if timer is not None:
                timer.cancel()


class Schedule:
    """All jobs of a server, what they may do, and the weight version they run with."""

    def __init__(self, version: str) -> None:
        self.jobs: dict[str, set[Job]] = {}
        """by rid"""
        self.version = version
        self.is_frozen = False
        """nothing makes progress"""
        self.is_holding = False
        """nothing new starts"""
        self.num_jobs = 0
        self.num_running = 0
        self._stopped_at = 0.0
        self._lost_s = 0.0
        self._idle = asyncio.Event()

    def now(self) -> float:
        """Seconds in which jobs could run."""
        real = asyncio.get_running_loop().time()
        return (self._stopped_at if self.is_frozen else real) - self._lost_s

    def start(self, rid: str, num_tokens: int, seconds: float, lead_s: float = 0.0) -> Job:
        job = Job(self, rid, num_tokens, seconds, lead_s)
        self.jobs.setdefault(rid, set()).add(job)
        self.num_jobs += 1
        return job

    def finish(self, job: Job) -> None:
        same = self.jobs[job.rid]
        same.discard(job)
        if not same:
            del self.jobs[job.rid]
        self.num_jobs -= 1
        self.num_running -= job.is_running
        if not self.num_running:
            self._idle.set()

    def abort(self, rids: Iterable[str]) -> None:
        """Abort the jobs of exactly these ids; unknown ones are ignored."""
        for rid in rids:
            for job in self.jobs.get(rid, ()):
                job.abort()

    def abort_where(self, matches: Callable[[str], bool]) -> int:
        """Abort the jobs whose id matches; how many ids those were."""
        rids = [rid for rid in self.jobs if matches(rid)]
        self.abort(rids)
        return len(rids)

    async def pause(self, mode: PauseMode) -> None:
        """Start nothing new; what runs is aborted, awaited or frozen. Returns when that is done."""
        self.is_holding = True
        if mode == "freeze":
            self._freeze()
            return
        if mode == "abort":
            self.abort(self.jobs)
        if self.num_running:
            self._idle.clear()
            await self._idle.wait()

    def resume(self) -> None:
        self.is_holding = False
        if self.is_frozen:
            self._lost_s += asyncio.get_running_loop().time() - self._stopped_at
            self.is_frozen = False
        self._wake_all()

    def set_version(self, version: str) -> None:
        """What runs goes on with the new weights, and knows how far the old ones came."""
        for job in chain.from_iterable(self.jobs.values()):
            job.changes.append((self.version, job.out))
        self.version = version

    def _freeze(self) -> None:
        if not self.is_frozen:
            self._stopped_at = asyncio.get_running_loop().time()
            self.is_frozen = True
            self._wake_all()

    def _wake_all(self) -> None:
        for job in chain.from_iterable(self.jobs.values()):
            job.wake()

"""RewardPart: one reward function, how it is called, and what it may return.

A function takes a finished request and gives its score. It may be sync (it runs in a thread) or
async. Whatever it does, raise, hang or answer nonsense, is a RewardError of the requests that it
was called for, and of no other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

import msgspec

from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.failures import describe, log_failure, message, shown
from fsm_rollout.request import Request
from fsm_rollout.rewards.batch import Batcher
from fsm_rollout.rewards.worker import Workers, check_importable
from fsm_rollout.tools.base import finite
from fsm_rollout.tools.signature import why_not_one_argument
from fsm_rollout.tools.supervisor import MAX_THREADS, Flight, Outcome, gate
from fsm_rollout.turn import Turn

Score: TypeAlias = float | Mapping[str, float | Sequence[float | None] | None] | None
"""a number; or named parts, each a number or one number per model turn (step rewards; None: none
for that turn); or None: no reward"""
RewardFunction: TypeAlias = Callable[[Request], Score | Awaitable[Score]]

logger = logging.getLogger(__name__)


class RewardError(RolloutError):
    """The reward could not be computed; the loop aborts the request as reward_error."""


@dataclass(eq=False, kw_only=True)
class RewardPart:
    """A reward function and how it is called.

    RewardPart(verify, weight=2.0, timeout_s=5, processes=4)   # CPU-heavy: four processes
    RewardPart(judge, batch=32)                                # a list of up to 32 requests
    RewardPart(novelty, group=True)                            # all usable requests of a group

    A function of a list returns a list of scores, in the order of the requests. Raises ConfigError
    when the options contradict each other, or a function cannot be found from another process.
    """

    function: Callable[..., Any] = field(kw_only=False)
    weight: float = 1.0
    """0: the part is recorded but not counted"""
    timeout_s: float | None = None
    """seconds of one call, not of the wait for it; None: Limits.tool_timeout_s"""
    batch: int | None = None
    """the most requests of one call; those that come while a call runs go into the next one"""
    batch_wait_s: float = 0.05
    """how long a batch that is not full waits for more"""
    group: bool = False
    """called once per group, when all its requests have ended, with those that are not ABORTED"""
    processes: int | None = None
    """run in as many processes of its own: for sync functions that hold the GIL, or hang in C; one
    that is out of time is killed"""

    def __post_init__(self) -> None:
        name = f"reward function {getattr(self.function, '__qualname__', repr(self.function))}"
        if not callable(self.function):
            raise ConfigError(f"{name} is not callable; give a function of a request")
        if not isinstance(self.weight, int | float) or not -inf < self.weight < inf:
            raise ConfigError(f"{name}: weight must be a finite number, got {self.weight!r}")
        if self.timeout_s is not None and not 0 < self.timeout_s < inf:
            raise ConfigError(f"{name}: timeout_s must be > 0 seconds, got {self.timeout_s!r}")
        for option in ("batch", "processes"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}: {option} must be >= 1, got {value!r}")
        if not 0 <= self.batch_wait_s < inf:
            raise ConfigError(f"{name}: batch_wait_s must be >= 0, got {self.batch_wait_s!r}")
        if self.group and self.batch is not None:
            raise ConfigError(f"{name}: a group is one call; give `group` or `batch`, not both")
        self._label = name
        self._is_async = inspect.iscoroutinefunction(self.function)
        self._workers: Workers | None = None
        if self.processes is not None:
            if self._is_async:
                raise ConfigError(f"{name} is async: `processes` are for sync functions")
            check_importable(self.function, name)
            self._workers = Workers(self.processes)
        if why := why_not_one_argument(self.function):
            what = (
                "a list of finished requests" if self.group or self.batch else "a finished request"
            )
            raise ConfigError(f"{name} {why}; it is called with {what}")
        self._here = _Here()

    async def score(self, request: Request) -> object:
        """What the function says of the request, not read yet. Raises RewardError."""
        if self.batch is None:
            return await self._call(request, [request])
        here, loop = self._here, asyncio.get_running_loop()
        if here.batcher is None or here.loop is not loop:
            calls = self.processes or 1
            here.batcher = Batcher(self._call_for_all, self.batch, self.batch_wait_s, calls=calls)
            here.loop = loop
        return await here.batcher.score(request)

    async def score_group(self, requests: Sequence[Request]) -> list[object]:
        """The same for each of the usable requests of a group, by one call."""
        return await self._call_for_all(list(requests))

    async def _call_for_all(self, requests: list[Request]) -> list[object]:
        scores = _plain(await self._call(requests, requests))
        if not isinstance(scores, list | tuple) or len(scores) != len(requests):
            got = f"{len(scores)} scores" if isinstance(scores, list | tuple) else shown(scores)
            raise RewardError(
                f"{self._label} returned {got} for {len(requests)} requests; "
                "return a list with one score for each, in their order"
            )
        return list(scores)

    async def _call(self, given: Request | list[Request], requests: list[Request]) -> Any:
        """One call of the function: in the event loop, in a thread, or in a process of ours."""
        timeout_s = self.timeout_s or requests[0].limits.tool_timeout_s
        if self._workers is not None:
            outcome = await self._workers.call(self.function, given, timeout_s)
        elif self._is_async:
            outcome = await self._fly(given, timeout_s)
        else:
            async with gate("reward threads", MAX_THREADS):  # tools have theirs
                outcome = await self._fly(given, timeout_s)
        if outcome is None:
            raise RewardError(f"{self._label} gave no value within {timeout_s:g} s")
        value, error = outcome
        if error is not None:
            numbers = ", ".join(str(request.index) for request in requests)
            where = f"request {numbers}"
            if self._workers is None:
                log_failure(logger, where, self._label, f"raised {describe(error)}", error)
            else:  # which says where in its own process; here stands only how it was asked
                text = message(error)
                _, has_frames, frame = text.rpartition("\n  File ")
                place = frame.partition("\n")[0] if has_frames else text.partition(":")[0]
                log_failure(logger, where, self._label, f"raised {text}", place=place)
            raise RewardError(f"{self._label} raised {describe(error)}") from error
        return value

    async def _fly(self, given: Request | list[Request], timeout_s: float) -> Outcome | None:
        flight = Flight(
            lambda: self.function(given),
            in_thread=not self._is_async,
            where="rewards",
            what=self._label,
            on_abandon=lambda: None,
        )
        try:
            is_done = await flight.settle(timeout_s)
        finally:
            if not flight.is_done:
                await flight.stop()
        return flight.task.result() if is_done else None


class _Here(threading.local):
    """The batcher of the event loop that runs in this thread."""

    loop: asyncio.AbstractEventLoop | None = None
    batcher: Batcher | None = None


class Given(msgspec.Struct):
    """What a function returned, read."""

    parts: dict[str, float] = {}
    """by name, not weighted"""
    steps: list[float | None] | None = None
    """one per model turn"""

    @property
    def total(self) -> float | None:
        """The sum of the parts; None: there is none."""
        return as_finite("the sum", sum(self.parts.values())) if self.parts else None


def read(score: object, name: str, *, prefix: str, num_turns: int) -> Given:
    """`score` as named parts: `name` for a number, `prefix` and its own name for one of a mapping.

    Raises RewardError for what is no finite number, or step rewards of another number of turns.
    """
    score = _plain(score)
    if score is None:
        return Given()
    if not isinstance(score, dict):
        return Given({name: as_finite(name, score)})
    given = Given({})
    for key, value in score.items():
        part, value = f"{prefix}{key}", _plain(value)
        if isinstance(value, list | tuple):
            steps = [None if v is None else as_finite(part, v) for v in map(_plain, value)]
            if len(steps) != num_turns:
                raise RewardError(
                    f"reward {part!r} has {len(steps)} step rewards for {num_turns} model turns; "
                    "give one for each (None: none), in order: fsm_rollout.rewards.model_turns"
                )
            given.steps = add_steps(given.steps, steps, 1.0)
            said = [step for step in steps if step is not None]
            if said:
                given.parts[part] = as_finite(part, sum(said))
        elif value is not None:
            given.parts[part] = as_finite(part, value)
    return given


def add_steps(
    known: list[float | None] | None, more: list[float | None], weight: float
) -> list[float | None]:
    """The sums turn by turn, `more` weighted; None where neither has one."""
    return [
        a if b is None else weight * b + (a or 0.0)
        for a, b in zip(known or [None] * len(more), more, strict=True)
    ]


def model_turns(request: Request) -> list[Turn]:
    """The turns that step rewards are for, in order: the model's, in all samples of the request."""
    return [turn for sample in request.samples for turn in sample.turns if turn.kind == "model"]


def _plain(value: Any) -> Any:
    """An array or tensor as the numbers and lists that it holds, a mapping with names as keys."""
    try:
        if isinstance(value, Mapping):
            return {str(key): part for key, part in value.items()}
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception as error:  # of the user's own class
        raise RewardError(f"a score cannot be read: {describe(error)}") from error


def as_finite(name: str, value: object) -> float:
    """A finite number as a float. Raises RewardError that names the part."""
    try:
        return finite(value, what=f"reward {name!r}")
    except Exception as error:  # a number may be of the user's own class
        raise RewardError(f"{error}; return a finite number, named parts, or None") from error

"""RolloutWorker: TRL's RolloutWorkerProtocol for its AsyncGRPOTrainer, in a thread of this process.

Plays groups without an end and puts scored samples into a bounded buffer. What goes wrong in a
sample costs the sample, what goes wrong in a group the group; the worker goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from fsm_rollout.adapters.advantages import group_advantages
from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.trl.environment import Environment
from fsm_rollout.adapters.trl.loop_thread import LoopThread
from fsm_rollout.adapters.trl.rollouts import Entry, play
from fsm_rollout.adapters.trl.rows import Played, RowSource, prompt_row
from fsm_rollout.dataset import checked_rows
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.metrics import metrics_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    from multiprocessing.queues import Queue as MPQueue

    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

logger = logging.getLogger(__name__)

_FULL_S = 0.05
"""how often a full buffer is looked at"""
_PAUSE_S = 1.0
"""how long a group without a sample keeps its place: a dead engine must not make the worker spin"""


class RolloutWorker:
    """`AsyncGRPOTrainer(..., rollout_worker=RolloutWorker(rollout, rows, num_generations=8))`.

    `rollout` samples as the trainer recomputes: its temperature is the trainer's. `rows` are played
    in order, again and again: columns as in RolloutFunc, but prompts may be equal. `environment`:
    what `rollout` has the tools, and maybe the reward, of. `max_groups`: groups that are played, or
    wait for room in the buffer. `max_buffered`: samples in the buffer. `scale`: advantages are
    divided by the group's standard deviation. `first_group`: where a resumed run goes on.

    A request of several samples (forks, sub-agents) gives as many rows with one advantage; only
    samples that `handover.sift` lets through are put into the buffer, and the rest is logged.
    `model_version` of a row is the one that was live when its group began: the oldest in it.
    """

    def __init__(
        self,
        rollout: Rollout,
        rows: RowSource,
        *,
        num_generations: int,
        environment: Environment | None = None,
        max_groups: int = 16,
        max_buffered: int = 1_024,
        scale: bool = True,
        first_group: int = 0,
    ) -> None:
        least = {"num_generations": 2, "max_groups": 1, "max_buffered": 1}
        for name, value in least.items():
            if (given := locals()[name]) < value:
                raise ConfigError(f"RolloutWorker: {name} must be >= {value}, got {given}")
        if names := rollout.loop.rewards.by_group:
            raise ConfigError(
                f"RolloutWorker: the reward {names[0]!r} is a group's, and requests "
                "are scored one by one; give the rollout a reward without it"
            )
        if not len(rows):
            raise ConfigError("RolloutWorker: no rows")
        for number, row in enumerate(rows):
            checked_rows([prompt_row(row, where=f"row {number}")], rollout.tools)
        self.rollout_buffer: queue.Queue[Any] | MPQueue[Any] = queue.Queue(max_buffered)
        self.metrics_queue: queue.Queue[Any] | MPQueue[Any] = queue.Queue()  # the protocol's types
        self._rollout = rollout
        self._rows = rows
        self._environment = environment
        self._num_generations = num_generations
        self._max_groups = max_groups
        self._scale = scale
        self._first_group = first_group
        self._version = 0
        self._thread = LoopThread("fsm-rollout-worker")
        self._running: Future[None] | None = None
        self._is_stopping = threading.Event()
        self._delivered_at = time.monotonic()
        self._last_fault = "none"

    # -- what the trainer calls --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to play. Raises RolloutError when it was started before."""
        if self._running is not None:
            raise RolloutError("RolloutWorker: started already")
        self._delivered_at = time.monotonic()
        self._running = self._thread.submit(self._play())

    def stop(self) -> None:
        """Cancel what runs, release its tools, close the engine. A second call does nothing."""
        if self._running is None or self._is_stopping.is_set():
            return
        self._is_stopping.set()
        self._running.cancel()
        try:
            self._thread.run(self._rollout.loop.engine.close())
        finally:
            self._thread.close()
            if self._environment is not None:
                self._environment.close()

    def update_model_version(self, model_version: int) -> None:
        """Take note of the version that is live from now on."""
        self._version = model_version
        forget = getattr(self._rollout.loop.engine, "forget", None)
        if forget is not None:  # an engine in this process
            forget(weight_version=model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise RolloutError when the worker has died, or made nothing for `stale_after_s`."""
        if self._running is not None and self._running.done() and not self._is_stopping.is_set():
            error = None if self._running.cancelled() else self._running.exception()
            raise RolloutError(f"RolloutWorker: it died: {shown(error)}") from error
        idle_s = time.monotonic() - self._delivered_at
        if self.rollout_buffer.empty() and idle_s > stale_after_s:
            raise RolloutError(
                f"RolloutWorker: no sample for {idle_s:.0f} s; the last fault: {self._last_fault}"
            )

    # -- in its thread -----------------------------------------------------------------------------

    async def _play(self) -> None:
        await self._rollout.start()
        places = asyncio.Semaphore(self._max_groups)
        turn = asyncio.Lock()  # the samples of a group stand side by side in the buffer

        async def group(group_id: int) -> None:
            try:
                items = await self._group(group_id)
                async with turn:
                    await self._deliver(items)
                if not items:
                    await asyncio.sleep(_PAUSE_S)
            except Exception as error:  # a bug, or a listener's
                self._last_fault = repr(error)
                how = f"is lost: {describe(error)}"
                log_failure(logger, f"group {group_id}", "the group", how, error)
                await asyncio.sleep(_PAUSE_S)
            finally:
                places.release()

        async with asyncio.TaskGroup() as tasks:
            for group_id in itertools.count(self._first_group):
                await places.acquire()
                tasks.create_task(group(group_id))

    async def _group(self, group_id: int) -> list[RolloutSample]:
        version, size = self._version, self._num_generations
        number = group_id % len(self._rows)
        columns = self._rows[number]
        played = Played(prompt_row(columns, where=f"row {number}"), columns)
        indices = range(group_id * size, (group_id + 1) * size)
        entries = [Entry(played, index, group_id) for index in indices]
        requests = await play(self._rollout, entries, self._environment)
        aborted = [request for request in requests if not request.rows]
        samples, refused = sift(sample for request in requests for sample in request.rows)
        faults = [f"request {r.index} is {r.status} ({r.stop_reason}): {r.error}" for r in aborted]
        faults += map(str, refused)
        if faults:
            self._last_fault = faults[-1]
            logger.warning(
                "group %d: %d left out: %s", group_id, len(faults), "; ".join(faults[:3])
            )
        refusals = {"rollout/refused_total": float(len(refused))}
        self.metrics_queue.put(metrics_of(requests) | refusals)
        advantages = group_advantages(samples, scale=self._scale)
        return [
            rollout_sample(sample, advantage=advantage, model_version=version)
            for sample, advantage in zip(samples, advantages, strict=True)
            if not sample.remove_sample
        ]

    async def _deliver(self, items: Sequence[RolloutSample]) -> None:
        """Put them into the buffer; wait while it is full.

        Not in a thread: Python waits for its threads at exit, also when nobody called `stop`.
        """
        for item in items:
            while True:
                item.enqueued_at = time.time()
                self._delivered_at = time.monotonic()  # also while it is full: that is not stale
                try:
                    self.rollout_buffer.put_nowait(item)
                    break
                except queue.Full:
                    await asyncio.sleep(_FULL_S)


def rollout_sample(sample: Sample, *, advantage: float, model_version: int) -> RolloutSample:
    """The sample as AsyncGRPOTrainer wants it: all columns over prompt and response, [T]."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    log_probs = sample.rollout_log_probs
    assert log_probs is not None  # `sift` looked
    messages: list[dict[str, Any]] = [dict(message) for message in sample.messages]
    played = [message for message in messages if message.pop("span") is not None]
    metrics = {"reward": float(sample.reward or 0.0)}
    metrics |= {f"rewards/{name}": part for name, part in sample.reward_parts.items()}
    return RolloutSample(
        prompt=messages[: len(messages) - len(played)],
        completion=played,
        input_ids=sample.tokens.astype(np.int64),
        completion_mask=_with_prompt(sample, sample.loss_mask).astype(np.int64),
        old_log_probs=_with_prompt(sample, log_probs),
        advantage=advantage,
        model_version=model_version,
        group_id=sample.group_index,
        metrics=metrics,
    )


def _with_prompt(sample: Sample, column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(sample.prompt_length, column.dtype), column])

"""RolloutWorker: its samples in the queue, planners and packing of TRL's AsyncGRPOTrainer.

That trainer needs a GPU to take a step. What runs without one is run: all that reads our samples.
"""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fsm_rollout.adapters.trl import RolloutWorker
from fsm_rollout.adapters.trl.worker import rollout_sample
from fsm_rollout.engines.scripted import Answer, Asked, _made_up
from fsm_rollout.errors import ConfigError, EngineError, RolloutError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from tests.trl_training import CALL, TOKENIZER, Roll, rows, scripted, table, tiny_policy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
DEAD = EngineError("the server is on fire", reason=StopReason.ENGINE_ERROR, final=True)
Script = Callable[[Asked], Answer] | Sequence[Answer]


@contextmanager
def working(
    script: Script = (CALL, "6"),
    *,
    reward: Callable[[Request], float | None] = lambda request: float(request.index % 2),
    tools: Sequence[Any] = (Roll,),
    start: bool = True,
    **options: Any,
) -> Iterator[RolloutWorker]:
    rollout = Rollout(
        scripted(script),
        TOKENIZER,
        tools=tools,
        reward=reward,
        limits=Limits(max_context=2_048, max_attempts=1),
    )
    options = {"num_generations": 2, "max_groups": 2, "max_buffered": 8} | options
    worker = RolloutWorker(rollout, rows(3), **options)
    if start:
        worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def first(worker: RolloutWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=100) for _ in range(count)]


def test_samples_hold_prompt_and_response_and_the_advantage_of_their_rollout() -> None:
    with working(max_groups=1) as worker:  # so that they come in order
        worker.update_model_version(3)
        samples = first(worker, 4)
    for group in ([0, 0], [1, 1]):
        assert [s.group_id for s in samples if s.group_id == group[0]] == group
    one, other = samples[:2]
    assert one.group_id == other.group_id
    assert sorted((one.advantage, other.advantage)) == pytest.approx([-0.7071, 0.7071], abs=1e-3)
    for sample in samples:
        shapes = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
        assert [a.dtype for a in shapes] == [np.int64, np.int64, np.float32]
        assert len({a.shape for a in shapes}) == 1
        assert not sample.old_log_probs[sample.completion_mask == 0].any()
        text = TOKENIZER.decode(sample.input_ids[sample.completion_mask == 1].tolist())
        assert text == f"{CALL}<|im_end|>6<|im_end|>"
        assert [m["role"] for m in sample.completion] == ["assistant", "tool", "assistant"]
        assert sample.prompt[0]["content"].startswith("go ")
        assert sample.model_version in (0, 3)


def trl_batch(worker: RolloutWorker, *, token_budget: int = 0) -> tuple[Any, dict[str, list[Any]]]:
    """One micro-batch of 4 samples, by the dataset, planner and collator of AsyncGRPOTrainer."""
    from trl.experimental.async_grpo import async_grpo_trainer

    trl: Any = async_grpo_trainer
    metrics: dict[str, list[Any]] = defaultdict(list)
    samples = trl.RolloutQueueDataset(
        worker.rollout_buffer, lambda: 0, worker.check_health, 300.0, metrics
    )
    planner: Any = trl.FixedCountBatcher(samples, 1, 4)
    if token_budget:
        planner = trl.TokenBudgetBatcher(samples, 1, token_budget, metrics)
    micro_batch = next(iter(planner))
    collator = trl.DataCollatorForRollout(0, metrics=metrics)
    return collator([micro_batch]), metrics


@pytest.mark.parametrize("token_budget", [0, 2_000])
def test_trl_packs_what_was_sampled(token_budget: int) -> None:
    with working() as worker:
        batch, metrics = trl_batch(worker, token_budget=token_budget)
    said = TOKENIZER.encode(f"{CALL}<|im_end|>6<|im_end|>", add_special_tokens=False)
    count = int(batch["global_n_tokens"][0]) // len(said)
    assert count >= 4
    targets = batch["shift_labels"][0][batch["token_index"][0]].tolist()
    assert targets == said * count
    expected = [float(value) for ids in (said[:-2], said[-2:]) for value in _made_up(ids)]
    assert batch["old_log_probs"][0].tolist() == pytest.approx(expected * count)
    assert metrics["reward"] == [0.5]


def test_a_fork_is_a_row_of_its_own_with_the_advantage_of_its_rollout() -> None:
    from trl.experimental.async_grpo.packing import TreeRow

    request = forked()
    items = [rollout_sample(s, advantage=0.5, model_version=7) for s in request.rows]
    assert [item.completion_mask.tolist() for item in items] == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert [item.input_ids.tolist() for item in items] == [[1, 2, 3, 4], [1, 2, 3, 5]]
    row: Any = TreeRow()  # type: ignore[no-untyped-call]
    for item in items:
        row.add({name: getattr(item, name) for name in item.__slots__})
    packed = row.pack()
    labels = packed["shift_labels"][packed["token_index"]]
    assert labels.tolist() == [3, 4, 5]  # each sampled token once
    assert packed["old_log_probs"].tolist() == [-1.0, -2.0, -3.0]
    assert packed["advantages"].tolist() == [0.5] * 3


def forked() -> Request:
    machine, request = Machine(), Request("q")
    request.set_prompt([1, 2])
    machine.fire(Event.GENERATE, request)
    request.append_response_tokens([3, 4], [-1.0, -2.0], meta_info={"finish_reason": "stop"})
    request.fork([1, 2, 3])
    request.append_response_tokens([5], [-3.0], meta_info={"finish_reason": "stop"})
    machine.settle(Event.COMPLETE, request, StopReason.STOP)
    request.reward = 1.0
    request.seal()
    return request


def test_one_bad_sample_costs_one_sample() -> None:
    def often_dead(asked: Asked) -> Answer:
        return DEAD if asked.session_id.endswith(("-1", "-6")) else "hi"

    options: dict[str, Any] = {"num_generations": 3, "max_groups": 1}
    with working(often_dead, reward=lambda r: float(r.index), **options) as worker:
        samples = first(worker, 7)
        metrics = [worker.metrics_queue.get(timeout=100) for _ in range(3)]
    by_group = {g: [s.advantage for s in samples if s.group_id == g] for g in (0, 1, 2)}
    assert [len(advantages) for advantages in by_group.values()] == [2, 3, 2]
    assert by_group[0] == pytest.approx([-0.7071, 0.7071], abs=1e-3)  # of the two that are there
    rates = sorted(m["rollout/abort_rate"] for m in metrics)
    assert rates == pytest.approx([0, 1 / 3, 1 / 3])


def test_a_sample_without_a_reward_is_left_out() -> None:
    def none_once(request: Request) -> float | None:
        return None if request.index == 0 else 1.0

    with working(["hi"], reward=none_once, max_groups=1) as worker:
        assert [s.group_id for s in first(worker, 3)].count(0) == 1


def test_a_dead_engine_is_reported_and_does_not_make_it_spin() -> None:
    asked: list[Asked] = []

    def dead(call: Asked) -> Answer:
        asked.append(call)
        return DEAD

    started = time.monotonic()
    with working(dead) as worker:
        worker.metrics_queue.get(timeout=100)  # the first group is over
        time.sleep(0.2)
        with pytest.raises(RolloutError, match=r"no sample for .* the server is on fire"):
            worker.check_health(0.1)
        worker.check_health(60)
    assert len(asked) <= 4 * (time.monotonic() - started + 2)  # two groups of two a second


def test_the_buffer_is_bounded_and_goes_on_when_there_is_room() -> None:
    asked: list[Asked] = []

    def counted(call: Asked) -> Answer:
        asked.append(call)
        return "hi"

    with working(counted, max_buffered=2, max_groups=3) as worker:
        deadline = time.monotonic() + 100
        while worker.rollout_buffer.qsize() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(asked) <= 2 * (3 + 1)  # the groups that wait, and the one in the buffer
        worker.check_health(0.1)  # full is not stale
        worker._delivered_at -= 1_000  # nor is one that was full for long, when it is empty again
        while time.monotonic() - worker._delivered_at > 500:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        groups: list[int] = []
        while len(groups) < 10:
            groups += [sample.group_id for sample in first(worker, 1)]
            time.sleep(0.02)  # whoever waits for room gets it meanwhile
    assert groups[::2] == groups[1::2]  # those of a group stand side by side


def test_stop_ends_what_runs_and_releases_its_tools() -> None:
    runs, released = threading.Event(), threading.Event()

    class Slow(Tool):
        """Slow."""

        async def execute(self) -> str:
            runs.set()
            await asyncio.sleep(600)
            return ""

        def release(self) -> None:
            released.set()

    slow = '<tool_call>\n{"name": "slow", "arguments": {}}\n</tool_call>'
    with working([slow], tools=[Slow]) as worker:
        assert runs.wait(100)
        worker.stop()
        worker.stop()
    assert released.is_set()


def test_a_process_ends_though_nobody_stopped_its_worker() -> None:
    """A trainer that raises: the buffer is full, and nobody takes anything out any more."""
    code = """if True:
    import time
    from fsm_rollout import Rollout, ScriptedEngine
    from fsm_rollout.adapters.trl import RolloutWorker
    from fsm_rollout.testing.tokenizer import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(["It is 42."], tokenizer=tokenizer)
    rollout = Rollout(engine, tokenizer, reward=lambda request: 1.0)
    worker = RolloutWorker(rollout, [{"prompt": "hi"}], num_generations=2, max_buffered=1)
    worker.start()
    while not worker.rollout_buffer.full():
        time.sleep(0.01)
    time.sleep(0.5)
    raise SystemExit(7)
    """
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=100)
    assert ended.returncode == 7


def test_an_engine_that_cannot_start_is_reported() -> None:
    with working(start=False) as worker:

        async def start(**_: Any) -> None:
            raise ConfigError("wrong log-probs")

        worker._rollout.loop.engine.start = start  # type: ignore[attr-defined]
        worker.start()
        assert worker._running is not None
        worker._running.exception(timeout=100)
        with pytest.raises(RolloutError, match="it died: ConfigError\\('wrong log-probs'\\)"):
            worker.check_health(60)
        with pytest.raises(RolloutError, match="started already"):
            worker.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations must be >= 2"),
        ({"max_buffered": 0}, "max_buffered must be >= 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), working(start=False, **options):
        pass


def test_the_trainer_itself_takes_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AsyncGRPOTrainer asks for the GPU's name when it is made, and for a GPU in its forward."""
    from trl.experimental.async_grpo import async_grpo_trainer as trl
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    model: Any = tiny_policy()
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(trl, "get_peak_flops_per_device", lambda *_: 1.0, raising=False)

    class NoTransfer:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    config: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1}
    with working(start=False) as worker:
        transfer: Any = NoTransfer()
        trainer = trl.AsyncGRPOTrainer(
            str(tmp_path / "model"),
            args=AsyncGRPOConfig(
                str(tmp_path), num_generations=2, token_budget=1_500, dtype="float32", **config
            ),
            train_dataset=table(rows(3)),
            processing_class=TOKENIZER,
            rollout_worker=worker,
            weight_transfer=transfer,
        )
        worker.start()
        batch: Any = next(iter(trainer.get_train_dataloader()))
    assert (batch["token_index"] >= 0).sum() > 0
    assert batch["old_log_probs"].shape == batch["advantages"].shape

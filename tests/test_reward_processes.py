"""Reward functions in processes of their own: real ones, which loop, die and are killed."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardPart, Rewards, worker
from fsm_rollout.rollout import Rollout
from tests import verifiers
from tests.playing import TOKENIZER, Echo

LIMITS = Limits(max_context=4_096, tool_timeout_s=30, max_attempts=1)


def generate(reward: Any, labels: Sequence[Any], *, num_samples: int = 1) -> list[Request]:
    engine = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Echo], limits=LIMITS, reward=reward)
    rows = [{"prompt": "hello", "label": label} for label in labels]
    groups = asyncio.run(rollout.generate(rows, num_samples=num_samples))
    return [request for group in groups for request in group.requests]


def outcomes(requests: Sequence[Request]) -> list[float | StopReason | None]:
    assert all(request.is_sealed for request in requests)
    return [r.stop_reason if r.status is Status.ABORTED else r.reward for r in requests]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 40
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def part() -> Iterator[RewardPart]:
    """One process, which the tests share: what each leaves behind must serve the next."""
    yield RewardPart(verifiers.by_label, processes=1, timeout_s=4)
    gc.collect()


def test_the_function_sees_the_finished_request_in_another_process() -> None:
    rewards = Rewards(
        {
            "length": RewardPart(verifiers.length, processes=1),
            "pid": RewardPart(verifiers.pid, processes=1, weight=0),
        }
    )
    requests = generate(rewards, [None] * 3)
    assert outcomes(requests) == [float(len(requests[0].sample.response or ""))] * 3
    pids = {request.reward_parts["pid"] for request in requests}
    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.parametrize("bad", ["loop", "hold"])
def test_a_function_that_never_ends_is_killed_and_the_next_call_works(
    part: RewardPart, bad: str
) -> None:
    requests = generate(part, ["good", bad, "good", "none"])
    assert outcomes(requests) == [1.5, StopReason.REWARD_ERROR, 1.5, None]
    assert "by_label gave no value within 4 s" in requests[1].error


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("raise", "no answer"),
        ("odd", "Odd"),
        ("exit", "SystemExit"),
        ("die", "died"),
        ("object", "must be a number"),
    ],
)
def test_what_a_function_does_in_its_process_costs_one_request(
    part: RewardPart, bad: str, why: str
) -> None:
    requests = generate(part, ["good", bad, "good"])
    assert outcomes(requests) == [1.5, StopReason.REWARD_ERROR, 1.5]
    assert why in requests[1].error


def test_what_a_function_raises_in_its_process_is_told_without_our_own_frames(
    part: RewardPart, caplog: pytest.LogCaptureFixture
) -> None:
    [request] = generate(part, ["raise"])
    assert request.error.endswith("in a process, ValueError('no answer')")
    assert 'raise ValueError("no answer")' in caplog.text
    assert "supervisor.py" not in caplog.text


def test_a_row_that_cannot_be_sent_costs_one_request(part: RewardPart) -> None:
    engine = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, limits=LIMITS, reward=part)
    requests = [rollout.request("a"), rollout.request("b")]
    requests[0].label = lambda: "a function of this process"

    async def drive() -> None:
        await asyncio.gather(*map(rollout.run, requests))

    asyncio.run(drive())
    assert outcomes(requests) == [StopReason.REWARD_ERROR, 1.5]
    assert "request or score cannot be sent to a process" in requests[0].error


def test_a_process_that_dies_while_it_is_idle_costs_nothing() -> None:
    part = RewardPart(verifiers.pid, processes=1)
    [first] = generate(part, ["a"])
    assert first.reward is not None
    os.kill(int(first.reward), signal.SIGKILL)
    wait_for_the_end_of(int(first.reward))
    assert part._workers is not None
    [idle] = part._workers._idle
    while not idle._executor._broken:  # type: ignore[union-attr]  # it has heard of it
        time.sleep(0.01)
    [second] = generate(part, ["a"])
    assert second.reward not in (None, first.reward)


def test_a_process_that_does_not_start_in_time_costs_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = RewardPart(verifiers.length, processes=1)
    with monkeypatch.context() as slow:
        slow.setattr(worker, "START_S", 0.001)
        [request] = generate(part, ["a"])
    assert request.stop_reason is StopReason.REWARD_ERROR
    assert "did not start within 0.001 s" in request.error
    assert generate(part, ["a"])[0].reward


def test_calls_run_in_as_many_processes_as_there_are() -> None:
    part = RewardPart(verifiers.by_label, processes=2)
    generate(part, ["good"] * 2)  # both have started
    started = time.monotonic()
    assert outcomes(generate(part, ["sleep"] * 4)) == [1.5] * 4
    assert time.monotonic() - started >= 0.4


def test_a_cancelled_run_kills_the_process_that_it_waits_for(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    engine = ScriptedEngine(lambda _: "done", tokenizer=TOKENIZER)
    part = RewardPart(verifiers.note_and_loop, processes=1, timeout_s=60)
    rollout = Rollout(engine, TOKENIZER, limits=LIMITS, reward=part)
    request = rollout.request({"prompt": "a", "label": str(note)})

    async def drive() -> None:
        task = asyncio.create_task(rollout.run(request))
        while not (note.exists() and note.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(drive())
    assert request.stop_reason is StopReason.CANCELLED
    wait_for_the_end_of(int(note.read_text()))


@pytest.mark.parametrize("how", [{"group": True}, {"batch": 3}])
def test_batches_and_groups_run_in_a_process_too(how: dict[str, Any]) -> None:
    requests = generate(RewardPart(verifiers.ranks, processes=1, **how), ["a"], num_samples=3)
    assert outcomes(requests) == [0.0] * 3


def test_forks_and_children_are_sent_too() -> None:
    request = Request()
    request.set_prompt([1, 2, 3])
    said = {"finish_reason": "stop"}
    request._status = Status.GENERATING
    request.append_response_tokens([4, 5], [-0.5, -0.5], meta_info=said)
    request.fork([1, 2, 3, 9])
    request.append_response_tokens([6], [-0.5], meta_info=said)
    child = request.spawn("b")
    child.set_prompt([7])
    child._status = Status.GENERATING
    child.append_response_tokens([8], [-0.5], meta_info=said)
    for one in (request, child):
        one.session = threading.Lock()  # type: ignore[assignment]  # what cannot be sent
        one._status, one.stop_reason = Status.COMPLETED, StopReason.STOP
    part = RewardPart(verifiers.tokens_of_rows, processes=1)
    assert asyncio.run(part.score(request)) == 5 + 5 + 2
    assert request.session is not None
    assert all(sample.request is request for sample in request.samples)


def test_a_function_that_another_process_cannot_find_is_refused_at_once() -> None:
    for function in (lambda request: 1.0, Echo().calc_reward):
        with pytest.raises(ConfigError, match="top level of a module"):
            RewardPart(function, processes=1)
    with pytest.raises(ConfigError, match="is async"):
        RewardPart(verifiers.coroutine, processes=1)


SCRIPT = """
import asyncio, os, sys, threading, time
from pathlib import Path
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardError, RewardPart

def verify(request):
    Path(sys.argv[1]).write_text(str(os.getpid()))
    if request.label == "leave a thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("said in it")
    time.sleep(float(sys.argv[2]))
    return 1.0

def main(label=None):
    request = Request("a", label=label)
    try:
        print(asyncio.run(RewardPart(verify, processes=1).score(request)), flush=True)
    except RewardError as error:
        print(error, flush=True)

{start}
"""


def script(folder: Path, start: str, *, seconds: float = 0) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.replace("{start}", start))
    command = [sys.executable, "-W", "error", str(path), str(folder / "pid"), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_process_ends_with_its_parent_whether_that_exits_or_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    running = script(tmp_path, 'if __name__ == "__main__": main()', seconds=60)
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)  # in the middle of a call
    running.communicate()
    wait_for_the_end_of(int(note.read_text()))

    ended = script(tmp_path, 'if __name__ == "__main__": main()')
    assert ended.communicate(timeout=200) == ("1.0\n", "")
    assert ended.returncode == 0
    wait_for_the_end_of(int(note.read_text()))


def test_a_thread_that_a_function_leaves_behind_does_not_keep_the_run_from_ending(
    tmp_path: Path,
) -> None:
    ended = script(tmp_path, 'if __name__ == "__main__": main("leave a thread")')
    out, error = ended.communicate(timeout=200)
    assert (sorted(out.split("\n")), error) == (["", "1.0", "said in it"], "")
    wait_for_the_end_of(int((tmp_path / "pid").read_text()))


def test_a_script_that_cannot_be_imported_a_second_time_is_told_what_to_do(tmp_path: Path) -> None:
    out, _ = script(tmp_path, "main(); raise SystemExit(0)").communicate(timeout=200)
    assert '`if __name__ == "__main__":`' in out

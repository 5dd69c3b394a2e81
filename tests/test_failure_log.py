"""One bug that meets many requests is logged in full once, and then counted."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import logging
from collections.abc import Callable
from copy import copy
from typing import Any

from fsm_rollout import failures
from fsm_rollout.agent import Context
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.errors import ToolError
from fsm_rollout.failures import log_failure
from fsm_rollout.limits import Limits
from fsm_rollout.request import Request
from fsm_rollout.rewards import RewardPart
from fsm_rollout.rollout import Rollout
from fsm_rollout.tools.base import Tool
from tests.playing import CALL, TOKENIZER, fail, swallow

COUNT = 12
"""requests of a run: one report in full, one of the 10th"""


class Broken(Tool):
    """It fails."""

    name = "echo"

    async def execute(self, text: str) -> str:
        """text: anything"""
        await fail()
        return ""


class Slow(Broken):
    """It hangs."""

    name = "echo"

    async def execute(self, text: str) -> str:
        """text: anything"""
        await asyncio.sleep(600)
        return ""


class Stubborn(Broken):
    """It hangs and cannot be stopped."""

    name = "echo"

    async def execute(self, text: str) -> str:
        """text: anything"""
        await swallow()
        return ""


class Halfborn(Broken):
    """It cannot be made."""

    name = "echo"

    async def create(self) -> None:
        raise OSError("no database")


def bad_reward(request: Request) -> float:
    raise KeyError(f"answer of {request.index}")


async def bad_agent(ctx: Context) -> None:
    await ctx.generate()
    raise OSError(f"no network for {ctx.request.index}")


def bad_model(asked: Any) -> Any:
    raise ZeroDivisionError(asked.request_id)


class BadCodec:
    """Puts a codec that cannot parse into the loop."""

    def __call__(self, rollout: Rollout) -> None:
        codec = rollout.loop.codec = copy(rollout.loop.codec)

        async def parse_async(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("no parser")

        codec.parse_async = parse_async  # type: ignore[method-assign]


def run(
    *,
    engine: Callable[[Any], Any] = lambda asked: CALL,
    spoil: Callable[[Rollout], None] = lambda rollout: None,
    **parts: Any,
) -> list[Request]:
    """COUNT requests of one turn with these parts."""
    limits = Limits(max_turns=1, max_attempts=1, tool_timeout_s=0.05, release_timeout_s=1)
    rollout = Rollout(
        ScriptedEngine(engine, tokenizer=TOKENIZER), TOKENIZER, limits=limits, **parts
    )
    spoil(rollout)
    groups = asyncio.run(rollout.generate(["hello"] * COUNT))
    return [request for group in groups for request in group.requests]


@pytest.mark.parametrize(
    ("parts", "what", "has_traceback"),
    [
        ({"tools": [Broken]}, "execute of tool echo failed: ValueError: boom", True),
        ({"tools": [Halfborn]}, "create of tool echo failed: OSError: no database", True),
        ({"tools": [Slow]}, "execute of tool echo timed out after 0.05 s", False),
        ({"reward": bad_reward}, "reward function bad_reward raised KeyError: 'answer of", True),
        ({"agent": bad_agent}, "the agent raised OSError: no network for", True),
        ({"engine": bad_model}, "the engine raised ZeroDivisionError", True),
        ({"spoil": BadCodec()}, "the codec failed: ValueError: no parser", True),
    ],
    ids=["tool", "create", "deadline", "reward", "agent", "engine", "codec"],
)
def test_one_bug_is_told_in_full_once_and_then_counted(
    parts: dict[str, Any], what: str, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fsm_rollout"):
        run(**parts)
    first, tenth = [r for r in caplog.records if what.split(":")[0] in r.getMessage()]
    assert caplog.records == [first, tenth]
    assert first.getMessage().startswith("request ")
    assert what in first.getMessage()
    assert bool(first.exc_info) is has_traceback
    assert not tenth.exc_info
    assert "(no. 10 of its kind in this process" in tenth.getMessage()
    assert "\n" not in tenth.getMessage()


def test_what_is_abandoned_is_told_apart_from_what_is_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(tools=[Stubborn])
    told = [
        record.getMessage().partition(": ")[2].partition(" (no.")[0] for record in caplog.records
    ]
    late = "execute of tool echo timed out after 0.05 s"
    left = "execute of tool echo swallows its cancellation: it is abandoned"
    assert sorted(told) == sorted([late, left] * 2)


def test_two_bugs_of_one_function_are_two_kinds(caplog: pytest.LogCaptureFixture) -> None:
    def two(request: Request) -> float:
        if request.index % 2:
            raise ValueError("odd")
        if request.index % 4:
            raise ValueError("twice odd")
        raise OSError("even")

    run(reward=two)
    told = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert sorted(map(str, told)) == ["even", "odd", "twice odd"]


def test_what_a_tool_tells_the_model_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def echo(text: str) -> str:
        """Refuse.

        text: anything
        """
        raise ToolError("not today")

    run(tools=[echo])
    assert caplog.records == []


def test_ten_thousand_failures_are_five_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("fsm_rollout.test")

    def failed(text: str) -> Exception:
        try:
            raise ValueError(text)
        except ValueError as error:
            return error

    for number in range(10_000):
        log_failure(logger, f"request {number}", "it", "raised", failed("boom"))
    assert [bool(record.exc_info) for record in caplog.records] == [True, *[False] * 4]
    assert caplog.messages[-1].startswith("request 9999: it raised (no. 10000 of its kind")
    caplog.clear()
    log_failure(logger, "request 1", "another", "raised", failed("boom" * 5_000))
    assert len(caplog.text) < 200


class Unspeakable(Exception):
    """It cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


def unspeakable(*_: Any) -> Any:
    raise Unspeakable


async def unspeakable_agent(ctx: Context) -> None:
    await ctx.generate()
    raise Unspeakable


def unspeakable_parser(rollout: Rollout) -> None:
    codec = rollout.loop.codec = copy(rollout.loop.codec)

    async def parse_async(*args: Any, **kwargs: Any) -> Any:
        raise Unspeakable

    codec.parse_async = parse_async  # type: ignore[method-assign]


def no_list(requests: list[Request]) -> Any:
    return Unspeakable()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"agent": unspeakable_agent}, "the agent raised Unspeakable"),
        ({"engine": unspeakable}, "the engine raised <Unspeakable>"),
        ({"spoil": unspeakable_parser}, "the codec failed: <Unspeakable>"),
        ({"reward": unspeakable}, "reward function unspeakable raised Unspeakable"),
        ({"reward": RewardPart(no_list, group=True)}, "no_list returned <Unspeakable> for 1"),
    ],
    ids=["agent", "engine", "codec", "reward", "scores"],
)
def test_what_cannot_be_shown_costs_its_requests_and_no_run(
    parts: dict[str, Any], error: str
) -> None:
    requests = run(**parts)
    assert {str(request.status) for request in requests} == {"aborted"}
    assert all(error in request.error for request in requests)


def test_what_is_endless_is_cut() -> None:
    def engine(asked: Any) -> Any:
        raise ValueError("x" * 1_000_000)

    async def agent(ctx: Context) -> None:
        raise ValueError("x" * 1_000_000)

    assert max(len(request.error) for request in run(engine=engine)) < 3_000
    assert max(len(request.error) for request in run(agent=agent)) < 3_000


def test_code_of_a_model_cannot_make_the_log_grow_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that runs it raises where, what and as often as it likes."""
    monkeypatch.setattr(failures, "_MAX_KINDS", 10)
    logger = logging.getLogger("fsm_rollout.test")

    def ran(number: int) -> Exception:
        source = f"class E{number}(Exception): pass\nraise E{number}"
        try:
            exec(compile(source, f"<cell {number}>", "exec"), {})
        except Exception as error:
            return error
        raise AssertionError

    for number in range(100):
        log_failure(logger, f"request {number}", "execute of tool python", "failed", ran(number))
    assert len(failures._failures) == 11
    assert len(caplog.records) == 10 + len(["the 1st", "the 10th of all others"])
    assert "(no. 10 of further kinds" in caplog.messages[-1]


def test_a_process_is_told_in_no_more_than_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    part = RewardPart(endless, processes=1, timeout_s=120)
    assert "ValueError" in run(reward=part)[0].error
    assert len(caplog.text) < 100_000


def endless(request: Request) -> float:
    raise ValueError("x" * 1_000_000)

"""The tool session: lifecycle, deadlines, threads, limits; test_session_machine.py has the rest."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from fsm_rollout.errors import ToolError
from fsm_rollout.limits import CUT_MARK, Limits
from fsm_rollout.tools.base import Tool, ToolResponse, tool
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import CallResult, ToolSession
from fsm_rollout.tools.supervisor import GRACE_S, MAX_THREADS, gate
from fsm_rollout.turn import ToolCall

SHORT = Limits(tool_timeout_s=0.05, release_timeout_s=0.1)
PATIENT = Limits(tool_timeout_s=30.0, release_timeout_s=30.0)


class Logged(Tool):
    """Writes down which hooks start; subclasses misbehave."""

    name = "t"
    log: ClassVar[list[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name, cls.log = "t", []

    async def create(self) -> None:
        self.log.append("create")

    async def execute(self) -> str:
        self.log.append("execute")
        return "done"

    async def release(self) -> None:
        self.log.append("release")


def call(name: str = "t", id: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id)


async def play(
    tools: Sequence[Any],
    calls: Sequence[ToolCall] = (),
    *,
    limits: Limits = PATIENT,
    kwargs: Mapping[str, Any] | None = None,
    allowed: int = 64,
) -> tuple[list[CallResult], ToolSession]:
    """Open, one turn of calls, close."""
    session = ToolSession(Toolset(tools), kwargs=kwargs, limits=limits, label="request 3")
    try:
        await session.open()
        return await session.execute(calls, allowed=allowed), session
    finally:
        await session.close()


def answer(tool: Any, limits: Limits = PATIENT, **arguments: Any) -> tuple[str, str, ToolSession]:
    """Outcome and text of one call of one tool."""
    results, session = asyncio.run(play([tool], [ToolCall(tool.name, arguments)], limits=limits))
    return results[0].outcome, results[0].response.text, session


async def cancelled(work: Awaitable[Any], *after_s: float) -> float:
    """Run `work`, cancel it after these pauses; the seconds until it raised CancelledError."""
    task = asyncio.ensure_future(work)
    clock = asyncio.get_running_loop().time
    started = clock()
    for pause in after_s:
        await asyncio.sleep(pause)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return clock() - started


# -- one life --------------------------------------------------------------------------------------


def test_state_lives_from_create_to_release_and_each_hook_gets_its_own_kwargs() -> None:
    seen: list[Any] = []

    class Count(Tool):
        def create(self, start: int) -> None:
            self.n = start

        def execute(self, step: int, *, scale: int) -> str:
            self.n += step * scale
            return str(self.n)

        def calc_reward(self, weight: float) -> float:
            return self.n * weight

        def release(self, why: str) -> None:
            seen.append((why, self.n))

    kwargs = {
        "count": {
            "create_kwargs": {"start": 1},
            "execute_kwargs": {"scale": 10},
            "calc_reward_kwargs": {"weight": 0.5},
            "release_kwargs": {"why": "end"},
        }
    }

    async def main() -> None:
        session = ToolSession(Toolset([Count]), kwargs=kwargs, limits=PATIENT)
        assert not session.is_alive
        assert session.is_closed
        await session.open()
        assert session.is_alive
        assert not session.is_closed
        for expected in ("11", "21"):
            (result,) = await session.execute([call("count", step=1)], allowed=1)
            assert (result.outcome, result.response.text) == ("ok", expected)
        assert await session.calc_rewards() == {"count": 10.5}
        assert await session.calc_rewards() == {"count": 10.5}
        await session.close()
        await session.close()
        assert not session.is_alive
        assert session.is_closed

    asyncio.run(main())
    assert seen == [("end", 21)]


def test_two_sessions_never_share_an_object() -> None:
    class Slot(Tool):
        async def create(self, owner: str) -> None:
            self.current = owner

        async def execute(self) -> str:
            await asyncio.sleep(0)
            return self.current

    async def main() -> list[str]:
        sessions = [
            ToolSession(
                Toolset([Slot]),
                kwargs={"slot": {"create_kwargs": {"owner": owner}}},
                limits=PATIENT,
            )
            for owner in "ab"
        ]
        await asyncio.gather(*(s.open() for s in sessions))
        answers = await asyncio.gather(*(s.execute([call("slot")], allowed=1) for s in sessions))
        await asyncio.gather(*(s.close() for s in sessions))
        return [results[0].response.text for results in answers]

    assert asyncio.run(main()) == ["a", "b"]


def test_a_tool_cannot_change_the_row_that_its_group_shares() -> None:
    class Greedy(Tool):
        def create(self, items: Any) -> None:
            items.append("mine")

        def execute(self) -> None: ...

    row = {"greedy": {"create_kwargs": {"items": ["ours"]}}}
    _, session = asyncio.run(play([Greedy], kwargs=row))
    assert not session.unavailable
    assert row == {"greedy": {"create_kwargs": {"items": ["ours"]}}}


@pytest.mark.parametrize("method", ["execute", "calc_rewards"])
def test_a_session_is_used_between_open_and_close_only(method: str) -> None:
    async def use(session: ToolSession) -> None:
        await (session.execute([], allowed=1) if method == "execute" else session.calc_rewards())

    async def main() -> None:
        session = ToolSession(Toolset(["calculator"]), limits=SHORT, label="request 3")
        with pytest.raises(RuntimeError, match=f"request 3: {method} needs a tool session"):
            await use(session)
        await session.open()
        with pytest.raises(RuntimeError, match="opened once"):
            await session.open()
        await session.close()
        with pytest.raises(RuntimeError, match="is open"):
            await use(session)
        with pytest.raises(RuntimeError, match="opened once"):
            await session.open()

    asyncio.run(main())


# -- calls -----------------------------------------------------------------------------------------


def test_every_kind_of_call_is_answered_in_its_place() -> None:
    @tool
    def add(a: int, b: int) -> int:
        return a + b

    calls = [
        call("nope", "c0"),
        ToolCall("add", id="c1", error="invalid_json", raw="{"),
        call("add", "c2", a=1),
        call("add", "c3", a=1, b=2),
        ToolCall("", id="c4", error="missing_name"),
    ]
    results, session = asyncio.run(play([add], calls))
    assert [(r.call.id, r.outcome) for r in results] == [
        ("c0", "unknown_tool"),
        ("c1", "malformed"),
        ("c2", "bad_arguments"),
        ("c3", "ok"),
        ("c4", "malformed"),
    ]
    assert [r.response.text for r in results] == [
        "unknown tool 'nope' (tools: add)",
        "malformed tool call, not executed: it is not valid JSON",
        "bad arguments for add: missing parameter `b` (parameters: a, b)",
        "3",
        "malformed tool call, not executed: the call names no tool",
    ]
    assert [r.is_invalid for r in results] == [True, True, True, False, True]
    assert [r.executed for r in results] == [False, False, False, True, False]
    assert session.metrics == Counter(
        tool_calls_unknown=1, tool_calls_malformed=2, tool_calls_bad_arguments=1
    )


def test_results_are_in_the_order_of_the_calls_whoever_ends_first() -> None:
    class Wait(Tool):
        async def execute(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return str(seconds)

    times = [0.03, 0.0, 0.02, 0.01]
    results, _ = asyncio.run(play([Wait], [call("wait", str(s), seconds=s) for s in times]))
    assert (
        [r.response.text for r in results] == [r.call.id for r in results] == list(map(str, times))
    )
    assert max(r.seconds for r in results) >= 0.03


@pytest.mark.parametrize(
    ("allowed", "parallel", "run"), [(6, 4, 4), (2, 4, 2), (0, 4, 0), (-1, 4, 0)]
)
def test_good_calls_beyond_the_limit_are_answered_and_counted(
    allowed: int, parallel: int, run: int
) -> None:
    limits = Limits(max_parallel_calls=parallel)
    calls = [call(), call("nope"), *[call() for _ in range(9)]]

    class Plain(Logged): ...

    results, session = asyncio.run(play([Plain], calls, limits=limits, allowed=allowed))
    assert len(results) == 11
    assert [r.outcome for r in results if r.call.name == "t"] == ["ok"] * run + ["dropped"] * (
        10 - run
    )
    assert session.metrics["tool_calls_dropped"] == 10 - run
    assert Plain.log.count("execute") == run
    assert results[-1].response.text == "not executed: limit reached"
    assert not results[-1].is_invalid


class Mute(ToolError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(ValueError("boom\nat line 2"), "bad failed: ValueError: boom", id="two lines"),
        pytest.param(KeyError(), "bad failed: KeyError", id="no text"),
        pytest.param(
            ValueError("<Box at 0x7f3a2b1c9d00>"),
            "bad failed: ValueError: <Box at 0x…>",
            id="a memory address",
        ),
        pytest.param(TimeoutError("mine"), "bad failed: TimeoutError: mine", id="own timeout"),
        pytest.param(asyncio.CancelledError(), "bad failed: CancelledError", id="own cancel"),
        pytest.param(
            SystemExit(3), "bad failed: RuntimeError: the tool raised SystemExit", id="exit"
        ),
    ],
)
def test_whatever_execute_raises_the_model_is_told_in_a_line(
    error: BaseException, text: str
) -> None:
    class Bad(Tool):
        async def execute(self) -> None:
            raise error

    outcome, said, session = answer(Bad)
    assert (outcome, said) == ("error", text)
    assert session.metrics == Counter(tool_errors=1)


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), StopIteration(1)]
)
def test_nothing_that_a_thread_raises_leaves_it(error: BaseException) -> None:
    class Bad(Tool):
        def execute(self) -> None:
            raise error

    outcome, said, _ = answer(Bad)
    assert outcome == "error"
    assert type(error).__name__ in said


@pytest.mark.parametrize(
    ("error", "text"),
    [(ToolError("the door is locked"), "the door is locked"), (Mute(), "refuses failed")],
)
def test_a_tool_error_is_told_as_it_is(error: ToolError, text: str) -> None:
    class Refuses(Tool):
        async def execute(self) -> None:
            raise error

    outcome, said, session = answer(Refuses)
    assert (outcome, said) == ("tool_error", text)
    assert session.metrics == Counter(tool_refusals=1)


def test_a_traceback_goes_to_the_log_and_not_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Tool):
        def execute(self) -> str:
            raise ValueError("boom")

    with caplog.at_level(logging.WARNING):
        _, text, _ = answer(Bad)
    assert "Traceback" not in text
    (record,) = caplog.records
    assert record.getMessage() == "request 3: execute of tool bad failed: ValueError: boom"
    assert record.exc_info


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}, {"a": object()}], ids=type)
def test_an_unusable_answer_is_an_error_of_the_tool(value: object) -> None:
    outcome, text, _ = answer(type("Odd", (Tool,), {"execute": lambda self: value}))
    assert outcome == "error"
    assert text.startswith("odd failed: TypeError")
    assert "0x" not in text


def test_a_huge_text_of_an_error_is_neither_told_nor_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bad(Tool):
        async def execute(self) -> None:
            raise ValueError("boom\n" * 1_000_000)

    assert answer(Bad)[1] == "bad failed: ValueError: boom"
    assert len(caplog.text) < 1_000


def test_a_sync_hook_may_return_an_awaitable() -> None:
    class Wrapped(Tool):
        def execute(self) -> Awaitable[str]:
            return asyncio.sleep(0, "later")

    assert answer(Wrapped)[:2] == ("ok", "later")


class Watched(list[int]):
    """A JSON value that calls `look` for each item that is written."""

    look: Callable[[], Any]

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            self.look()
            yield item


@pytest.mark.parametrize("blocking", [True, False], ids=["async", "inline"])
def test_the_event_loop_goes_on_while_a_huge_answer_is_written(blocking: bool) -> None:
    turns = 0
    seen: list[int] = []
    value = Watched(range(10_000))
    value.look = lambda: seen.append(turns)

    async def execute(self: Tool) -> Any:
        return value

    hooks = {"execute": execute if blocking else lambda self: value, "blocking": blocking}

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> str:
        turning = asyncio.create_task(turn())
        results, _ = await play([type("Huge", (Tool,), hooks)], [call("huge")])
        turning.cancel()
        return results[0].response.text

    assert asyncio.run(main()) == json.dumps(list(range(10_000)))
    assert len(set(seen)) > 5


def test_what_a_thread_answers_is_written_in_that_thread() -> None:
    threads = set()
    value = Watched([1, 2])
    value.look = lambda: threads.add(threading.current_thread())

    class Sync(Tool):
        def execute(self) -> list[int]:
            threads.add(threading.current_thread())
            return value

    assert answer(Sync)[:2] == ("ok", "[1, 2]")
    assert len(threads) == 1
    assert threading.main_thread() not in threads


# -- deadlines -------------------------------------------------------------------------------------


class SwallowOnce(Logged):
    async def execute(self) -> str:
        try:
            await asyncio.sleep(600)
        except BaseException:
            await asyncio.sleep(600)
        return "late"


class SwallowForever(Logged):
    async def execute(self) -> str:
        while True:
            try:
                await asyncio.sleep(600)
            except BaseException:
                self.log.append("swallowed")


@pytest.mark.parametrize("bad", [SwallowOnce, SwallowForever])
def test_a_tool_that_swallows_its_cancellation_is_abandoned_and_still_released(
    bad: type[Logged],
) -> None:
    bad.log.clear()
    outcome, text, session = answer(bad, SHORT)
    assert (outcome, text) == ("timeout", "t timed out after 0.05 s")
    assert session.metrics["tool_timeouts"] == session.metrics["tool_zombies"] == 1
    assert bad.log.count("release") == 1


def test_a_tool_that_answers_its_cancellation_still_timed_out() -> None:
    class Stubborn(Tool):
        async def execute(self) -> str:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                return "too late"
            return ""

    outcome, _, session = answer(Stubborn, SHORT)
    assert (outcome, session.metrics["tool_zombies"]) == ("timeout", 0)


def test_after_a_cancel_the_calls_have_a_bounded_grace_and_the_cancel_is_delivered() -> None:
    class Clean(Logged):
        async def execute(self) -> str:
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.01)
                self.log.append("cleaned")
            return ""

    async def main(bad: type[Logged]) -> ToolSession:
        session = ToolSession(Toolset([bad]), limits=PATIENT)
        await session.open()
        seconds = await cancelled(session.execute([call(), call()], allowed=2), 0.02)
        assert seconds < GRACE_S + 0.3
        await session.close()
        return session

    assert asyncio.run(main(Clean)).metrics["tool_zombies"] == 0
    assert Clean.log == ["create", "cleaned", "cleaned", "release"]
    assert asyncio.run(main(SwallowForever)).metrics["tool_zombies"] == 2


def test_a_second_cancel_ends_the_grace() -> None:
    async def main() -> float:
        session = ToolSession(Toolset([SwallowForever]), limits=PATIENT)
        await session.open()
        seconds = await cancelled(session.execute([call()], allowed=1), 0.02, 0.01)
        await session.close()
        return seconds

    assert asyncio.run(main()) < 0.02 + GRACE_S


# -- create ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
def test_a_create_that_raises_gets_no_release_and_the_tool_is_unavailable(
    is_async: bool, is_required: bool
) -> None:
    class Broken(Logged):
        required = is_required

        def create(self) -> Any:
            self.log.append("create")
            if is_async:
                return asyncio.get_running_loop().create_task(self.fail())
            raise RuntimeError("no sandbox")

        async def fail(self) -> None:
            raise RuntimeError("no sandbox")

    Broken.blocking = not is_async
    outcome, text, session = answer(Broken)
    assert outcome == "unavailable"
    assert text == "t is unavailable: create failed: RuntimeError: no sandbox"
    assert session.unavailable == {"t": "create failed: RuntimeError: no sandbox"}
    assert session.failed_required == (["t"] if is_required else [])
    assert Broken.log == ["create"]


def test_a_create_that_times_out_is_still_released() -> None:
    class Slow(Logged):
        async def create(self) -> None:
            self.log.append("create")
            await asyncio.sleep(600)

    outcome, text, _ = answer(Slow, SHORT)
    assert (outcome, text) == ("unavailable", "t is unavailable: create timed out after 0.05 s")
    assert Slow.log == ["create", "release"]


def test_a_create_that_is_cancelled_is_still_released_and_one_that_never_began_is_not() -> None:
    class Slow(Logged):
        async def create(self) -> None:
            self.log.append("create")
            await asyncio.sleep(600)

    async def main(*after_s: float) -> None:
        session = ToolSession(Toolset([Slow]), limits=PATIENT)
        await cancelled(session.open(), *after_s)
        await session.close()

    asyncio.run(main(0.02))
    assert Slow.log == ["create", "release"]
    Slow.log.clear()
    asyncio.run(main(0))
    assert Slow.log in ([], ["create", "release"])


def test_a_session_whose_creates_were_cancelled_cannot_go_on() -> None:
    class Slow(Logged):
        async def create(self) -> None:
            await asyncio.sleep(600)

    async def main() -> None:
        session = ToolSession(Toolset([Slow, "calculator"]), limits=PATIENT)
        opening = asyncio.create_task(session.open())
        await asyncio.sleep(0.01)
        assert not session.is_alive
        await cancelled(opening, 0.0)
        assert not session.is_alive
        assert not session.is_closed
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0)
        assert not session.is_closed
        await closing
        assert session.is_closed

    asyncio.run(main())


@pytest.mark.parametrize(
    "create", [lambda self: 1 / 0, lambda self: asyncio.sleep(600)], ids=["fails", "hangs"]
)
def test_a_session_goes_on_without_a_tool_whose_create_failed_or_timed_out(create: Any) -> None:
    async def main() -> None:
        session = ToolSession(
            Toolset([type("Failing", (Logged,), {"create": create}), "calculator"]), limits=SHORT
        )
        await session.open()
        assert session.is_alive
        assert list(session.unavailable) == ["t"]
        await session.close()

    asyncio.run(main())


def test_a_create_whose_thread_raises_after_its_deadline_failed_by_itself() -> None:
    late = threading.Event()

    class Late(Logged):
        def create(self) -> None:  # type: ignore[override]
            late.wait(600)
            raise RuntimeError("no sandbox")

    async def main() -> None:
        limits = Limits(tool_timeout_s=0.02, release_timeout_s=30)
        session = ToolSession(Toolset([Late]), limits=limits)
        await session.open()
        late.set()
        assert session.unavailable["t"] == "create timed out after 0.02 s"
        await session.close()

    asyncio.run(main())
    assert Late.log == []


def test_a_create_that_raises_its_own_cancelled_error_failed_by_itself() -> None:
    class Odd(Logged):
        async def create(self) -> None:
            raise asyncio.CancelledError

    assert answer(Odd)[0] == "unavailable"
    assert Odd.log == []


def test_kwargs_that_do_not_fit_make_the_tool_unavailable_without_creating_it() -> None:
    class Strict(Logged):
        async def create(self, n: int) -> None:  # type: ignore[override]
            self.log.append("create")

    results, session = asyncio.run(
        play([Strict], [call()], kwargs={"t": {"create_kwargs": {"m": 1}}})
    )
    assert results[0].outcome == "unavailable"
    assert "missing parameter `n`" in session.unavailable["t"]
    assert Strict.log == []


def test_one_failing_tool_does_not_touch_another() -> None:
    class Broken(Tool):
        def create(self) -> None:
            raise RuntimeError("no")

        def execute(self) -> None: ...

    class Fine(Logged): ...

    results, _ = asyncio.run(play([Broken, Fine], [call("broken"), call("t")]))
    assert [r.outcome for r in results] == ["unavailable", "ok"]
    assert Fine.log == ["create", "execute", "release"]


# -- release ---------------------------------------------------------------------------------------


def test_any_number_of_cancels_while_closing_still_releases_and_delivers_the_cancel() -> None:
    class Slow(Logged):
        async def release(self) -> None:
            await asyncio.sleep(0.05)
            self.log.append("release")

    async def main() -> None:
        session = ToolSession(Toolset([Slow]), limits=PATIENT)
        await session.open()
        assert await cancelled(session.close(), 0.01, 0.01, 0.01) > 0.049
        await session.close()

    asyncio.run(main())
    assert Slow.log == ["create", "release"]


@pytest.mark.parametrize("how", ["raise", "hang", "cancel itself"])
def test_a_release_that_fails_is_counted_and_hurts_no_other(how: str) -> None:
    class Fine(Logged): ...

    Fine.name = "fine"

    class Bad(Logged):
        async def release(self) -> None:
            self.log.append("release")
            if how == "raise":
                raise RuntimeError("gone")
            if how == "cancel itself":
                raise asyncio.CancelledError
            await asyncio.sleep(600)

    _, session = asyncio.run(play([Bad, Fine], limits=SHORT))
    assert Bad.log == Fine.log == ["create", "release"]
    assert session.metrics["release_errors"] == 1


def test_the_end_of_the_event_loop_does_not_lose_a_release() -> None:
    class Slow(Logged):
        async def release(self) -> None:
            await asyncio.sleep(0.02)
            self.log.append("release")

    async def use() -> None:
        session = ToolSession(Toolset([Slow]), limits=PATIENT)
        try:
            await session.open()
            has_opened.set()
            await asyncio.sleep(600)
        finally:
            await session.close()

    async def main() -> None:
        tasks.append(asyncio.create_task(use()))
        await has_opened.wait()

    has_opened = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert Slow.log == ["create", "release"]


def test_a_session_closed_while_it_opens_and_while_it_executes_releases_once() -> None:
    class Slow(Logged):
        async def create(self) -> None:
            self.log.append("create")
            await asyncio.sleep(0.01)

        async def execute(self) -> str:
            await asyncio.sleep(600)
            return ""

    async def main(pause_s: float) -> None:
        session = ToolSession(Toolset([Slow]), limits=PATIENT)

        async def use() -> None:
            await session.open()
            results = await session.execute([call()], allowed=1)
            assert results[0].outcome in ("timeout", "unavailable")

        using = asyncio.create_task(use())
        await asyncio.sleep(pause_s)
        await session.close()
        await asyncio.wait([using])

    for pause_s in (0, 0.005, 0.03):
        Slow.log.clear()
        asyncio.run(main(pause_s))
        assert Slow.log in ([], ["create", "release"])


# -- threads ---------------------------------------------------------------------------------------


class Stuck(Tool):
    """A sync tool that blocks until it is let go."""

    go: ClassVar[threading.Event]
    released: ClassVar[threading.Event]
    log: ClassVar[list[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.go, cls.released, cls.log = threading.Event(), threading.Event(), []

    def execute(self) -> str:
        self.log.append("start")
        self.go.wait(600)
        self.log.append("end")
        return "late"

    def calc_reward(self) -> float:
        return 1.0

    def release(self) -> None:
        self.log.append("release")
        self.released.set()


def test_a_sync_tool_that_hangs_is_abandoned_and_released_only_when_its_thread_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hang(Stuck): ...

    async def main() -> ToolSession:
        session = ToolSession(Toolset([Hang]), limits=SHORT)
        await session.open()
        (first,) = await session.execute([call("hang")], allowed=1)
        assert first.outcome == "timeout"
        assert not session.is_alive
        (second,) = await session.execute([call("hang")], allowed=1)
        assert second.outcome == "unavailable"
        assert await session.calc_rewards() == {}
        assert session.reward_errors == {"hang": "an earlier call is still running"}
        await session.close()
        assert "release" not in Hang.log
        Hang.go.set()
        assert await asyncio.to_thread(Hang.released.wait, 30)
        return session

    session = asyncio.run(main())
    assert Hang.log == ["start", "end", "release"]
    assert (session.metrics["tool_zombies"], session.metrics["releases_late"]) == (1, 1)
    assert "waits for a thread that hangs" in caplog.text


def test_a_reward_waits_for_a_thread_of_its_object_that_ends_in_time() -> None:
    class Late(Stuck): ...

    async def main() -> None:
        session = ToolSession(Toolset([Late]), limits=Limits(tool_timeout_s=1.0))
        await session.open()
        (result,) = await session.execute([call("late")], allowed=1)
        assert result.outcome == "timeout"
        asyncio.get_running_loop().call_later(0.02, Late.go.set)
        assert await session.calc_rewards() == {"late": 1.0}
        assert session.reward_errors == {}
        assert Late.log == ["start", "end"]
        await session.close()

    asyncio.run(main())


def test_a_reward_does_not_wait_for_a_coroutine_that_swallows_its_cancellation() -> None:
    class Rewarded(SwallowForever):
        async def calc_reward(self) -> float:
            return float(self.log.count("swallowed") > 0)

    async def main() -> None:
        session = ToolSession(Toolset([Rewarded]), limits=SHORT)
        await session.open()
        (result,) = await session.execute([call()], allowed=1)
        assert (result.outcome, session.is_alive) == ("timeout", False)
        assert await session.calc_rewards() == {"t": 1.0}
        assert session.reward_errors == {}
        await session.close()

    asyncio.run(main())


def test_a_thread_that_ends_after_its_event_loop_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Late(Stuck): ...

    with caplog.at_level(logging.DEBUG):
        outcome, _, _ = answer(Late, SHORT)
        Late.go.set()
        for _ in range(3_000):
            if "ended after its event loop" in caplog.text:
                break
            time.sleep(0.01)
    assert outcome == "timeout"
    assert Late.log == ["start", "end"]
    assert "ended after its event loop" in caplog.text


def test_idle_threads_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_rollout.tools.supervisor._IDLE_S", 0.01)
    threads: list[threading.Thread] = []

    @tool
    def where() -> None:
        threads.append(threading.current_thread())

    answer(where)
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_a_release_waits_for_a_thread_that_ends_in_time() -> None:
    class Late(Stuck): ...

    async def main() -> None:
        session = ToolSession(
            Toolset([Late]), limits=Limits(tool_timeout_s=0.05, release_timeout_s=30.0)
        )
        await session.open()
        await session.execute([call("late")], allowed=1)
        asyncio.get_running_loop().call_later(0.05, Late.go.set)
        await session.close()
        assert Late.log == ["start", "end", "release"]

    asyncio.run(main())


def test_a_create_that_still_waits_for_a_thread_never_starts_once_the_session_is_closed() -> None:
    class Waiting(Logged):
        def create(self) -> None:  # type: ignore[override]
            self.log.append("create")

    async def main() -> None:
        slots = gate("threads", MAX_THREADS)
        for _ in range(MAX_THREADS):
            await slots.acquire()
        session = ToolSession(Toolset([Waiting]), limits=PATIENT)
        opening = asyncio.create_task(session.open())
        await asyncio.sleep(0.01)
        await session.close()
        await asyncio.wait([opening])
        for _ in range(MAX_THREADS):
            slots.release()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert Waiting.log == []


def test_hanging_threads_do_not_starve_other_tools() -> None:
    class Hang(Stuck): ...

    hang = tool(name="hang")(lambda: Hang().execute())

    @tool
    def fine(n: int) -> int:
        return n

    async def main() -> None:
        limits = Limits(tool_timeout_s=1.0, max_parallel_calls=MAX_THREADS)
        session = ToolSession(Toolset([hang, fine]), limits=limits)
        await session.open()
        stuck = await session.execute([call("hang")] * MAX_THREADS, allowed=MAX_THREADS)
        assert {r.outcome for r in stuck} == {"timeout"}
        results = await session.execute([call("fine", n=n) for n in range(8)], allowed=8)
        assert [r.response.text for r in results] == [str(n) for n in range(8)]
        Hang.go.set()
        await session.close()

    asyncio.run(main())


def test_sync_calls_of_one_object_run_one_after_the_other_and_functions_in_parallel() -> None:
    meet, running, most = threading.Barrier(4), 0, 0

    class Stateful(Tool):
        def execute(self) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.01)
            running -= 1

    function = tool(name="function")(lambda: meet.wait(30))
    calls = [call("stateful")] * 4 + [call("function")] * 4
    results, _ = asyncio.run(play([Stateful, function], calls))
    assert [r.outcome for r in results] == ["ok"] * 8
    assert most == 1


def test_sync_hooks_run_in_threads_of_our_own_unless_the_tool_is_not_blocking() -> None:
    @tool
    def where() -> str:
        return threading.current_thread().name

    inline = tool(name="inline", blocking=False)(where.function)
    results, _ = asyncio.run(play([where, inline], [call("where"), call("inline")]))
    assert [r.response.text for r in results] == ["fsm-tool", threading.current_thread().name]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
def test_a_tool_runs_at_most_max_concurrent_calls_over_all_sessions(is_async: bool) -> None:
    lock, running, most = threading.Lock(), 0, 0
    both: Any  # of those that may run at the same time: none goes on before the other is there

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        yield
        with lock:
            running -= 1

    async def wait() -> None:
        with counted():
            await both.wait()

    def sleep() -> None:
        with counted():
            both.wait(30)

    limited = tool(name="limited", max_concurrent=2)(wait if is_async else sleep)

    async def main() -> list[str]:
        nonlocal both
        both = asyncio.Barrier(2) if is_async else threading.Barrier(2)
        plays = await asyncio.gather(*(play([limited], [call("limited")] * 3) for _ in range(4)))
        return [r.outcome for results, _ in plays for r in results]

    for _ in range(2):  # a second event loop has gates of its own
        running = most = 0
        assert asyncio.run(main()) == ["ok"] * 12
        assert most == 2


def test_neither_asyncio_run_nor_the_interpreter_waits_for_tools_that_hang() -> None:
    program = """
        import asyncio, time
        from fsm_rollout.limits import Limits
        from fsm_rollout.turn import ToolCall
        from fsm_rollout.tools import Tool, Toolset, ToolSession

        class Sleeps(Tool):
            def execute(self): time.sleep(600)
            def release(self): print("released")

        class Swallows(Tool):
            async def execute(self):
                while True:
                    try: await asyncio.sleep(600)
                    except BaseException: pass

        async def main():
            limits = Limits(tool_timeout_s=0.05, release_timeout_s=0.05)
            session = ToolSession(Toolset([Sleeps, Swallows]), limits=limits)
            await session.open()
            calls = [ToolCall("sleeps"), ToolCall("swallows")]
            print([r.outcome for r in await session.execute(calls, allowed=2)])
            await session.close()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout == "['timeout', 'timeout']\n"
    assert "destroyed" not in done.stderr


# -- output and rewards ----------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "kept"), [("left", "…z"), ("right", "a…"), ("middle", "a…z")])
def test_output_is_cut_to_eight_characters_a_token_before_anybody_tokenises_it(
    side: str, kept: str
) -> None:
    class Huge(Tool):
        max_response_tokens = 2

        async def execute(self) -> str:
            return "a" * 5_000_000 + "z" * 5_000_000

    Huge.truncate_side = side  # type: ignore[assignment]
    _, text, session = answer(Huge, Limits(max_tool_response_tokens=5))
    assert len(text) == 16 + len(CUT_MARK)
    head, tail = kept.split("…")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert session.metrics["tool_outputs_cut"] == 1
    assert (session.token_cap("huge"), session.token_cap("other")) == (2, 5)
    assert (session.truncate_side("huge"), session.truncate_side("other")) == (side, "middle")


def test_output_is_cut_to_the_characters_of_a_run() -> None:
    class Huge(Tool):
        async def execute(self) -> str:
            return "x" * 1_000

    _, text, session = answer(Huge, Limits(max_tool_response_chars=10))
    assert text == "x" * 5 + CUT_MARK + "x" * 5
    assert session.metrics["tool_outputs_cut"] == 1


def test_output_without_a_token_cap_is_cut_all_the_same() -> None:
    class Huge(Tool):
        async def execute(self) -> str:
            return "x" * 1_000_000

    _, text, session = answer(Huge)
    assert len(text) < 263_000
    assert session.token_cap("huge") is None


def test_text_that_is_not_unicode_is_made_unicode() -> None:
    class Odd(Tool):
        async def execute(self) -> str:
            return "a\ud83d\ude00\udc00b"

    assert answer(Odd)[1] == "a😀\ufffdb"


def test_a_response_passes_with_all_it_carries() -> None:
    given = ToolResponse("t", images=("image",), reward=0.5, metrics={"hits": 2}, stop=True)

    class Rich(Tool):
        async def execute(self) -> ToolResponse:
            return given

    results, _ = asyncio.run(play([Rich], [call("rich")]))
    assert results[0].response is given


def rewarded(value: Any, called: str) -> type[Tool]:
    async def execute(self: Tool) -> None: ...

    def calc_reward(self: Tool) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    hooks = {"execute": execute, "calc_reward": calc_reward}
    return type(called, (Tool,), {"name": called, "blocking": False, **hooks})


def test_rewards_come_in_the_order_of_the_tools_and_none_is_not_zero() -> None:
    async def slow() -> float:
        await asyncio.sleep(0.01)
        return 0.5

    async def main() -> None:
        parts = {"slow": slow, "none": None, "fast": 1, "zero": 0.0}
        toolset = Toolset([*(rewarded(value, name) for name, value in parts.items()), "calculator"])
        session = ToolSession(toolset, limits=PATIENT)
        await session.open()
        rewards = await session.calc_rewards()
        await session.close()
        assert list(rewards.items()) == [("slow", 0.5), ("fast", 1.0), ("zero", 0.0)]
        assert session.reward_errors == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "failed: ValueError: the reward must be finite, got nan"),
        (float("-inf"), "failed: ValueError: the reward must be finite, got -inf"),
        ("1.0", "failed: TypeError: the reward must be a number, got str"),
        (RuntimeError("boom"), "failed: RuntimeError: boom"),
        (asyncio.CancelledError(), "failed: CancelledError"),
        (asyncio.Event().wait, "timed out after 0.05 s"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_a_number(
    value: Any, why: str
) -> None:
    async def main() -> None:
        session = ToolSession(
            Toolset([rewarded(value, "bad"), rewarded(1.0, "good")]), limits=SHORT
        )
        await session.open()
        assert await session.calc_rewards() == {"good": 1.0}
        await session.close()
        assert session.reward_errors == {"bad": f"calc_reward {why}"}
        assert session.metrics["reward_errors"] == 1

    asyncio.run(main())


def test_a_cancelled_reward_is_an_error_and_not_asked_again() -> None:
    async def main() -> None:
        session = ToolSession(
            Toolset([rewarded(lambda: asyncio.sleep(600), "slow")]), limits=PATIENT
        )
        await session.open()
        await cancelled(session.calc_rewards(), 0.01)
        assert await session.calc_rewards() == {}
        assert session.reward_errors == {"slow": "calc_reward was interrupted"}
        await session.close()

    asyncio.run(main())


def test_a_tool_whose_backing_is_gone_says_so_and_is_released_once() -> None:
    class Leased(Tool):
        released = 0

        async def create(self) -> None:
            self.lease: str | None = "sandbox"

        async def execute(self) -> str:
            if self.lease is None:
                raise ToolError("the sandbox was evicted")
            self.lease = None
            return json.dumps({"ok": True})

        async def release(self) -> None:
            Leased.released += 1

    async def main() -> None:
        session = ToolSession(Toolset([Leased]), limits=PATIENT)
        await session.open()
        outcomes = [(await session.execute([call("leased")], allowed=1))[0] for _ in range(2)]
        await session.close()
        assert [r.outcome for r in outcomes] == ["ok", "tool_error"]
        assert outcomes[1].response.text == "the sandbox was evicted"

    asyncio.run(main())
    assert Leased.released == 1

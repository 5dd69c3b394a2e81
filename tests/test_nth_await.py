"""Fail the n-th await: one scripted scenario, every n, and each way in which an await can fail.

The awaits are counted, not listed: every coroutine function of the engine and the codec, every hook
of the tools and the reward function, when it starts and when it ends; for a cancel from outside,
every suspension of the request's task. So an await that is added is failed too. Time is virtual:
deadlines are the real ones and must be met exactly.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

from fsm_rollout.codec import Codec
from fsm_rollout.engines.scripted import Asked, ScriptedEngine
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools import supervisor
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset
from tests.clock import FastForward

T = TypeVar("T")

LIMITS = Limits(max_attempts=2, max_tool_response_tokens=200)
DEADLINES = {
    "Engine": LIMITS.turn_timeout_s,
    "Tool": LIMITS.tool_timeout_s,
    "Tool.release": LIMITS.release_timeout_s,
    "reward": LIMITS.tool_timeout_s,
    "Codec": LIMITS.request_timeout_s,
}
FAULTS = ("raise", "cancel itself", "hang", "malformed")
TRUSTED = "Codec.decode_async"
"""what it returns is a text of our own, which nothing checks"""
TOKENIZER = tiny_tokenizer()
REQUESTS, HIT = 3, 1
"""requests that play at once, and the one that is hit"""


# -- what is awaited -------------------------------------------------------------------------------


@dataclass
class Plan:
    """Which await of one request fails, and how. `names` are those that were reached."""

    at: int = 0
    fault: str = ""
    names: list[str] = field(default_factory=list)
    error: BaseException | None = None
    """what was raised"""

    @property
    def name(self) -> str:
        """The await that failed."""
        return self.names[self.at - 1]

    @property
    def was_hit(self) -> bool:
        return 0 < self.at <= len(self.names)

    async def reach(self, name: str, value: Any = None) -> Any:
        """Count one await; `value`, or what stands in for it when it is its turn to fail."""
        self.names.append(name)
        is_hit = len(self.names) == self.at
        await asyncio.sleep(0)  # so that every await is one that a cancel can meet
        if not is_hit:
            return value
        match self.fault:
            case "raise":
                self.error = RuntimeError("injected")
                raise self.error
            case "cancel itself":
                self.error = asyncio.CancelledError("injected")
                raise self.error
            case "hang":
                await asyncio.Event().wait()
        return object()


_plan: ContextVar[Plan] = ContextVar("_plan")
"""set in the task of the request that is hit, and so in all that it starts"""


def watched(name: str, function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """`function`, whose start and end are awaits that can fail."""

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        plan = _plan.get(Plan())
        await plan.reach(f"{name} starts")
        return await plan.reach(f"{name} ends", await function(*args, **kwargs))

    return call


def all_watched(kind: str, cls: type[Any]) -> type[Any]:
    """A class whose coroutine functions are all watched."""
    functions = {
        name: watched(f"{kind}.{name}", function)
        for name, function in inspect.getmembers(cls, inspect.iscoroutinefunction)
        if not name.startswith("_")
    }
    return type(cls.__name__, (cls,), functions)


# -- the scenario ----------------------------------------------------------------------------------

CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "{text}"}}}}\n</tool_call>'
    for name, text in (("echo", "a"), ("note", "b"), ("echo", "c"))
)


def answer(asked: Asked) -> str:
    """Two turns with parallel calls, and one that ends it."""
    turn = TOKENIZER.decode(asked.ids).count("<|im_start|>assistant")
    return CALLS if turn < 3 else "done"


class Echo(Tool):
    """Say it again."""

    lives: ClassVar[list[Echo]] = []

    async def create(self) -> None:
        self.end = "interrupted"
        self.releases = 0
        Echo.lives.append(self)
        try:
            await watched("Tool.create", asyncio.sleep)(1)
        except BaseException as error:
            if error is _plan.get(Plan()).error:
                self.end = "failed"
            raise
        self.end = "returned"

    async def execute(self, text: str) -> str:
        """text: what to say"""
        await asyncio.sleep(1)
        return text

    async def calc_reward(self) -> float:
        await asyncio.sleep(1)
        return 0.25

    async def release(self) -> None:
        self.releases += 1
        await watched("Tool.release", asyncio.sleep)(1)


class Note(Echo):
    """Write it down."""


def parts() -> tuple[Codec, Toolset]:
    hooks = ("execute", "calc_reward")  # the others keep a record outside of what fails
    tools = []
    for cls in (Echo, Note):
        own = {hook: watched(f"Tool.{hook}", getattr(cls, hook)) for hook in hooks}
        tools.append(type(cls.__name__, (cls,), {**own, "__doc__": cls.__doc__}))
    toolset = Toolset(tools)
    return all_watched("Codec", Codec)(TOKENIZER, tools=toolset.schemas), toolset


CODEC, TOOLS = parts()
Engine = all_watched("Engine", ScriptedEngine)


async def reward(request: Request) -> float:
    await asyncio.sleep(1)
    return 1.0


@dataclass
class Played:
    requests: list[Request]
    outcomes: list[Any]
    seconds: float
    """until the request that is hit was over"""
    left: list[Any]
    """what still runs long after"""
    problems: list[str]

    @property
    def hit(self) -> Request:
        return self.requests[HIT]


def play(plan: Plan, run: Callable[[Rollout, Request], Coroutine[Any, Any, Any]]) -> Played:
    """Some requests side by side; `run` plays the one that `plan` hits."""
    Echo.lives = []
    kept = set(supervisor._kept)  # of other tests

    async def main() -> Played:
        loop, problems = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: problems.append(str(context)))
        rollout = Rollout(
            Engine(answer, tokenizer=TOKENIZER),
            codec=CODEC,
            tools=TOOLS,
            limits=LIMITS,
            reward=watched("reward", reward),
        )
        rollout.loop.run_id = "run"
        requests = [Request("hello", index=i, limits=LIMITS) for i in range(REQUESTS)]

        async def hit(request: Request) -> None:
            _plan.set(plan)
            started = loop.time()
            try:
                await run(rollout, request)
            finally:
                seconds.append(loop.time() - started)

        seconds: list[float] = []
        outcomes = await asyncio.gather(
            *(hit(r) if i == HIT else rollout.run(r) for i, r in enumerate(requests)),
            return_exceptions=True,
        )
        await asyncio.sleep(60)
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        return Played(requests, outcomes, seconds[0], [*left, *(supervisor._kept - kept)], problems)

    with asyncio.Runner(loop_factory=FastForward) as runner:
        return runner.run(main())


# -- what must hold --------------------------------------------------------------------------------


def run_it(rollout: Rollout, request: Request) -> Coroutine[Any, Any, Any]:
    return rollout.run(request)


def tokens(request: Request) -> list[int]:
    found: list[int] = request.sample.tokens.tolist()
    return found


def assert_sound(played: Played, undisturbed: Played, deadline_s: float) -> None:
    """Whatever failed: every request has ended and adds up, nothing is left, no other noticed."""
    for i, (request, calm) in enumerate(zip(played.requests, undisturbed.requests, strict=True)):
        assert request.is_done
        assert request.is_sealed
        assert not [v for sample in request.samples for v in violations(sample)]
        if i != HIT:
            assert played.outcomes[i] is request
            assert (request.status, request.reward, request.attempt) == (Status.COMPLETED, 1.0, 1)
            assert tokens(request) == tokens(calm)
    assert [life.releases for life in Echo.lives] == [
        0 if life.end == "failed" else 1 for life in Echo.lives
    ]
    assert len(Echo.lives) == 2 * sum(request.attempt for request in played.requests)
    assert not played.left
    assert not played.problems
    assert played.seconds <= 2 * undisturbed.seconds + deadline_s + 2 * supervisor.GRACE_S


def deadline(name: str) -> float:
    call = name.partition(" ")[0]
    return DEADLINES[call] if call in DEADLINES else DEADLINES[call.partition(".")[0]]


def expected(name: str, fault: str) -> tuple[Status, StopReason]:
    """How the request that is hit ends."""
    call, _, when = name.partition(" ")
    if fault == "malformed" and when == "starts":  # nobody looks at it
        return Status.COMPLETED, StopReason.STOP
    match call.partition("."), fault:
        case ("Engine", _, _), "malformed":
            return Status.ABORTED, StopReason.ENGINE_ERROR  # a bug of the engine: final
        case ("Codec", _, _), "cancel itself":
            return Status.ABORTED, StopReason.CANCELLED  # our own code, in our own task
        case ("Codec", _, "prompt_async" | "delta_async" | "fit_async" | "parse_async"), "hang":
            return Status.TRUNCATED, StopReason.TIMEOUT
        case ("Codec", _, _), _:
            return Status.ABORTED, StopReason.INVARIANT
        case ((("reward", _, _) | (_, _, "calc_reward")), _):
            return Status.ABORTED, StopReason.REWARD_ERROR
    return Status.COMPLETED, StopReason.STOP


@pytest.fixture(autouse=True)
def quiet() -> Generator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def calm() -> Played:
    return play(Plan(), run_it)


def test_the_scenario_reaches_every_boundary(calm: Played) -> None:
    plan = Plan()
    assert_sound(play(plan, run_it), calm, 0)
    assert calm.hit.num_turns == 3
    assert {name.partition(" ")[0] for name in plan.names} >= {
        *("Codec.prompt_async", "Codec.delta_async", "Codec.fit_async", "Engine.generate"),
        *("Tool.create", "Tool.execute", "Tool.calc_reward", "Tool.release", "reward"),
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_await_fails_one_request_pays_and_nothing_is_lost(
    fault: str, calm: Played
) -> None:
    at = 0
    while at := at + 1:
        plan = Plan(at, fault)
        played = play(plan, run_it)
        hit = played.hit
        if not plan.was_hit:
            break
        if fault == "malformed" and plan.name.startswith(TRUSTED):
            continue
        assert_sound(played, calm, deadline(plan.name))
        assert (hit.status, hit.stop_reason) == expected(plan.name, fault), plan.name
        is_retried = plan.name.startswith("Engine") and fault != "malformed"
        assert hit.attempt == 1 + is_retried, plan.name
        is_cancelled = hit.stop_reason is StopReason.CANCELLED
        assert isinstance(played.outcomes[HIT], asyncio.CancelledError) == is_cancelled
    assert at > 40


@types.coroutine
def suspending(
    work: Coroutine[Any, Any, T], suspended: Callable[[], None]
) -> Generator[Any, Any, T]:
    """`work`; `suspended` is called each time that it gives way to the event loop."""
    step = partial(work.send, None)
    while True:
        try:
            future = step()
        except StopIteration as end:
            value: T = end.value
            return value
        suspended()
        try:
            yield future
            step = partial(work.send, None)
        except BaseException as error:
            step = partial(work.throw, error)


@dataclass
class Countdown:
    """Cancels a task from outside at its n-th suspension, and at the `times - 1` that follow."""

    at: int
    times: int
    count: int = 0

    @property
    def was_reached(self) -> bool:
        return self.count >= self.at

    def suspended(self) -> None:
        self.count += 1
        if self.at <= self.count < self.at + self.times:
            task = asyncio.current_task()
            assert task
            asyncio.get_running_loop().call_soon(task.cancel)

    async def run(self, rollout: Rollout, request: Request) -> None:
        await suspending(rollout.run(request), self.suspended)


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancel_at_any_suspension_is_passed_on_and_nothing_is_lost(
    times: int, calm: Played
) -> None:
    """`times`: cancelled once more at each suspension that follows, while it cleans up."""
    at = 0
    while at := at + 1:
        count = Countdown(at, times)
        played = play(Plan(), count.run)
        if not count.was_reached:
            break
        assert_sound(played, calm, 0)
        assert isinstance(played.outcomes[HIT], asyncio.CancelledError)
        ends = {Status.ABORTED: StopReason.CANCELLED, Status.COMPLETED: StopReason.STOP}
        assert played.hit.stop_reason is ends[played.hit.status]
    assert at > 20

"""Agents: loops of the user's own, through the same machine, record, codec and tools."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import asyncio
import contextlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import fsm_rollout
from fsm_rollout.agent import Agent, Context
from fsm_rollout.codec import Codec
from fsm_rollout.engines.scripted import Asked, Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError, InvariantError, RolloutError
from fsm_rollout.invariants import check, violations
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rewards import model_turns
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.table import Event
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.base import Tool, ToolResponse
from fsm_rollout.tools.supervisor import GRACE_S
from tests.playing import CALL, TOKENIZER, Echo, ids, play, said_by_tools


async def chat(ctx: Context) -> None:
    """What the built-in loop does."""
    turn = await ctx.generate()
    while turn.calls:
        await ctx.observe(await ctx.call_tools())
        turn = await ctx.generate()


def trained_texts(request: Request) -> list[str]:
    """What is trained, turn by turn, over all rows."""
    return [
        str(TOKENIZER.decode(row.columns.response_ids(turn.start, turn.stop)[:-1]))
        for row in request.rows
        for turn in row.turns
        if turn.kind == "model" and row.loss_mask[turn.start : turn.stop].all()
    ]


@pytest.mark.parametrize(
    "script",
    [
        ["hi"],
        [CALL, "done"],
        [CALL, CALL + CALL, "done"],
        ['<tool_call>{"name": ', "done"],
        [CALL] * 9,
        [Reply(ids("long"), finish="length")],
        [Reply(ids(CALL), log_probs=None), "done"],
    ],
)
def test_an_agent_that_does_what_the_loop_does_gets_the_same_samples(script: list[Any]) -> None:
    limits = Limits(max_context=4_096, max_turns=6, max_attempts=2)
    (ours, _), (theirs, _) = (play(script, agent=agent, limits=limits) for agent in (None, chat))
    assert (theirs.status, theirs.stop_reason) == (ours.status, ours.stop_reason)
    assert theirs.attempt == ours.attempt
    assert theirs.num_tool_calls == ours.num_tool_calls
    one, other = (request.sample.to_dict() for request in (ours, theirs))
    for row in (one, other):
        row["non_generation_time"] = None
        for turn in row["turns"]:
            turn["seconds"] = None
    assert one == other


def test_an_agent_answers_turns_that_call_nothing() -> None:
    async def critic(ctx: Context) -> None:
        turn = await ctx.generate()
        while "sure" not in turn.messages[0]["content"]:
            await ctx.observe("Are you sure?")
            turn = await ctx.generate()

    request, _ = play(["four", "I am sure: 4"], agent=critic)
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    said = [(m["role"], m["content"]) for m in request.sample.messages]
    assert said[1:] == [
        ("assistant", "four"),
        ("user", "Are you sure?"),
        ("assistant", "I am sure: 4"),
    ]
    assert trained_texts(request) == ["four", "I am sure: 4"]


def test_an_agent_answers_calls_by_itself_and_ends_behind_its_own_answer() -> None:
    async def own(ctx: Context) -> None:
        [call] = (await ctx.generate()).calls
        text = str(call.arguments["text"])
        await ctx.observe([{"role": "tool", "name": "echo", "content": text, "id": call.id}])

    request, _ = play([CALL], agent=own)
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.ENV_DONE)
    assert request.sample.messages[-1]["content"] == "hi"
    assert request.num_tool_calls == 0


def test_history_is_rewritten_into_a_new_row() -> None:
    async def compacting(ctx: Context) -> None:
        await ctx.generate()
        await ctx.rewrite([*ctx.messages[:1], {"role": "user", "content": "You said: four."}])
        await ctx.generate()

    request, engine = play(["two and two is four", "4"], agent=compacting)
    first, second = request.rows
    assert engine.asked[1].ids == second.tokens[: second.prompt_length].tolist()
    assert "two and two" not in str(TOKENIZER.decode(engine.asked[1].ids))
    assert trained_texts(request) == ["two and two is four", "4"]
    assert [m["content"] for m in second.messages] == ["hello", "You said: four.", "4"]
    assert (first.rollout_id, first.response) == (
        second.rollout_id,
        "two and two is four<|im_end|>",
    )
    assert second.response == "4<|im_end|>"


def test_thinking_that_the_template_drops_is_dropped_and_trained_all_the_same() -> None:
    template = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
    tokenizer = tiny_tokenizer(template)
    codec = Codec(tokenizer)
    assert not codec.is_prefix_stable

    async def forgetful(ctx: Context) -> None:
        for question in ("And 3 + 3?", "And 4 + 4?"):
            await ctx.generate()
            await ctx.rewrite([*ctx.messages, {"role": "user", "content": question}])
        await ctx.generate()

    script = [f"<think>\nhm {n}\n</think>\n\nIt is {n}." for n in (4, 6, 8)]
    rollout = Rollout(ScriptedEngine(script, tokenizer=tokenizer), tokenizer, agent=forgetful)
    [group] = fsm_rollout.run(rollout.generate(["2 + 2?"]))
    rows = group.samples
    assert len(rows) == 3
    last = str(tokenizer.decode(rows[2].tokens[: rows[2].prompt_length].tolist()))
    assert "hm 4" not in last
    assert "hm 6" not in last
    assert [row.response for row in rows] == [text + "<|im_end|>" for text in script]
    assert rows[2].tokens[: rows[2].prompt_length].tolist() == codec.prompt(
        [{k: v for k, v in m.items() if k != "span"} for m in rows[2].prompt]
    )


@pytest.mark.parametrize("shortens", [False, True])
def test_a_history_that_outgrew_the_context_is_shortened_or_the_end(shortens: bool) -> None:
    async def hoarding(ctx: Context) -> None:
        await ctx.generate()
        try:
            await ctx.rewrite("x" * 500)
        except InvariantError:
            if not shortens:
                raise
            await ctx.rewrite("x")
        await ctx.generate()

    request, _ = play(["a", "b"], agent=hoarding, tools=(), limits=Limits(max_context=400))
    end = (Status.COMPLETED, StopReason.STOP) if shortens else (Status.TRUNCATED, "max_context")
    assert (request.status, request.stop_reason) == end
    assert trained_texts(request) == ["a", "b"][: 1 + shortens]


def by_prompt(asked: Asked) -> Any:
    """Sub-agents say who they are, their parent what they said."""
    text = str(TOKENIZER.decode(asked.ids))
    for name in ("one", "two", "three"):
        if f"part {name}" in text and "Both" not in text:
            return f"I am {name}"
    return "together" if "Both" in text else "split it"


async def lead(ctx: Context) -> None:
    await ctx.generate()
    parts = await asyncio.gather(ctx.spawn("part one"), ctx.spawn("part two"))
    said = [part.sample.messages[-1]["content"] for part in parts]
    await ctx.observe(f"Both: {said}")
    await ctx.generate()


def test_sub_agents_are_rows_of_their_parent_and_share_its_reward() -> None:
    request, engine = play(by_prompt, agent=lead, reward=lambda r: 0.5)
    assert trained_texts(request) == ["split it", "together", "I am one", "I am two"]
    assert {row.rollout_id for row in request.rows} == {request.index}
    # the tools of a sub-agent said what it earned; the reward function is asked for the parent only
    assert [row.reward for row in request.rows] == [0.5, 0.25, 0.25]
    assert len({asked.params.seed for asked in engine.asked}) == len(engine.asked)
    assert len({asked.request_id for asked in engine.asked}) == len(engine.asked)


def test_a_sub_agent_without_tools_has_the_reward_of_its_parent() -> None:
    request, _ = play(by_prompt, agent=lead, tools=(), reward=lambda r: 0.5)
    assert [row.reward for row in request.rows] == [0.5, 0.5, 0.5]


def test_a_sub_agent_may_have_an_agent_and_budgets_of_its_own() -> None:
    async def inner(ctx: Context) -> None:
        await ctx.generate()
        await ctx.observe("part three")
        await ctx.generate()

    async def outer(ctx: Context) -> None:
        child = await ctx.spawn("part one", agent=inner, limits=Limits(max_turns=1))
        assert child.stop_reason is StopReason.MAX_TURNS
        child.reward = -1.0
        await ctx.generate()

    request, _ = play(by_prompt, agent=outer, tools=(), reward=lambda r: 1.0)
    assert [(row.stop_reason, row.reward) for row in request.rows] == [
        ("stop", 1.0),
        ("max_turns", -1.0),
    ]


def test_an_aborted_sub_agent_is_seen_by_its_parent_and_trained_by_nobody() -> None:
    def failing(asked: Asked) -> Any:
        is_child = "part" in str(TOKENIZER.decode(asked.ids))
        return Reply(ids("x"), log_probs=None) if is_child else "fine"

    async def outer(ctx: Context) -> None:
        child = await ctx.spawn("part one", limits=Limits(max_attempts=2))
        assert (child.status, child.stop_reason) == ("aborted", "missing_log_probs")
        assert child.attempt == 2
        await ctx.generate()

    request, _ = play(failing, agent=outer)
    assert trained_texts(request) == ["fine"]


def test_sub_agents_that_are_left_running_are_cancelled_with_their_tools_released() -> None:
    released: list[str] = []

    class Slow(Tool):
        """Slow."""

        async def execute(self) -> str:
            is_running.set()
            await asyncio.sleep(600)
            return ""

        def release(self) -> None:
            released.append("slow")

    def script(asked: Asked) -> Any:
        is_child = "part" in str(TOKENIZER.decode(asked.ids))
        return '<tool_call>{"name": "slow", "arguments": {}}</tool_call>' if is_child else "done"

    left: list[asyncio.Task[Request]] = []
    is_running = asyncio.Event()

    async def outer(ctx: Context) -> None:
        left.append(asyncio.ensure_future(ctx.spawn("part one")))
        await is_running.wait()
        await ctx.generate()

    request, _ = play(script, agent=outer, tools=(Slow,), limits=Limits(tool_timeout_s=300))
    assert request.status is Status.COMPLETED
    assert [child.stop_reason for child in request.children] == [StopReason.CANCELLED]
    assert released == ["slow", "slow"]
    assert len(request.rows) == 1


def test_sub_agents_end_at_once_and_together_even_if_the_run_is_cancelled_twice() -> None:
    left: list[asyncio.Task[Request]] = []

    async def stubborn(ctx: Context) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)

    async def endless(ctx: Context) -> None:
        while True:
            await ctx.generate()
            await ctx.observe("go on")

    async def outer(ctx: Context) -> None:
        left.extend(asyncio.ensure_future(ctx.spawn("x", agent=stubborn)) for _ in range(9))
        left.append(asyncio.ensure_future(ctx.spawn("x", agent=endless)))
        await stubborn(ctx)

    async def main() -> tuple[float, float, Request]:
        script = lambda asked: Reply(ids("x"), delay_s=0.005)  # noqa: E731
        engine = ScriptedEngine(script, tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, agent=outer, limits=Limits(max_turns=1_000))
        request = rollout.request("hello")
        running = asyncio.ensure_future(rollout.run(request))
        await asyncio.sleep(0.2)
        running.cancel()
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(0.02)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        seconds, asked = clock() - started, len(engine.asked)
        await asyncio.sleep(0.3)
        return seconds, len(engine.asked) - asked, request

    seconds, asked_later, request = asyncio.run(main())
    assert seconds < 6 * GRACE_S
    assert asked_later == 0
    assert {child.stop_reason for child in request.children} == {StopReason.CANCELLED}


# -- what an agent may do wrong ------------------------------------------------------------------


async def _generates_twice(ctx: Context) -> None:
    await ctx.generate()
    await ctx.generate()


async def _calls_without_telling(ctx: Context) -> None:
    await ctx.generate()
    await ctx.call_tools()
    await ctx.generate()


async def _rewrites_in_vain(ctx: Context) -> None:
    await ctx.generate()
    with contextlib.suppress(InvariantError):
        await ctx.rewrite("x" * 40_000)
    await ctx.generate()


async def _observes_twice(ctx: Context) -> None:
    await ctx.generate()
    await ctx.observe("a")
    await ctx.observe("b")


async def _observes_first(ctx: Context) -> None:
    await ctx.observe("a")


async def _says_nonsense(ctx: Context) -> None:
    await ctx.generate()
    await ctx.observe([{"role": "oracle", "content": "a"}])


async def _returns_at_once(ctx: Context) -> None:
    pass


async def _generates_twice_at_once(ctx: Context) -> None:
    await asyncio.gather(ctx.generate(), ctx.generate())


async def _asks_again_beside_its_first_question(ctx: Context) -> None:
    first = asyncio.ensure_future(ctx.generate())
    await asyncio.wait([first], timeout=0.01)
    await ctx.generate()


async def _rewrites_while_it_is_answered(ctx: Context) -> None:
    await ctx.generate()
    ctx._loop.codec = slow = copy(ctx._loop.codec)

    async def prompt_async(messages: Any) -> list[int]:
        await asyncio.sleep(0.01)
        return slow.prompt(messages)

    slow.prompt_async = prompt_async  # type: ignore[method-assign]
    await ctx.observe("go on")
    await asyncio.gather(ctx.rewrite("another history"), ctx.generate())


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_generates_twice, "the turn before has no answer"),
        (_calls_without_telling, "the turn before has no answer"),
        (_rewrites_in_vain, "the turn before has no answer"),
        (_observes_twice, "the turn was answered already"),
        (_observes_first, "there is no turn yet"),
        (_says_nonsense, "'oracle' is not one of"),
        (_returns_at_once, "it must be `async def` and `await ctx.generate"),
        (lambda ctx: None, "it must be `async def` and `await ctx.generate"),
        (_generates_twice_at_once, "another call of this context still runs"),
        (_asks_again_beside_its_first_question, "another call of this context still runs"),
        (_rewrites_while_it_is_answered, "another call of this context still runs"),
    ],
)
def test_a_misused_context_aborts_the_request_for_good_and_says_how_to_mend_it(
    agent: Agent, why: str
) -> None:
    script = [Reply(ids(text), delay_s=0.03) for text in "abc"]
    request, _ = play(script, agent=agent)
    assert (request.status, request.stop_reason) == (Status.ABORTED, StopReason.AGENT_ERROR)
    assert why in request.error
    assert (request.attempt, request.rows) == (1, [])


def test_an_agent_that_raises_is_retried_from_scratch() -> None:
    attempts: list[int] = []

    async def flaky(ctx: Context) -> None:
        attempts.append(ctx.request.attempt)
        await ctx.generate()
        await ctx.spawn("part one")
        if len(attempts) < 3:
            raise OSError("the network is down")

    request, _ = play(by_prompt, agent=flaky)
    assert (request.status, attempts) == (Status.COMPLETED, [1, 2, 3])
    assert trained_texts(request) == ["split it", "I am one"]


def test_an_agent_that_catches_everything_still_ends() -> None:
    async def stubborn(ctx: Context) -> None:
        while True:
            with contextlib.suppress(Exception):
                await ctx.generate()
                await ctx.observe("go on")

    request, _ = play(lambda asked: "x", agent=stubborn, limits=Limits(max_turns=3))
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert trained_texts(request) == ["x", "x", "x"]


def test_an_agent_that_hangs_and_swallows_its_cancellation_is_left_behind() -> None:
    late: list[BaseException] = []

    async def hanging(ctx: Context) -> None:
        await ctx.generate()
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(GRACE_S + 0.3)
        try:
            await ctx.observe("late")
        except BaseException as error:
            late.append(error)
            raise

    async def main() -> Request:
        engine = ScriptedEngine(["a"], tokenizer=TOKENIZER)
        limits = Limits(request_timeout_s=0.1)
        rollout = Rollout(engine, TOKENIZER, agent=hanging, limits=limits)
        request = await rollout.run(rollout.request("hello"))
        tokens = request.sample.tokens.tolist()
        await asyncio.sleep(4 * (GRACE_S + 0.3))
        assert request.sample.tokens.tolist() == tokens
        return request

    request = asyncio.run(main())
    assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.TIMEOUT)
    assert [type(error).__name__ for error in late] == ["Ended"]


def test_a_turn_that_takes_too_long_for_the_agent_is_asked_for_again() -> None:
    async def impatient(ctx: Context) -> None:
        try:
            async with asyncio.timeout(0.05):
                await ctx.generate()
        except TimeoutError:
            await ctx.generate()

    request, engine = play([Reply(ids("slow"), delay_s=600.0), "fast"], agent=impatient)
    assert request.status is Status.COMPLETED
    assert trained_texts(request) == ["fast"]
    assert len(engine.asked) == 2


@pytest.mark.parametrize("then", ["returns", "generates", "answers"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_turn_is_read_even_if_the_agent_cancelled_that(then: str, finish: Any) -> None:
    calls: list[int] = []

    async def impatient(ctx: Context) -> None:
        ctx._loop.codec = slow = copy(ctx._loop.codec)
        parse = slow.parse_async

        async def parse_async(*args: Any, **kwargs: Any) -> Any:
            if not patience.expired():  # now it does
                patience.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)  # as for a long turn, in a thread
            return await parse(*args, **kwargs)

        slow.parse_async = parse_async  # type: ignore[method-assign]
        patience = asyncio.timeout(None)
        with contextlib.suppress(TimeoutError):
            async with patience:
                await ctx.generate()
        assert patience.expired()
        if then == "generates":
            calls.append(len((await ctx.generate()).calls))
        elif then == "answers":
            await ctx.observe(await ctx.call_tools())

    request, engine = play([Reply(ids(CALL), finish=finish)], agent=impatient)
    if finish == "length":
        assert (request.status, request.stop_reason) == (Status.TRUNCATED, StopReason.LENGTH)
    else:
        assert request.status is Status.COMPLETED
        assert calls == ([1] if then == "generates" else [])
        assert said_by_tools(request) == (["<hi>"] if then == "answers" else [])
    assert len(request.sample.turns[0].messages) == len(engine.asked) == 1
    check(request.sample)


def test_a_tool_may_end_the_request_of_an_agent() -> None:
    class Submit(Tool):
        """Submit."""

        def execute(self) -> ToolResponse:
            return ToolResponse("thanks", stop=True)

    call = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
    request, _ = play([call, "more"], agent=chat, tools=(Submit,))
    assert (request.stop_reason, request.num_turns) == (StopReason.TOOL_STOP, 1)


class Step(Tool):
    """Rewards each step with 0.5."""

    name = "echo"

    def execute(self, text: str) -> ToolResponse:
        """text: anything"""
        return ToolResponse("ok", reward=0.5)


async def _one_by_one(ctx: Context) -> None:
    turn = await ctx.generate()
    said = [message for call in turn.calls for message in await ctx.call_tools([call])]
    await ctx.observe(said)
    await ctx.generate()


async def _rewrites_between_calls(ctx: Context) -> None:
    turn = await ctx.generate()
    first, second = turn.calls
    said = await ctx.call_tools([first])
    await ctx.rewrite("once more")
    await ctx.observe([*said, *await ctx.call_tools([second])])
    await ctx.call_tools([second])
    await ctx.generate()


@pytest.mark.parametrize(
    ("agent", "reward"), [(chat, 1.0), (_one_by_one, 1.0), (_rewrites_between_calls, 1.5)]
)
def test_step_rewards_add_up_on_the_turn_that_made_the_calls(agent: Agent, reward: float) -> None:
    request, _ = play([CALL + CALL, "done"], agent=agent, tools=(Step,))
    assert request.status is Status.COMPLETED
    assert [turn.reward for turn in model_turns(request)] == [reward, None]
    assert {t.reward for s in request.samples for t in s.turns if t.kind != "model"} <= {None}


def test_a_row_of_a_sub_agent_that_fits_no_tool_is_refused() -> None:
    async def outer(ctx: Context) -> None:
        with pytest.raises(ConfigError, match="nope"):
            await ctx.spawn("part one", tools_kwargs={"nope": {"create_kwargs": {}}})
        await ctx.generate()

    request, _ = play(["a"], agent=outer)
    assert (request.status, request.children) == (Status.COMPLETED, [])


STEPS = ("generate", "tools", "say", "rewrite", "spawn", "raise")


@given(st.lists(st.sampled_from(STEPS), max_size=12), st.integers(1, 5), st.integers(200, 900))
def test_whatever_an_agent_does_the_request_ends_and_what_was_sampled_is_trained_once(
    steps: Sequence[str], turns: int, context: int
) -> None:
    async def agent(ctx: Context) -> None:
        for step in steps:
            try:
                if step == "generate":
                    await ctx.generate()
                elif step == "tools":
                    await ctx.observe(await ctx.call_tools())
                elif step == "say":
                    await ctx.observe("go on")
                elif step == "rewrite":
                    await ctx.rewrite([*ctx.messages[:1], {"role": "user", "content": "again"}])
                elif step == "spawn":
                    await ctx.spawn("part one")
                else:
                    raise OSError("no network")
            except RolloutError:
                pass

    replies = [CALL, "fine", CALL + CALL]
    limits = Limits(max_context=context, max_turns=turns, max_attempts=2, max_tool_calls=3)
    engine = ScriptedEngine(lambda asked: replies[len(asked.ids) % 3], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Echo], agent=agent, limits=limits)
    request = fsm_rollout.run(rollout.run(rollout.request("hello")))
    assert request.is_done
    assert not [v for row in request.rows for v in violations(row, at_rest=True)]
    sampled = sum(row.columns.num_sampled for row in request.rows)
    assert sum(int(row.loss_mask.sum()) for row in request.rows) == sampled
    for row in request.rows:
        for turn in row.turns:
            if turn.kind == "model" and turn.finish == "stop":
                tokens = row.columns.response_ids(turn.start, turn.stop)
                assert tokens in [ids(reply) for reply in replies]


@pytest.mark.parametrize("when", ["the engine", "a tool"])
def test_a_request_that_is_resumed_beneath_its_agent_starts_it_anew(when: str) -> None:
    starts: list[int] = []

    async def agent(ctx: Context) -> None:
        starts.append(ctx.request.num_turns)
        await chat(ctx)

    class Slow(Tool):
        """Slow."""

        name = "echo"

        async def execute(self, text: str) -> ToolResponse:
            """text: anything"""
            is_called.set()
            await asyncio.sleep(0.1)
            return ToolResponse("ok", reward=0.5)

    is_called = asyncio.Event()

    async def main() -> Request:
        script: list[Any] = [CALL, *[Reply(ids("done"), delay_s=0.1)] * 2]
        engine = ScriptedEngine(script, tokenizer=TOKENIZER)
        rollout = Rollout(engine, TOKENIZER, tools=[Slow], agent=agent)
        request = rollout.request("hello")
        playing = asyncio.ensure_future(rollout.run(request))
        await is_called.wait()
        while when == "the engine" and len(engine.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        rollout.loop.machine.fire(Event.ABORT, request, StopReason.PAUSED)
        rollout.loop.machine.fire(Event.RESUME, request)
        return await playing

    request = asyncio.run(main())
    assert (request.status, request.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert (request.attempt, starts) == (1, [0, 1])
    assert trained_texts(request) == [CALL, "done"]
    assert [turn.reward for turn in model_turns(request)] == [0.5, None]


def test_an_agent_that_takes_no_context_is_refused_at_once() -> None:
    async def forgot() -> None: ...

    with pytest.raises(ConfigError, match=r"takes \(\), .* give an `async def agent\(ctx\)`"):
        play(["a"], agent=forgot)


def test_a_sub_agent_whose_tools_lack_kwargs_says_where_they_go() -> None:
    class Search(Tool):
        def create(self, docs: str) -> None: ...
        def execute(self) -> str:
            return ""

    async def lead(ctx: Context) -> None:
        await ctx.generate()
        await ctx.spawn("part", tools_kwargs=ctx.request.tools_kwargs)
        await ctx.spawn("part")

    engine = ScriptedEngine(["a"], tokenizer=TOKENIZER)
    rollout = Rollout(engine, TOKENIZER, tools=[Search], agent=lead)
    kwargs = {"search": {"create_kwargs": {"docs": "none"}}}
    [group] = fsm_rollout.run(rollout.generate([{"prompt": "a", "tools_kwargs": kwargs}]))
    [request] = group.requests
    assert "spawn: tools_kwargs['search'].create_kwargs: missing" in request.error
    assert "`tools_kwargs=ctx.request.tools_kwargs`" in request.error

"""Classes that were written for TRL's `environment_factory`, played by this package."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import asyncio
import copy
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trl.chat_template_utils import qwen2_5_chat_template

from fsm_rollout.adapters.trl import Environment, RolloutFunc, RolloutWorker, reward
from fsm_rollout.adapters.trl.rollouts import Entry, play
from fsm_rollout.adapters.trl.rows import Played, prompt_row
from fsm_rollout.engines.scripted import Answer, Reply, ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.tools.registry import Toolset
from tests.trl_training import (
    batch_of,
    prompt,
    rows,
    scripted,
    taught,
    trained,
    training,
)

TOKENIZER = tiny_tokenizer()


class Counter:
    """As TRL's documentation has it: state, methods with hints and Google's docstrings."""

    made = 0

    def __init__(self) -> None:
        Counter.made += 1
        self.value = 0
        self.log: list[str] = []

    def reset(self, start: int = 0, **kwargs: Any) -> str | None:
        self.value = start
        self.log = [threading.current_thread().name]
        return f" It is at {start}." if start else None

    def increment(self, step: int) -> str:
        """
        Increment the counter.

        Args:
            step: The amount to add.

        Returns:
            The new value.
        """
        time.sleep(0.02)  # a slow one still comes before the call behind it
        self.log.append(threading.current_thread().name)
        self.value += step
        return f"at {self.value}"

    async def double(self) -> int:
        """Double the counter."""
        self.value *= 2
        return self.value

    def get_reward(self) -> float | None:
        assert len(set(self.log)) == 1  # always the same thread
        return float(self.value)

    def _private(self) -> None: ...


def call(name: str, **arguments: Any) -> str:
    text = str(arguments).replace("'", '"')
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def played(
    environment: Environment,
    script: Sequence[Answer],
    *,
    given: Sequence[dict[str, Any]] = ({"prompt": "Count."},),
    max_concurrent: int = 8,
    **limits: Any,
) -> list[Request]:
    async def run() -> list[Request]:
        rollout = Rollout(
            ScriptedEngine(script, tokenizer=TOKENIZER),
            TOKENIZER,
            tools=environment.tools,
            reward=environment.reward if environment.has_reward else None,
            limits=Limits(max_context=4_096, **limits),
            max_concurrent=max_concurrent,
        )
        entries = [
            Entry(Played(prompt_row(row, where=""), row), index, 0)
            for index, row in enumerate(given)
        ]
        return await play(rollout, entries, environment)

    try:
        return asyncio.run(run())
    finally:
        environment.close()


def test_methods_are_tools_reset_speaks_and_get_reward_counts() -> None:
    environment = Environment(Counter)
    both = call("increment", step=4) + call("double")
    up = [{"role": "user", "content": "Up!"}]
    given: list[dict[str, Any]] = [{"prompt": "Count.", "start": 1}, {"prompt": up}]
    first, second = played(environment, [both, "Done."], given=given)
    assert [m["content"] for m in first.sample.messages if m["role"] != "assistant"] == [
        "Count. It is at 1.",
        "at 5",
        "10",
    ]
    assert second.sample.messages[0]["content"] == "Up!"
    assert (first.reward, first.reward_parts) == (10.0, {"Counter": 10.0})
    assert (second.reward, second.status) == (8.0, "completed")


class Account:
    """What an await lets in between would be lost money."""

    def reset(self, **kwargs: Any) -> None:
        self.held = 0

    async def pay(self, amount: int) -> str:
        """
        Pay in.

        Args:
            amount: How much.
        """
        held = self.held
        await asyncio.sleep(0.02)
        self.held = held + amount
        return str(self.held)

    async def take(self, amount: int) -> str:
        """
        Take out.

        Args:
            amount: How much.
        """
        return await self.pay(-amount)


def test_async_methods_do_not_interleave() -> None:
    calls = call("pay", amount=5) + call("take", amount=2) + call("pay", amount=1)
    [request] = played(Environment(Account), [calls, "done"])
    told = [m["content"] for m in request.sample.messages if m["role"] == "tool"]
    assert told == ["5", "3", "4"]


def test_the_schema_is_that_of_the_method() -> None:
    environment = Environment(Counter)
    rollout = Rollout(ScriptedEngine([]), TOKENIZER, tools=environment.tools)
    double, increment = rollout.tools.schemas
    assert increment["function"] == {
        "name": "increment",
        "description": "Increment the counter.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "The amount to add."}},
            "required": ["step"],
        },
    }
    assert double["function"]["name"] == "double"


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


def test_functions_that_trl_takes_as_tools_are_tools() -> None:
    [schema] = Toolset([multiply]).schemas
    assert schema["function"]["description"] == "Multiplies two integers."
    assert schema["function"]["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first integer."},
        "b": {"type": "integer", "description": "The second integer."},
    }


def test_objects_are_used_again_and_only_one_request_has_one() -> None:
    Counter.made = 0
    environment = Environment(Counter)
    given = [{"prompt": "Count."}] * 3
    script = [call("increment", step=1), "Done."]
    assert [r.reward for r in played(environment, script, given=given)] == [1.0] * 3
    assert Counter.made == 3  # one was the probe


def test_a_retry_resets_the_object_again() -> None:
    nan = Reply([65], log_probs=[float("nan")])
    script: list[Answer] = [call("increment", step=1), nan, call("increment", step=1), "Done."]
    [request] = played(Environment(Counter), script, given=[{"prompt": "Count.", "start": 5}])
    assert (request.attempt, request.reward) == (2, 6.0)


def test_a_reset_that_fails_costs_its_request() -> None:
    class Picky(Counter):
        def reset(self, start: int = 0, **kwargs: Any) -> str | None:
            if start < 0:
                raise ValueError("below zero")
            return super().reset(start)

    given = [{"prompt": "Count.", "start": -1}, {"prompt": "Count.", "start": 1}]
    bad, good = played(Environment(Picky), ["Done."], given=given)
    assert (bad.status, bad.stop_reason, bad.rows) == ("aborted", "tool_unavailable", [])
    assert "reset of the environment failed: ValueError('below zero')" in bad.error
    assert good.reward == 1.0


def test_an_object_that_hangs_is_dropped_with_its_thread() -> None:
    free = threading.Event()

    class Hanging(Counter):
        def increment(self, step: int) -> str:
            """Increment."""
            free.wait(600)
            return ""

    Counter.made = 0
    environment = Environment(Hanging)
    script = [call("increment", step=1), "Done."]
    given = [{"prompt": "Count."}] * 2
    requests = played(environment, script, given=given, max_concurrent=1, tool_timeout_s=1)
    free.set()
    for request in requests:
        assert request.stop_reason == "reward_error"  # nobody can ask it for its reward
        assert "timed out after 1 s" in request.sample.messages[2]["content"]
    assert Counter.made == 2  # the second did not get the first one's


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_the_trainer_is_handed_what_an_environment_earned(tmp_path: Path) -> None:
    func = RolloutFunc(
        environment=Environment(Counter), engine=scripted([call("increment", step=1), "Done."])
    )
    with training(func, tmp_path, dataset=rows(2, start=lambda n: 10 * n)) as trainer:
        batch = batch_of(trainer)
        assert sorted(trainer._logs["rewards"]["reward"]) == [1.0, 1.0, 11.0, 11.0]
    assert trained(batch).any(1).all()
    assert not trained(batch).all()


class Adder:
    """What both loops play below."""

    def reset(self, start: int = 0, **_: Any) -> None:
        self.value = start

    def add(self, step: int) -> str:
        """
        Add.

        Args:
            step: How much.
        """
        self.value += step
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_trls_own_loop_gives_the_same_ids_mask_and_reward(tmp_path: Path) -> None:
    """The same class and policy, almost greedy. Only the schemas in the two prompts differ."""
    tokenizer = tiny_tokenizer(qwen2_5_chat_template)
    row: dict[str, Any] = {"prompt": prompt(0), "start": 2}
    script = [call("add", step=3), "Done."]
    ours = RolloutFunc(environment=Environment(Adder), engine=scripted(script))
    with training(ours, tmp_path, dataset=[row], tokenizer=tokenizer, num_generations=4) as trainer:
        said = ours([row["prompt"]], trainer)
    theirs: Any = tokenizer.apply_chat_template(
        row["prompt"], tools=[Adder().add], add_generation_prompt=True, return_dict=False
    )
    policy = taught(
        [
            (context, said["completion_ids"][0], said["env_mask"][0])
            for context in (said["prompt_ids"][0], theirs)
        ]
    )
    loops: list[dict[str, Any]] = [
        {"rollout_func": RolloutFunc(environment=Environment(Adder))},
        {"rollout_func": None, "trainer_kwargs": {"environment_factory": Adder}},
    ]
    batches = []
    for options in loops:
        func: Any = options.pop("rollout_func")
        with training(
            func,
            tmp_path,
            dataset=[row],
            tokenizer=copy.deepcopy(tokenizer),
            model=copy.deepcopy(policy),
            reward_funcs=[reward] if func else [],
            num_generations=4,
            temperature=0.05,
            **options,
        ) as trainer:
            batches.append(batch_of(trainer))
            assert set(*trainer._logs["rewards"].values()) == {5.0}
    for name in ("completion_ids", "completion_mask", "tool_mask"):
        assert torch.equal(batches[0][name], batches[1][name])
    assert batches[0]["completion_ids"][0].tolist() == said["completion_ids"][0]


def test_a_worker_plays_environments_too() -> None:
    environment = Environment(Counter)
    rollout = Rollout(
        scripted([call("increment", step=1), "Done."]),
        TOKENIZER,
        tools=environment.tools,
        reward=environment.reward,
    )
    given = rows(2, start=lambda n: 10 * n)
    worker = RolloutWorker(rollout, given, num_generations=2, environment=environment)
    worker.start()
    try:
        samples = [worker.rollout_buffer.get(timeout=100) for _ in range(4)]
    finally:
        worker.stop()
    rewards = {(s.group_id % 2, s.metrics["reward"]) for s in samples}
    assert rewards <= {(0, 1.0), (1, 11.0)}


def test_what_is_no_environment_is_refused() -> None:
    class NoReset:
        def increment(self) -> str:
            return ""

    class NoTools:
        def reset(self) -> None: ...

    with pytest.raises(ConfigError, match="NoReset has no method `reset`"):
        Environment(NoReset)
    with pytest.raises(ConfigError, match="NoTools has no public method"):
        Environment(NoTools)

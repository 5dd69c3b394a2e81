"""Rewards: the parts of a reward by name, and their sum.

The loop asks for what a finished request earned, the rollout for what a whole group did. The reward
is the weighted sum of the parts that there are: a part that is None is left out, and a request
without any has the reward None, which is not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from fsm_rollout.errors import ConfigError, hint
from fsm_rollout.request import Request
from fsm_rollout.rewards.part import (
    Given,
    RewardError,
    RewardFunction,
    RewardPart,
    add_steps,
    as_finite,
    model_turns,
    read,
)
from fsm_rollout.tools.base import finite
from fsm_rollout.tools.registry import Toolset
from fsm_rollout.tools.session import ToolSession

T = TypeVar("T")

TURNS = "turns"
TOOL = "tool/"


class Rewards:
    """A reward made of named parts: `Rollout(reward=Rewards({...}))`.

        Rewards({
            "tool/check_answer": 1.0,  # the weight of what this tool's calc_reward says
            "turns": 0.1,              # and of what its tools said of its steps, summed
            "format": tidy,            # a function of a request, sync or async
            "answer": RewardPart(verify, weight=2.0, processes=4, timeout_s=5),
        })

    `reward_parts` holds each part as it was given, not weighted, and tools that are not named here
    too: they are recorded but not counted. What a function calls its own parts stands behind its
    name: `format/spaces`. Raises ConfigError for a part that is no function and no weight.
    """

    def __init__(self, parts: Mapping[str, float | RewardFunction | RewardPart]) -> None:
        self.functions: dict[str, RewardPart] = {}
        self.weights: dict[str, float] = {}
        self._is_bare = False
        for name, part in parts.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"a part of a reward is called {name!r}; give it a name")
            if name == TURNS or name.startswith(TOOL):
                try:
                    self.weights[name] = finite(part, what="a weight")
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"reward {name!r}: {error}") from error
            elif isinstance(part, RewardPart) or callable(part):
                function = part if isinstance(part, RewardPart) else RewardPart(part)
                self.functions[name] = function
                self.weights[name] = function.weight
            else:
                raise ConfigError(
                    f"reward {name!r} is {part!r}; give a function or a RewardPart "
                    f"(only {TURNS!r} and '{TOOL}<name>' have a weight alone)"
                )

    @classmethod
    def of(cls, given: RewardFunction | RewardPart | Rewards | None, tools: Toolset) -> Rewards:
        """What `Rollout(reward=...)` may be given, for these tools.

        One function: its value is the part `reward`, or it names the parts; None: the sum of what
        the tools say. Raises ConfigError for a part of a tool that there is not.
        """
        if given is None:
            return cls({f"{TOOL}{name}": 1.0 for name in tools})
        if isinstance(given, Mapping):
            raise ConfigError("reward is a mapping of parts; give Rewards({...}) of it")
        if not isinstance(given, Rewards):
            rewards = cls({"reward": given})
            rewards._is_bare = True
            return rewards
        for name in given.weights:
            tool = name.removeprefix(TOOL)
            if tool != name and tool not in tools:
                raise ConfigError(
                    f"reward {name!r}: the rollout has no such tool; {hint(tool, tools)}"
                )
        return given

    @property
    def by_group(self) -> list[str]:
        """The parts that are scored once for a whole group."""
        return [name for name, part in self.functions.items() if part.group]

    async def score(self, request: Request) -> Earned:
        """What a COMPLETED or TRUNCATED request earned, without the parts of its group.

        Its functions run at the same time. Raises RewardError when a part cannot be had.
        """
        parts = {f"{TOOL}{name}": value for name, value in (await _of_tools(request)).items()}
        said = [t.reward for s in request.samples for t in s.turns if t.reward is not None]
        if said and TURNS in self.weights:
            parts[TURNS] = sum(said)
        given = {name: Given({name: value}) for name, value in parts.items()}
        alone = {name: part for name, part in self.functions.items() if not part.group}
        scores = await _all(*(part.score(request) for part in alone.values()))
        for name, score in zip(alone, scores, strict=True):
            given[name] = self._read(name, score, request)
        return self._earned(given)

    async def score_group(self, requests: Sequence[Request]) -> list[Earned | RewardError]:
        """For each of these usable requests: what its group's functions say, or why they cannot."""
        if not requests:
            return []
        functions = {name: self.functions[name] for name in self.by_group}
        scores = await _all(*(_or_error(f.score_group(requests)) for f in functions.values()))
        earned: list[Earned | RewardError] = []
        for number, request in enumerate(requests):
            try:
                given = {}
                for name, score in zip(functions, scores, strict=True):
                    if isinstance(score, RewardError):
                        raise score
                    given[name] = self._read(name, score[number], request)
                earned.append(self._earned(given))
            except RewardError as error:
                earned.append(error)
        return earned

    def _read(self, name: str, score: object, request: Request) -> Given:
        prefix = "" if self._is_bare else f"{name}/"
        return read(score, name, prefix=prefix, num_turns=len(model_turns(request)))

    def _earned(self, given: Mapping[str, Given]) -> Earned:
        parts: dict[str, float] = {}
        counted: list[float] = []
        steps: list[float | None] | None = None
        for name, one in given.items():
            parts |= one.parts
            weight, total = self.weights.get(name, 0.0), one.total
            if weight and total is not None:
                counted.append(weight * total)
                if one.steps is not None:
                    steps = add_steps(steps, one.steps, weight)
        return Earned(as_finite("the sum", sum(counted)) if counted else None, parts, steps)


class Earned(NamedTuple):
    """What a request earned."""

    reward: float | None
    """the weighted sum"""
    parts: dict[str, float]
    """not weighted"""
    steps: list[float | None] | None
    """weighted, one per model turn"""

    def record(self, request: Request) -> None:
        """Make it the request's reward."""
        request.reward, request.reward_parts = None, {}
        self.add(request)

    def add(self, request: Request) -> None:
        """Add it to the request's reward. Step rewards go to their turns, beside their tools'."""
        request.reward_parts |= self.parts
        if self.reward is not None:
            request.reward = self.reward + (request.reward or 0.0)
        for turn, step in zip(model_turns(request), self.steps or (), strict=False):
            if step is not None:
                turn.reward = step + (turn.reward or 0.0)


async def _of_tools(request: Request) -> dict[str, float]:
    if not isinstance(session := request.session, ToolSession):
        return {}
    rewards = await session.calc_rewards()
    if failed := session.reward_errors:
        raise RewardError("; ".join(f"tool {name!r}: {why}" for name, why in failed.items()))
    return rewards


async def _all(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The values of all, once each has ended. Raises the first error."""
    if len(works) < 2:
        return [await work for work in works]
    ended = await asyncio.gather(*works, return_exceptions=True)
    for value in ended:
        if isinstance(value, BaseException):
            raise value
    return cast("list[T]", ended)


async def _or_error(work: Coroutine[Any, Any, list[object]]) -> list[object] | RewardError:
    try:
        return await work
    except RewardError as error:
        return error

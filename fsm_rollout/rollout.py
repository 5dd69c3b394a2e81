"""Rollout: what a trainer holds. Builds the parts, plays many prompts, hands back groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from fsm_rollout.agent import Agent, player
from fsm_rollout.codec import Codec
from fsm_rollout.columns import Prompt
from fsm_rollout.dataset import PromptRow, checked_rows
from fsm_rollout.engines.base import Engine, SamplingParams
from fsm_rollout.errors import ConfigError, RolloutError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.loop import Loop
from fsm_rollout.request import Group, Request
from fsm_rollout.rewards import RewardError, RewardFunction, RewardPart, Rewards
from fsm_rollout.states.guards import Guard
from fsm_rollout.states.machine import Listener, Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset, ToolSpec
from fsm_rollout.tuning import fast_loop, tuned_gc

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_PROBED = "Tell me about a river that you know, where it begins and what lives in it."
"""behind a prompt like this no model is certain how to go on"""


class Rollout:
    """Plays requests against one engine, one codec and one set of tools.

    `tokenizer` with a chat template, or a ready `codec`. `parser` names the wire format of tool
    calls (default: hermes). `reward` scores a finished request: a function of it, or
    `rewards.Rewards` of several (default: the sum of what its tools say). `agent` is a loop of
    yours, `async def agent(ctx)`: see `fsm_rollout.agent`. `listeners` and `guards` are the
    machine's.
    Raises ConfigError (TemplateError) at once when a part does not fit: nothing starts half-way.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        codec: Codec | None = None,
        tools: Toolset | Sequence[ToolSpec] = (),
        parser: str | None = None,
        chat_template: str | None = None,
        limits: Limits | None = None,
        params: SamplingParams | None = None,
        reward: RewardFunction | RewardPart | Rewards | None = None,
        agent: Agent | None = None,
        log_probs: bool = True,
        max_concurrent: int = 256,
        seed: int = 0,
        listeners: Iterable[Listener] = (),
        guards: Mapping[Event, Iterable[Guard]] | None = None,
    ) -> None:
        if isinstance(engine, type):
            raise ConfigError(f"{engine.__name__} is a class; give the engine that it makes")
        for method in ("generate", "abort", "close"):
            if not callable(getattr(engine, method, None)):
                raise ConfigError(
                    f"{type(engine).__name__} is no engine: it has no method {method!r}; "
                    "see fsm_rollout.engines.base.Engine"
                )
        _check_count("max_concurrent", max_concurrent)
        _check_types(limits, params)
        self.tools = tools if isinstance(tools, Toolset) else Toolset(tools)
        if codec is not None and tokenizer is None:
            if parser is not None or chat_template is not None:
                raise ConfigError("parser and chat_template are the codec's: give them to Codec")
            self.codec = codec
        elif tokenizer is not None and codec is None:
            self.codec = Codec(
                tokenizer,
                tools=self.tools.schemas,
                parser="hermes" if parser is None else parser,
                chat_template=chat_template,
                stop_token_ids=getattr(engine, "stop_token_ids", None),
            )
        else:
            raise ConfigError("Rollout needs a tokenizer or a codec, and not both")
        self.limits = limits or Limits()
        self.log_probs = log_probs
        self.max_concurrent = max_concurrent
        self._indices, self._group_indices = count(), count()
        self._is_started = False
        self._starting: asyncio.Lock | None = None
        self.loop = Loop(
            engine=engine,
            codec=self.codec,
            tools=self.tools,
            machine=Machine(listeners, guards=guards),
            params=params or SamplingParams(),
            reward=reward,
            agent=None if agent is None else player(agent),
            seed=seed,
        )

    async def generate(
        self, rows: Iterable[PromptRow | Mapping[str, Any] | str], *, num_samples: int = 1
    ) -> list[Group]:
        """Play `num_samples` requests of each row; one Group per row, in order.

        Indices count on from call to call, and with them the seeds: no two requests are alike.

        A row is a prompt or `{prompt, id, label, metadata, tools_kwargs}`. Every request comes back
        COMPLETED, TRUNCATED or ABORTED with a reason. Raises ConfigError, naming the row, before
        anything starts.
        """
        if isinstance(rows, str | Mapping):
            raise ConfigError("generate takes a list of rows: put the one row into a list")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"generate takes a list of rows, got {rows!r}")
        _check_count("num_samples", num_samples)
        checked = checked_rows(rows, self.tools)
        await self.start()
        groups = [self._group(row, num_samples) for row in checked]
        for row, group in zip(checked, groups, strict=True):  # before anything starts
            try:
                prompt = Prompt(await self.codec.prompt_async(row.prompt))  # once per group
            except ConfigError as error:
                raise ConfigError(f"{row.where}: {error}") from error
            for request in group.requests:
                request.prompt_ids = prompt
            await asyncio.sleep(0)  # other tasks of the loop get their turn
        await self._play_all(groups)
        return groups

    async def _play_all(self, groups: Sequence[Group]) -> None:
        gate = asyncio.Semaphore(self.max_concurrent)
        left = {group.index: len(group.requests) for group in groups}

        async def admitted(request: Request, group: Group) -> None:
            try:
                await self.loop.run(request)
            finally:
                gate.release()
            left[group.index] -= 1
            if self.loop.rewards.by_group and not left[group.index]:
                await self._reward_group(group)  # by the last to end: nobody waits for anybody

        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    for request in group.requests:
                        await gate.acquire()
                        tasks.create_task(admitted(request, group))
                        await asyncio.sleep(0)  # all at once would stop the event loop for seconds
        except BaseExceptionGroup as bugs:  # a bug of ours or of a listener: no request's fault
            raise bugs.exceptions[0] from bugs
        finally:
            for request in (r for group in groups for r in group.requests):
                if request.is_done and not request.is_sealed:
                    self.loop.abort(
                        request, StopReason.CANCELLED, "the run ended before its group did"
                    )
                    request.seal()

    async def _reward_group(self, group: Group) -> None:
        """Add what the group's functions say of its usable requests, and seal them."""
        open_ones = [r for r in group.requests if r.is_done and not r.is_sealed]
        usable = [(r, r.seq) for r in open_ones if r.status is not Status.ABORTED]
        scores = await self.loop.rewards.score_group([request for request, _ in usable])
        for (request, seq), earned in zip(usable, scores, strict=True):
            if request.seq != seq:  # aborted meanwhile
                continue
            if isinstance(earned, RewardError):
                self.loop.abort(request, StopReason.REWARD_ERROR, str(earned))
            else:
                earned.add(request)
        for request in open_ones:
            if request.is_done:
                request.seal()

    def _group(self, row: PromptRow, num_samples: int) -> Group:
        group_index = next(self._group_indices)
        return Group(group_index, [self._request(row, group_index) for _ in range(num_samples)])

    def request(
        self,
        row: PromptRow | Mapping[str, Any] | str,
        *,
        index: int | None = None,
        group_index: int | None = None,
    ) -> Request:
        """One request of a row, to `run`: what a trainer that counts for itself plays.

        `index` (default: the next) sets the seeds: no two requests of a run may share one. Raises
        ConfigError when the row does not fit.
        """
        [checked] = checked_rows([row], self.tools)
        if group_index is None:
            group_index = next(self._group_indices)
        return self._request(checked, group_index, index)

    def _request(self, row: PromptRow, group_index: int, index: int | None = None) -> Request:
        return Request(
            prompt=row.prompt,
            index=next(self._indices) if index is None else index,
            group_index=group_index,
            limits=self.limits,
            row_id=row.id,
            label=row.label,
            metadata=deepcopy(row.metadata),  # nothing is shared within a group
            tools_kwargs=deepcopy(row.tools_kwargs),
            log_probs=self.log_probs,
        )

    def variant(
        self, *, limits: Limits | None = None, params: SamplingParams | None = None
    ) -> Rollout:
        """This rollout with other budgets or sampling, for an evaluation or another trainer step.

        It shares all parts, and the indices; making one is cheap.
        """
        _check_types(limits, params)
        other = copy(self)
        other.limits = limits or self.limits
        if params is not None:
            other.loop = replace(self.loop, params=params)
            other._is_started = False  # which log-probs an engine reports depends on the sampling
            other._starting = None
        return other

    async def run(self, request: Request) -> Request:
        """Play one request of your own to its end; see `Loop.run`.

        Raises ConfigError when a part of the reward is a group's: only `generate` knows groups.
        """
        if names := self.loop.rewards.by_group:
            raise ConfigError(
                f"the reward {names[0]!r} is a group's: play whole groups with `generate`, or give "
                "this rollout a reward without it"
            )
        await self.start()
        return await self.loop.run(request)

    async def start(self) -> None:
        """Get the engine ready, once: an engine may have a `start` for it. `generate` and `run` do.

        Raises what that raises: ConfigError when its log-probs are not those that trainers need, or
        when it was closed: every request would be aborted.
        """
        if getattr(self.loop.engine, "is_closed", False):
            raise ConfigError(
                f"the {type(self.loop.engine).__name__} of this rollout was closed; make a new one"
            )
        if self._is_started:
            return
        lock = self._starting = self._starting or asyncio.Lock()
        try:
            async with lock:
                start = None if self._is_started else getattr(self.loop.engine, "start", None)
                if start is not None:
                    await start(
                        max_concurrent=self.max_concurrent,
                        params=self.loop.params,
                        log_probs=self.log_probs,
                        prompt=self.codec.prompt(_PROBED),
                    )
                self._is_started = True
        finally:
            self._starting = None  # it belongs to this event loop; the next try may be in another


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def _check_types(limits: object, params: object) -> None:
    for name, given, cls in ("limits", limits, Limits), ("params", params, SamplingParams):
        if given is not None and not isinstance(given, cls):
            raise ConfigError(f"{name} must be {cls.__name__}(...), got {given!r}")


def run(coroutine: Coroutine[Any, Any, T], *, tuned: bool = False) -> T:
    """Run a rollout from code that is not async: `fsm_rollout.run(rollout.generate(rows))`.

    `tuned`: for thousands of requests in flight: uvloop where it is installed (the extra `fast`),
    and a collector of garbage that runs rarely; both are process-wide until the rollout ends.
    Raises RolloutError, at once, where an event loop already runs (a notebook): `await` it there.
    """
    if not asyncio.iscoroutine(coroutine):
        raise ConfigError(
            f"run takes a coroutine, `run(rollout.generate(rows))`, got {coroutine!r}"
        )
    if _is_in_a_loop():
        coroutine.close()
        raise RolloutError("an event loop already runs here: use `await` in place of `run(...)`")
    if not tuned:
        return asyncio.run(coroutine)
    with tuned_gc(), asyncio.Runner(loop_factory=fast_loop()) as runner:
        return runner.run(coroutine)


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

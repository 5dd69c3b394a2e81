"""Player: plays verl's rows through one Rollout; one per worker process and YAML entry.

verl makes an agent loop per trajectory, so what is costly (codec, tools, machine) is made once and
shared here. Nothing that a row, an engine or a tool does is raised: it is a request that ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from fsm_rollout.adapters.verl.engine import PRIORITY, VerlEngine
from fsm_rollout.adapters.verl.settings import (
    LoopSettings,
    check_training,
    limits_of,
    log_prob_kind_of,
    prompt_row_of,
    sampling_of,
    selection_of,
)
from fsm_rollout.codec import Codec
from fsm_rollout.config import imported
from fsm_rollout.dataset import PromptRow
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.engines.probe import fits
from fsm_rollout.errors import ConfigError
from fsm_rollout.failures import log_failure, message
from fsm_rollout.limits import StopReason
from fsm_rollout.metrics import Alarm, Facts, facts_of
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.tools.base import Tool
from fsm_rollout.tools.registry import Toolset, find_tool
from fsm_rollout.tools.verl import verl_tools

logger = logging.getLogger(__name__)

WATCHED = 64
"""requests that the alarm on aborts looks at together"""


class Player:
    """Plays rows with the parts that `config` (verl's, whole) and `settings` name.

    `client` has verl's `LLMServerClient.generate`; `tools` are those that verl loaded. Raises
    ConfigError at once for what could not run.
    """

    def __init__(
        self, config: Any, client: Any, tokenizer: Any, tools: Sequence[Any], settings: LoopSettings
    ) -> None:
        its = config.actor_rollout_ref.rollout
        self._settings = settings
        self._alarm = Alarm(default=settings.max_abort_rate)
        self._ended: list[Facts] = []
        self._kind: LogProbKind = settings.log_prob_kind or log_prob_kind_of(its)
        check_training(its, self._kind)
        self._config, self._tokenizer = config, tokenizer
        self._engine = VerlEngine(client, log_prob_kind=self._kind)
        self._limits = limits_of(its, settings.limits)
        named = {cls.name: cls for cls in map(find_tool, settings.tools)}
        side = its.multi_turn.tool_response_truncate_side
        self._tools = [*named.values(), *verl_tools(tools, truncate_side=side).values()]
        is_verls = settings.reward in (None, "verl")
        self._reward = None if is_verls else imported(str(settings.reward), what="reward")
        self._agent = imported(settings.agent, what="agent") if settings.agent else None
        mtp = config.actor_rollout_ref.model.get("mtp") or {}
        self.drafts = bool(mtp.get("enable") and mtp.get("enable_rollout"))
        """verl's trackers are told of drafted tokens"""
        self._rollouts: dict[tuple[Any, ...], Rollout] = {}
        rollout = self._rollout((), None)  # what can't run says so now
        self.pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        """what fills verl's tensors"""
        self._judges = {t for t in rollout.tools if "calc_reward" in rollout.tools[t].own_hooks}
        self.gives_rewards = settings.reward != "verl" and bool(self._reward or self._judges)
        """False: verl's reward loop is asked"""
        self.group_rewards = tuple(rollout.loop.rewards.by_group)
        """the parts of the reward that compare a whole group"""

    def check_plays_alone(self) -> None:
        """Raise ConfigError when a reward compares a group: the caller may have a part of it."""
        if self.group_rewards:
            raise ConfigError(
                f"the reward {self.group_rewards[0]!r} is a group's, and here a group may be "
                "played in parts: use verl's V1 with FsmAgentLoopManagerTQ, which plays whole "
                "groups, or a reward without it"
            )

    def lacks_reward(self, request: Request, columns: Mapping[str, Any]) -> bool:
        """Whether the reward of this row was ours to give, and is None.

        Of a row without the tools that say something it is verl's reward loop's.
        """
        if not self.gives_rewards or request.reward is not None or not request.rows:
            return False
        selection = selection_of(columns)
        return bool(self._reward) or not selection or not self._judges.isdisjoint(selection)

    async def play(
        self, columns: Mapping[str, Any], sampling_params: Mapping[str, Any], *, n: int = 1
    ) -> list[Request]:
        """`n` finished requests of one row; ABORTED ones, too, where the row cannot be played.

        Raises ConfigError for sampling that no row could be played with.
        """
        params = sampling_of(sampling_params)
        row = None
        try:
            PRIORITY.set(int(columns.get("priority") or 0))
            rollout = self._rollout(selection_of(columns), params)
            row = prompt_row_of(columns, list(rollout.tools))
            [group] = await rollout.generate([row], num_samples=n)
        except Exception as error:  # whatever it is, other rows may be good
            where, how = f"row {columns.get('index', '?')}", f"cannot be played: {message(error)}"
            log_failure(logger, where, "the row", how, error)
            has_log_probs = self._has_log_probs(params)
            return self._watched(
                [self._refused(row, columns, error, has_log_probs) for _ in range(n)]
            )
        for request in group.requests:
            for sample in {*request.samples, *request.rows}:  # other processes count from 0, too
                sample.sample_id = f"{rollout.loop.run_id}-{sample.sample_id}"
                if sample.continued_by:
                    sample.continued_by = f"{rollout.loop.run_id}-{sample.continued_by}"
        return self._watched(group.requests)

    def _watched(self, requests: list[Request]) -> list[Request]:
        """The requests, after the alarm on aborts has seen them."""
        self._ended += map(facts_of, requests)
        if len(self._ended) >= WATCHED:
            self._alarm.watch(self._ended)
            self._ended.clear()
        return requests

    def _rollout(self, selection: tuple[str, ...], params: SamplingParams | None) -> Rollout:
        """The rollout of these tools (none: all) and this sampling; each is made once."""
        key = (selection, params)
        if (known := self._rollouts.get(key)) is None:
            base = self._make(selection) if params is None else self._rollout(selection, None)
            known = base if params is None else base.variant(params=params)
            if params is not None:
                known.log_probs = self._has_log_probs(params)
            self._rollouts[key] = known
        return known

    def _has_log_probs(self, params: SamplingParams) -> bool:
        """False, too, for an evaluation's sampling that they would not fit: nobody trains on it."""
        wanted = bool(self._config.actor_rollout_ref.rollout.calculate_log_probs)
        return wanted and fits(self._kind, params)

    def _make(self, selection: tuple[str, ...]) -> Rollout:
        rollout = self._config.actor_rollout_ref.rollout
        by_name: dict[str, type[Tool]] = Toolset(self._tools).classes
        if strange := [name for name in selection if name not in by_name]:
            known = ", ".join(by_name) or "none"
            raise ConfigError(
                f"tool_selection names no tool of this run: {strange} (tools: {known})"
            )
        tools = Toolset([by_name[name] for name in selection] or self._tools)
        codec = Codec(
            self._tokenizer,
            tools=tools.schemas,
            parser=self._settings.parser or rollout.multi_turn.format,
            chat_template=self._settings.chat_template,
            template_kwargs=self._config.data.get("apply_chat_template_kwargs") or {},
        )
        return Rollout(
            self._engine,
            codec=codec,
            tools=tools,
            limits=self._limits,
            reward=self._reward,
            agent=self._agent,
            log_probs=bool(rollout.calculate_log_probs),
        )

    def _refused(
        self, row: PromptRow | None, columns: Mapping[str, Any], error: Exception, log_probs: bool
    ) -> Request:
        """A request that says why it was never played. `log_probs`: the others' have some."""
        prompt = columns.get("raw_prompt") if row is None else row.prompt
        request = Request(prompt=prompt, log_probs=log_probs)
        why = str(error) if isinstance(error, ConfigError) else repr(error)
        request.error, request.final = f"the row cannot be played: {why}", True
        Machine().fire(Event.ABORT, request, StopReason.INVARIANT)
        request.seal()
        request.sample.sample_id = f"{uuid4().hex[:12]}-refused"
        return request


_PLAYERS: dict[tuple[int, int, int, str], Player] = {}
"""of this process; they hold what their keys are the ids of"""


def player_of(
    config: Any, client: Any, tokenizer: Any, tools: Sequence[Any], settings: LoopSettings
) -> Player:
    """The one player of this config, client, tokenizer and entry."""
    key = id(config), id(client), id(tokenizer), repr(settings)
    if key not in _PLAYERS:
        _PLAYERS[key] = Player(config, client, tokenizer, tools, settings)
    return _PLAYERS[key]

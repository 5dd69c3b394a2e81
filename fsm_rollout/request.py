"""Request and Group: one rollout of one prompt, and the n rollouts of a prompt.

A request owns status, budgets and what is used of them, the tool session, its samples, its children
and its reward. Its status changes only through `states.machine.Machine.fire`. A child is a request
of its own that a sub-agent plays; its rows are handed on with those of its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsm_rollout.arrays import Ints
from fsm_rollout.columns import Column, Columns, Prompt
from fsm_rollout.errors import ConfigError, InvariantError
from fsm_rollout.limits import TERMINAL, Limits, Status, StopReason
from fsm_rollout.sample import Sample
from fsm_rollout.turn import Media, ToolCall


class Session(Protocol):
    """The tools of a request, as far as the record knows them."""

    @property
    def is_alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Request:
    """One rollout of one prompt. `samples[-1]` is the open sample; `fork` opens the next one."""

    prompt: Any = None
    """messages, or a string that stands for one user message"""
    prompt_ids: Ints | Prompt | None = None
    """the prompt's tokens, rendered once per group; None: the loop renders them"""
    index: int = 0
    """unique in a run, but for children: they have their parent's"""
    group_index: int = 0
    limits: Limits = field(default_factory=Limits)
    row_id: str = ""
    """the dataset's own id of the row"""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`{tool: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}`"""
    log_probs: bool = True
    """False: the run is sampled without log-probs as a whole"""
    declared: Sequence[Column] = ()
    name: str = ""
    """what its samples and seeds are named by: the index, and in a child the path from there"""
    has_agent: bool = False
    """a turn without a call may be answered too: an agent of the user's plays it"""
    is_child: bool = False
    """a sub-agent's; it is handed on with its parent"""
    samples: list[Sample] = field(default_factory=list)
    children: list[Request] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str = ""
    """what went wrong, in words, when the request was aborted"""
    final: bool = False
    """a retry cannot help (an HTTP 400, a broken tool class)"""
    was_over: bool = False
    """it had ended before it was aborted: there is nothing to go on with, only a retry"""
    attempt: int = 1
    """counts retries from scratch"""
    seq: int = 0
    """transitions fired; fences late replies and results"""
    num_tool_calls: int = 0
    """those that were started, whatever became of them"""
    num_invalid_calls: int = 0
    calls_before: tuple[int, int] | None = None
    """both counts when the last turn was read: a `resume` that runs its calls again starts there"""
    num_asked: int = 0
    """engine calls, those of earlier attempts included: no two have the same id"""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """what its tools counted: tool_errors, tool_timeouts …, and metrics of their own; how the calls
    of each ended: tool/<name>/ok …; what its engine counted: engine/prompt_tokens …"""
    session: Session | None = None
    is_sealed: bool = False
    _status: Status = Status.PENDING
    _earlier_response: int = 0
    """response tokens of the samples before the open one"""
    _earlier_turns: int = 0
    """model turns of the samples before the open one"""
    _spawned: int = 0
    """children so far, those of earlier attempts included: no two have the same seeds"""

    def __post_init__(self) -> None:
        self.name = self.name or str(self.index)
        self.samples = self.samples or [self._new_sample(self.prompt)]
        for sample in self.samples:
            sample.request = self

    def _new_sample(self, prompt: Any) -> Sample:
        return Sample(
            index=self.index,
            group_index=self.group_index,
            rollout_id=self.index,
            sample_id=f"{self.name}-{len(self.samples)}",
            session_id=self.samples[0].session_id if self.samples else self.name,
            row_id=self.row_id,
            is_child=self.is_child,
            prompt=prompt,
            label=self.label,
            metadata=self.metadata,
            columns=Columns(log_probs=self.log_probs, declared=self.declared),
        )

    # -- read --------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Where the request stands; moved by `Machine.fire` alone."""
        return self._status

    @property
    def is_done(self) -> bool:
        """COMPLETED, TRUNCATED or ABORTED."""
        return self._status in TERMINAL

    @property
    def sample(self) -> Sample:
        """The open sample."""
        return self.samples[-1]

    @property
    def num_turns(self) -> int:
        """Model turns over all samples, an interrupted one included."""
        return self._earlier_turns + self.samples[-1].num_turns

    @property
    def response_length(self) -> int:
        """Response tokens over all samples; the context that a fork starts from is none."""
        return self._earlier_response + self.samples[-1].columns.response_length

    @property
    def family(self) -> Iterator[Request]:
        """The request, its children, theirs: what one rollout is made of."""
        yield self
        for child in self.children:
            yield from child.family

    @property
    def rows(self) -> list[Sample]:
        """What a trainer is handed: its samples and those of its children, in order.

        None of an ABORTED request, nor of one that has not ended, nor a fork in which nothing was
        sampled. All share `rollout_id`: a loss weights them as one rollout.
        """
        if self._status is Status.ABORTED or not self.is_done:
            return []
        own = [s for n, s in enumerate(self.samples) if not n or s.columns.num_sampled]
        return own + [sample for child in self.children for sample in child.rows]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Calls of the last turn that wait for an observation."""
        turns = self.samples[-1].turns
        return turns[-1].calls if turns else ()

    @property
    def room(self) -> int:
        """Tokens that may still be appended: what max_context and max_response leave."""
        columns, limits = self.samples[-1].columns, self.limits
        length = columns.length
        room = limits.max_context - length
        if limits.max_response is not None:
            left = limits.max_response + columns.prompt_length - length - self._earlier_response
            return left if left < room else room
        return room

    @property
    def max_new_tokens(self) -> int:
        """Budget of the next engine call; an interrupted turn keeps what is left of its own."""
        room, left, turns = self.room, self.limits.max_new_tokens, self.samples[-1].turns
        if turns and turns[-1].kind == "model" and turns[-1].is_open:
            left -= turns[-1].stop - turns[-1].start
        return left if left < room else room

    # -- write -------------------------------------------------------------------------------------

    def check_prompt(self, length: int, *, is_fork: bool = False) -> None:
        """Raise InvariantError R3.5.prompt when a prompt of so many tokens is not allowed.

        max_prompt is for the user's: a fork starts from what was sampled and observed as well.
        """
        limits = self.limits
        most = min(limits.max_context, limits.max_prompt or limits.max_context)
        if is_fork:
            most = limits.max_context
        if length > most:
            raise InvariantError(
                "R3.5.prompt",
                f"the prompt of request {self.name} has {length} tokens, allowed are {most} "
                f"(max_context {limits.max_context}, max_prompt {limits.max_prompt})",
            )

    def set_prompt(self, ids: Ints | Prompt) -> None:
        """Set the prompt tokens of the first sample; see `Sample.set_prompt`."""
        self.samples[-1].set_prompt(ids)

    def append_response_tokens(self, tokens: Ints, *args: Any, **kwargs: Any) -> None:
        """Append to the open sample; see `Sample.append_response_tokens`."""
        self.samples[-1].append_response_tokens(tokens, *args, **kwargs)

    def fork(
        self, ids: Ints | Prompt, *, prompt: Any = None, media: Iterable[Media] = ()
    ) -> Sample:
        """Open a new sample whose context is `ids`, and close the one before to appends.

        For history that is rewritten: a summary in place of old turns, thinking that is dropped, a
        way that is tried from an earlier point. The new sample's `ids` are its prompt, so they are
        never trained in it, and every sampled token is trained once, where it was sampled. Budgets
        are spent over all samples. `prompt`: the messages that were rendered, for the chat view;
        `media`: what the placeholder spans in `ids` stand for.

        Raises InvariantError: R3.closed when the request has ended or nothing was sampled yet,
        R3.4.fork inside a turn, R3.5.prompt when `ids` do not fit.
        """
        last = self.samples[-1]
        if self.is_done or self.is_sealed or not last.turns:
            why = "nothing was sampled yet" if not last.turns else f"it is {self._status}"
            raise InvariantError("R3.closed", f"request {self.name} cannot be forked: {why}")
        if last.open_turn is not None:
            raise InvariantError(
                "R3.4.fork",
                f"request {self.name}: turn {self.num_turns} is open; end it, then fork",
            )
        fresh = self._new_sample(prompt)
        fresh.set_prompt(ids)  # while it is nobody's: the status is that of a new one
        self.check_prompt(fresh.prompt_length, is_fork=True)
        fresh.media += media
        fresh.is_fork = True
        fresh.request, last.continued_by = self, fresh.sample_id
        self._earlier_response += last.response_length
        self._earlier_turns += last.num_turns
        self.samples.append(fresh)
        return fresh

    def spawn(self, prompt: Any, **fields: Any) -> Request:
        """A child: a request of its own for a sub-agent, whose rows are handed on with these.

        It has the parent's budgets, each for itself, its label and metadata, unless `fields` say
        otherwise.
        """
        if not isinstance(fields.get("limits", self.limits), Limits):
            raise ConfigError(f"spawn: limits must be Limits(...), got {fields['limits']!r}")
        self._spawned += 1
        child = Request(
            **{
                "prompt": prompt,
                "index": self.index,
                "group_index": self.group_index,
                "name": f"{self.name}.{self._spawned}",
                "is_child": True,
                "limits": self.limits,
                "row_id": self.row_id,
                "label": self.label,
                "metadata": self.metadata,
                "log_probs": self.log_probs,
                "declared": self.declared,
                **fields,
            }
        )
        self.children.append(child)
        return child

    def reset(self) -> None:
        """Empty every generated field and count the attempt. The `retry` event calls it."""
        self.samples[0].reset()  # refuses when it is sealed
        self.samples[0].continued_by = ""
        del self.samples[1:]
        self.children = []
        self._earlier_response = self._earlier_turns = 0
        self.reward, self.reward_parts, self.metrics, self.error = None, {}, {}, ""
        self.num_tool_calls = self.num_invalid_calls = 0
        self.session = None
        self.was_over, self.calls_before = False, None
        self.attempt += 1

    def seal(self) -> None:
        """Record the outcome on every sample and freeze them; only sealed samples are delivered."""
        if not self.is_done:
            raise InvariantError(
                "R3.6.seal", f"request {self.index} is {self.status}: it has no outcome yet"
            )
        if self.is_sealed:
            raise InvariantError("R3.closed", f"request {self.index} is sealed already")
        self.reward = _plain(self.reward)
        if self._status is Status.ABORTED:  # what it earned before is nobody's reward
            self.reward, self.reward_parts = None, {}
        for sample in self.samples:
            sample._status, sample._stop_reason = self._status, self.stop_reason
            sample.reward, sample.reward_parts = self.reward, dict(self.reward_parts)
            sample.remove_sample |= not sample.columns.num_trained
            sample.request = None
            sample.columns.seal()
        self.is_sealed = True
        for child in self.children:
            if child.is_done and not child.is_sealed:
                if child.reward is None:  # else its agent said what it earned
                    child.reward, child.reward_parts = self.reward, dict(self.reward_parts)
                child.seal()


def _plain(reward: Any) -> Any:
    """A bool, or a number of numpy or torch, as a float; what is none is refused at hand-over."""
    try:
        return reward if reward is None or isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        return reward


@dataclass(slots=True)
class Group:
    """The `n` requests of one prompt (a GRPO group)."""

    index: int
    requests: list[Request]

    @property
    def is_done(self) -> bool:
        """Every request has ended."""
        return all(request.is_done for request in self.requests)

    @property
    def samples(self) -> list[Sample]:
        """The samples that a trainer may use: those of COMPLETED and TRUNCATED requests."""
        return [sample for request in self.requests for sample in request.rows]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per request, in order; None where there is none."""
        return [request.reward for request in self.requests]


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """The usable samples of many groups, in order."""
    return [sample for group in groups for sample in group.samples]

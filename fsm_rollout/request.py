"""Request and Group: one rollout of one prompt, and the n rollouts of a prompt.

A request owns status, budgets and what is used of them, the tool session, its samples and its
reward. Its status changes only through `states.machine.Machine.fire`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsm_rollout.arrays import Ints
from fsm_rollout.columns import Column, Columns, Prompt
from fsm_rollout.errors import InvariantError
from fsm_rollout.limits import TERMINAL, Limits, Status, StopReason
from fsm_rollout.sample import Sample
from fsm_rollout.turn import ToolCall


class Session(Protocol):
    """The tools of a request, as far as the record knows them."""

    @property
    def is_alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Request:
    """One rollout of one prompt. `samples[-1]` is the open sample."""

    prompt: Any = None
    """messages, or a string that stands for one user message"""
    prompt_ids: Ints | Prompt | None = None
    """the prompt's tokens, rendered once per group; None: the loop renders them"""
    index: int = 0
    """unique in a run"""
    group_index: int = 0
    limits: Limits = field(default_factory=Limits)
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`{tool: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}`"""
    log_probs: bool = True
    """False: the run is sampled without log-probs as a whole"""
    declared: Sequence[Column] = ()
    samples: list[Sample] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str = ""
    """what went wrong, in words, when the request was aborted"""
    final: bool = False
    """a retry cannot help (an HTTP 400, a broken tool class)"""
    attempt: int = 1
    """counts retries from scratch"""
    seq: int = 0
    """transitions fired; fences late replies and results"""
    num_tool_calls: int = 0
    num_invalid_calls: int = 0
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """what its tools counted: tool_errors, tool_timeouts …, and metrics of their own; what its
    engine counted: engine/prompt_tokens, engine/cached_tokens …"""
    session: Session | None = None
    is_sealed: bool = False
    _status: Status = Status.PENDING

    def __post_init__(self) -> None:
        self.samples = self.samples or [self._new_sample()]
        for sample in self.samples:
            sample.request = self

    def _new_sample(self) -> Sample:
        return Sample(
            index=self.index,
            group_index=self.group_index,
            rollout_id=self.index,
            sample_id=f"{self.index}-{len(self.samples)}",
            session_id=str(self.index),
            prompt=self.prompt,
            label=self.label,
            metadata=self.metadata,
            columns=Columns(log_probs=self.log_probs, declared=self.declared),
            request=self,
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
        """Model turns, an interrupted one included."""
        return self.samples[-1].num_turns

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
            left = limits.max_response + columns.prompt_length - length
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

    def set_prompt(self, ids: Ints | Prompt) -> None:
        """Set the prompt tokens of the first sample; see `Sample.set_prompt`."""
        self.samples[-1].set_prompt(ids)

    def append_response_tokens(self, tokens: Ints, *args: Any, **kwargs: Any) -> None:
        """Append to the open sample; see `Sample.append_response_tokens`."""
        self.samples[-1].append_response_tokens(tokens, *args, **kwargs)

    def reset(self) -> None:
        """Empty every generated field and count the attempt. The `retry` event calls it."""
        self.samples[0].reset()  # refuses when it is sealed
        del self.samples[1:]
        self.reward, self.reward_parts, self.metrics, self.error = None, {}, {}, ""
        self.num_tool_calls = self.num_invalid_calls = 0
        self.session = None
        self.attempt += 1

    def seal(self) -> None:
        """Record the outcome on every sample and freeze them; only sealed samples are delivered."""
        if not self.is_done:
            raise InvariantError(
                "R3.6.seal", f"request {self.index} is {self.status}: it has no outcome yet"
            )
        if self.is_sealed:
            raise InvariantError("R3.closed", f"request {self.index} is sealed already")
        for sample in self.samples:
            sample._status, sample._stop_reason = self._status, self.stop_reason
            sample.reward, sample.reward_parts = self.reward, dict(self.reward_parts)
            sample.remove_sample |= not sample.columns.num_trained
            sample.request = None
            sample.columns.seal()
        self.is_sealed = True


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
        return [
            s
            for r in self.requests
            if r.is_done and r.status is not Status.ABORTED
            for s in r.samples
        ]

    @property
    def rewards(self) -> list[float | None]:
        """One reward per request, in order; None where there is none."""
        return [request.reward for request in self.requests]


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """The usable samples of many groups, in order."""
    return [sample for group in groups for sample in group.samples]

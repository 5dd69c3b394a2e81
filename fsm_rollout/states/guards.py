"""Guards: pure, total predicates of a request. Each says why it refused and what that means.

`means` is the StopReason that the request ends with when `Machine.settle` meets the refusal; None:
the caller is wrong, not the request. A broken invariant (`aligned`, `sound`) aborts it alone.
Users add guards of their own: `@guard(...)`, then `Machine(guards={Event.GENERATE: [mine]})`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fsm_rollout.errors import ConfigError
from fsm_rollout.invariants import violations
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request

Guard = Callable[[Request], bool]
Means = Callable[[Request], StopReason | None]


class Refusal(NamedTuple):
    """What a guard's refusal means and how it is told."""

    means: Means
    says: Callable[[Request], str]


REFUSALS: dict[Guard, Refusal] = {}


def guard(
    says: Callable[[Request], str], means: StopReason | Means | None = None
) -> Callable[[Guard], Guard]:
    """Declare a predicate of a request as a guard: what a refusal says, and what it means.

    A refusal may mean a TRUNCATED or an ABORTED reason, or None: it never completes a request.
    """
    if isinstance(means, StopReason) and means.status is Status.COMPLETED:
        raise ConfigError(f"a guard's refusal cannot mean {means}, a reason of COMPLETED")

    def meaning(request: Request) -> StopReason | None:
        return means if means is None or isinstance(means, StopReason) else means(request)

    def register(function: Guard) -> Guard:
        REFUSALS[function] = Refusal(meaning, says)
        return function

    return register


def _lengths(request: Request) -> str:
    sample = request.sample
    columns = sample.columns
    return (
        f"{columns.length} tokens, prompt_length {columns.prompt_length}, {len(columns.loss_mask)} "
        f"loss_mask, last turn stops at {sample.turns[-1].stop if sample.turns else 0}, "
        f"{columns.num_sampled} sampled, {sample.num_versioned} in version runs"
    )


def _binding_budget(request: Request) -> StopReason:
    """Which budget leaves no token: the context, the response, or the turn's own."""
    limits = request.limits
    if limits.max_context - request.sample.columns.length < 1:
        return StopReason.MAX_CONTEXT
    if limits.max_response is not None and limits.max_response - request.response_length < 1:
        return StopReason.MAX_RESPONSE
    return StopReason.LENGTH


@guard(_lengths, StopReason.INVARIANT)
def aligned(request: Request) -> bool:
    """Tokens, mask, log-probs, turns and version runs, each with its own length, agree."""
    sample = request.samples[-1]
    columns = sample.columns
    turns = sample.turns
    return (
        columns.is_aligned
        and columns.num_sampled == sample.num_versioned
        and (turns[-1].stop if turns else 0) == columns.response_length
    )


@guard(
    lambda r: "; ".join(str(v) for sample in r.samples for v in violations(sample)),
    StopReason.INVARIANT,
)
def sound(request: Request) -> bool:
    """Every invariant of every sample holds: the full check, once per request."""
    return not any(violations(sample) for sample in request.samples)


@guard(
    lambda r: (
        f"no token left: {r.sample.columns.length} of max_context {r.limits.max_context}, "
        f"{r.response_length} of max_response {r.limits.max_response}"
    ),
    _binding_budget,
)
def has_room(request: Request) -> bool:
    """The next turn may sample at least one token."""
    return request.max_new_tokens >= 1


@guard(lambda r: f"{r.num_turns} of max_turns {r.limits.max_turns} are used", StopReason.MAX_TURNS)
def turns_left(request: Request) -> bool:
    """Another model turn may start, or the interrupted one go on."""
    is_left = request.num_turns < request.limits.max_turns
    return is_left or request.samples[-1].open_turn is not None


@guard(lambda r: "the last turn is not a finished model turn with tool calls")
def needs_observation(request: Request) -> bool:
    """The last turn waits for an answer: it made a call, well-formed or not, or an agent asks."""
    turns = request.samples[-1].turns
    if not turns or turns[-1].finish != "stop":
        return False
    return bool(turns[-1].calls) or request.has_agent


@guard(
    lambda r: f"{r.num_tool_calls} of max_tool_calls {r.limits.max_tool_calls} are used",
    StopReason.MAX_TOOL_CALLS,
)
def calls_left(request: Request) -> bool:
    """At least one more tool call may be executed, or there is none to execute."""
    return request.num_tool_calls < request.limits.max_tool_calls or not request.calls


@guard(lambda r: "it is sealed: its outcome was recorded and may have been delivered")
def not_sealed(request: Request) -> bool:
    """The outcome is not recorded yet."""
    return not request.is_sealed


@guard(
    lambda r: (
        f"stop reason {r.stop_reason} cannot be resumed, or it had ended before, or the last turn "
        f"left nothing to go on with (error: {r.error or 'none'})"
    )
)
def resumable(request: Request) -> bool:
    """The tokens so far are good and no end was met: the request may go on from them."""
    reason, turns = request.stop_reason, request.samples[-1].turns
    if reason is None or not reason.resumable or request.final or request.was_over:
        return False
    is_over = bool(turns) and turns[-1].kind == "model" and not turns[-1].is_open
    return not is_over or needs_observation(request)


@guard(lambda r: "its tools were released: only a retry can open new ones")
def tools_alive(request: Request) -> bool:
    """Every tool instance of the request still lives; a request without tools has none to lose."""
    return request.session is None or request.session.is_alive


@guard(lambda r: f"stop reason {r.stop_reason} is final (error: {r.error or 'none'})")
def retryable(request: Request) -> bool:
    """Starting again from scratch may help."""
    reason = request.stop_reason
    return reason is not None and reason.retryable and not request.final


@guard(lambda r: f"attempt {r.attempt} of max_attempts {r.limits.max_attempts} failed")
def attempts_left(request: Request) -> bool:
    """Another attempt may be made."""
    return request.attempt < request.limits.max_attempts

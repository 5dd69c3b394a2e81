"""ScriptedEngine: deterministic replies, faults included, and a log of what was asked.

For tests, docs and users' own tools: no model, no network. Each session plays the script from its
start; a function in its place decides by what was asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from fsm_rollout.arrays import Floats
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, SamplingParams, checked
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from fsm_rollout.replay import WeightVersion


class Reply(msgspec.Struct, frozen=True):
    """One scripted answer. log_probs "auto": valid ones are made up; None: left out, a fault."""

    token_ids: Sequence[int]
    log_probs: Any = "auto"  # floats [N], "auto" or None
    finish: str = "stop"
    weight_version: WeightVersion = None
    delay_s: float = 0.0
    """an abort in the meantime returns the first half"""


class Asked(msgspec.Struct, frozen=True):
    """One call of `generate`, as the engine saw it."""

    ids: list[int]
    max_new_tokens: int
    params: SamplingParams
    request_id: str
    session_id: str


Answer: TypeAlias = Reply | str | Exception
"""a reply, the text of one (needs a tokenizer), or what to raise"""


class ScriptedEngine:
    """Plays `script`, a list of answers per session or a function of what was asked.

    With a tokenizer, text stands for its ids and an end-of-turn id; it is cut with finish "length"
    when it does not fit, as a model would be. A used-up script is a final EngineError.
    """

    def __init__(
        self,
        script: Sequence[Answer] | Callable[[Asked], Answer],
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        log_probs_required: bool = True,
    ) -> None:
        if isinstance(script, str):
            raise ConfigError("the script is a text; put it into a list: one answer per turn")
        self.asked: list[Asked] = []
        self._script = script
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._log_probs_required = log_probs_required
        self._position: dict[str, itertools.count[int]] = {}
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None = None,
    ) -> Generation:
        """The next scripted answer, checked; an exception in its place is raised."""
        asked = Asked(columns.tokens.tolist(), max_new_tokens, params, request_id, session_id)
        self.asked.append(asked)
        answer = self._next(asked)
        if isinstance(answer, Exception):
            raise answer
        reply = self._reply(answer, max_new_tokens) if isinstance(answer, str) else answer
        ids, log_probs, finish = list(reply.token_ids), reply.log_probs, reply.finish
        if isinstance(log_probs, str):
            log_probs = _made_up(ids)
        if reply.delay_s and await self._aborted(request_id, reply.delay_s):
            half = len(ids) // 2
            ids, log_probs, finish = (
                ids[:half],
                None if log_probs is None else log_probs[:half],
                "abort",
            )
        return checked(
            ids,
            log_probs,
            finish,
            max_new_tokens=max_new_tokens,
            vocab_size=self._vocab_size,
            log_probs_required=self._log_probs_required,
            weight_versions=[(reply.weight_version, len(ids))] if ids else (),
            prompt_tokens=len(asked.ids),
            engine_id="scripted",
        )

    async def abort(self, request_id: str) -> None:
        """Let a delayed reply of `request_id` return what it has."""
        if event := self._aborts.get(request_id):
            event.set()

    async def close(self) -> None:
        """Nothing to close."""

    def _next(self, asked: Asked) -> Answer:
        if callable(self._script):
            return self._script(asked)
        position = next(self._position.setdefault(asked.session_id, itertools.count()))
        if position >= len(self._script):
            raise EngineError(
                f"the script has {len(self._script)} answers, session {asked.session_id!r} "
                f"asks for number {position + 1}: add one, or pass a function",
                reason=StopReason.ENGINE_ERROR,
                final=True,
            )
        return self._script[position]

    def _reply(self, text: str, max_new_tokens: int) -> Reply:
        if self._tokenizer is None:
            raise ConfigError(
                "a scripted text needs a tokenizer: ScriptedEngine(..., tokenizer=...)"
            )
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids.append(self._tokenizer.eos_token_id)
        if len(ids) > max_new_tokens:
            return Reply(ids[:max_new_tokens], finish="length")
        return Reply(ids)

    async def _aborted(self, request_id: str, delay_s: float) -> bool:
        event = self._aborts[request_id] = asyncio.Event()
        try:
            await asyncio.wait_for(event.wait(), delay_s)
        except TimeoutError:
            return False
        finally:
            del self._aborts[request_id]
        return True


def _made_up(ids: Sequence[int]) -> Floats:
    return [-((token * 31 + position * 7) % 97 + 1) / 64 for position, token in enumerate(ids)]

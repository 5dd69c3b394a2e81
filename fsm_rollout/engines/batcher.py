"""Batcher: continuous batching of one Hugging Face model, with reuse of common prefixes.

The engine's worker thread owns it and calls `step` while there is work. A step runs one ragged pass
over the next token of each decoding row and a bounded share of the prompts, then samples.

Why not the library's own ContinuousBatchingManager (5.24): its log-prob is taken after top-k and
top-p, inside a private method; `cancel_request` answers nothing, so the partial tokens are lost;
there are no seeds per request; an exception in one forward ends the manager; and without a flash
kernel it attends over the whole packed batch (32 rows of 530 tokens, float32, one core: 4 tokens/s,
here 137).

Prefixes: a request starts from the longest prefix that any running row or kept sequence shares with
it. So a common prompt is computed once, and a session's next turn computes its new tokens only.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future

import numpy as np
import torch
from transformers import PreTrainedModel

from fsm_rollout.engines.base import Finish, SamplingParams
from fsm_rollout.engines.kept import Ids, Kept, common
from fsm_rollout.engines.ragged import SPARE, KeyValues, Span, forward
from fsm_rollout.engines.sampler import sample
from fsm_rollout.errors import EngineError
from fsm_rollout.failures import describe, log_failure
from fsm_rollout.limits import StopReason

logger = logging.getLogger(__name__)


class Row:
    """One request: its ids, what of them is computed, and who waits for the sampled ones."""

    def __init__(
        self,
        prompt: Ids,  # [P], P >= 1
        max_new_tokens: int,
        params: SamplingParams,
        *,
        stop_token_ids: frozenset[int],
        request_id: str,
        session_id: str,
    ) -> None:
        self.ids = np.empty(len(prompt) + max_new_tokens, np.int32)
        self.ids[: len(prompt)] = prompt
        self.size = self.prompt_size = len(prompt)
        self.log_probs: list[float] = []
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.request_id = request_id
        self.session_id = session_id
        self.cache = KeyValues()
        self.answer: Future[tuple[Ids, list[float], Finish]] = Future()
        self._random = np.random.default_rng(None if params.seed is None else params.seed % 2**64)
        self.draw = self._random.random()  # in [0, 1), for the next token

    @property
    def pending(self) -> int:
        """Known tokens that the model has not seen yet: 1 while decoding."""
        return self.size - self.cache.length

    def append(self, token: int, log_prob: float) -> Finish | None:
        """Take a sampled token. Returns how the row is finished, if it is."""
        self.ids[self.size] = token
        self.size += 1
        self.log_probs.append(log_prob)
        self.draw = self._random.random()
        if token in self.stop_token_ids:
            return "stop"
        return "length" if self.size == len(self.ids) else None

    def resolve(self, finish: Finish) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_result((self.ids[self.prompt_size : self.size], self.log_probs, finish))

    def fail(self, error: EngineError) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Batcher:
    """The rows that run, the rows that wait, and the sequences that are kept. Owned by one thread.

    `max_batch`: rows that run at once. `prefill_tokens`: prompt tokens per step, over all rows.
    `cache_tokens`: tokens of ended turns that are kept for reuse; the oldest turn goes first.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_batch: int, prefill_tokens: int, cache_tokens: int
    ) -> None:
        self._model = model
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._rows: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._kept = Kept(cache_tokens)
        self._weights: list[tuple[int, int]] = []

    @property
    def is_idle(self) -> bool:
        return not self._rows and not self._waiting

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def abort(self, request_id: str) -> None:
        """End the request with what it has so far."""
        for row in [*self._rows, *self._waiting]:
            if row.request_id == request_id:
                self._leave(row, "abort")

    def forget(self) -> None:
        """Keep no sequence, since the weights have changed; what runs ends with what it has."""
        for row in [*self._rows, *self._waiting]:
            self._leave(row, "abort")
        self._kept.clear()
        self._weights = _stamps(self._model)

    def notice(self) -> None:
        """Weights that changed without a `forget`: what was computed with the old ones is dropped.

        Writes in place are seen, an optimizer's for instance; those to `weight.data` are not.
        """
        weights = _stamps(self._model)
        if weights == self._weights:
            return
        if self._weights and (self._kept or self._rows):
            logger.warning(
                "the model's weights have changed: call `engine.forget(weight_version=...)` after "
                "each optimizer step. Its old keys and values are dropped"
            )
            for row in [*self._rows]:
                self._leave(row, "abort")
            self._kept.clear()
        self._weights = weights

    def fail_all(self, message: str, reason: StopReason) -> None:
        """End every request, running or waiting, with an EngineError, and keep no sequence."""
        for row in [*self._rows, *self._waiting]:
            row.fail(EngineError(f"request {row.request_id}: {message}", reason=reason))
        self._rows.clear()
        self._waiting.clear()
        self._kept.clear()

    def step(self) -> None:
        """One pass: every decoding row gets a token, waiting prompts get a share of the pass."""
        for row in [*self._rows, *self._waiting]:
            if row.answer.cancelled():
                self._leave(row, "abort")
        if self._waiting:
            self.notice()
        self._admit()
        room = self._prefill_tokens
        plan: list[tuple[Row, int]] = []
        for row in self._rows:
            count = row.pending
            if count > 1:
                count = min(count, room)
                room -= count
            if count:
                plan.append((row, count))
        if plan:
            self._advance(plan)

    def _admit(self) -> None:
        """Let waiting rows in, in order, while the pass has room for their prompts."""
        room = self._prefill_tokens - sum(row.pending for row in self._rows if row.pending > 1)
        while self._waiting and len(self._rows) < self._max_batch and room > 0:
            row = self._waiting[0]
            try:
                cache = self._reuse(row)
            except RuntimeError as error:  # out of memory
                self._waiting.popleft()
                self._fail(row, error)
                continue
            if cache is None:
                return
            self._waiting.popleft()
            row.cache = cache
            self._rows.append(row)
            room -= row.pending

    def _reuse(self, row: Row) -> KeyValues | None:
        """The longest known prefix of the row's prompt; None while that is still being computed."""
        prompt = row.ids[: row.size - 1]  # the last token is computed anew: its logits are needed
        shared, session = self._kept.longest(prompt, row.session_id)
        ready, cache = shared, KeyValues() if session is None else self._kept[session]
        is_own = session == row.session_id
        for other in self._rows:
            length = common(other.ids[: other.size], prompt)
            computed = min(length, other.cache.length)
            if (length, computed) > (shared, ready):
                shared, ready, cache, is_own = length, computed, other.cache, False
        if ready < shared:
            return None
        if is_own:
            self._kept.take(row.session_id)
            cache.length = shared
            return cache
        return cache.fork(shared, capacity=row.size + SPARE)

    def _advance(self, plan: list[tuple[Row, int]]) -> None:
        """Compute the next `count` tokens of every row; sample where no known token is left."""
        try:
            logits = forward(self._model, [_span(row, count) for row, count in plan])
            done = [index for index, (row, count) in enumerate(plan) if count == row.pending]
            rows = [plan[index][0] for index in done]
            params, draws = [row.params for row in rows], [row.draw for row in rows]
            sampled = sample(logits[done], params, draws) if rows else ([], [])
        except Exception as error:
            self._isolate(plan, error)
            return
        for row, count in plan:
            row.cache.length += count
        for row, token, log_prob in zip(rows, *sampled, strict=True):
            if finish := row.append(token, log_prob):
                self._leave(row, finish)

    def _isolate(self, plan: list[tuple[Row, int]], error: Exception) -> None:
        """A pass failed and changed nothing: try its rows one by one; only the guilty fail."""
        self._kept.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(plan) > 1:
            for part in plan:
                self._advance([part])
            return
        row = plan[0][0]
        self._rows.remove(row)
        self._fail(row, error)

    def _fail(self, row: Row, error: Exception) -> None:
        how = f"failed: {describe(error)}"
        log_failure(logger, f"request {row.request_id}", "the model", how, error)
        row.fail(
            EngineError(
                f"request {row.request_id}: the model failed on {row.size} tokens "
                f"({type(error).__name__}: {error}); if memory ran out, lower max_batch, "
                "prefill_tokens or cache_tokens of the TransformersEngine",
                reason=StopReason.ENGINE_ERROR,
            )
        )

    def _leave(self, row: Row, finish: Finish) -> None:
        """Take the row out, answer it, and keep its sequence for the session's next turn."""
        if row in self._rows:
            self._rows.remove(row)
            self._kept.put(row.session_id, row.ids[: row.cache.length], row.cache)
        else:
            self._waiting.remove(row)
        row.resolve(finish)


def _stamps(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Where each weight lies, and how often it was written in place."""
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    ]


def _span(row: Row, count: int) -> Span:
    start = row.cache.length
    return Span(row.cache, row.ids[start : start + count].tolist())

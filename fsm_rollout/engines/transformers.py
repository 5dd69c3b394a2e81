"""TransformersEngine: a Hugging Face causal model in this process, on CPU or GPU.

The embedded engine of the demo, the tests and small runs. Everything that torch does while serving
runs in one worker thread, which owns a Batcher; the event loop only waits for futures.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from fsm_rollout.engines.base import Generation, SamplingParams, checked
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from fsm_rollout.replay import WeightVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fsm_rollout.columns import Columns
    from fsm_rollout.engines.batcher import Row


logger = logging.getLogger(__name__)


class TransformersEngine:
    """Serves `model`: a directory or name that transformers can load, or a loaded PreTrainedModel.

    A loaded model keeps its device and dtype and is put in eval mode; leave it alone while requests
    run, and call `forget` when you have changed its weights.

    Log-probs are log_softmax(logits / temperature) over the full vocabulary in float32, before
    top-k and top-p; at temperature 0 (greedy) those of temperature 1. In float32 they agree with a
    plain forward pass to about 1e-4; in bfloat16 to a few 1e-1, as the model itself rounds.
    With a seed, a request's tokens do not depend on what else runs, but for ties within rounding.

    `max_batch`: requests that run at once; others wait. `prefill_tokens`: prompt tokens per step.
    `cache_tokens`: tokens whose keys and values are kept after their turn. `num_threads`: torch's
    CPU threads, process-wide; more of them than idle cores makes torch many times slower.

    `stop_token_ids`: all end-of-turn ids of the model's generation config.

    Construction loads the model (seconds) and proves the batched pass equal to the plain one; it
    raises ConfigError when the model cannot be loaded or its attention cannot be batched.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_batch: int = 32,
        prefill_tokens: int = 512,
        cache_tokens: int = 32_768,
        num_threads: int | None = None,
    ) -> None:
        import torch

        from fsm_rollout.engines.batcher import Batcher
        from fsm_rollout.engines.ragged import prove

        for name, value in (("max_batch", max_batch), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ConfigError(f"TransformersEngine: {name} must be >= 1, got {value}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded = _load(model, device, dtype) if isinstance(model, (str, Path)) else model.eval()
        prove(loaded)
        config = loaded.config.get_text_config()
        self._vocab_size: int = config.vocab_size
        self._max_context: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.stop_token_ids = _ids(loaded.generation_config.eos_token_id)
        self._batcher = Batcher(
            loaded, max_batch=max_batch, prefill_tokens=prefill_tokens, cache_tokens=cache_tokens
        )
        self._weight_version: WeightVersion = None
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self.is_closed = False
        self._thread = threading.Thread(target=self._serve, name="transformers-engine", daemon=True)
        self._thread.start()

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
        """Continue `columns.tokens`; see Engine. A turn that meets the model's last position ends
        with finish "length"; a prompt that fills the context is EngineError(max_context)."""
        row = self._row(columns, max_new_tokens, params, request_id, session_id, media)
        if self.is_closed:
            raise EngineError("the engine is closed", reason=StopReason.NO_ENGINE, final=True)
        version = self._weight_version
        self._inbox.put(partial(self._batcher.add, row))
        token_ids, log_probs, finish = await asyncio.wrap_future(row.answer)
        return checked(
            token_ids,
            log_probs,
            finish,
            max_new_tokens=max_new_tokens,
            vocab_size=self._vocab_size,
            matched=int(token_ids[-1]) if finish == "stop" else None,
            weight_versions=() if version is None else [(version, len(token_ids))],
            prompt_tokens=row.prompt_size,
            engine_id="transformers",
        )

    async def abort(self, request_id: str) -> None:
        """Take the request out before the next step; its `generate` returns what it has."""
        self._inbox.put(partial(self._batcher.abort, request_id))

    def forget(self, *, weight_version: WeightVersion = None) -> None:
        """Say that the model's weights have changed: after each optimizer step, before `generate`.

        Keys and values of the old weights are dropped, and requests that still run are aborted as
        by `abort`. From now on tokens carry `weight_version` (None: it is not known).
        """
        self._weight_version = weight_version
        self._inbox.put(self._batcher.forget)

    async def close(self) -> None:
        """Fail what is pending, stop the thread, free the caches. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _row(
        self,
        columns: Columns,
        max_new_tokens: int,
        params: SamplingParams,
        request_id: str,
        session_id: str,
        media: Sequence[Any] | None,
    ) -> Row:
        from fsm_rollout.engines.batcher import Row

        where = f"request {request_id}"
        if media:
            raise _refused(f"{where}: the in-process engine serves text only, got media")
        prompt = columns.tokens
        if not prompt.size or max_new_tokens < 1:
            raise _refused(
                f"{where}: nothing to do with {prompt.size} prompt tokens and "
                f"max_new_tokens={max_new_tokens}; both must be >= 1"
            )
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab_size:
            raise _refused(
                f"{where}: prompt ids range over [{prompt.min()}, {prompt.max()}], the model has "
                f"{self._vocab_size} ids; use the model's own tokenizer"
            )
        room = self._max_context - prompt.size
        if room < 1:
            raise EngineError(
                f"{where}: {prompt.size} tokens fill the model's context of {self._max_context}; "
                "set Limits.max_context to at most that",
                reason=StopReason.MAX_CONTEXT,
                final=True,
            )
        return Row(
            prompt,
            min(max_new_tokens, room),
            params,
            stop_token_ids=frozenset(params.stop_token_ids) or self.stop_token_ids,
            request_id=request_id,
            session_id=session_id,
        )

    def _serve(self) -> None:
        """The worker thread: take what has arrived, make a step, until `close`."""
        import torch

        with torch.inference_mode():
            is_open = True
            while is_open:
                try:
                    if is_open := self._receive():
                        self._batcher.step()
                except Exception as error:
                    logger.exception("the batcher failed")
                    message = f"the engine failed ({type(error).__name__}: {error})"
                    self._batcher.fail_all(message, StopReason.ENGINE_ERROR)
        self._batcher.fail_all("the engine was closed", StopReason.NO_ENGINE)

    def _receive(self) -> bool:
        """Do what callers asked of the batcher; wait while there is nothing. False: closed."""
        wait = self._batcher.is_idle
        while wait or not self._inbox.empty():
            wait = False
            work = self._inbox.get()
            if work is None:
                return False
            work()
        return True


def _load(name: str | Path, device: str, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        loaded: PreTrainedModel = model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"TransformersEngine: cannot load {str(name)!r} as {dtype} on {device}: {error}"
        ) from error
    return loaded


def _refused(message: str) -> EngineError:
    return EngineError(message, reason=StopReason.ENGINE_ERROR, final=True)


def _ids(value: int | Sequence[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)

"""VLLMStream: puts a reply of vLLM together, streamed or not, of either route.

`/inference/v1/generate` and `/v1/completions` answer in one shape but for their log-probs. Streams
send deltas; that none is missing shows in the usage at their end.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fsm_rollout.engines.http.replies import (
    Parts,
    bad,
    decoded,
    finish_word,
    is_filtered,
    prompt_echo,
    refusal,
    replayed,
)
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.errors import EngineError

NAME = "vllm"
_REMEDIES = {
    401: "pass headers={'Authorization': 'Bearer …'}",
    403: "start the server with --enable-scale-out, or use route='completions'",
    404: "is the model's name right (model=…), and is this a vLLM server with this route? "
    "/inference/v1/generate needs --enable-scale-out; route='completions' does not",
}


class LogProb(msgspec.Struct, gc=False):
    """The log-prob of one token."""

    logprob: float
    token_id: int | None = None
    token: str | None = None


class LogProbs(msgspec.Struct, gc=False):
    """Those of a choice: `content` by generate (and chat), the lists by completions."""

    content: list[LogProb] | None = None
    token_logprobs: list[float] | None = None
    tokens: list[str] | None = None


class Choice(msgspec.Struct, gc=False):
    """The answer, or the next part of it."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: LogProbs | list[dict[int, float | LogProb]] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    sampling_mask: list[Any] | None = None
    routed_experts: Any = None
    weight_versions: Any = None


class PromptDetails(msgspec.Struct, gc=False):
    """usage.prompt_tokens_details"""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """How many tokens the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Speculation(msgspec.Struct, gc=False):
    """metrics.speculative_decoding"""

    num_accepted_draft_tokens: int | None = None
    num_draft_tokens: int | None = None


class Metrics(msgspec.Struct, gc=False):
    """What a server tells of one request when it was started to."""

    speculative_decoding: Speculation | None = None


class Event(msgspec.Struct, gc=False):
    """A reply, or one event of a stream."""

    request_id: str | None = None
    id: str | None = None  # on the completions route
    choices: list[Choice] | None = None
    usage: Usage | None = None
    metrics: Metrics | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: Any = None


_EVENT = msgspec.json.Decoder(Event)
_INTS = msgspec.json.Decoder(list[int])


class VLLMStream:
    """Puts a reply together from its events; see Stream. A whole reply is one event."""

    __slots__ = (
        "_ask", "_experts", "_is_gapped", "_last", "_metrics", "_needed", "_parts", "_prompt",
        "_rid", "_usage",
    )  # fmt: skip

    def __init__(self, ask: Ask, *, sampling_mask: bool, routed_experts: bool) -> None:
        self._ask = ask
        self._needed = {}
        if sampling_mask and is_filtered(ask.params):
            self._needed["top_p"] = "start the server with --return-sampling-mask"
        if routed_experts:
            flag = "--enable-return-routed-experts"
            self._needed["routed_experts"] = f"start the server with {flag}"
        self._parts = Parts(ask, NAME)
        self._last: Choice | None = None  # the one with the finish reason
        self._experts: Any = None
        self._usage = Usage()
        self._metrics = Metrics()
        self._prompt: list[int] | None = None
        self._is_gapped = False
        self._rid: str | None = None

    def feed(self, event: bytes) -> None:
        """Take the data of one server-sent event, `[DONE]` included. EngineError when it is bad."""
        if event != b"[DONE]":
            self.take(event)

    def take(self, data: bytes) -> None:
        """Decode an event and add its tokens."""
        event = decoded(_EVENT, data, NAME)
        if event.error is not None:
            code = event.error.get("code") if isinstance(event.error, dict) else None
            raise refused(code if isinstance(code, int) else 500, data)
        if event.choices is None:
            raise bad(f"{NAME}: $.choices is missing")
        if len(event.choices) > 1:
            raise bad(f"{NAME}: {len(event.choices)} choices, asked for one")
        self._rid = event.request_id or event.id or self._rid
        self._usage = event.usage or self._usage
        self._metrics = event.metrics or self._metrics
        self._prompt = self._prompt or prompt_echo(event.prompt_token_ids, self._ask, NAME)
        for choice in event.choices:
            self._take(choice)

    def reply(self) -> Reply:
        """The whole reply. EngineError when it ended without a finish reason."""
        last, parts, ask, usage = self._last, self._parts, self._ask, self._usage
        if last is None or last.finish_reason is None:
            raise bad(f"{NAME}: the reply ended without a finish reason")
        parts.counted(usage.completion_tokens)
        if self._is_gapped and usage.completion_tokens is None:
            raise bad(
                f"{NAME}: a part came without token_ids, and no usage tells how many they were"
            )
        meta = self._counted() | {
            "prompt_tokens": usage.prompt_tokens,
            "weight_versions": last.weight_versions,
            "routed_experts": self._experts,
            "sampling_mask": parts.masks or None,
        }
        return Reply(
            token_ids=parts.ids,
            log_probs=parts.log_probs if ask.log_probs else None,
            rid=self._rid,
            finish=finish_word(last.finish_reason, NAME),
            matched=last.stop_reason,
            prompt_tokens=usage.prompt_tokens,
            prompt_token_ids=self._prompt,
            **replayed(
                meta,
                len(parts.ids),
                ask,
                source=NAME,
                needed=self._needed,
                is_abort=last.finish_reason == "abort",
            ),
        )

    def _take(self, choice: Choice) -> None:
        if self._last is not None:
            raise bad(f"{NAME}: more came after the finish reason")
        if choice.finish_reason is not None:
            self._last = choice
        self._prompt = self._prompt or prompt_echo(choice.prompt_token_ids, self._ask, NAME)
        if choice.routed_experts is not None:
            self._experts = choice.routed_experts
        told, log_probs = _log_probs(choice)
        ids = told if choice.token_ids is None else choice.token_ids
        if ids is None:
            if log_probs:
                raise bad(f"{NAME}: {len(log_probs)} log-probs, but no token_ids")
            self._is_gapped = True
            return
        if told is not None and told != ids:
            raise bad(
                f"{NAME}: token_ids and the ids of the log-probs differ: {len(ids)} and "
                f"{len(told)} tokens"
            )
        self._parts.add(ids, log_probs, choice.sampling_mask)

    def _counted(self) -> dict[str, Any]:
        """Our names of what the server counted, as replay.py reads them."""
        details = self._usage.prompt_tokens_details or PromptDetails()
        speculation = self._metrics.speculative_decoding or Speculation()
        return {
            "cached_tokens": details.cached_tokens,
            "spec_num_correct_drafts": speculation.num_accepted_draft_tokens,
            "spec_num_proposed_drafts": speculation.num_draft_tokens,
        }


def refused(status: int, body: bytes) -> EngineError:
    """What an HTTP status of vLLM means, also one that it reports inside a stream."""
    return refusal(NAME, status, body, _REMEDIES)


def _log_probs(choice: Choice) -> tuple[list[int] | None, list[float] | None]:
    """The log-probs of a part, and of which ids they are; None: not said."""
    found = choice.logprobs
    if found is None:
        return None, None
    if isinstance(found, list):
        return None, _looked_up(found, choice.token_ids)
    if found.content is not None:
        log_probs = [entry.logprob for entry in found.content]
        ids = [entry.token_id for entry in found.content if entry.token_id is not None]
        if len(ids) == len(log_probs):
            return ids, log_probs
        return _ids_in([entry.token or "" for entry in found.content]), log_probs
    return _ids_in(found.tokens or []), found.token_logprobs


def _looked_up(
    entries: list[dict[int, float | LogProb]], ids: list[int] | None
) -> list[float] | None:
    """Entries per token that hold other candidates too: the sampled id says which one it is."""
    if ids is None or len(ids) != len(entries):
        raise bad(f"{NAME}: {len(entries)} log-probs for {len(ids or [])} token_ids")
    log_probs = []
    for token, entry in zip(ids, entries, strict=True):
        if (value := entry.get(token)) is None:
            raise bad(f"{NAME}: no log-prob for the sampled token {token}")
        log_probs.append(value.logprob if isinstance(value, LogProb) else value)
    return log_probs


def _ids_in(tokens: list[str]) -> list[int] | None:
    """The ids in `token_id:1`, `token_id:2` …; None when these are texts."""
    if not tokens or not tokens[0].startswith("token_id:"):
        return None
    numbers = ",".join(tokens).replace("token_id:", "")
    return decoded(_INTS, f"[{numbers}]".encode(), f"{NAME}: the ids in logprobs.tokens")

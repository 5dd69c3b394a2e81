"""SGLangStream: puts a reply of SGLang's `/generate` together, streamed or not.

Whether the events of a stream repeat what came before (cumulative, the server's default) or not
(`--incremental-streaming-output`) shows in the token counts of each event; it is never assumed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fsm_rollout.engines.base import SamplingParams
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

NAME = "sglang"
_REMEDIES = {
    401: "pass headers={'Authorization': 'Bearer …'}",
    403: "pass headers={'Authorization': 'Bearer …'}",
    404: "is this the address of an SGLang server or router?",
    413: "raise the router's --max-payload-size",
}


class Finish(msgspec.Struct, gc=False):
    """meta_info.finish_reason"""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None

    @property
    def is_abort(self) -> bool:
        """Somebody ended the request."""
        return self.type == "abort"


class Meta(msgspec.Struct, gc=False):
    """meta_info, as far as we read it."""

    id: str | None = None
    finish_reason: Finish | str | None = None
    completion_tokens: int | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_token_sampling_mask: list[Any] | None = None
    prompt_tokens: int | None = None
    # what follows is read by replay.py
    weight_version: Any = None
    weight_versions: Any = None
    cached_tokens: Any = None
    spec_num_correct_drafts: Any = None
    spec_num_proposed_drafts: Any = None
    spec_accept_token_num: Any = None
    spec_draft_token_num: Any = None
    spec_verify_ct: Any = None
    top_p_token_ids: Any = None
    top_p_token_offsets: Any = None
    top_p_kept_token_ids: Any = None
    top_p_kept_token_offsets: Any = None
    routed_experts: Any = None
    routed_experts_start_len: Any = None


_KEPT = Meta.__struct_fields__[5:]


class Event(msgspec.Struct, gc=False):
    """A reply, or one event of a stream."""

    output_ids: msgspec.Raw = msgspec.Raw()
    meta_info: Meta | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: Any = None


_EVENT = msgspec.json.Decoder(Event)
_INTS = msgspec.json.Decoder(list[int])
_GOES_ON = re.compile(rb'"finish_reason": ?null')


class SGLangStream:
    """Puts a reply together from its events; see Stream. A whole reply is one event.

    An event of a cumulative stream repeats all tokens: the ones between need no decoding.
    """

    __slots__ = (
        "_ask", "_finish", "_held", "_is_cumulative", "_meta", "_meta_before", "_needed",
        "_parts", "_prompt", "_shape",
    )  # fmt: skip

    def __init__(
        self, ask: Ask, *, sampling_mask: bool, routed_experts: tuple[int, int] | None
    ) -> None:
        self._ask = ask
        self._shape = routed_experts
        self._needed = {}
        if sampling_mask and is_filtered(ask.params):
            self._needed["top_p"] = "a stock server does if 1 <= top_k <= 4096"
        if routed_experts:
            self._needed["routed_experts"] = "start it with --enable-return-routed-experts"
        self._parts = Parts(ask, NAME)
        self._finish: Finish | None = None
        self._meta: Meta | None = None
        self._meta_before: Meta | None = None
        self._prompt: list[int] | None = None
        self._is_cumulative = False
        self._held = b""  # the latest event of a cumulative stream; the next one repeats it

    def feed(self, event: bytes) -> None:
        """Take the data of one server-sent event, `[DONE]` included. EngineError when it is bad."""
        if self._is_cumulative and _GOES_ON.search(event):
            self._held = event
        elif event != b"[DONE]":
            self.take(event)

    def take(self, data: bytes) -> None:
        """Decode an event and add its new tokens."""
        if self._finish is not None:
            raise bad(f"{NAME}: more came after the finish reason")
        event = decoded(_EVENT, data, NAME)
        if event.error is not None:
            code = event.error.get("code") if isinstance(event.error, dict) else None
            raise refused(code if isinstance(code, int) else 500, data)
        if event.meta_info is None:
            raise bad(f"{NAME}: $.meta_info is missing")
        finish = self._finish_of(event.meta_info)
        if self._held and finish is not None and finish.is_abort:  # it may not repeat them
            held, self._held = self._held, b""
            self.take(held)
        self._meta_before, self._meta = self._meta, event.meta_info
        self._add(event.output_ids, event.meta_info, finish is not None and finish.is_abort)
        self._prompt = prompt_echo(event.prompt_token_ids, self._ask, NAME)
        self._finish = finish

    def reply(self) -> Reply:
        """The whole reply. EngineError when it ended without a finish reason."""
        finish, parts, ask = self._finish, self._parts, self._ask
        if finish is None:
            raise bad(f"{NAME}: the reply ended without a finish reason")
        meta = _reported(self._meta_before) | _reported(self._meta)
        if parts.masks:
            meta["output_token_sampling_mask"] = parts.masks
        matched = finish.matched
        return Reply(
            token_ids=parts.ids,
            log_probs=parts.log_probs if ask.log_probs else None,
            rid=None if self._meta is None else self._meta.id,
            finish=finish_word(finish.type, NAME),
            matched=next(reversed(matched), None) if isinstance(matched, list) else matched,
            prompt_tokens=meta.get("prompt_tokens"),
            prompt_token_ids=self._prompt,
            log_prob_kind="raw" if _ignores_temperature(ask.params) else None,
            **replayed(
                meta,
                len(parts.ids),
                ask,
                source=NAME,
                needed=self._needed,
                is_abort=finish.is_abort,
                shape=self._shape,
            ),
        )

    def _finish_of(self, meta: Meta) -> Finish | None:
        found = meta.finish_reason
        finish = Finish(found) if isinstance(found, str) else found
        if finish is not None and finish.is_abort and (finish.status_code or 0) >= 400:
            message = finish.message or "aborted by the scheduler"
            raise refused(finish.status_code or 0, message.encode())
        return finish

    def _add(self, raw_ids: msgspec.Raw, meta: Meta, is_abort: bool) -> None:
        triples = meta.output_token_logprobs
        log_probs = told = None
        if triples is not None:
            told, log_probs = [t[1] for t in triples], [t[0] for t in triples]
        ids = _ids(raw_ids, told)
        if ids is None:
            raise bad(f"{NAME}: $.output_ids is missing")
        if is_abort:
            ids, log_probs = self._without_repeat(ids, told, log_probs, meta.completion_tokens)
        elif told is not None and ids is not told and ids != told:
            raise bad(
                f"{NAME}: output_ids and the ids of output_token_logprobs differ: {len(ids)} and "
                f"{len(told)} tokens"
            )
        start = self._start(ids, log_probs, meta.completion_tokens)
        masks = meta.output_token_sampling_mask
        if start:
            if masks is not None and len(masks) == len(ids):
                masks = masks[start:]
            ids, log_probs = ids[start:], None if log_probs is None else log_probs[start:]
        self._parts.add(ids, log_probs, masks)

    def _without_repeat(
        self,
        ids: list[int],
        told: list[int] | None,
        log_probs: list[float] | None,
        total: int | None,
    ) -> tuple[list[int], list[float] | None]:
        """An abort in the waiting queue sends the last id once more, and all log-probs (`told`)."""
        held = self._parts.ids
        if told is None or log_probs is None:
            before = [*held[-1:], *ids]
            repeats = len(before) > 1 and before[-1] == before[-2]
            is_late = repeats and total == len(held) + len(ids) - 1
            return (ids[:-1] if is_late else ids), None
        if ids == told and total in (None, len(ids), len(held) + len(ids)):
            return ids, log_probs
        if total is None or not 0 < total <= len(told) or ids[-1:] != told[-1:]:
            raise bad(
                f"{NAME}: an abort with {len(ids)} output_ids, {len(told)} log-probs, "
                f"completion_tokens {total}"
            )
        return told[-total:], log_probs[-total:]

    def _start(self, ids: list[int], log_probs: list[float] | None, total: int | None) -> int:
        """Where in an event its new tokens begin: behind those before, or at 0."""
        held = self._parts.ids
        if total == len(held) + len(ids) or (total is None and not held):
            return 0
        same = ids[: len(held)] == held
        if total is None:
            if self._ask.log_probs and log_probs is not None:
                same = same and log_probs[: len(held)] == self._parts.log_probs
            if not same:
                if self._is_cumulative:
                    raise bad(f"{NAME}: an event does not repeat the {len(held)} tokens before it")
                return 0
            if len(ids) == len(held) and not self._is_cumulative:
                raise bad(f"{NAME}: no completion_tokens to tell if an event repeats the tokens")
        elif total != len(ids):
            raise bad(
                f"{NAME}: {len(ids)} output_ids after {len(held)}, completion_tokens is {total}"
            )
        elif not same:
            raise bad(f"{NAME}: an event repeats the {len(held)} tokens before it with other ids")
        self._is_cumulative = True
        return len(held)


def refused(status: int, body: bytes) -> EngineError:
    """What an HTTP status of SGLang means, also one that it reports inside a reply."""
    return refusal(NAME, status, body, _REMEDIES)


def _ids(raw: msgspec.Raw, told: list[int] | None) -> list[int] | None:
    """The output_ids; `told`, the ids of the log-probs, when there are none or exactly these."""
    data = bytes(raw)
    if data in (b"", b"null") or (told is not None and data == msgspec.json.encode(told)):
        return told
    return decoded(_INTS, data, f"{NAME}: $.output_ids")


def _reported(meta: Meta | None) -> dict[str, Any]:
    if meta is None:
        return {}
    return {name: value for name in _KEPT if (value := getattr(meta, name)) is not None}


def _ignores_temperature(params: SamplingParams) -> bool:
    """A batch that is all greedy, as top_k = 1 is, gets the log-probs of temperature 1."""
    return params.top_k == 1 and params.temperature not in (0, 1)

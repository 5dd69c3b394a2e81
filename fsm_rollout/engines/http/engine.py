"""HttpEngine: one or several inference servers behind the Engine protocol, over any Wire.

Nothing of a bad reply gets out: `generate` returns a Generation that passed every check, or raises
EngineError. How a call is tried and tried again is in call.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Literal, get_args

import msgspec

from fsm_rollout.arrays import Ints
from fsm_rollout.columns import Columns
from fsm_rollout.engines.base import Generation, LogProbKind, SamplingParams, checked
from fsm_rollout.engines.http.call import Call
from fsm_rollout.engines.http.endpoints import Endpoint, Endpoints
from fsm_rollout.engines.http.servers import Servers
from fsm_rollout.engines.http.transport import reserve_files
from fsm_rollout.engines.http.wire import Ask, Reply, Wire
from fsm_rollout.engines.probe import Finding, fits, probe
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from fsm_rollout.turn import engine_ids

logger = logging.getLogger(__name__)


class HttpEngine:
    """An Engine over HTTP: a Wire, and one or several servers that speak it.

    A session keeps to one server while that answers. A server that failed 5 times in a row is left
    alone until it answers again. Connections are opened in the event loop that first uses them.
    """

    def __init__(
        self,
        wire: Wire,
        urls: str | Sequence[str],
        *,
        stream: bool = False,
        vocab_size: int | None = None,
        log_prob_kind: LogProbKind | None = None,
        headers: Mapping[str, str] | None = None,
        settings: HttpSettings | None = None,
    ) -> None:
        if log_prob_kind not in (None, *get_args(LogProbKind)):
            known = ", ".join(get_args(LogProbKind))
            raise ConfigError(f"log_prob_kind {log_prob_kind!r} is none of {known}")
        self.wire = wire
        self.settings = settings or HttpSettings()
        self.log_prob_kind: LogProbKind = log_prob_kind or wire.log_prob_kind
        """what replies report that do not say it themselves; `start` finds it out if not given"""
        self._is_kind_given = log_prob_kind is not None
        self._stream = stream
        self._vocab_size = vocab_size
        self._servers = Servers(wire, urls, headers or {}, self.settings)
        self._calls: dict[str, Call] = {}
        self._numbers = count()
        self._drained: asyncio.Event | None = None  # no call is left, once it is being closed

    @property
    def endpoints(self) -> Endpoints:
        """The servers that generate, and how they do."""
        return self._servers.endpoints

    @property
    def is_closed(self) -> bool:
        """`close` was called: there is no way back."""
        return self._servers.is_closed

    @property
    def metrics(self) -> Counter[str]:
        """tries, retries, reroutes (tries away from the session's home), faults.<kind> (FaultKind),
        breaker_opened, knocks (at servers left alone), aborts_sent, aborts_failed."""
        return self._servers.metrics

    @property
    def control_urls(self) -> Sequence[str]:
        """Where aborts and control calls go, behind a router. Empty: to the endpoints."""
        return self._servers.control_urls

    @control_urls.setter
    def control_urls(self, urls: Sequence[str]) -> None:
        self._servers.control_urls = tuple(urls)

    async def start(
        self, *, max_concurrent: int, params: SamplingParams, log_probs: bool, prompt: Ints
    ) -> None:
        """Get ready for a run: `max_concurrent` requests at a time, sampled with `params`.

        Where kinds of log-probs differ under `params`, every server is probed behind the ids of
        `prompt`. ConfigError when they are not log_softmax(logits / temperature), or when this
        process may not open that many connections; EngineError when a server cannot be asked.
        """
        reserve_files(max_concurrent)
        if not log_probs or all(fits(kind, params) for kind in get_args(LogProbKind)):
            return
        if self._is_kind_given:
            try:
                Finding(self.log_prob_kind, ()).require(params)
            except ConfigError as error:
                raise ConfigError(
                    f"as log_prob_kind={self.log_prob_kind!r} says, {error}"
                ) from None
            return
        found = await asyncio.gather(
            *(self._probed(endpoint, prompt, params) for endpoint in self.endpoints)
        )
        if len(set(found)) > 1:
            told = ", ".join(
                f"{e.url} {kind}" for e, kind in zip(self.endpoints, found, strict=True)
            )
            raise ConfigError(f"the servers report different kinds of log-probs: {told}")
        self.log_prob_kind = found[0]
        logger.info("%s reports %s log-probs", self.wire.name, self.log_prob_kind)

    async def _probed(
        self, endpoint: Endpoint, prompt: Ints, params: SamplingParams
    ) -> LogProbKind:
        names = (f"probe-{number}" for number in count())
        session_id = next(name for name in names if self.endpoints.home(name) is endpoint)
        try:
            return (await probe(self, prompt, session_id=session_id)).require(params)
        except EngineError as error:
            raise EngineError(
                f"{endpoint.url}, asked which log-probs it reports: {error}; if you know, say it "
                "with log_prob_kind",
                reason=error.reason,
                final=error.final,
            ) from error

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
        """Up to `max_new_tokens` tokens after `columns`, checked. Raises EngineError.

        A cancel frees the server's work: the connection is cut, and an abort sent behind.
        """
        ids, num_ids = columns.encoded(), columns.length
        if media:
            sent = engine_ids(columns.tokens, media).tolist()
            ids, num_ids = bytearray(msgspec.json.encode(sent)[1:-1]), len(sent)
        log_probs = columns.has_log_probs
        take = partial(
            self._generation,
            columns=columns,
            has_media=bool(media),
            max_new_tokens=max_new_tokens,
            log_probs=log_probs,
        )
        # asked again, after a cancel: the abort that was sent behind the first must not meet it
        name = f"{request_id}/{next(self._numbers)}"
        call = self._calls[request_id] = Call(self._servers, name, session_id, take=take)
        ask = Ask(
            ids=ids,
            num_ids=num_ids,
            max_new_tokens=max_new_tokens,
            params=params,
            rid=call.rid,
            session_id=session_id,
            log_probs=log_probs,
            stream=self._stream,
            experts_start=0 if columns.replay is None else columns.replay.num_rows,
            media=[span.item for span in media] if media else (),
        )
        try:
            return await call.answer(ask)
        finally:
            if self._calls.get(request_id) is call:
                del self._calls[request_id]
            if self._drained is not None and not self._calls:
                self._drained.set()
            if call.endpoint is not None:
                self._servers.transport.spawn(self._servers.abort(call.endpoint, call.rid))

    def _generation(
        self,
        reply: Reply,
        endpoint: Endpoint,
        *,
        columns: Columns,
        has_media: bool,
        max_new_tokens: int,
        log_probs: bool,
    ) -> Generation:
        """The reply, checked against what was asked. EngineError when it is no answer to it."""
        _check_prompt(reply, columns, endpoint, has_media=has_media)
        return checked(
            reply.token_ids,
            reply.log_probs,
            str(reply.finish),
            max_new_tokens=max_new_tokens,
            vocab_size=self._vocab_size,
            log_probs_required=log_probs,
            matched=reply.matched,
            weight_versions=reply.weight_versions,
            prompt_tokens=columns.length,
            log_prob_kind=reply.log_prob_kind or self.log_prob_kind,
            engine_id=endpoint.url,
            top_p=reply.top_p,
            routed_experts=reply.routed_experts,
            counters=reply.counters,
        )

    async def abort(self, request_id: str) -> None:
        """Let a running `generate` return what it has; one that waits to try again ends too.

        One that does not end within `abort_timeout_s` raises EngineError(engine_abort).
        """
        call = self._calls.get(request_id)
        if call is None:
            return
        call.is_aborted = True
        if call.endpoint is None:
            call.interrupt()
        else:
            await self._servers.abort(call.endpoint, call.rid)
            call.hurry()

    async def call(
        self,
        path: str,
        body: object | None = None,
        *,
        method: Literal["GET", "POST"] = "POST",
        to: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, Any]:
        """A control call to these base URLs (None: every server); what each of them answered.

        JSON, or text where it is none. EngineError names the server that refused or is not there.
        """
        urls = to or self.control_urls or [endpoint.url for endpoint in self.endpoints]
        return await self._servers.call(method, path, body, urls, timeout_s)

    async def health(self) -> dict[str, bool]:
        """Of each URL whether it answers that it is well."""

        async def answers(url: str) -> bool:
            try:
                await self.call("/health", method="GET", to=[url], timeout_s=10)
            except EngineError:
                return False
            return True

        urls = [endpoint.url for endpoint in self.endpoints]
        return dict(zip(urls, await asyncio.gather(*map(answers, urls)), strict=True))

    async def close(self) -> None:
        """End what runs (EngineError no_engine), abort it on the servers, close the connections.

        It takes about `abort_timeout_s` at most; a second call does nothing.
        """
        if self._servers.is_closed:
            return
        self._servers.is_closed = True
        self._drained = asyncio.Event()
        try:
            if self._calls:
                for call in self._calls.values():
                    call.interrupt()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.abort_timeout_s):
                        await self._drained.wait()
        finally:
            await self._servers.transport.close()


def _check_prompt(reply: Reply, columns: Columns, endpoint: Endpoint, *, has_media: bool) -> None:
    """The server continued what it was sent, not its own idea of it.

    Media count with all of their placeholders, which are the server's to put in.
    """
    count, ids = reply.prompt_tokens, reply.prompt_token_ids
    if count is not None and count != columns.length:
        drift = f"it counts {count} prompt tokens, {columns.length} were sent"
    elif ids is not None and len(ids) != columns.length:
        drift = f"it names {len(ids)} prompt ids, {columns.length} were sent"
    elif ids is not None and not has_media and list(ids) != columns.tokens.tolist():
        drift = "the prompt ids that it names are not those that were sent"
    else:
        return
    raise EngineError(f"{endpoint.url}: prompt drift: {drift}", reason=StopReason.BAD_REPLY)

"""Call: one `generate` in flight: try after try, until there is an answer.

engine.py makes one for each `generate`. A try that may still run on a server is aborted there
before the next one is sent, and each try has an id of its own: no reply is taken twice or late.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

import msgspec

from fsm_rollout.engines.base import Generation
from fsm_rollout.engines.http.clock import Clock
from fsm_rollout.engines.http.endpoints import Endpoint
from fsm_rollout.engines.http.replies import BUSY
from fsm_rollout.engines.http.servers import Servers
from fsm_rollout.engines.http.transport import Answer, Fault, FaultKind
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason

_MAY_RUN_ON = frozenset({"disconnect", "timeout", "broken", "reply"})
"""faults after which the server may be at work on the try"""
_WORTH_A_TRY = frozenset({StopReason.ENGINE_ERROR, StopReason.BAD_REPLY})
_GATEWAY = frozenset({502, 504})
"""a router says so of a server that may be at work"""
_BACKOFF_S, _DOUBLINGS = 0.1, 6
"""before a server is tried again that failed this call; doubled with each try"""
_LOOK_AGAIN_S = 1.0
"""how long a call sleeps at most while no server can be had"""


class Call:
    """The tries of one `generate`. `endpoint` and `rid`: where one may run, and its id.

    `take` makes of a reply what is wanted; the EngineError that it raises is one of the server.
    """

    __slots__ = (
        "_busy_at", "_clock", "_failed", "_home", "_lost_at", "_not_before", "_number",
        "_request_id", "_servers", "_session_id", "_take", "_was_cut", "endpoint", "is_aborted",
        "rid",
    )  # fmt: skip

    def __init__(
        self,
        servers: Servers,
        request_id: str,
        session_id: str,
        *,
        take: Callable[[Reply, Endpoint], Generation],
    ) -> None:
        self.endpoint: Endpoint | None = None
        self._take = take
        self.rid = _rid(servers.salt, request_id, 1)
        self.is_aborted = False
        self._servers = servers
        self._request_id = request_id
        self._session_id = session_id
        self._home = servers.endpoints.home(session_id)
        self._clock = Clock()
        self._number = 1  # of the try
        self._failed = 0  # tries that reached a server and failed
        self._not_before: dict[Endpoint, float] = {}  # when one that failed it may be tried again
        self._lost_at: float | None = None  # since when it finds no server
        self._busy_at: float | None = None  # since when it finds only busy ones
        self._was_cut = False  # a connection ended without a byte: perhaps it was an old one

    async def answer(self, ask: Ask) -> Generation:
        """The first good answer. `ask.rid` is this call's first. Raises EngineError."""
        servers = self._servers
        while True:
            endpoint = await self._endpoint()
            self.endpoint = endpoint
            try:
                generation = await self._try(endpoint, ask)
            except Fault as fault:
                self._raise_if_over()
                self._book(fault, endpoint)
                if fault.kind not in _MAY_RUN_ON:
                    self.endpoint = None
                if self._failed >= servers.settings.max_tries:
                    raise fault.error or EngineError(
                        f"{endpoint.url}: {fault} (try {self._number})",
                        reason=StopReason.ENGINE_ERROR,
                    ) from fault
                if self.endpoint is not None:
                    await servers.abort(endpoint, self.rid)
                    self.endpoint = None
                self._number += 1
                self.rid = _rid(servers.salt, self._request_id, self._number)
                ask = msgspec.structs.replace(ask, rid=self.rid)
            except EngineError:  # an answer, and another try would bring the same
                if not ask.stream:  # else the server may be in the middle of it
                    self.endpoint = None
                servers.endpoints.succeeded(endpoint)
                raise
            else:
                self.endpoint = None
                servers.endpoints.succeeded(endpoint)
                return generation

    def interrupt(self) -> None:
        """Let what it waits for time out now; it then looks whether it should go on."""
        self._clock.interrupt()

    def hurry(self) -> None:
        """Its try was aborted, so it has to end soon; the server may not even have known it."""
        self._clock.extend(self._servers.settings.abort_timeout_s)

    async def _endpoint(self) -> Endpoint:
        """Where the next try goes, at the time when it may go there."""
        endpoints, wait_s = self._servers.endpoints, self._servers.settings.engine_wait_s
        while True:
            self._raise_if_over()
            now = self._clock.now()
            if self._lost_at is not None and now >= self._lost_at + wait_s:
                raise EngineError(
                    f"no server answered within engine_wait_s ({wait_s:g} s): "
                    f"{', '.join(map(repr, endpoints))}; start one, or correct the URLs",
                    reason=StopReason.NO_ENGINE,
                )
            endpoint = endpoints.pick(self._session_id, self._not_before)
            if endpoint is None:
                self._lost_at = self._lost_at or now
                delay_s = min(endpoints.next_try_s(), _LOOK_AGAIN_S) * random.uniform(1, 1.5)
            elif endpoint.is_open:
                if await self._servers.knock(endpoint):
                    self._raise_if_over()
                    return endpoint
                continue
            elif (delay_s := self._not_before.get(endpoint, now) - now) <= 0:
                return endpoint
            if self._lost_at is not None:
                delay_s = min(delay_s, self._lost_at + wait_s - now)
            await self._sleep(delay_s)

    async def _try(self, endpoint: Endpoint, ask: Ask) -> Generation:
        """One exchange. Fault: worth another try. EngineError: an answer like any other."""
        servers, wire = self._servers, self._servers.wire
        servers.metrics["tries"] += 1
        if self._number > 1:
            servers.metrics["retries"] += 1
        if endpoint is not self._home:
            servers.metrics["reroutes"] += 1
        stream = wire.stream(ask) if ask.stream else None
        try:
            answer = await servers.transport.post(
                endpoint.url + wire.path,
                wire.body(ask),
                wire.headers(ask),
                clock=self._clock,
                timeout_s=servers.settings.timeout_s,
                on_event=None if stream is None else stream.feed,
            )
            if answer.status == 200:
                reply = (
                    stream.reply() if stream and answer.is_stream else wire.reply(answer.body, ask)
                )
                self._check_rid(reply.rid)
                return self._take(reply, endpoint)
        except EngineError as error:
            if error.final or error.reason not in _WORTH_A_TRY:
                raise
            raise Fault("reply", str(error), error=error) from error
        raise self._refusal(answer)

    def _check_rid(self, told: str | None) -> None:
        """A reply that comes late, or twice, lies in the connection that the next request uses."""
        if told is not None and self.rid not in told and self._servers.salt in told:
            raise EngineError(
                f"the reply to {told!r} came for {self.rid}", reason=StopReason.BAD_REPLY
            )

    def _refusal(self, answer: Answer) -> Fault | EngineError:
        """What a status other than 200 comes to: the wire says what it means."""
        error = self._servers.wire.refusal(answer.status, answer.body)
        is_busy = answer.status in BUSY
        if error.final or error.reason not in _WORTH_A_TRY or not (is_busy or answer.status >= 500):
            return error
        kind: FaultKind = "busy" if is_busy else "server"
        if answer.status in _GATEWAY:
            kind = "broken"
        return Fault(kind, str(error), error=error, retry_after_s=answer.retry_after_s)

    def _book(self, fault: Fault, endpoint: Endpoint) -> None:
        """What a fault means for the endpoint, and for when this call may go there again."""
        self._servers.metrics[f"faults.{fault.kind}"] += 1
        if fault.kind == "disconnect" and not self._was_cut:
            self._was_cut = True  # the server may just have closed a connection that was idle
            return
        if fault.kind != "busy":
            self._servers.failed(endpoint, str(fault))
        now = self._clock.now()
        backoff_s = _BACKOFF_S * 2 ** min(self._number - 1, _DOUBLINGS)
        pause_s = max(backoff_s * random.uniform(0.5, 1.5), fault.retry_after_s)
        self._not_before[endpoint] = now + pause_s
        if fault.kind == "connect":
            self._lost_at = self._lost_at or now
            return
        self._lost_at = None
        if fault.kind != "busy":
            self._busy_at = None
            self._failed += 1
            return
        settings, self._busy_at = self._servers.settings, self._busy_at or now
        if now >= self._busy_at + settings.engine_wait_s:  # time bounds it, not the tries
            self._failed = settings.max_tries

    async def _sleep(self, delay_s: float) -> None:
        with suppress(TimeoutError), self._clock.within(delay_s):
            await asyncio.get_running_loop().create_future()

    def _raise_if_over(self) -> None:
        if self._servers.is_closed:
            raise EngineError("the engine was closed", reason=StopReason.NO_ENGINE, final=True)
        if self.is_aborted:
            raise EngineError("aborted between two tries", reason=StopReason.ENGINE_ABORT)


def _rid(salt: str, request_id: str, number: int) -> str:
    """32 hex digits: no two tries share one, and none is a prefix of another."""
    return salt + blake2b(f"{request_id}/{number}".encode(), digest_size=12).hexdigest()

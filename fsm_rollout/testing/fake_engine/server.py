"""FakeEngine: an HTTP server that looks like SGLang and vLLM at once, and fails as it is told to.

For tests of engines, tools and trainers, in process (`async with FakeEngine(...) as fake`) or from
the command line. What it answers is a pure function of prompt and seed; what goes wrong is a
FaultPlan; what it saw is in `fake.seen`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from fsm_rollout.engines.base import LogProbKind
from fsm_rollout.testing.fake_engine.answers import TOOL_CALL, Answers, LogNormal, plain_ids
from fsm_rollout.testing.fake_engine.completions import Completions
from fsm_rollout.testing.fake_engine.control import ROUTES, Answer, Handler
from fsm_rollout.testing.fake_engine.faults import AnyFault, Delay, Status
from fsm_rollout.testing.fake_engine.model import FakeModel
from fsm_rollout.testing.fake_engine.plan import GENERATES, FaultPlan, Faults, Rule
from fsm_rollout.testing.fake_engine.schedule import Latency, Schedule
from fsm_rollout.testing.fake_engine.seen import Seen
from fsm_rollout.testing.fake_engine.sending import refuse, send_body
from fsm_rollout.testing.fake_engine.service import Service
from fsm_rollout.testing.fake_engine.sglang import SGLang
from fsm_rollout.testing.fake_engine.vllm import Generate
from fsm_rollout.testing.fake_engine.wire import BadRequest, Wire, encode

DEFAULT_TOKENS = LogNormal(64)
AT_ONCE = Latency()


class FakeEngine:
    """A server on `url` while it is entered; several can run at once.

    `script`: what turn 1, 2, ... says, texts (with a `tokenizer`) or ids. Without, `tokens` random
    ids per turn, followed by a tool call in each of the first `tool_turns` turns. `vocab_size` is
    the tokenizer's unless given. A fault without a rule hits every generation. `log_prob_kind`
    None: scaled on SGLang's wire and raw on vLLM's, as the servers start up by default.
    ConfigError on nonsense.
    """

    def __init__(
        self,
        script: Sequence[str | Sequence[int]] | None = None,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        tokens: LogNormal = DEFAULT_TOKENS,
        tool_turns: int = 0,
        tool_call: str = TOOL_CALL,
        latency: Latency = AT_ONCE,
        faults: FaultPlan | Sequence[Rule | AnyFault] = (),
        log_prob_kind: LogProbKind | None = None,
        incremental: bool = False,
        sampling_mask: bool = False,
        max_context: int = 131_072,
        weight_version: str = "default",
        keep_alive_s: float = 3600.0,
        seed: int = 0,
        record: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        size = vocab_size or (32_000 if tokenizer is None else len(tokenizer))
        eos_id = size - 1 if tokenizer is None else tokenizer.eos_token_id
        plain = None if tokenizer is None else plain_ids(tokenizer)

        def model(kind: LogProbKind) -> FakeModel:
            kind = log_prob_kind or kind
            return FakeModel(size, ids=plain, stop_ids=[eos_id], log_prob_kind=kind, seed=seed)

        self.host, self.port = host, port
        self.seen: list[Seen] = []
        self._record = record
        self._latency, self._max_context, self._keep_alive_s = latency, max_context, keep_alive_s
        self._version = weight_version
        if not isinstance(faults, FaultPlan):
            rules = [rule if isinstance(rule, Rule) else Rule(fault=rule) for rule in faults]
            faults = FaultPlan(rules=rules)
        self._plan = faults
        self._answers = Answers(
            script,
            tokenizer=tokenizer,
            eos_id=eos_id,
            tokens=tokens,
            tool_turns=tool_turns,
            tool_call=tool_call,
            seed=seed,
        )
        vllm = model("raw")
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "eos_id": eos_id,
            "sampling_mask": sampling_mask,
        }
        self._wires: list[Wire] = [
            SGLang(model("scaled"), tokenizer=tokenizer, incremental=incremental),
            Generate(vllm, **options),
            Completions(vllm, **options),
        ]
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def num_running(self) -> int:
        """Generations that run right now."""
        return 0 if self._runner is None else self._schedule.num_running

    def generations(self) -> list[Seen]:
        """What was seen of requests to generate."""
        return [seen for seen in self.seen if seen.path in GENERATES]

    async def start(self) -> None:
        """Listen. A stopped server starts again on the port that it had, its fault plan anew."""
        self._schedule = Schedule(self._version)
        self._faults = Faults(self._plan)
        self._service = Service(
            self._answers,
            self._schedule,
            latency=self._latency,
            max_context=self._max_context,
        )
        app = web.Application(client_max_size=256 * 2**20)
        for wire in self._wires:
            app.router.add_post(wire.path, partial(self._generate, wire))
        for method, path, handler in ROUTES:
            app.router.add_route(method, path, partial(self._control, handler))
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._keep_alive_s,
            shutdown_timeout=0.01,  # 0 would mean for ever
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=8192)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Drop every connection, as a server that dies. Stopping twice does nothing."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for connection in runner.server.connections if runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _control(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = self._see(request, body)
        seen.fault = fault = self._faults.draw(request.path, None)
        if isinstance(fault, Status):
            seen.outcome = "refused"
            error = encode({"error": {"message": "a fault of the plan"}})
            return refuse(fault.status, error, fault)
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        try:
            values = msgspec.json.decode(body) if body else {}
            answer = await handler(self._schedule, values, request.query)
        except (msgspec.DecodeError, BadRequest) as error:
            answer = Answer(encode({"detail": str(error)}), 400)
        seen.outcome = "done"
        return await send_body(
            request, answer.body, fault, status=answer.status, content_type=answer.content_type
        )

    async def _generate(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = self._see(request, body, session=request.headers.get(wire.session_header))
        seen.fault = self._faults.draw(request.path, seen.session)
        return await self._service.generate(wire, request, body, seen)

    def _see(self, request: web.Request, body: bytes, session: str | None = None) -> Seen:
        seen = Seen(number=next(self._numbers), path=request.path, session=session)
        if self._record:
            seen.body = body
            self.seen.append(seen)
        return seen

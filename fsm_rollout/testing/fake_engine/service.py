"""Service: one request to generate, from its body to the last byte of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from fsm_rollout.testing.fake_engine.answers import Answers
from fsm_rollout.testing.fake_engine.faults import (
    Delay,
    ErrorEvent,
    Fault,
    Late,
    NotApplicable,
    Status,
)
from fsm_rollout.testing.fake_engine.reply import Reply
from fsm_rollout.testing.fake_engine.schedule import Job, Latency, Schedule
from fsm_rollout.testing.fake_engine.seen import Seen
from fsm_rollout.testing.fake_engine.sending import refuse, send_body, send_events
from fsm_rollout.testing.fake_engine.wire import Asked, BadRequest, Wire


class Service:
    """Puts answers on a schedule and tells them in the words of a wire."""

    def __init__(
        self, answers: Answers, schedule: Schedule, *, latency: Latency, max_context: int
    ) -> None:
        self._answers = answers
        self._schedule = schedule
        self._latency = latency
        self._max_context = max_context

    async def generate(
        self, wire: Wire, request: web.Request, body: bytes, seen: Seen
    ) -> web.StreamResponse:
        """Serve it with the fault that `seen` names, and note there what came of it."""
        fault = seen.fault
        seen.outcome = "refused"
        if isinstance(fault, Status):
            return refuse(fault.status, wire.error(fault.status, "a fault of the plan"), fault)
        try:
            asked = wire.asked(body, request.headers.get("X-Request-Id"))
            seen.rid, seen.num_ids = asked.rid, asked.prompt.num_ids
            reply = self._reply(wire, asked)
            if isinstance(fault, Fault):
                fault.spoil(reply, wire.model)
        except BadRequest as error:
            return refuse(400, wire.error(400, str(error)))
        except NotApplicable as error:
            kind = type(fault).__name__
            return refuse(400, wire.error(400, f"{kind} of the fault plan cannot show: {error}"))
        if reply.abort_status is not None and not asked.streams:
            return refuse(reply.abort_status, wire.error(reply.abort_status, "Aborted"))
        seen.outcome = "running"
        return await self._serve(wire, request, asked, reply, seen)

    def _reply(self, wire: Wire, asked: Asked) -> Reply:
        if problem := wire.too_long(asked, self._max_context):
            raise BadRequest(problem)
        prompt = asked.prompt
        room = self._max_context - prompt.num_ids
        limit = room if asked.limit is None else min(room, asked.limit)
        try:
            answer = self._answers.answer(
                prompt,
                wire.model,
                asked.sampling,
                limit=limit,
                seed=asked.seed,
                stop_ids=asked.stop_ids,
            )
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return Reply(
            rid=asked.rid,
            prompt_tokens=prompt.num_ids,
            prompt_items=prompt.items,
            limit=limit,
            streams=asked.streams,
            ids=answer.ids,
            log_probs=answer.log_probs if asked.log_probs else None,
            finish="length" if answer.matched is None else "stop",
            matched=answer.matched,
        )

    async def _serve(
        self, wire: Wire, request: web.Request, asked: Asked, reply: Reply, seen: Seen
    ) -> web.StreamResponse:
        fault, num_tokens = seen.fault, len(reply.ids)
        seconds = self._latency.seconds(num_tokens, asked.prompt.hash(asked.seed))
        rid = "" if isinstance(fault, Late) else asked.rid  # no abort finds it
        lead_s = fault.seconds if isinstance(fault, Delay) else 0.0
        job = self._schedule.start(rid, num_tokens, seconds, lead_s)
        try:
            error = None
            if isinstance(fault, ErrorEvent):
                error = wire.error_event(fault.status, fault.message)
            if asked.streams:
                events = self._events(wire, asked, reply, job)
                response = await send_events(request, events, fault, error=error)
            else:
                await job.until(num_tokens)
                self._catch_up(reply, job, num_tokens)
                response = await send_body(request, error or wire.body(asked, reply), fault)
            seen.outcome = "aborted" if job.is_aborted else "done"
            return response
        except asyncio.CancelledError:
            seen.outcome = "disconnected"
            raise
        except ConnectionResetError:  # written to before the cancel came: aiohttp would log a bug
            seen.outcome = "disconnected"
            return web.Response()  # to nobody
        finally:
            seen.num_new_ids = len(reply.ids)
            self._schedule.finish(job)

    async def _events(
        self, wire: Wire, asked: Asked, reply: Reply, job: Job
    ) -> AsyncIterator[tuple[bytes, bool]]:
        stop, is_last = 0, False
        while not is_last:
            start, stop = stop, min(stop + self._latency.chunk_tokens, len(reply.ids))
            await job.until(stop)
            stop = self._catch_up(reply, job, stop)
            is_last = stop == len(reply.ids)
            event = wire.event(asked, reply, start, stop, is_last=is_last)
            if event is not None:
                yield event, is_last
        for event in wire.ending(asked, reply):
            yield event, True

    def _catch_up(self, reply: Reply, job: Job, count: int) -> int:
        """How many ids can be told, `count` unless it was aborted; the reply says so if it was."""
        if job.is_aborted:
            count = job.num_tokens
            reply.cut(count)
            reply.was_waiting = job.was_waiting
        reply.set_versions(job, self._schedule.version, count)
        return count

"""Control: the routes that generate nothing. Abort, pause, sleep, weights, health, of both servers.

What SGLang and vLLM spell alike (/health, /update_weight_version) answers for both.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fsm_rollout.testing.fake_engine.schedule import PauseMode, Schedule
from fsm_rollout.testing.fake_engine.vllm import MODEL
from fsm_rollout.testing.fake_engine.wire import BadRequest, encode


class Answer(NamedTuple):
    """What a control route says."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"


Body: TypeAlias = Mapping[str, Any]
Handler: TypeAlias = Callable[[Schedule, Body, Mapping[str, str]], Awaitable[Answer]]
"""(schedule, JSON body, query) -> response"""

SGLANG_PAUSES: dict[str, PauseMode] = {"abort": "abort", "retract": "freeze", "in_place": "freeze"}
PAUSES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "freeze"}


def _json(content: Any) -> Answer:
    return Answer(encode(content))


def _from_sglang(rid: str) -> bool:
    return not rid.startswith(("generate-tokens-", "cmpl-"))


# SGLang.


async def _abort_request(schedule: Schedule, body: Body, query: Body) -> Answer:
    """Aborts by prefix, but only when a request has exactly that id."""
    rid = body.get("rid") or ""
    if body.get("abort_all"):
        schedule.abort_where(_from_sglang)
    elif rid in schedule.jobs:
        schedule.abort_where(lambda other: other.startswith(rid))
    return Answer()


async def _pause_generation(schedule: Schedule, body: Body, query: Body) -> Answer:
    await schedule.pause(_mode(body, SGLANG_PAUSES))
    return _json({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(schedule: Schedule, body: Body, query: Body) -> Answer:
    schedule.resume()
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def _flush_cache(schedule: Schedule, body: Body, query: Body) -> Answer:
    if schedule.num_jobs:
        return Answer(b"Flush cache failed: requests are running.\n", 400, "text/plain")
    return Answer(b"Cache flushed.\n", content_type="text/plain")


async def _release_memory(schedule: Schedule, body: Body, query: Body) -> Answer:
    await schedule.pause("freeze")
    return _json(None)


async def _resume_memory(schedule: Schedule, body: Body, query: Body) -> Answer:
    schedule.resume()
    return _json(None)


async def _update_weights(schedule: Schedule, body: Body, query: Body) -> Answer:
    if body.get("abort_all_requests"):
        schedule.abort_where(_from_sglang)
    if version := body.get("weight_version"):
        schedule.set_version(str(version))
    message = "Succeeded to update model weights."
    return _json({"success": True, "message": message, "num_paused_requests": 0})


async def _model_info(schedule: Schedule, body: Body, query: Body) -> Answer:
    return _json(
        {
            "model_path": MODEL,
            "served_model_name": MODEL,
            "tokenizer_path": MODEL,
            "is_generation": True,
            "weight_version": schedule.version,
        }
    )


async def _server_info(schedule: Schedule, body: Body, query: Body) -> Answer:
    return _json({"version": "0.5.23", "served_model_name": MODEL, "internal_states": [{}]})


async def _loads(schedule: Schedule, body: Body, query: Body) -> Answer:
    running, known = schedule.num_running, schedule.num_jobs
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": known - running,
        "num_total_reqs": known,
    }
    return _json({"timestamp": time.time(), "version": "0.5.23", "loads": [load]})


# vLLM.


async def _inference_abort(schedule: Schedule, body: Body, query: Body) -> Answer:
    """Aborts exactly the ids as the server knows them; others it ignores without a word."""
    ids = body.get("request_ids")
    if ids is None:
        raise BadRequest("Missing 'request_ids' in request body")
    schedule.abort(ids)
    return Answer()


async def _abort_requests(schedule: Schedule, body: Body, query: Body) -> Answer:
    ids = body.get("request_ids") or [rid for rid in schedule.jobs if not _from_sglang(rid)]
    schedule.abort(ids)
    return _json({"status": "aborted", "aborted": len(ids)})


async def _pause(schedule: Schedule, body: Body, query: Body) -> Answer:
    await schedule.pause(_mode(query, PAUSES))
    return _json({"status": "paused"})


async def _resume(schedule: Schedule, body: Body, query: Body) -> Answer:
    schedule.resume()
    return _json({"status": "resumed"})


async def _is_paused(schedule: Schedule, body: Body, query: Body) -> Answer:
    return _json({"is_paused": schedule.is_holding})


async def _sleep(schedule: Schedule, body: Body, query: Body) -> Answer:
    await schedule.pause(_mode(query, PAUSES))
    return _json({"status": "sleeping", "level": int(query.get("level", 1))})


async def _wake_up(schedule: Schedule, body: Body, query: Body) -> Answer:
    schedule.resume()
    return _json({"status": "awake", "tags": None})


async def _is_sleeping(schedule: Schedule, body: Body, query: Body) -> Answer:
    return _json({"is_sleeping": schedule.is_holding})


async def _weight_info(schedule: Schedule, body: Body, query: Body) -> Answer:
    return _json({"weight_version": schedule.version})


async def _models(schedule: Schedule, body: Body, query: Body) -> Answer:
    card = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "parent": None}
    return _json({"object": "list", "data": [card]})


async def _metrics(schedule: Schedule, body: Body, query: Body) -> Answer:
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    running, known = schedule.num_running, schedule.num_jobs
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{labels} {running:.1f}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{labels} {known - running:.1f}",
    ]
    return Answer("\n".join([*lines, ""]).encode(), content_type="text/plain")


# Both.


async def _health(schedule: Schedule, body: Body, query: Body) -> Answer:
    return Answer()


async def _update_weight_version(schedule: Schedule, body: Body, query: Body) -> Answer:
    """SGLang aborts its requests unless told not to; vLLM never does."""
    version = body.get("new_version")
    if not isinstance(version, str):
        raise BadRequest("new_version must be a string")
    if body.get("abort_all_requests", True):
        schedule.abort_where(_from_sglang)
    schedule.set_version(version)
    message = f"Weight version updated to {version}"
    return _json({"success": True, "message": message, "new_version": version})


def _mode(values: Body, modes: Mapping[str, PauseMode]) -> PauseMode:
    mode = values.get("mode", "abort")
    if mode not in modes:
        raise BadRequest(f"mode must be one of {', '.join(modes)}, got {mode!r}")
    return modes[mode]


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/abort_request", _abort_request),
    ("POST", "/pause_generation", _pause_generation),
    ("POST", "/continue_generation", _continue_generation),
    ("*", "/flush_cache", _flush_cache),
    ("*", "/release_memory_occupation", _release_memory),
    ("*", "/resume_memory_occupation", _resume_memory),
    ("POST", "/update_weights_from_disk", _update_weights),
    ("POST", "/update_weight_version", _update_weight_version),
    ("GET", "/health_generate", _health),
    ("GET", "/health", _health),
    ("GET", "/model_info", _model_info),
    ("GET", "/get_model_info", _model_info),
    ("GET", "/server_info", _server_info),
    ("GET", "/get_server_info", _server_info),
    ("GET", "/v1/loads", _loads),
    ("POST", "/inference/v1/abort_requests", _inference_abort),
    ("POST", "/abort_requests", _abort_requests),
    ("POST", "/pause", _pause),
    ("POST", "/resume", _resume),
    ("GET", "/is_paused", _is_paused),
    ("POST", "/sleep", _sleep),
    ("POST", "/wake_up", _wake_up),
    ("GET", "/is_sleeping", _is_sleeping),
    ("GET", "/weight_info", _weight_info),
    ("GET", "/v1/models", _models),
    ("GET", "/metrics", _metrics),
]

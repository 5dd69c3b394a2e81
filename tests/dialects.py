"""One reply of a server, said in every dialect: SGLang and vLLM's two routes, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsm_rollout.engines.base import Generation, SamplingParams, checked
from fsm_rollout.engines.http import HttpEngine
from fsm_rollout.engines.http.wire import Ask, Reply, Wire
from fsm_rollout.engines.sglang import SGLangEngine, SGLangWire
from fsm_rollout.engines.vllm import VLLMEngine, VLLMWire

RID = "0123456789abcdef" * 2
DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a server says, faults included: None is left out."""

    ids: Sequence[int] | None
    log_probs: Sequence[Any] | None
    finish: str | None = "stop"
    matched: int | str | None = None
    prompt: Sequence[int] = (1, 2, 3)
    prompt_tokens: int | None = 3
    echo: Sequence[int] | None = None
    """the prompt ids that the server claims to have read"""
    completion_tokens: int | None = None
    """None: as many as there are ids"""
    versions: Sequence[dict[str, Any]] = ()
    cached_tokens: int = 0
    masks: Sequence[Sequence[int]] | None = None
    experts: str | None = None
    status_code: int | None = None

    @property
    def counted(self) -> int:
        return len(self.ids or ()) if self.completion_tokens is None else self.completion_tokens


def ask(**changes: Any) -> Ask:
    values: dict[str, Any] = {
        "ids": b"1,2,3",
        "num_ids": 3,
        "max_new_tokens": 64,
        "params": SamplingParams(seed=7, stop_token_ids=(9,)),
        "rid": RID,
        "session_id": "session",
        "log_probs": True,
        "stream": False,
    }
    return Ask(**(values | changes))


def dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


# -- SGLang ----------------------------------------------------------------------------------------


def sglang(said: Said, start: int = 0, stop: int | None = None, *, is_last: bool = True) -> bytes:
    """The tokens [start, stop) of a reply, of which [0, stop) are sampled so far."""
    total = len(said.ids or ())
    stop = total if stop is None else stop
    meta: dict[str, Any] = {
        "id": RID,
        "finish_reason": _sglang_finish(said) if is_last else None,
        "prompt_tokens": said.prompt_tokens,
        "weight_version": said.versions[-1]["version"] if said.versions else None,
        "completion_tokens": said.counted - (total - stop),
        "cached_tokens": said.cached_tokens,
    }
    if said.log_probs is not None:
        ids = list(said.ids or ())
        ids += [0] * (len(said.log_probs) - len(ids))
        meta["output_token_logprobs"] = [
            [log_prob, token, None]
            for log_prob, token in list(zip(said.log_probs, ids, strict=False))[start:stop]
        ]
    if said.masks is not None:
        meta["output_token_sampling_mask"] = list(said.masks[start:stop])
    if is_last and said.versions:
        meta["weight_versions"] = list(said.versions)
    if is_last and said.experts:
        meta["routed_experts"] = said.experts
    reply: dict[str, Any] = {"text": "té" * stop, "meta_info": meta}
    if said.ids is not None:
        reply["output_ids"] = list(said.ids[start:stop])
    if said.echo is not None:
        reply["prompt_token_ids"] = list(said.echo)
    return dumped(reply)


def _sglang_finish(said: Said) -> dict[str, Any] | None:
    match said.finish:
        case None:
            return None
        case "abort":
            code = said.status_code
            return {"type": "abort", "message": "Aborted", "status_code": code, "err_type": None}
        case "length":
            return {"type": "length", "length": said.counted}
    return {"type": said.finish, "matched": said.matched}


def sglang_cumulative(said: Said, cuts: Iterable[int]) -> list[bytes]:
    events = [sglang(said, 0, cut, is_last=False) for cut in cuts]
    return [*events, sglang(said), DONE]


def sglang_incremental(said: Said, cuts: Iterable[int]) -> list[bytes]:
    events, start = [], 0
    for cut in cuts:
        events.append(sglang(said, start, cut, is_last=False))
        start = cut
    return [*events, sglang(said, start), DONE]


# -- vLLM ------------------------------------------------------------------------------------------


def _vllm_choice(said: Said, start: int, stop: int | None, is_last: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": said.finish if is_last else None,
        "stop_reason": said.matched if is_last else None,
        "token_ids": None if said.ids is None else list(said.ids[start:stop]),
        "logprobs": None,
    }
    if is_last and said.versions:
        choice["weight_versions"] = list(said.versions)
    if is_last and said.experts:
        choice["routed_experts"] = said.experts
    return choice


def _paired(said: Said, start: int, stop: int | None) -> list[tuple[Any, int | None]]:
    ids: list[int | None] = list(said.ids or ())
    log_probs = list(said.log_probs or ())
    ids += [None] * (len(log_probs) - len(ids))
    return list(zip(log_probs, ids, strict=False))[start:stop]


def _usage(said: Said) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.counted,
        "total_tokens": (said.prompt_tokens or 0) + said.counted,
    }
    if said.cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": said.cached_tokens}
    return usage


def generate(
    said: Said, start: int = 0, stop: int | None = None, *, is_last: bool = True
) -> dict[str, Any]:
    choice = _vllm_choice(said, start, stop, is_last)
    if said.log_probs is not None:
        choice["logprobs"] = {
            "content": [
                {
                    "token_id": token,
                    "logprob": log_prob,
                    "rank": 1,
                    "top_logprobs": [{"token_id": token, "logprob": log_prob, "rank": 1}],
                }
                for log_prob, token in _paired(said, start, stop)
            ]
        }
    if said.masks is not None:
        choice["sampling_mask"] = list(said.masks[start:stop])
    event: dict[str, Any] = {"request_id": RID, "choices": [choice]}
    if said.echo is not None and not start:
        event["prompt_token_ids"] = list(said.echo)
    return event


def completions(
    said: Said, start: int = 0, stop: int | None = None, *, is_last: bool = True
) -> dict[str, Any]:
    choice = _vllm_choice(said, start, stop, is_last)
    choice["text"] = "té"
    if said.log_probs is not None:
        pairs = _paired(said, start, stop)
        tokens = [f"token_id:{token}" for _, token in pairs if token is not None]
        choice["logprobs"] = {
            "text_offset": [0] * len(pairs),
            "token_logprobs": [log_prob for log_prob, _ in pairs],
            "tokens": tokens,
            "top_logprobs": [{f"token_id:{token}": log_prob} for log_prob, token in pairs],
        }
    if not start:
        choice["prompt_token_ids"] = list(said.prompt if said.echo is None else said.echo)
    return {"id": f"cmpl-{RID}", "object": "text_completion", "model": "m", "choices": [choice]}


Event = Callable[..., dict[str, Any]]


def _whole(event: Event) -> Callable[[Said], bytes]:
    return lambda said: dumped(event(said) | {"usage": _usage(said)})


def _deltas(event: Event) -> Callable[[Said, Iterable[int]], list[bytes]]:
    def events(said: Said, cuts: Iterable[int]) -> list[bytes]:
        parts, start = [], 0
        for cut in cuts:
            parts.append(event(said, start, cut, is_last=False) | {"usage": None})
            start = cut
        parts.append(event(said, start))
        return [*map(dumped, parts), dumped({"choices": [], "usage": _usage(said)}), DONE]

    return events


# -- all of them -----------------------------------------------------------------------------------


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    is_stream: bool = False


def sse(events: Iterable[bytes]) -> bytes:
    return b"".join(b"data: " + event + b"\n\n" for event in events)


class Dialect(NamedTuple):
    name: str
    wire: Callable[..., Wire]
    engine: Callable[..., HttpEngine]
    whole: Callable[[Said], bytes]
    events: Callable[[Said, Iterable[int]], list[bytes]] | None = None
    """None: it does not stream"""

    def read(
        self, said: Said, asked: Ask | None = None, cuts: Iterable[int] = (), **kw: Any
    ) -> Reply:
        """What the wire makes of it."""
        wire, asked = self.wire(**kw), asked or ask(stream=self.events is not None)
        if self.events is None:
            return wire.reply(self.whole(said), asked)
        stream = wire.stream(asked)
        for event in self.events(said, cuts):
            stream.feed(event)
        return stream.reply()

    def answer(self, said: Said) -> Answer:
        """What a server would send; a stream in two events where there are two tokens."""
        if self.events is None:
            return Answer(self.whole(said))
        cuts = [1] if len(said.ids or ()) > 1 else []
        return Answer(sse(self.events(said, cuts)), is_stream=True)


def _completions_wire(**kw: Any) -> VLLMWire:
    return VLLMWire(route="completions", **kw)


def _completions_engine(url: str, **kw: Any) -> VLLMEngine:
    return VLLMEngine(url, route="completions", **kw)


DIALECTS = [
    Dialect("sglang", SGLangWire, SGLangEngine, sglang),
    Dialect("sglang-cumulative", SGLangWire, SGLangEngine, sglang, sglang_cumulative),
    Dialect("sglang-incremental", SGLangWire, SGLangEngine, sglang, sglang_incremental),
    Dialect("generate", VLLMWire, VLLMEngine, _whole(generate)),
    Dialect("generate-stream", VLLMWire, VLLMEngine, _whole(generate), _deltas(generate)),
    Dialect("completions", _completions_wire, _completions_engine, _whole(completions)),
    Dialect(
        "completions-stream",
        _completions_wire,
        _completions_engine,
        _whole(completions),
        _deltas(completions),
    ),
]
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
SGLANG = [dialect for dialect in DIALECTS if dialect.name.startswith("sglang")]
VLLM = [dialect for dialect in DIALECTS if dialect not in SGLANG]
STREAMS = [dialect for dialect in DIALECTS if dialect.events is not None]


def generation(reply: Reply, max_new_tokens: int = 64) -> Generation:
    """The reply as an engine checks it, without its engine's id."""
    return checked(
        reply.token_ids,
        reply.log_probs,
        str(reply.finish),
        max_new_tokens=max_new_tokens,
        matched=reply.matched,
        weight_versions=reply.weight_versions,
        prompt_tokens=reply.prompt_tokens or 0,
        counters=reply.counters,
        top_p=reply.top_p,
    )

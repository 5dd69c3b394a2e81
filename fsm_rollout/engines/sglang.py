"""SGLang: the native token-in, token-out protocol of `POST /generate`, 0.5 and slime's patches.

SGLangEngine is what a run uses; SGLangWire alone speaks, without a network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import msgspec

from fsm_rollout.arrays import Ints
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.engines.http import HttpEngine, HttpSettings
from fsm_rollout.engines.http.endpoints import base_url
from fsm_rollout.engines.http.replies import NEUTRAL, encoded_media, is_filtered
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.engines.sglang_stream import NAME, SGLangStream, refused
from fsm_rollout.errors import ConfigError, EngineError

_ROUTER_S = 5.0
"""for a router to name its workers; a server that is none answers 404"""


class SGLangWire:
    """Speaks to SGLang's `/generate`; see Wire.

    `sampling_mask`: have the ids that top-p and top-k kept reported, for replay. A stock server
    needs `1 <= top_k <= 4096` for it. `routed_experts`: the (layers, experts per token) of a
    mixture-of-experts model, to have its routing reported. `stop`: strings that end a turn beside
    its stop ids; the tokens that spell one stay in the turn.
    """

    name = NAME
    path = "/generate"
    log_prob_kind: LogProbKind = "scaled"

    def __init__(
        self,
        *,
        sampling_mask: bool = False,
        routed_experts: tuple[int, int] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        if isinstance(stop, str):
            raise ConfigError(f"SGLang: stop must be a list of strings, got {stop!r}")
        self.sampling_mask = sampling_mask
        self.routed_experts = routed_experts
        self.stop = tuple(stop)

    def headers(self, ask: Ask) -> Mapping[str, str]:
        """The key by which a router keeps a session on one worker."""
        return {"x-smg-routing-key": ask.session_id}

    def body(self, ask: Ask) -> bytes:
        """The request's body."""
        params = ask.params
        sampling, flags = _constant(
            params.temperature,
            params.top_p,
            params.top_k,
            params.stop_token_ids,
            self.stop,
            log_probs=ask.log_probs,
            stream=ask.stream,
            mask=self.sampling_mask and is_filtered(params),
            experts=self.routed_experts is not None,
        )
        seed = "" if params.seed is None else f',"sampling_seed":{params.seed}'
        own = f',"max_new_tokens":{ask.max_new_tokens}{seed}}},"rid":"{ask.rid}"'
        if self.routed_experts:
            own += f',"routed_experts_start_len":{ask.experts_start}'
        media = b',"image_data":' + encoded_media(ask.media, self.name) if ask.media else b""
        return b"".join((sampling, own.encode(), flags, media, b',"input_ids":[', ask.ids, b"]}"))

    def reply(self, body: bytes, ask: Ask) -> Reply:
        """The reply of a request that did not stream. EngineError(bad_reply) when it is none."""
        stream = self.stream(ask)
        stream.take(body)
        return stream.reply()

    def stream(self, ask: Ask) -> SGLangStream:
        """What puts a streamed reply together."""
        return SGLangStream(
            ask, sampling_mask=self.sampling_mask, routed_experts=self.routed_experts
        )

    def refusal(self, status: int, body: bytes) -> EngineError:
        """What an HTTP status other than 200 means."""
        return refused(status, body)

    def abort(self, rid: str) -> tuple[str, bytes]:
        """Aborts whatever id begins with `rid`; as all have one length, just this one."""
        return "/abort_request", b'{"rid":"%b"}' % rid.encode()


class SGLangEngine(HttpEngine):
    """SGLang servers, or routers in front of them, at `urls`; see HttpEngine and SGLangWire.

    Generations go to `urls`; aborts and control calls go past a router, to each of its workers.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        stream: bool = False,
        vocab_size: int | None = None,
        log_prob_kind: LogProbKind | None = None,
        sampling_mask: bool = False,
        routed_experts: tuple[int, int] | None = None,
        stop: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        settings: HttpSettings | None = None,
    ) -> None:
        super().__init__(
            SGLangWire(sampling_mask=sampling_mask, routed_experts=routed_experts, stop=stop),
            urls,
            stream=stream,
            vocab_size=vocab_size,
            log_prob_kind=log_prob_kind,
            headers=headers,
            settings=settings,
        )

    async def start(
        self, *, max_concurrent: int, params: SamplingParams, log_probs: bool, prompt: Ints
    ) -> None:
        """See HttpEngine; finds the workers of routers."""
        await super().start(
            max_concurrent=max_concurrent, params=params, log_probs=log_probs, prompt=prompt
        )
        self.control_urls = await self.workers()

    async def workers(self) -> list[str]:
        """The servers themselves: the workers of each router, and each URL that is no router."""
        found = await asyncio.gather(*(self._workers(e.url) for e in self.endpoints))
        return list(dict.fromkeys(url for urls in found for url in urls))

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop sampling, for new weights: end what runs (finish "abort"), or let it wait."""
        await self._control_workers("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._control_workers("/continue_generation", {})

    async def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Free GPU memory; `tags` (kv_cache, weights, cuda_graph): only this. Nothing may run."""
        await self._control_workers("/release_memory_occupation", {"tags": tags} if tags else {})

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `sleep` freed."""
        await self._control_workers("/resume_memory_occupation", {"tags": tags} if tags else {})

    async def flush_cache(self) -> None:
        """Forget all prefixes. EngineError while requests run."""
        await self._control_workers("/flush_cache", {})

    async def _control_workers(self, path: str, body: object) -> None:
        self.control_urls = await self.workers()
        await self.call(path, body)

    async def _workers(self, url: str) -> list[str]:
        """Asked both ways at once: routers since 0.3, and before."""
        paths = ("/workers", "/list_workers")
        answers = await asyncio.gather(
            *(self.call(path, method="GET", to=[url], timeout_s=_ROUTER_S) for path in paths),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, dict) and (urls := _urls(answer[url])):
                return urls
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        return [url]


def _urls(answer: object) -> list[str]:
    """The workers that a router names; a data-parallel rank may hang on, behind an @."""
    named = answer if isinstance(answer, dict) else {}
    entries = named.get("workers") or named.get("urls")
    urls = []
    for entry in entries if isinstance(entries, list) else ():
        url = entry.get("url") if isinstance(entry, dict) else entry
        with suppress(ConfigError):  # what is no URL is no worker
            urls.append(base_url(url.partition("@")[0] if isinstance(url, str) else url))
    return urls


@lru_cache(maxsize=128)
def _constant(
    temperature: float,
    top_p: float,
    top_k: int,
    stop_token_ids: tuple[int, ...],
    stop: tuple[str, ...],
    *,
    log_probs: bool,
    stream: bool,
    mask: bool,
    experts: bool,
) -> tuple[bytes, bytes]:
    """What the bodies of a run share: the begin of the sampling parameters, and the flags."""
    sampling = {
        **NEUTRAL,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k or -1,
        "stop_token_ids": stop_token_ids,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if stop:
        sampling["stop"] = stop
    flags: dict[str, Any] = {"stream": stream, "return_logprob": log_probs}
    if log_probs:
        flags["logprob_start_len"] = -1  # none of the prompt's
    if mask:
        sampling["custom_params"] = {"return_top_p_token_ids": True}  # slime's server
        if top_k:
            flags["return_sampling_mask"] = True  # a stock one; it refuses an unbounded top_k
    if experts:
        flags["return_routed_experts"] = True
    encode = msgspec.json.encode
    return b'{"sampling_params":' + encode(sampling)[:-1], b"," + encode(flags)[1:-1]

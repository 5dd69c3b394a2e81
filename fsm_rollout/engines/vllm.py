"""vLLM: token ids in and out, by `/inference/v1/generate` or by `/v1/completions`, 0.3x.

VLLMEngine is what a run uses; VLLMWire alone speaks, without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec

from fsm_rollout.engines.base import LogProbKind
from fsm_rollout.engines.http import HttpEngine, HttpSettings
from fsm_rollout.engines.http.replies import NEUTRAL, encoded_media, failed
from fsm_rollout.engines.http.wire import Ask, Reply
from fsm_rollout.engines.vllm_stream import NAME, VLLMStream, refused
from fsm_rollout.errors import ConfigError, EngineError

Route = Literal["generate", "completions"]


class VLLMWire:
    """Speaks to vLLM; see Wire.

    `route`: generate needs a server with `--enable-scale-out` and reports everything; completions
    works with any, without sampling masks, and without routed experts in a stream. `model`: its
    name, when a server has several. `sampling_mask`, `routed_experts`: insist that the server
    reports what top-p and top-k kept, and the routing of a mixture-of-experts model, for replay
    (flags `--return-sampling-mask`, `--enable-return-routed-experts`).
    """

    name = NAME
    log_prob_kind: LogProbKind = "raw"

    def __init__(
        self,
        *,
        route: Route = "generate",
        model: str | None = None,
        sampling_mask: bool = False,
        routed_experts: bool = False,
    ) -> None:
        if route not in get_args(Route):
            raise ConfigError(f"vLLM: route {route!r}; known: {', '.join(get_args(Route))}")
        if route == "completions" and sampling_mask:
            raise ConfigError("vLLM: /v1/completions has no sampling masks; use route='generate'")
        self.route = route
        self.path = "/inference/v1/generate" if route == "generate" else "/v1/completions"
        self.sampling_mask = sampling_mask
        self.routed_experts = routed_experts
        self._model = model
        self._ids_key = b',"token_ids":[' if route == "generate" else b',"prompt":['

    def headers(self, ask: Ask) -> Mapping[str, str]:
        """The key of session affinity, and the id, which a proxy would else make up."""
        return {"X-Session-ID": ask.session_id, "X-Request-Id": ask.rid}

    def body(self, ask: Ask) -> bytes:
        """The request's body. EngineError when it has media and the route takes none."""
        params = ask.params
        head, tail = _constant(
            self.route,
            self._model,
            params.temperature,
            params.top_p,
            params.top_k,
            params.stop_token_ids,
            log_probs=ask.log_probs,
            stream=ask.stream,
        )
        seed = "" if params.seed is None else f',"seed":{params.seed}'
        own = f',"max_tokens":{ask.max_new_tokens}{seed}'
        if self.routed_experts:
            own += f',"routed_experts_prompt_start":{ask.experts_start}'
        media = self._media(ask) if ask.media else b""
        rid = f',"request_id":"{ask.rid}"'.encode()
        return b"".join((head, own.encode(), tail, rid, media, self._ids_key, ask.ids, b"]}"))

    def reply(self, body: bytes, ask: Ask) -> Reply:
        """The reply of a request that did not stream. EngineError(bad_reply) when it is none."""
        stream = self.stream(ask)
        stream.take(body)
        return stream.reply()

    def stream(self, ask: Ask) -> VLLMStream:
        """What puts a streamed reply together."""
        return VLLMStream(ask, sampling_mask=self.sampling_mask, routed_experts=self.routed_experts)

    def refusal(self, status: int, body: bytes) -> EngineError:
        """What an HTTP status other than 200 means."""
        return refused(status, body)

    def abort(self, rid: str) -> tuple[str, bytes]:
        """Aborts the request by the id that it has inside the server, which says 200 to any other.

        For completions this route needs VLLM_SERVER_DEV_MODE=1, as pausing does; without it the cut
        connection ends the request.
        """
        if self.route == "generate":
            inner, path = f"generate-tokens-{rid}", "/inference/v1/abort_requests"
        else:
            inner, path = f"cmpl-{rid}-0", "/abort_requests"
        return path, msgspec.json.encode({"request_ids": [inner]})

    def _media(self, ask: Ask) -> bytes:
        if self.route == "completions":
            raise failed(
                f"{NAME}: /v1/completions takes no media; use route='generate'", final=True
            )
        parts = [
            {"type": "image_url", "url": item} if isinstance(item, str) else item
            for item in ask.media
        ]
        return b',"content_parts":' + encoded_media(parts, NAME)


class VLLMEngine(HttpEngine):
    """vLLM servers at `urls`; see HttpEngine and VLLMWire.

    pause, resume, sleep and wake need servers that were started with VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        route: Route = "generate",
        model: str | None = None,
        stream: bool = False,
        vocab_size: int | None = None,
        log_prob_kind: LogProbKind | None = None,
        sampling_mask: bool = False,
        routed_experts: bool = False,
        headers: Mapping[str, str] | None = None,
        settings: HttpSettings | None = None,
    ) -> None:
        if stream and routed_experts and route == "completions":
            raise ConfigError(
                "vLLM: streams of /v1/completions have no routed experts; use route='generate'"
            )
        super().__init__(
            VLLMWire(
                route=route,
                model=model,
                sampling_mask=sampling_mask,
                routed_experts=routed_experts,
            ),
            urls,
            stream=stream,
            vocab_size=vocab_size,
            log_prob_kind=log_prob_kind,
            headers=headers,
            settings=settings,
        )

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Stop sampling, for new weights: end what runs (finish "abort"), let it end, or freeze it.

        New requests are taken, and answered after `resume`.
        """
        await self.call(f"/pause?mode={mode}", timeout_s=self.settings.timeout_s)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.call("/resume")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free GPU memory: 1 keeps the weights in RAM, 2 drops them. Ends what runs."""
        await self.call(f"/sleep?level={level}")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `sleep` freed; `tags` (weights, kv_cache): only this."""
        query = "&".join(f"tags={tag}" for tag in tags or ())
        await self.call(f"/wake_up?{query}")


@lru_cache(maxsize=128)
def _constant(
    route: Route,
    model: str | None,
    temperature: float,
    top_p: float,
    top_k: int,
    stop_token_ids: tuple[int, ...],
    *,
    log_probs: bool,
    stream: bool,
) -> tuple[bytes, bytes]:
    """What the bodies of a run share: what stands before and after the turn's own parameters."""
    sampling: dict[str, Any] = {
        **NEUTRAL,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k or -1,
        "stop_token_ids": stop_token_ids,
    }
    if log_probs:
        sampling["logprobs"] = 0  # the sampled token's only
    flags: dict[str, Any] = {"stream": stream}
    if stream:
        flags["stream_options"] = {"include_usage": True}
    if model is not None:
        flags["model"] = model
    encode = msgspec.json.encode
    if route == "generate":
        sampling["detokenize"] = False
        return b'{"sampling_params":' + encode(sampling)[:-1], b"}," + encode(flags)[1:-1]
    sampling |= {
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
        "skip_special_tokens": False,
    }
    return encode(sampling)[:-1], b"," + encode(flags)[1:-1]

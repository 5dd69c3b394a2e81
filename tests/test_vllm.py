"""vLLM's wire and engine, both routes: what is asked, and what only vLLM answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.http.wire import Reply
from fsm_rollout.engines.vllm import VLLMEngine, VLLMWire
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.limits import StopReason
from tests.canned import serve
from tests.dialects import DONE, RID, VLLM, Answer, Dialect, Said, ask, dumped

SAID = Said(ids=[5, 6, 9], log_probs=[-0.5, -0.25, -0.125], matched=9)
WIRE, COMPLETIONS = VLLMWire(), VLLMWire(route="completions")
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop_token_ids": [9],
    "max_tokens": 64,
    "seed": 7,
    "logprobs": 0,
}

dialects = pytest.mark.parametrize("dialect", VLLM, ids=[dialect.name for dialect in VLLM])


def body(wire: VLLMWire = WIRE, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wire.body(ask(**changes)))
    return found


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None, "token_ids": None} | fields


def content(*pairs: tuple[int, float]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": log_prob} for token, log_prob in pairs]}


def read(*choices: dict[str, Any], usage: int | None = None, **changes: Any) -> Reply:
    """A stream of these choices, each its own event, and of a usage if it is told."""
    stream = WIRE.stream(ask(stream=True, **changes))
    for one in choices:
        stream.feed(dumped({"choices": [one]}))
    if usage is not None:
        stream.feed(dumped({"choices": [], "usage": {"completion_tokens": usage}}))
    stream.feed(DONE)
    return stream.reply()


def refused(*choices: dict[str, Any], usage: int | None = None, **changes: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        read(*choices, usage=usage, **changes)
    return caught.value


# -- the request -----------------------------------------------------------------------------------


def test_generate_is_asked_for_everything_that_it_would_else_make_up() -> None:
    assert body() == {
        "sampling_params": NEUTRAL | {"detokenize": False},
        "stream": False,
        "request_id": RID,
        "token_ids": [1, 2, 3],
    }
    assert WIRE.path == "/inference/v1/generate"


def test_completions_are_asked_for_ids_in_every_form() -> None:
    assert body(COMPLETIONS) == NEUTRAL | {
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
        "skip_special_tokens": False,
        "stream": False,
        "request_id": RID,
        "prompt": [1, 2, 3],
    }
    assert COMPLETIONS.path == "/v1/completions"


@pytest.mark.parametrize("route", ["generate", "completions"])
def test_a_turn_brings_its_own_ids_budget_and_seed(route: Any) -> None:
    wire = VLLMWire(route=route, model="m")
    params = SamplingParams(temperature=0, top_p=0.5, top_k=20)
    asked = body(wire, ids=bytearray(b"4"), max_new_tokens=1, params=params, log_probs=False)
    sampling = asked if route == "completions" else asked["sampling_params"]
    assert asked["prompt" if route == "completions" else "token_ids"] == [4]
    assert asked["model"] == "m"
    assert (sampling["max_tokens"], sampling["temperature"], sampling["top_k"]) == (1, 0, 20)
    assert not {"seed", "logprobs"} & sampling.keys()


@pytest.mark.parametrize("wire", [WIRE, COMPLETIONS])
def test_a_stream_is_asked_for_its_usage(wire: VLLMWire) -> None:
    asked = body(wire, stream=True)
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}


def test_media_go_along_for_the_server_to_fetch() -> None:
    media = ["http://x/y.png", {"type": "audio_url", "url": "http://x/z.wav"}]
    assert body(media=media)["content_parts"] == [
        {"type": "image_url", "url": "http://x/y.png"},
        {"type": "audio_url", "url": "http://x/z.wav"},
    ]
    for wire, items in ((COMPLETIONS, media), (WIRE, [object()])):
        with pytest.raises(EngineError, match="media") as caught:
            body(wire, media=items)
        assert caught.value.final


def test_an_abort_names_the_id_that_the_request_has_inside_the_server() -> None:
    path, data = WIRE.abort(RID)
    assert path == "/inference/v1/abort_requests"
    assert json.loads(data) == {"request_ids": [f"generate-tokens-{RID}"]}
    path, data = COMPLETIONS.abort(RID)
    assert (path, json.loads(data)) == ("/abort_requests", {"request_ids": [f"cmpl-{RID}-0"]})
    assert WIRE.headers(ask()) == {"X-Session-ID": "session", "X-Request-Id": RID}


def test_what_a_route_cannot_do_is_refused_at_once() -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"route": "chat"}, "known: generate, completions"),
        ({"route": "completions", "sampling_mask": True}, "route='generate'"),
        ({"route": "completions", "stream": True, "routed_experts": True}, "route='generate'"),
    ]
    for arguments, why in refusals:
        with pytest.raises(ConfigError, match=why):
            VLLMEngine("http://127.0.0.1:9", **arguments)


# -- ids and log-probs -----------------------------------------------------------------------------


@dialects
def test_log_probs_of_other_ids_are_refused(dialect: Dialect) -> None:
    wire = dialect.wire()
    good = dialect.whole(SAID)
    for swapped in (b'"token_id":6', b'"token_id:6"'):
        if swapped in good:
            with pytest.raises(EngineError, match="differ") as caught:
                wire.reply(good.replace(swapped, swapped.replace(b"6", b"7")), ask())
            assert caught.value.reason is StopReason.BAD_REPLY
            break
    else:
        pytest.fail("no id to swap")


def test_ids_may_come_with_their_log_probs_alone() -> None:
    named = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.5, -0.25]}
    chat = {"content": [{"token": "token_id:5", "logprob": -0.5}]}
    assert read(choice(logprobs=named, finish_reason="stop")).token_ids == [5, 6]
    assert read(choice(logprobs=chat, finish_reason="stop")).token_ids == [5]
    assert read(choice(logprobs=content((5, -0.5)), finish_reason="stop")).token_ids == [5]


@pytest.mark.parametrize("tokens", [["token_id:5", "x"], ["token_id:"], ["token_id:5,6"]])
def test_token_strings_that_are_no_ids_are_refused(tokens: list[str]) -> None:
    log_probs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens)}
    ids = list(range(5, 5 + len(tokens)))
    error = refused(choice(token_ids=ids, logprobs=log_probs, finish_reason="stop"))
    assert error.reason is StopReason.BAD_REPLY


def test_texts_of_tokens_do_not_matter() -> None:
    texts = {"tokens": ["a", "token_id:7"], "token_logprobs": [-0.5, -0.25]}
    reply = read(choice(token_ids=[5, 6], logprobs=texts, finish_reason="stop"))
    assert (reply.token_ids, reply.log_probs) == ([5, 6], [-0.5, -0.25])
    assert "no token_ids" in str(refused(choice(logprobs=texts, finish_reason="stop")))


def test_candidates_are_looked_up_by_the_sampled_id() -> None:
    candidates = [{"382": -4.2, "13": {"logprob": -0.7, "rank": 1}}, {"785": -1.6}]
    stop: dict[str, Any] = {"logprobs": candidates, "finish_reason": "stop"}
    assert read(choice(token_ids=[13, 785], **stop)).log_probs == [-0.7, -1.6]
    for ids in ([13, 1], [13], None):
        assert refused(choice(token_ids=ids, **stop)).reason is StopReason.BAD_REPLY


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b'{"choices":[{"token_ids":[5],"logprobs":{"content":[{"token_id":5}]}}]}', "content[0]"),
        (b'{"choices":[{"logprobs":{"content":[{"logprob":null}]}}]}', "content[0].logprob"),
        (b'{"choices":[{"logprobs":{"token_logprobs":[null]}}]}', "token_logprobs[0]"),
        (b'{"choices":[{"logprobs":[{"5":null}]}]}', "logprobs[0]"),
        (b'{"choices":[{"logprobs":-0.5}]}', "$.choices[0].logprobs"),
        (b'{"choices":[{"token_ids":["5"]}]}', "$.choices[0].token_ids[0]"),
        (b'{"choices":[{"finish_reason":{"type":"stop"}}]}', "$.choices[0].finish_reason"),
        (b'{"choices":[],"usage":{"completion_tokens":1.5}}', "$.usage.completion_tokens"),
        (b'{"choices":{}}', "$.choices"),
        (b'{"text":"hi"}', "$.choices is missing"),
        (b'{"choices":[{},{}]}', "2 choices"),
        (b'{"choices":[{"token_ids":[5', "truncated"),
        (b"[]", "object"),
        (b"", "truncated"),
    ],
)
def test_a_wrong_shape_is_refused_by_its_path(data: bytes, path: str) -> None:
    for wire in (WIRE, COMPLETIONS):
        with pytest.raises(EngineError) as caught:
            wire.reply(data, ask())
        assert caught.value.reason is StopReason.BAD_REPLY
        assert "vllm" in str(caught.value)
        assert path in str(caught.value)


@dialects
def test_an_echo_of_the_prompt_is_handed_on_when_it_is_another(dialect: Dialect) -> None:
    assert dialect.read(SAID).prompt_token_ids is None
    echoed = Said(ids=[5], log_probs=[-0.5], echo=[1, 2, 4])
    assert dialect.read(echoed).prompt_token_ids == [1, 2, 4]


# -- streams ---------------------------------------------------------------------------------------


def test_a_part_without_ids_is_missed_when_the_usage_counts_more() -> None:
    parts = (
        choice(token_ids=[5], logprobs=content((5, -0.5))),
        choice(),
        choice(token_ids=[9], logprobs=content((9, -0.5)), finish_reason="stop"),
    )
    assert "missing tokens" in str(refused(*parts, usage=4))
    assert "surplus tokens" in str(refused(*parts, usage=1))
    assert "no usage" in str(refused(*parts))
    assert read(*parts, usage=2).token_ids == [5, 9]


def test_a_usage_may_be_left_out_when_no_part_lacks_ids() -> None:
    assert read(choice(token_ids=[5], logprobs=content((5, -0.5)), finish_reason="stop")).token_ids


def test_only_a_finish_reason_ends_a_stream_and_nothing_comes_after_it() -> None:
    part = choice(token_ids=[5], logprobs=content((5, -0.5)))
    stop = choice(token_ids=[], logprobs=content(), finish_reason="stop")
    assert read(part, stop).token_ids == [5]
    for parts, why in (
        ((part,), "without a finish reason"),
        ((), "without a finish reason"),
        ((part, stop, stop), "after the finish reason"),
    ):
        error = refused(*parts)
        assert error.reason is StopReason.BAD_REPLY
        assert why in str(error)


@pytest.mark.parametrize(
    ("event", "reason", "final"),
    [
        ({"error": {"message": "boom", "code": 500}}, StopReason.ENGINE_ERROR, False),
        ({"error": {"message": "boom", "code": None}}, StopReason.ENGINE_ERROR, False),
        ({"error": "boom"}, StopReason.ENGINE_ERROR, False),
        ({"error": {"message": "boom", "code": 400}}, StopReason.ENGINE_ERROR, True),
        (
            {"error": {"message": "maximum context length is 64: boom", "code": 400}},
            StopReason.MAX_CONTEXT,
            True,
        ),
    ],
)
def test_an_error_in_a_stream_means_what_its_status_would(
    event: dict[str, Any], reason: StopReason, final: bool
) -> None:
    stream = WIRE.stream(ask(stream=True))
    stream.feed(dumped({"choices": [choice(token_ids=[5], logprobs=content((5, -0.5)))]}))
    with pytest.raises(EngineError, match="boom") as caught:
        stream.feed(dumped(event))
    assert (caught.value.reason, caught.value.final) == (reason, final)


# -- what a trainer replays ------------------------------------------------------------------------


def npy(rows: Any) -> str:
    with io.BytesIO() as file:
        np.save(file, rows)
        return base64.b64encode(file.getvalue()).decode()


@dialects
def test_routed_experts_are_npy_of_any_width(dialect: Dialect) -> None:
    if dialect.name == "completions-stream":
        return  # the route does not stream them; VLLMEngine refuses to ask
    for dtype in (np.uint8, np.uint16, np.int32):
        rows = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(dtype)
        said = Said(ids=[5, 6], log_probs=[-0.5, -0.25], experts=npy(rows))
        experts = dialect.read(said, cuts=[1], routed_experts=True).routed_experts
        assert experts is not None
        assert experts.rows.dtype == dtype
        assert (experts.rows == rows).all()


def test_sampling_masks_are_collected_from_all_parts() -> None:
    said = Said(ids=[5, 6], log_probs=[-0.5, -0.25], masks=[[5, 7], [6]])
    for dialect in VLLM[:2]:
        top_p = dialect.read(said, cuts=[1], sampling_mask=True).top_p
        assert top_p is not None
        assert (top_p.ids.tolist(), top_p.offsets.tolist()) == ([5, 7, 6], [0, 2, 3])
    short = Said(ids=[5, 6], log_probs=[-0.5, -0.25], masks=[[5, 7]])
    with pytest.raises(EngineError, match="1 sampling masks for 2 tokens"):
        VLLM[0].read(short, sampling_mask=True)


@pytest.mark.parametrize("wire", [VLLMWire(sampling_mask=True), VLLMWire(routed_experts=True)])
def test_what_should_be_replayed_but_is_not_reported_ends_the_run(wire: VLLMWire) -> None:
    asked = ask(params=SamplingParams(top_p=0.9))
    with pytest.raises(EngineError, match=r"start the server with --") as caught:
        wire.reply(VLLM[0].whole(SAID), asked)
    assert caught.value.final
    nothing = Said(ids=[], log_probs=None, finish="abort")
    reply = wire.reply(VLLM[0].whole(nothing), asked)
    assert (reply.token_ids, reply.log_probs) == ([], [])


def test_num_006_kept_ids_that_do_not_fit_are_refused_and_never_wrap() -> None:
    said = Said(ids=[5], log_probs=[-0.5], masks=[[5, 2**31]])
    with pytest.raises(EngineError, match="int32") as caught:
        VLLM[0].read(said, sampling_mask=True)
    assert caught.value.reason is StopReason.BAD_REPLY


def test_counters_have_our_names() -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    drafts = {"num_accepted_draft_tokens": 4, "num_draft_tokens": 6}
    stop = choice(token_ids=[5], logprobs=content((5, -0.5)), finish_reason="stop")
    reply = WIRE.reply(
        dumped({"choices": [stop], "usage": usage, "metrics": {"speculative_decoding": drafts}}),
        ask(),
    )
    expected = {"cached_tokens": 2, "spec_accepted_tokens": 4, "spec_draft_tokens": 6}
    assert reply.counters == expected
    assert reply.prompt_tokens == 3


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 64 tokens. However, you requested 70",
        "This model's maximum context length is 64 tokens. However, your prompt contains 70 input "
        "tokens, which exceeds this limit even without any output tokens.",
        "The decoder prompt (length 70) is longer than the maximum model length of 64. Make sure",
        "The decoder prompt (length 64) plus the number of requested output tokens (at least 1) is "
        "longer than the maximum model length of 64.",
        "Input length (70) exceeds model's maximum context length (64).",
        "max_tokens must be at least 1, got 0.",
        "max_tokens=70 cannot be greater than max_model_len=64. Please request fewer",
        "'max_tokens' or 'max_completion_tokens' is too large: 70. This model's maximum context "
        "length is 64 tokens and your request has 60 input tokens",
    ],
)
def test_a_full_context_is_told_from_other_refusals(said: str) -> None:
    for text in ({"error": {"message": said, "code": 400}}, {"object": "error", "message": said}):
        error = WIRE.refusal(400, dumped(text))
        assert (error.reason, error.final) == (StopReason.MAX_CONTEXT, True)
        assert said[:20] in str(error)
    assert WIRE.refusal(500, dumped({"message": said})).reason is StopReason.ENGINE_ERROR


@pytest.mark.parametrize(
    ("status", "final"),
    [(400, True), (403, True), (404, True), (422, True), (408, False), (429, False), (500, False),
     (503, False)],
)  # fmt: skip
def test_a_status_says_whether_trying_again_helps(status: int, final: bool) -> None:
    error = WIRE.refusal(status, b'{"error":{"message":"because"}}')
    assert (error.reason, error.final) == (StopReason.ENGINE_ERROR, final)
    assert f"HTTP {status}: because" in str(error)


def test_a_server_without_the_route_says_how_to_start_it() -> None:
    for status in (403, 404):
        assert "--enable-scale-out" in str(WIRE.refusal(status, b'{"detail":"Not Found"}'))


# -- the engine ------------------------------------------------------------------------------------


def test_control_calls() -> None:
    async def drive() -> None:
        async with serve(routes={"/health": Answer(b"")}) as server:
            engine = VLLMEngine([server.url, "http://127.0.0.1:9"])
            assert await engine.health() == {server.url: True, "http://127.0.0.1:9": False}
            await engine.close()
            engine = VLLMEngine(server.url)
            await engine.pause("keep")
            await engine.resume()
            await engine.sleep(2)
            await engine.wake(["weights", "kv_cache"])
            await engine.wake()
            await engine.close()
            assert [(method, path) for method, path, _ in server.others[1:]] == [
                ("POST", "/pause?mode=keep"),
                ("POST", "/resume"),
                ("POST", "/sleep?level=2"),
                ("POST", "/wake_up?tags=weights&tags=kv_cache"),
                ("POST", "/wake_up"),
            ]

    asyncio.run(drive())

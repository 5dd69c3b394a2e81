"""SGLang's wire and engine: what is asked, and what only SGLang answers."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.http.wire import Reply
from fsm_rollout.engines.sglang import SGLangEngine, SGLangWire
from fsm_rollout.errors import EngineError
from fsm_rollout.limits import StopReason
from tests.canned import serve
from tests.dialects import DONE, RID, Answer, Said, ask, dumped, sglang

SAID = Said(ids=[5, 6, 9], log_probs=[-0.5, -0.25, -0.125], matched=9)
WIRE = SGLangWire()
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def body(wire: SGLangWire = WIRE, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wire.body(ask(**changes)))
    return found


def event(ids: list[int] | None, log_probs: list[float] | None = None, **meta: Any) -> bytes:
    """An event with these output_ids; log-probs go with them unless `told` names other ids."""
    told = meta.pop("told", ids)
    meta = {"finish_reason": None, "completion_tokens": len(told or ids or ())} | meta
    if log_probs is not None:
        pairs = zip(log_probs, told, strict=True)
        meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    return dumped({"text": "x", "output_ids": ids, "meta_info": meta})


def read(*events: bytes, **changes: Any) -> Reply:
    stream = WIRE.stream(ask(stream=True, **changes))
    for data in [*events, DONE]:
        stream.feed(data)
    return stream.reply()


def refused(*events: bytes, **changes: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        read(*events, **changes)
    return caught.value


# -- the request -----------------------------------------------------------------------------------


def test_a_body_says_everything_that_a_server_would_else_make_up() -> None:
    assert body() == {
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "max_new_tokens": 64,
            "sampling_seed": 7,
        },
        "rid": RID,
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": -1,
        "input_ids": [1, 2, 3],
    }


def test_a_turn_brings_its_own_ids_budget_and_seed() -> None:
    first, second = body(), body(ids=bytearray(b"4"), max_new_tokens=1, params=SamplingParams())
    assert second["input_ids"] == [4]
    assert second["sampling_params"]["max_new_tokens"] == 1
    assert "sampling_seed" not in second["sampling_params"]
    assert first == body()


def test_greedy_and_filters_are_said_as_they_are() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=20, stop_token_ids=(9, 7))
    sampling = body(params=params)["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0, 0.5, 20)
    assert sampling["stop_token_ids"] == [9, 7]


def test_a_run_without_log_probs_asks_for_none() -> None:
    asked = body(log_probs=False, stream=True)
    assert asked["stream"] is True
    assert asked["return_logprob"] is False
    assert "logprob_start_len" not in asked


def test_images_go_along_as_they_are() -> None:
    assert body(media=["data:image/png;base64,AA", "http://x/y.png"])["image_data"] == [
        "data:image/png;base64,AA",
        "http://x/y.png",
    ]
    with pytest.raises(EngineError, match="URL, a data URI or base64") as caught:
        body(media=[object()])
    assert caught.value.final


@pytest.mark.parametrize(
    ("params", "native", "slime"),
    [
        (SamplingParams(), False, False),  # nothing is filtered: there is no mask
        (SamplingParams(top_p=0.9), False, True),  # a stock server refuses an unbounded top_k
        (SamplingParams(top_p=0.9, top_k=50), True, True),
    ],
)
def test_a_sampling_mask_is_asked_for_in_both_ways(
    params: SamplingParams, native: bool, slime: bool
) -> None:
    asked = body(SGLangWire(sampling_mask=True), params=params)
    assert asked.get("return_sampling_mask", False) is native
    custom = asked["sampling_params"].get("custom_params", {})
    assert custom.get("return_top_p_token_ids", False) is slime


def test_routed_experts_are_asked_for() -> None:
    assert body(SGLangWire(routed_experts=(2, 2)))["return_routed_experts"] is True
    assert "return_routed_experts" not in body()


def test_a_session_has_a_routing_key_and_a_try_its_abort() -> None:
    assert WIRE.headers(ask()) == {"x-smg-routing-key": "session"}
    path, data = WIRE.abort(RID)
    assert (path, json.loads(data)) == ("/abort_request", {"rid": RID})


# -- log-probs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "kind"),
    [(0.7, 1, "raw"), (1, 1, None), (0, 1, None), (0.7, 2, None), (0.7, 0, None), (0, 0, None)],
)
def test_a_hot_greedy_batch_ignores_its_temperature(
    temperature: float, top_k: int, kind: str | None
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k)
    assert WIRE.reply(sglang(SAID), ask(params=params)).log_prob_kind == kind


def test_ids_may_come_with_their_log_probs_alone() -> None:
    reply = read(event(None, [-0.5, -0.25], told=[5, 6], finish_reason="stop"))
    assert (reply.token_ids, reply.log_probs, reply.finish) == ([5, 6], [-0.5, -0.25], "stop")


def test_log_probs_of_other_ids_are_refused() -> None:
    error = refused(event([5, 6], [-0.5, -0.25], told=[5, 7], finish_reason="stop"))
    assert error.reason is StopReason.BAD_REPLY
    assert "differ" in str(error)


def test_a_run_without_log_probs_reads_none() -> None:
    assert WIRE.reply(sglang(SAID), ask(log_probs=False)).log_probs is None


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[null,5,null]]}}', "[0][0]"),
        (b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[-1e999,5,null]]}}', "[0][0]"),
        (b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[-0.5,5]]}}', "logprobs[0]"),
        (b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[-0.5,"5",null]]}}', "[0][1]"),
        (b'{"output_ids":[5.5],"meta_info":{}}', "$.output_ids"),
        (b'{"output_ids":[true],"meta_info":{}}', "$.output_ids"),
        (b'{"output_ids":{"0":5},"meta_info":{}}', "$.output_ids"),
        (b'{"output_ids":[5],"meta_info":{"finish_reason":{"kind":"stop"}}}', "finish_reason"),
        (b'{"output_ids":[5],"meta_info":{"finish_reason":3}}', "$.meta_info.finish_reason"),
        (b'{"output_ids":[5],"meta_info":{"completion_tokens":"1"}}', "completion_tokens"),
        (b'{"meta_info":{"finish_reason":"stop"}}', "$.output_ids"),
        (b'{"output_ids":[5]}', "$.meta_info"),
        (b'[{"output_ids":[5]}]', "object"),
        (b'{"output_ids":[5],"meta_info":{"output_token_logprobs":[[NaN,5,null]]}}', "malformed"),
        (b'{"output_ids":[5', "truncated"),
        (b'{"extra":' + b"[" * 100_000, "recursion"),
        (b"<html>502</html>", "<html>"),
        (b"\xff\xfe", "malformed"),
        (b"null", "object"),
        (b"", "truncated"),
    ],
)
def test_a_wrong_shape_is_refused_by_its_path(data: bytes, path: str) -> None:
    with pytest.raises(EngineError) as caught:
        WIRE.reply(data, ask())
    assert caught.value.reason is StopReason.BAD_REPLY
    assert not caught.value.final
    assert "sglang" in str(caught.value)
    assert path in str(caught.value)


# -- streams ---------------------------------------------------------------------------------------


def test_what_a_cumulative_event_repeats_is_not_read_again() -> None:
    first = [event([5], [-0.5]), event([5, 6], [-0.5, -0.25])]
    unread = b'{"finish_reason":null} which is no JSON'
    last = event([5, 6, 9], [-0.5, -0.25, -0.125], finish_reason={"type": "stop", "matched": 9})
    assert read(*first, unread, last) == read(last)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([event([5], [-0.5]), event([6, 7], [-0.5, -0.5], completion_tokens=4)], "after 1"),
        ([event([5], [-0.5]), event([6, 7], [-0.5, -0.5])], "other ids"),
        ([event([5], [-0.5], completion_tokens=0)], "after 0"),
        ([event([5], [-0.5], finish_reason="stop")] * 2, "after the finish reason"),
        ([event([5], [-0.5], completion_tokens=None)] * 2, "no completion_tokens"),
        ([event([5], [-0.5])], "without a finish reason"),
        ([], "without a finish reason"),
    ],
)
def test_events_that_do_not_add_up_are_refused(events: list[bytes], why: str) -> None:
    error = refused(*events)
    assert error.reason is StopReason.BAD_REPLY
    assert why in str(error)


def test_a_server_that_does_not_count_is_read_by_prefix() -> None:
    uncounted: dict[str, Any] = {"completion_tokens": None}
    stop: dict[str, Any] = uncounted | {"finish_reason": "stop"}
    cumulative = [event([5], [-0.5], **uncounted), event([5, 6], [-0.5, -0.25], **stop)]
    assert read(*cumulative).token_ids == [5, 6]
    deltas = [event([5], [-0.5], **uncounted), event([5, 6], [-0.4, -0.25], **stop)]
    assert read(*deltas).token_ids == [5, 5, 6]
    assert read(event([5], **uncounted), event([6], **stop), log_probs=False).token_ids == [5, 6]


IDS, LOG_PROBS = [5, 6, 6], [-0.5, -0.25, -0.125]


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize(
    ("before", "last"),
    [
        ([], [6]),  # nothing was handed out before
        ([event([5], [-0.5])], [6]),
        ([event([5], [-0.5]), event([5, 6, 6], LOG_PROBS)], [6]),  # cumulative
        ([event([5], [-0.5]), event([6, 6], LOG_PROBS[1:], completion_tokens=3)], [6]),
        ([event([5], [-0.5]), event([6], [-0.25], completion_tokens=2)], [6, 6]),  # coalesced
        ([event([5], [-0.5])], [6, 6, 6]),
    ],
)
def test_an_abort_in_the_queue_repeats_its_last_id(
    before: list[bytes], last: list[int], log_probs: bool
) -> None:
    told = [*last[:-1], *IDS]
    values = [*[-1.0] * len(last[:-1]), *LOG_PROBS]
    meta: dict[str, Any] = {"finish_reason": ABORT, "completion_tokens": 3}
    if log_probs:
        reply = read(*before, event(last, values, told=told, **meta))
        assert reply.log_probs == LOG_PROBS
    elif not before:  # the tokens before the last one are lost
        assert "completion_tokens" in str(refused(event(last, **meta), log_probs=False))
        return
    elif len(before) == 1 and len(last) == 1:
        error = refused(*before, event(last, **meta), log_probs=False)
        assert error.reason is StopReason.BAD_REPLY
        return
    else:
        reply = read(*before, event(last, **meta), log_probs=False)
    assert reply.token_ids == IDS
    assert reply.finish == "abort"


def test_an_abort_in_the_queue_keeps_what_was_counted_before() -> None:
    first = event([5], [-0.5], prompt_tokens=3, cached_tokens=2)
    reply = read(first, event([5], [-0.5], finish_reason=ABORT))
    assert (reply.token_ids, reply.prompt_tokens, reply.counters) == ([5], 3, {"cached_tokens": 2})


@pytest.mark.parametrize("told", [[7, 6], [5, 7], [6]])
def test_an_abort_that_repeats_other_tokens_is_refused(told: list[int]) -> None:
    last = event([6], [-0.1] * len(told), told=told, finish_reason=ABORT, completion_tokens=2)
    error = refused(event([5], [-0.5]), event([6], [-0.2], completion_tokens=2), last)
    assert error.reason is StopReason.BAD_REPLY


def test_sampling_masks_follow_their_tokens_in_every_mode() -> None:
    wire = SGLangWire(sampling_mask=True)
    asked = ask(params=SamplingParams(top_p=0.9), stream=True)
    whole = event(
        [5, 6], [-0.5, -0.25], output_token_sampling_mask=[[5, 7], [6]], finish_reason="stop"
    )
    first = event([5], [-0.5], output_token_sampling_mask=[[5, 7]])
    delta = event(
        [6],
        [-0.25],
        output_token_sampling_mask=[[6]],
        finish_reason="stop",
        completion_tokens=2,
    )
    for events in ([whole], [first, whole], [first, delta]):
        stream = wire.stream(asked)
        for data in events:
            stream.feed(data)
        top_p = stream.reply().top_p
        assert top_p is not None
        assert (top_p.ids.tolist(), top_p.offsets.tolist()) == ([5, 7, 6], [0, 2, 3])


# -- what a trainer replays ------------------------------------------------------------------------


def b64(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def test_top_p_comes_as_masks_or_as_slimes_pair() -> None:
    pair = {"top_p_token_ids": b64([5, 7, 6]), "top_p_token_offsets": b64([0, 2, 3])}
    for meta in ({"output_token_sampling_mask": [[5, 7], [6]]}, pair):
        top_p = read(event([5, 6], [-0.5, -0.25], finish_reason="stop", **meta)).top_p
        assert top_p is not None
        assert (top_p.ids.tolist(), top_p.offsets.tolist()) == ([5, 7, 6], [0, 2, 3])


def test_half_a_top_p_pair_is_refused() -> None:
    error = refused(event([5], [-0.5], finish_reason="stop", top_p_token_ids=b64([5])))
    assert error.reason is StopReason.BAD_REPLY
    assert "top_p" in str(error)


def test_num_006_offsets_that_do_not_fit_are_refused_and_never_wrap() -> None:
    far: dict[str, Any] = {"top_p_token_ids": [5], "top_p_token_offsets": [0, 40_000 * 60_000]}
    error = refused(event([5], [-0.5], finish_reason="stop", **far))
    assert error.reason is StopReason.BAD_REPLY
    assert "int32" in str(error)


def test_routed_experts_are_raw_int32_of_the_shape_that_was_declared() -> None:
    wire = SGLangWire(routed_experts=(2, 2))
    rows = list(range(4 * 2 * 2))
    said = Said(ids=[5, 6], log_probs=[-0.5, -0.25], experts=b64(rows))
    experts = wire.reply(sglang(said), ask()).routed_experts
    assert experts is not None
    assert experts.rows.reshape(-1).tolist() == rows
    assert experts.rows.shape == (4, 2, 2)
    short = Said(ids=[5, 6, 9], log_probs=[-0.5, -0.25, -0.1], experts=b64(rows))
    with pytest.raises(EngineError, match="routed_experts") as caught:
        wire.reply(sglang(short), ask())
    assert caught.value.reason is StopReason.BAD_REPLY


@pytest.mark.parametrize(
    "wire", [SGLangWire(sampling_mask=True), SGLangWire(routed_experts=(2, 2))]
)
def test_what_should_be_replayed_but_is_not_reported_ends_the_run(wire: SGLangWire) -> None:
    asked = ask(params=SamplingParams(top_p=0.9))
    with pytest.raises(EngineError, match=r"no (top_p|routed_experts) reported") as caught:
        wire.reply(sglang(SAID), asked)
    assert caught.value.final
    nothing = Said(ids=[], log_probs=[], finish="abort")
    assert not wire.reply(sglang(nothing), asked).token_ids


def test_counters_have_our_names() -> None:
    meta = {"cached_tokens": 2, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 6}
    counters = read(event([5], [-0.5], finish_reason="stop", **meta)).counters
    assert counters == {"cached_tokens": 2, "spec_accepted_tokens": 4, "spec_draft_tokens": 6}


@pytest.mark.parametrize(
    ("matched", "expected"),
    [(9, 9), (0, 0), ([7, 9], 9), ([], None), ("\n\n", "\n\n"), (None, None)],
)
def test_what_matched_is_an_id_or_a_string(matched: Any, expected: Any) -> None:
    finish = {"type": "stop", "matched": matched}
    assert read(event([5], [-0.5], finish_reason=finish)).matched == expected


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "The input (70 tokens) is longer than the model's context length (64 tokens).",
        "Requested token count exceeds the model's maximum context length of 64 tokens. You "
        "requested a total of 70 tokens",
        "Input length (70 tokens) exceeds the maximum allowed length (59 tokens). Use a shorter "
        "input or enable --allow-auto-truncate.",
    ],
)
def test_a_full_context_is_told_from_other_refusals(said: str) -> None:
    for text in ({"error": {"message": said}}, {"message": said, "code": 400}, said):
        error = WIRE.refusal(400, dumped(text))
        assert (error.reason, error.final) == (StopReason.MAX_CONTEXT, True)
        assert said[:20] in str(error)
    abort = ABORT | {"message": said, "status_code": 400}
    assert refused(event([], [], finish_reason=abort)).reason is StopReason.MAX_CONTEXT


@pytest.mark.parametrize(
    ("status", "final"),
    [(400, True), (401, True), (404, True), (422, True), (408, False), (429, False), (500, False),
     (503, False)],
)  # fmt: skip
def test_a_status_says_whether_trying_again_helps(status: int, final: bool) -> None:
    error = WIRE.refusal(status, b'{"error":{"message":"because"}}')
    assert (error.reason, error.final) == (StopReason.ENGINE_ERROR, final)
    assert f"HTTP {status}: because" in str(error)
    abort = ABORT | {"message": "because", "status_code": status}
    assert refused(event([5], [-0.5], finish_reason=abort)).final is final


def test_an_error_shows_an_excerpt_and_a_remedy() -> None:
    assert len(str(WIRE.refusal(500, b"x" * 10_000))) < 400
    assert len(str(WIRE.refusal(500, b"[" * 100_000))) < 400
    assert "headers=" in str(WIRE.refusal(401, b"{}"))
    assert "SGLang" in str(WIRE.refusal(404, b'{"detail":"Not Found"}'))


# -- the engine ------------------------------------------------------------------------------------

WORKERS = {
    "/workers": Answer(b'{"workers":[{"id":"1","url":"WORKER"},{"id":"2","url":"WORKER@1"}]}')
}
OLD_WORKERS = {"/workers": Answer(b"", 404), "/list_workers": Answer(b'{"urls":["WORKER"]}')}


@pytest.mark.parametrize("routes", [WORKERS, OLD_WORKERS], ids=["workers", "list_workers"])
def test_control_calls_go_past_a_router_to_its_workers(routes: dict[str, Answer]) -> None:
    async def drive() -> None:
        async with serve() as worker:
            named = {
                path: answer._replace(body=answer.body.replace(b"WORKER", worker.url.encode()))
                for path, answer in routes.items()
            }
            async with serve(routes=named) as router:
                engine = SGLangEngine(router.url)
                await engine.start(
                    max_concurrent=1, params=SamplingParams(), log_probs=True, prompt=[1]
                )
                assert list(engine.control_urls) == await engine.workers() == [worker.url]
                await engine.pause("in_place")
                await engine.resume()
                await engine.sleep(["weights"])
                await engine.wake()
                await engine.flush_cache()
                assert worker.others == [
                    ("POST", "/pause_generation", {"mode": "in_place"}),
                    ("POST", "/continue_generation", {}),
                    ("POST", "/release_memory_occupation", {"tags": ["weights"]}),
                    ("POST", "/resume_memory_occupation", {}),
                    ("POST", "/flush_cache", {}),
                ]
                await engine.close()

    asyncio.run(drive())


def test_a_server_without_a_router_is_its_own_worker() -> None:
    async def drive() -> None:
        async with serve(
            routes={"/workers": Answer(b"", 404), "/list_workers": Answer(b"", 404)}
        ) as s:
            engine = SGLangEngine([s.url, "http://127.0.0.1:9"])
            assert await engine.workers() == [s.url, "http://127.0.0.1:9"]
            assert await engine.health() == {s.url: True, "http://127.0.0.1:9": False}
            await engine.close()

    asyncio.run(drive())

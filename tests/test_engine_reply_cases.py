"""The handed `engine-reply` cases: said in every dialect, over HTTP, to the real loop.

The cases of what is replayed and recorded (rex, tpp, wv) have their own file; here those go through
that are a matter of the wire.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import Reply as Scripted
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.limits import Status, StopReason
from fsm_rollout.request import Request
from tests.canned import CALL, REASONS, ended, play, played, request_for
from tests.dialects import (
    BY_NAME,
    DIALECTS,
    SGLANG,
    VLLM,
    Answer,
    Dialect,
    Said,
    ask,
    dumped,
    generation,
)

CASES = {
    case["id"]: case
    for case in map(
        json.loads,
        (Path(__file__).parent / "cases" / "engine-reply.jsonl").read_text().split("\n")[:-1],
    )
}
ELSEWHERE = {case for case in CASES if case.split("-")[0] in ("rex", "tpp", "wv")}
"""driven through the record, in its own test file"""


def said_in(case: dict[str, Any]) -> Said:
    """What the server of a case says, whatever the dialect that the case chose."""
    given = case["input"]
    reply = given.get("reply", {})
    if "reply_tokens" in given:
        return Said(ids=given["reply_tokens"], log_probs=given["reply_logprobs"], matched=9)
    if "choices" in reply:
        (choice,) = reply["choices"]
        content = (choice.get("logprobs") or {}).get("content")
        return Said(
            ids=choice["token_ids"],
            log_probs=given.get("logprobs", content and [entry["logprob"] for entry in content]),
            finish=choice["finish_reason"],
            matched=choice.get("stop_reason"),
        )
    meta = reply["meta_info"]
    finish = meta["finish_reason"] or {"type": None}
    pairs = meta.get("output_token_logprobs")
    return Said(
        ids=reply["output_ids"],
        log_probs=None if pairs is None else [log_prob for log_prob, _, _ in pairs],
        finish=finish["type"],
        matched=finish.get("matched"),
        completion_tokens=meta["completion_tokens"],
    )


def check(request: Request, case: dict[str, Any]) -> None:
    """Each key that `expected` has."""
    ids, log_probs, mask = ended(request)
    for key, value in case["expected"].items():
        match key:
            case "status":
                assert request.status.name == value
            case "next" if value == "COMPLETED":
                assert request.status is Status.COMPLETED
            case "reason":
                assert request.stop_reason is REASONS[value]
            case "tokens" | "append":
                assert ids == value
            case "log_probs":
                assert log_probs == value
            case "loss_mask":
                assert mask == value
            case "response_length":
                assert request.sample.response_length == value
            case "finish":
                assert request.sample.turns[-1].finish == value
            case "resumable":
                assert request.stop_reason is not None
                assert request.stop_reason.resumable is value
            case "truncated":
                assert (request.status is Status.TRUNCATED) is value
            case "calls":
                assert list(request.sample.turns[-1].calls) == value
            case "must" | "must_not" | "default" | "action":
                if request.status is Status.ABORTED and request.stop_reason is not (
                    StopReason.ENGINE_ABORT
                ):
                    assert not ids  # nothing of a refused reply is kept, padded or cut
                if request.status is Status.COMPLETED and not ids:
                    assert request.sample.remove_sample  # an empty row is never trained
            case _:
                pytest.fail(f"{case['id']}: what is {key!r}?")


each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=[d.name for d in DIALECTS])

PLAIN = ["eng-001", "eng-002", "eng-003", "eng-005", "eng-006", "eng-009", "eng-010", "eng-012",
         "eng-014", "eng-015", "eng-025"]  # fmt: skip


@each_dialect
@pytest.mark.parametrize("name", PLAIN)
def test_engine_reply_case(name: str, dialect: Dialect) -> None:
    request, server = play(dialect, said_in(CASES[name]))
    check(request, CASES[name])
    assert len(server.asked) == 1


@pytest.mark.parametrize("dialect", VLLM, ids=[d.name for d in VLLM])
def test_a_finish_reason_of_tool_calls_is_not_believed(dialect: Dialect) -> None:
    case = CASES["eng-007"]
    for finish in ("tool_calls", "function_call"):
        said = said_in(case)
        said = Said(ids=said.ids, log_probs=case["input"]["logprobs"], finish=finish)
        check(play(dialect, said)[0], case)


@each_dialect
def test_a_full_context_in_mid_rollout_truncates_and_keeps_the_turns_before(
    dialect: Dialect,
) -> None:
    case = CASES["eng-016"]
    given = case["input"]
    call = Said(
        ids=[5, 6, CALL], log_probs=[-0.5, -0.25, -0.125], prompt_tokens=50, prompt=[1] * 50
    )
    refusal = Answer(dumped(given["body"]), status=given["http_status"])
    request, server = play(dialect, call, refusal, prompt=[1] * 50)
    check(request, case)
    assert len(request.sample.tokens) == given["sample"]["tokens_so_far"]
    assert request.sample.loss_mask.tolist() == [1, 1, 1] + [0] * 7
    assert len(server.asked) == 2


@each_dialect
def test_every_finish_reason_is_told_from_success(dialect: Dialect) -> None:
    case = CASES["eng-018"]
    given, expected = case["input"], case["expected"]
    for reply, log_probs in zip(given["replies"], given["logprobs"], strict=True):
        said = Said(ids=reply["token_ids"], log_probs=log_probs, finish=reply["finish_reason"])
        request = play(dialect, said)[0]
        wanted = expected[said.finish]
        assert request.status.name == wanted["status"]
        assert request.stop_reason is not None
        if said.finish == "error":
            assert request.stop_reason.retryable is wanted["retryable"]
            assert not request.sample.response_length
        else:
            assert request.stop_reason is REASONS[wanted["reason"]]
    request = play(dialect, Said(ids=[5], log_probs=[-0.5], finish="eaten"))[0]
    wanted = expected["unknown_reason"]
    assert request.status.name == wanted["status"]
    assert request.stop_reason is REASONS[wanted["reason"].partition(":")[0]]
    assert "'eaten'" in request.error


@each_dialect
def test_a_prompt_that_the_server_took_for_another_is_refused(dialect: Dialect) -> None:
    case = CASES["eng-019"]
    prompt, reply = case["input"]["request"]["prompt_ids"], case["input"]["reply"]
    echo = reply["prompt_token_ids"]
    for changes in (
        {"echo": echo, "prompt_tokens": len(echo)},
        {"echo": echo, "prompt_tokens": None},
        {"echo": [1, 3], "prompt_tokens": 2},
        {"prompt": prompt, "prompt_tokens": 1},
    ):
        said = Said(ids=reply["output_ids"], log_probs=[-0.5, -0.25], **cast(Any, changes))
        request = play(dialect, said, prompt=prompt)[0]
        check(request, case)


@each_dialect
def test_no_sample_has_an_empty_prompt(dialect: Dialect) -> None:
    """The prompt is what we send, repeated by the server or not; without one we don't ask."""
    case = CASES["eng-021"]
    ids = case["input"]["reply"]["choices"][0]["token_ids"]
    said = Said(ids=ids, log_probs=[-0.5, -0.25], prompt_tokens=None)
    request, server = play(dialect, said, prompt=[])
    check(request, case)
    assert not server.asked
    request, _ = play(dialect, said)
    assert request.sample.tokens.tolist() == [1, 2, 3, *ids]


@pytest.mark.parametrize("dialect", VLLM, ids=[d.name for d in VLLM])
def test_the_log_prob_is_that_of_the_sampled_id(dialect: Dialect) -> None:
    given, expected = CASES["eng-023"]["input"], CASES["eng-023"]["expected"]
    choice = {"token_ids": given["token_ids"], "logprobs": given["logprobs"]}
    body = dumped({"choices": [choice | {"finish_reason": "stop"}]})
    assert dialect.wire().reply(body, ask()).log_probs == expected["log_probs"]


@each_dialect
def test_a_log_prob_a_rounding_above_zero_is_kept(dialect: Dialect) -> None:
    request = play(dialect, Said(ids=[5, 9], log_probs=[1e-7, -0.5], matched=9))[0]
    assert request.status is Status.COMPLETED


# -- the wire's part of what is replayed -----------------------------------------------------------


@pytest.mark.parametrize("dialect", SGLANG + VLLM[:2], ids=[d.name for d in SGLANG + VLLM[:2]])
def test_sampling_masks_come_through(dialect: Dialect) -> None:
    case = CASES["tpp-007"]
    masks = case["input"]["meta_info"]["output_token_sampling_mask"]
    top_p = dialect.read(Said(ids=[5, 6], log_probs=[-0.1, -0.3], masks=masks), cuts=[1]).top_p
    assert top_p is not None
    spans = [top_p.ids[a:b].tolist() for a, b in pairwise(top_p.offsets.tolist())]
    assert spans == case["expected"]["spans"]


@each_dialect
def test_a_weight_version_that_changes_inside_a_reply_comes_through(dialect: Dialect) -> None:
    case = CASES["wv-001"]
    ids = case["input"]["output_ids"]
    spans = case["input"]["meta_info"]["weight_versions"]
    said = Said(ids=ids, log_probs=[-0.5] * 4, versions=spans)
    reply = dialect.read(said, cuts=[1, 3])
    per_token = [version for version, count in reply.weight_versions for _ in range(count)]
    assert per_token == case["expected"]["per_token_versions"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_each_engine_has_its_own_encoding_of_routed_experts(dtype: str) -> None:
    assert "magic" in CASES["rex-004"]["expected"]["must"]
    rows = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(dtype)
    with io.BytesIO() as file:
        np.save(file, rows)
        npy = base64.b64encode(file.getvalue()).decode()
    raw = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    for name, experts, shape in (("generate", npy, True), ("sglang", raw, (2, 2))):
        said = Said(ids=[5, 6], log_probs=[-0.5, -0.25], experts=experts)
        found = BY_NAME[name].read(said, routed_experts=shape).routed_experts
        assert found is not None
        assert (found.rows == rows).all()


# -- one reply, every engine -----------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["stop", "length", "abort", "repetition"])
def test_one_reply_makes_one_sample_whatever_the_engine(finish: str) -> None:
    ids, log_probs = [5, 6, 7, 9], [-0.5, -0.25, -1.5, -0.125]
    spans = [{"version": "7", "start": 0, "end": 4}]
    said = Said(ids=ids, log_probs=log_probs, finish=finish, matched=None, versions=spans)
    engine = ScriptedEngine([Scripted(ids, log_probs, finish, "7")])
    expected = asyncio.run(played(engine, request_for([1, 2, 3])))
    for dialect in DIALECTS:
        request, _ = play(dialect, said)
        assert request.status is expected.status
        assert request.stop_reason is expected.stop_reason
        assert comparable(request) == comparable(expected)
        made = generation(dialect.read(said, cuts=[2]))
        assert made.token_ids.tolist() == ids
        assert made.finish == finish
        assert made.weight_versions == (("7", 4),)


def comparable(request: Request) -> dict[str, Any]:
    """A sample without what is its own: ids of this run, seconds, the server's kind of log-prob."""
    found = request.sample.to_dict()
    for own in ("session_id", "sample_id", "rollout_id", "non_generation_time"):
        found.pop(own, None)
    for turn in found["turns"]:
        turn.pop("seconds", None)
        turn.pop("log_prob_kind", None)
    return found


def test_every_case_is_driven() -> None:
    by_hand = {"eng-007", "eng-016", "eng-018", "eng-019", "eng-021", "eng-023"}
    assert {*PLAIN, *by_hand, *ELSEWHERE} == CASES.keys()
    assert SamplingParams().temperature == 1

"""Any finished request as slime's and miles's Sample, and what slime normalises of a batch."""

from __future__ import annotations

import asyncio
import math
import statistics
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.adapters.slime import post_process_rewards, record, reward
from fsm_rollout.adapters.slime.outcome import outcome
from fsm_rollout.adapters.slime.rewards import take_out_unscored
from fsm_rollout.errors import HandOverError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from tests.slime_stub import MilesSample, SlimeSample, consume, slime_args
from tests.slime_stub import Status as Theirs

MACHINE = Machine()
LAYERS, TOP_K = 2, 3


def meta_of(ids: list[int], request: Request, options: dict[str, Any], turn: int) -> dict[str, Any]:
    """What an engine says about new tokens: kept ids around each, experts of all but the last."""
    meta: dict[str, Any] = {"finish_reason": "stop", "weight_version": f"v{turn}"}
    if options["top_p"]:
        meta["top_p_token_ids"] = [kept for one in ids for kept in (one, one + 1)]
        meta["top_p_token_offsets"] = list(range(0, 2 * len(ids) + 1, 2))
    if options["experts"]:
        held = request.sample.rollout_routed_experts
        start = 0 if held is None else len(held)
        rows = len(request.sample.tokens) + len(ids) - 1 - start
        meta |= {
            "routed_experts": np.full((rows, LAYERS, TOP_K), turn + 1, np.int32),
            "routed_experts_start_len": start,
        }
    return meta


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, dict[str, Any]]:
    """A sealed request of some turns, perhaps forked, cut, masked or empty; and what it reports."""
    options = {"top_p": draw(st.booleans()), "experts": draw(st.booleans())}
    request = Request(limits=Limits(), index=draw(st.integers(0, 99)), has_agent=True)
    request.set_prompt(draw(st.lists(st.integers(1, 50), min_size=1, max_size=5)))
    for turn in range(draw(st.integers(1, 4))):
        if turn:
            MACHINE.fire(Event.OBSERVE, request)
            seen = draw(st.lists(st.integers(1, 50), max_size=4))
            request.append_response_tokens(seen, trainable=False)
            if draw(st.booleans()) and not options["experts"]:
                request.fork(draw(st.lists(st.integers(1, 50), min_size=1, max_size=5)))
        MACHINE.fire(Event.GENERATE, request)
        ids = draw(st.lists(st.integers(51, 90), min_size=0 if not turn else 1, max_size=6))
        log_probs = [-0.5 - i / 8 for i in range(len(ids))]
        meta = meta_of(ids, request, options, turn)
        request.append_response_tokens(ids, log_probs, meta_info=meta)
        if draw(st.booleans()) and ids:
            request.sample.mask_out(request.sample.response_length - 1)
    if draw(st.booleans()):
        MACHINE.fire(Event.OBSERVE, request)
        request.append_response_tokens([7, 8], trainable=False)
        MACHINE.fire(Event.TRUNCATE, request, StopReason.OBSERVATION_OVERFLOW)
    else:
        MACHINE.fire(Event.COMPLETE, request, StopReason.STOP)
    request.reward = draw(st.floats(-10, 10))
    request.seal()
    return request, options


def args_of(options: dict[str, Any], **given: Any) -> Any:
    return slime_args(
        rollout_top_p=0.9 if options["top_p"] else 1.0,
        use_rollout_routing_replay=options["experts"],
        num_layers=LAYERS,
        moe_router_topk=TOP_K,
        **given,
    )


@given(requests(), st.sampled_from([SlimeSample, MilesSample]))
def test_what_was_sampled_is_what_the_trainer_trains(
    played: tuple[Request, dict[str, Any]], kind: Any
) -> None:
    request, options = played
    options = options if kind is SlimeSample else {**options, "top_p": False}
    args = args_of(options)
    sample = kind(index=request.index, metadata={"mine": 1})
    out = outcome(args, sample, request, has_reward=True, evaluation=False)
    samples = out if isinstance(out, list) else [out]
    assert samples[0] is sample
    assert len({one.rollout_id for one in samples}) == 1
    rows = consume(args, samples)
    assert len(rows) == len(request.rows)
    for one, row, ours in zip(samples, rows, request.rows, strict=True):
        trained = {
            ours.prompt_length + int(at): float(ours.rollout_log_probs[at])  # type: ignore[index]
            for at in np.flatnonzero(ours.loss_mask)
        }
        assert row["trained"] == trained
        assert row["tokens"][: len(ours.tokens)] == ours.tokens.tolist()
        assert one.reward == request.reward
        assert one.status is Theirs(request.status.value)
        assert one.remove_sample is (not trained)
        assert one.metadata["mine"] == 1
        assert record.fault_of(one, args) == ""
        if ours.rollout_routed_experts is not None and ours.response_length:
            known = len(ours.rollout_routed_experts)
            found = np.asarray(one.rollout_routed_experts)
            assert (found[:known] == ours.rollout_routed_experts).all()
    for one in samples[1:]:
        assert one.metadata is not sample.metadata
        assert one.tokens is not sample.tokens


@given(requests())
def test_a_failed_sample_fits_into_any_batch(played: tuple[Request, dict[str, Any]]) -> None:
    request, options = played
    args = args_of(options, reward_key="score")
    good, bad = SlimeSample(index=1), SlimeSample(index=2, tokens=[1], weight_versions=["1"])
    outcome(args, good, request, has_reward=True, evaluation=False)
    record.fail(bad, "no server", args)
    rows = consume(args, [bad, *([good] if isinstance(good, SlimeSample) else good)])
    assert rows[0]["trained"] == {}
    assert (bad.reward, bad.weight_versions) == ({"score": 0.0}, [])


def test_what_slimes_metrics_would_round_is_taken_out_and_an_answer_of_a_teacher_is_not() -> None:
    def batch() -> list[Any]:
        aborted = scored(1.0, 0, status=Theirs.ABORTED)
        return [scored(None, 0), scored({"logprobs": []}, 0), scored(1.0, None), aborted]

    for estimator, taken in (("grpo", [True, False, False, True]), ("ppo", [False] * 3 + [True])):
        samples = batch()
        take_out_unscored(slime_args(advantage_estimator=estimator), samples)
        assert [sample.remove_sample for sample in samples] == taken


def test_a_failed_sample_has_the_category_that_slimes_metrics_look_up() -> None:
    sample = SlimeSample(index=0)
    record.fail(sample, "no server", slime_args(reward_key="score", log_reward_category="kind"))
    assert sample.reward == {"score": 0.0, "kind": "failed"}


class Picky(SlimeSample):
    """One that falls over in the middle, in a way of its own."""

    def append_response_tokens(self, args: Any = None, **given: Any) -> None:
        super().append_response_tokens(args, **given)
        raise RuntimeError("no such layer")


@given(requests())
def test_a_sample_that_refuses_costs_itself(played: tuple[Request, dict[str, Any]]) -> None:
    request, options = played
    sample, args = Picky(index=0), args_of(options)
    out = outcome(args, sample, request, has_reward=True, evaluation=False)
    if request.sample.response_length:
        assert (out, sample.status) == (sample, Theirs.FAILED)
        assert "Picky refused it: RuntimeError" in sample.metadata["fsm_rollout"]["error"]
        consume(args, [sample])


def test_slimes_rates_of_a_speculation_have_all_that_they_divide_by() -> None:
    """slime: accepted / drafted, and completion tokens / verifications."""
    request = Request()
    request.set_prompt([1, 2])
    MACHINE.fire(Event.GENERATE, request)
    request.append_response_tokens([5, 6], [-1.0, -1.0], meta_info={"finish_reason": "stop"})
    MACHINE.fire(Event.COMPLETE, request, StopReason.STOP)
    request.metrics |= {
        "engine/spec_accepted_tokens": 3,
        "engine/spec_draft_tokens": 4,
        "engine/spec_verify_count": 2,
    }
    request.reward = 1.0
    request.seal()
    sample = SlimeSample(index=0)
    outcome(slime_args(), sample, request, has_reward=True, evaluation=False)
    assert astuple(sample.spec_info) == (3, 4, 2, 2)


def test_an_aborted_request_is_aborted_only_if_somebody_asked_for_it() -> None:
    for reason, evaluation, status in (
        (StopReason.ENGINE_ABORT, False, Theirs.ABORTED),
        (StopReason.PAUSED, False, Theirs.ABORTED),
        (StopReason.ENGINE_ABORT, True, Theirs.FAILED),
        (StopReason.ENGINE_ERROR, False, Theirs.FAILED),
        (StopReason.TOOL_UNAVAILABLE, False, Theirs.FAILED),
    ):
        request = Request()
        request.set_prompt([1, 2])
        MACHINE.fire(Event.GENERATE, request)
        request.append_response_tokens([3], [-1.0], meta_info={"finish_reason": "abort"})
        MACHINE.fire(Event.ABORT, request, reason)
        sample = SlimeSample(index=0)
        outcome(slime_args(), sample, request, has_reward=False, evaluation=evaluation)
        assert (sample.status, request.status) == (status, Status.ABORTED)
        if status is Theirs.ABORTED:
            assert (sample.tokens, sample.rollout_log_probs) == ([1, 2, 3], [-1.0])
            assert (sample.loss_mask, sample.reward) == ([1], None)


# -- normalisation ---------------------------------------------------------------------------------


def scored(value: Any, group: int | None, rollout: int | None = None, **given: Any) -> Any:
    return SlimeSample(
        index=len(str(value)),
        group_index=group,
        rollout_id=rollout,
        tokens=[1, 2],
        response_length=1,
        loss_mask=[1],
        rollout_log_probs=[-1.0],
        reward=value,
        **{"status": Theirs.COMPLETED, **given},
    )


def test_the_baseline_is_per_rollout_of_a_group_whatever_number_of_samples_each_has() -> None:
    """slime's own takes these five for one group."""
    samples = [
        scored(1.0, 0, 0),
        scored(1.0, 0, 0),
        scored(1.0, 0, 0),
        scored(0.0, 0, 1),
        scored(5.0, 1, 2),
    ]
    raw, plain = post_process_rewards(slime_args(grpo_std_normalization=False), samples)
    assert raw == [1.0, 1.0, 1.0, 0.0, 5.0]
    assert plain == [0.5, 0.5, 0.5, -0.5, 0.0]
    _, scaled = post_process_rewards(slime_args(), samples)
    assert scaled == pytest.approx([x / (math.sqrt(0.5) + 1e-6) for x in plain])
    rpp = slime_args(advantage_estimator="reinforce_plus_plus_baseline")
    assert post_process_rewards(rpp, samples)[1] == plain
    for off in ({"advantage_estimator": "ppo"}, {"rewards_normalization": False}):
        assert post_process_rewards(slime_args(**off), samples) == (raw, raw)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), min_size=1, max_size=4))
def test_where_slimes_own_normalisation_is_right_ours_is_the_same(
    groups: list[list[float]],
) -> None:
    samples = [scored(value, g) for g, group in enumerate(groups) for value in group]
    _, found = post_process_rewards(slime_args(), samples)
    wanted = [
        (value - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
        for group in groups
        for value in group
    ]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_samples_of_a_rollout_that_differ_are_not_divided_by_nothing() -> None:
    samples = [scored(reward, 0, rollout) for rollout in (0, 1) for reward in (1.0, 0.0)]
    _, found = post_process_rewards(slime_args(), samples)
    assert found == pytest.approx([1.118, -1.118] * 2, abs=1e-3)


@pytest.mark.parametrize(
    "broken",
    [
        {"reward": None},
        {"reward": math.nan},
        {"reward": "good"},
        {"loss_mask": [1, 1]},
        {"rollout_log_probs": []},
        {"rollout_log_probs": [math.nan]},
        {"rollout_log_probs": [3.0]},
        {"loss_mask": [2]},
        {"loss_mask": [-1]},
        {"loss_mask": [math.nan]},
        {"loss_mask": ["yes"]},
        {"response_length": 0},
        {"response_length": 3},
        {"status": Theirs.ABORTED},
        {"remove_sample": True, "loss_mask": [1, 1]},
        {"remove_sample": True, "rollout_log_probs": [math.nan]},
        {"group_index": None},
        {"rollout_log_probs": None},
        {"status": "pending"},
        {"rollout_top_p_token_offsets": [0]},
        {"rollout_routed_experts": [1, 2, 3]},
        {"teacher_log_probs": [0.0, 0.0]},
    ],
    ids=str,
)
def test_one_bad_sample_costs_one_sample_and_no_step(broken: dict[str, Any]) -> None:
    bad = scored(9.0, 0, 2)
    for name, value in broken.items():
        setattr(bad, name, value)
    samples = [scored(1.0, 0, 0), scored(0.0, 0, 1), bad, scored(9.0, 0, 3, remove_sample=True)]
    raw, found = post_process_rewards(slime_args(grpo_std_normalization=False), samples)
    assert found == [0.5, -0.5, 0.0, 0.0]
    assert raw == [1.0, 0.0, 0.0, 9.0]
    assert bad.remove_sample
    assert bad.metadata["fsm_rollout"]["error"]
    rows = consume(slime_args(), samples)
    assert [len(row["trained"]) for row in rows] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("flags", "broken"),
    [
        ({"rollout_top_p": 0.9}, {"rollout_top_p_token_ids": None}),
        ({"rollout_top_p": 0.9}, {"rollout_top_p_token_offsets": [0, 3]}),
        ({"use_rollout_routing_replay": True}, {"rollout_routed_experts": None}),
    ],
    ids=str,
)
def test_a_sample_without_what_the_flags_replay_costs_itself(
    flags: dict[str, Any], broken: dict[str, Any]
) -> None:
    args = slime_args(num_layers=LAYERS, moe_router_topk=TOP_K, **flags)
    replayed = {
        "rollout_top_p_token_ids": [2],
        "rollout_top_p_token_offsets": [0, 1],
        "rollout_routed_experts": np.ones((1, LAYERS, TOP_K), np.int32),
    }
    good, bad = scored(1.0, 0, 0, **replayed), scored(0.0, 0, 1, **{**replayed, **broken})
    post_process_rewards(args, [good, bad])
    assert (good.remove_sample, bad.remove_sample) == (False, True)
    assert [len(row["trained"]) for row in consume(args, [good, bad])] == [1, 0]


@pytest.mark.parametrize("first", [True, False])
def test_what_was_taken_out_has_the_columns_of_the_others(*, first: bool) -> None:
    good, bad = scored(1.0, 0, 0), scored(None, 0, 1)
    good.rollout_log_probs = None  # of a generate function that asks for none
    post_process_rewards(slime_args(), [bad, good] if first else [good, bad])
    assert (good.rollout_log_probs, good.remove_sample) == (None, False)
    assert (bad.rollout_log_probs, bad.remove_sample) == (None, True)


def test_a_step_with_nothing_to_train_is_an_error_that_says_why() -> None:
    samples = [SlimeSample(index=4), SlimeSample(index=5)]
    for sample in samples:
        record.fail(sample, "no server answered", slime_args())
    with pytest.raises(HandOverError, match=r"none of 2 samples .* sample 4: no server answered"):
        post_process_rewards(slime_args(), samples)


def test_slimes_own_contract_tests_call_it_so() -> None:
    """Without any flag there is no estimator that compares, so no group is missed."""
    flags = type("Args", (), {})()
    samples = [scored(0.5, None), scored(1.5, None)]
    assert post_process_rewards(flags, samples) == ([0.5, 1.5], [0.5, 1.5])
    assert not any(sample.remove_sample for sample in samples)


def test_the_reward_model_gives_back_what_the_rollout_scored() -> None:
    args = slime_args()
    samples = [scored(1.0, 0), SlimeSample(status=Theirs.ABORTED)]
    assert asyncio.run(reward(args, samples)) == [1.0, None]
    with pytest.raises(HandOverError, match="sample 7 has no reward"):
        asyncio.run(reward(args, SlimeSample(index=7, status=Theirs.COMPLETED)))

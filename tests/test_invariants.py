"""Each invariant sees each way of breaking it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from fsm_rollout import invariants
from fsm_rollout.columns import Column
from fsm_rollout.errors import InvariantError
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Media, Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.testing.tampering import TAMPERINGS
from fsm_rollout.turn import ToolCall


def a_sample() -> Sample:
    """In flight: model [0, 4) with [0, 1) forced and replay data, observation [4, 6), an image."""
    request = Request(declared=[Column("entropy")], limits=Limits(max_context=8, max_response=6))
    request.set_prompt([1, 2])
    Machine().fire(Event.GENERATE, request)
    sample = request.sample
    sample.append_response_tokens([3], trainable=False, forced=True)
    sample.append_response_tokens(
        [4, 5, 6],
        [-1.0] * 3,
        meta_info={
            "finish_reason": "stop",
            "weight_version": "v1",
            "sampling_mask": [[4, 9], [5], [9, 6]],
            "routed_experts": [[[1], [2]]] * 5,
        },
    )
    sample.append_response_tokens([7, 8], trainable=False)
    sample.media.append(Media(6, 2, "image"))
    return sample


def _set(path: str, value: object) -> Callable[[Sample], object]:
    def breaks(sample: Sample) -> None:
        *parents, name = path.split(".")
        thing: object = sample
        for parent in parents:
            thing = thing[int(parent)] if isinstance(thing, list) else getattr(thing, parent)
        if isinstance(thing, (list, bytearray)) or hasattr(thing, "typecode"):
            thing[int(name)] = value  # type: ignore[index]
        else:
            setattr(thing, name, value)

    return breaks


BROKEN: dict[str, tuple[str, Callable[[Any], object]]] = {
    "mask too long": ("R3.1", lambda s: s.columns._mask.append(0)),
    "mask too short": ("R3.1", lambda s: s.columns._mask.pop()),
    "log-prob lost": ("R3.1", lambda s: s.columns._log_probs and s.columns._log_probs.pop()),
    "token lost": ("R3.1", lambda s: s.columns._ids.pop()),
    "extra column short": ("R3.1", lambda s: s.columns._extra["entropy"].pop()),
    "prompt longer than the tokens": ("R3.1", _set("columns.prompt_length", 99)),
    "turn too short": ("R3.1", _set("turns.1.stop", 5)),
    "gap between turns": ("R3.1", _set("turns.1.start", 5)),
    "turn backwards": ("R3.1", _set("turns.0.stop", -1)),
    "turn lost": ("R3.1", lambda s: s.turns.pop()),
    "top-p offset lost": ("R3.1", lambda s: s.columns.replay.offsets.pop()),
    "top-p id lost": ("R3.1", lambda s: s.columns.replay.ids.pop()),
    "top-p ids without offsets": ("R3.1", _set("columns.replay.offsets", None)),
    "top-p offsets end early": ("R3.1", _set("columns.replay.offsets.6", 4)),
    "row of experts for the last token": (
        "R3.1",
        lambda s: s.columns.replay.rows.extend(bytes(3 * s.columns.replay.row.itemsize)),
    ),
    "mask of 2": ("R3.2", _set("columns._mask.1", 2)),
    "observation trained": ("R3.2", _set("columns._mask.4", 1)),
    "forced token trained": ("R3.2", _set("columns._mask.0", 1)),
    "NaN": ("R3.3", _set("columns._log_probs.1", math.nan)),
    "infinity": ("R3.3", _set("columns._log_probs.1", math.inf)),
    "clamp": ("R3.3", _set("columns._log_probs.1", -9999.0)),
    "positive log-prob": ("R3.3", _set("columns._log_probs.1", 0.1)),
    "log-prob of an observation": ("R3.3", _set("columns._log_probs.5", -1.0)),
    "log-prob of a forced token": ("R3.3", _set("columns._log_probs.0", -1.0)),
    "NaN of an observation": ("R3.3", _set("columns._log_probs.5", math.nan)),
    "kind of log-probs unknown": ("R3.3", _set("turns.0.log_prob_kind", "guessed")),
    "temperature negative": ("R3.3", _set("turns.0.temperature", -1.0)),
    "temperature NaN": ("R3.3", _set("turns.0.temperature", math.nan)),
    "temperature infinite": ("R3.3", _set("turns.0.temperature", math.inf)),
    "temperature infinite as float32": ("R3.3", _set("turns.0.temperature", 1e300)),
    "temperature no number": ("R3.3", _set("turns.0.temperature", "1.0")),
    "version run too long": ("R3.4", _set("turns.0.weight_versions", [("v1", 4)])),
    "version run lost": ("R3.4", _set("turns.0.weight_versions", [])),
    "empty version run": ("R3.4", _set("turns.0.weight_versions", [("v1", 3), ("v2", 0)])),
    "version of an observation": ("R3.4", _set("turns.1.weight_versions", [("v1", 2)])),
    "forced outside of its turn": ("R3.4", _set("turns.0.forced", [(4, 5)])),
    "forced twice": ("R3.4", _set("turns.0.forced", [(0, 1), (0, 1)])),
    "forced tokens in an observation": ("R3.4", _set("turns.1.forced", [(4, 5)])),
    "top-p offsets from 1": ("R3.4", _set("columns.replay.offsets.0", 1)),
    "top-p offsets fall": ("R3.4", _set("columns.replay.offsets.2", 5)),
    "token not kept": ("R3.4", _set("columns.replay.ids.0", 5)),
    "token kept for another": ("R3.4", _set("columns.replay.offsets.2", 0)),
    "forced token with kept ids": ("R3.4", _set("columns.replay.offsets.1", 1)),
    "observation with kept ids": ("R3.4", _set("columns.replay.offsets.4", 4)),
    "experts of a sampled token's past lost": (
        "R3.4",
        lambda s: s.columns.replay.rows.__delitem__(slice(s.columns.replay.row.itemsize)),
    ),
    "context": ("R3.5", _set("request.limits", Limits(max_context=7))),
    "response": ("R3.5", _set("request.limits", Limits(max_response=5))),
    "reason of another status": ("R3.6", _set("request.stop_reason", StopReason.STOP)),
    "finish unknown": ("R3.6", _set("turns.0.finish", "eos")),
    "reward NaN": ("R3.6", _set("reward", math.nan)),
    "part of the reward infinite": ("R3.6", _set("reward_parts", {"tool": math.inf})),
    "reward of a turn NaN": ("R3.6", _set("turns.0.reward", math.nan)),
    "media past the end": ("R3.7", _set("media.0", Media(7, 2, "image"))),
    "media twice": ("R3.7", lambda s: s.media.append(Media(6, 1, "image"))),
    "media without tokens": ("R3.7", _set("media.0", Media(6, 0, "image"))),
    "media over sampled tokens": ("R3.7", _set("media.0", Media(5, 2, "image"))),
}


def test_a_sample_written_by_its_writers_is_sound() -> None:
    assert invariants.violations(a_sample()) == []
    assert invariants.violations(Sample()) == []


def test_a_sample_is_written_on_after_it_was_checked() -> None:
    sample = a_sample()
    sample.columns._mask[4] = 1
    found = invariants.violations(sample)
    sample.columns._mask[4] = 0
    sample.truncate(4)
    sample.append_response_tokens([7, 8], trainable=False)
    assert [violation.code for violation in found] == ["R3.2"]
    assert invariants.violations(sample) == []


@pytest.mark.parametrize("name", BROKEN)
def test_an_invariant_sees_what_breaks_it(name: str) -> None:
    code, breaks = BROKEN[name]
    sample = a_sample()
    sample.sample_id = "7-0"
    breaks(sample)
    found = invariants.violations(sample)
    assert {violation.code for violation in found} == {code}
    with pytest.raises(InvariantError, match="sample 7-0: ") as raised:
        invariants.check(sample)
    assert raised.value.code == code
    assert str(found[0]) == f"{code}: {found[0].message}"


def test_every_invariant_is_broken_by_something() -> None:
    assert {code for code, _ in BROKEN.values()} == set(invariants.INVARIANTS)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_of_the_state_machine_breaks_an_invariant_or_a_count(name: str) -> None:
    sample = a_sample()
    assert TAMPERINGS[name].breaks(sample)
    counts_differ = sample.columns.num_sampled != sample.num_versioned
    assert invariants.violations(sample) or counts_differ


def test_a_message_about_lengths_carries_all_of_them() -> None:
    sample = a_sample()
    sample.columns._mask.append(0)
    assert str(invariants.violations(sample)[0]) == (
        "R3.1: 8 tokens, prompt_length 2, response_length 6, 7 loss_mask, "
        "6 rollout_log_probs, 6 entropy, 5 top-p ids, 7 offsets, 5 expert rows"
    )


def test_a_terminal_sample_says_why_it_ended() -> None:
    sample = a_sample()
    request = sample.request
    assert request is not None
    Machine().fire(Event.COMPLETE, request, StopReason.STOP)
    request.stop_reason = None
    assert [v.code for v in invariants.violations(sample)] == ["R3.6"]


def test_a_sealed_sample_without_a_token_to_train_on_is_marked() -> None:
    request = Request()
    Machine().fire(Event.GENERATE, request)
    request.append_response_tokens([], [], meta_info={"finish_reason": "stop"})
    Machine().fire(Event.COMPLETE, request, StopReason.STOP)
    request.seal()
    assert request.sample.remove_sample
    request.sample.remove_sample = False
    assert [v.code for v in invariants.violations(request.sample)] == ["R3.6"]


def test_a_run_without_log_probs_is_sound_without_them() -> None:
    request = Request(log_probs=False)
    request.append_response_tokens([1, 2], meta_info={"finish_reason": "stop"})
    assert invariants.violations(request.sample) == []


def test_media_may_lie_over_the_prompt_and_over_forced_tokens() -> None:
    sample = a_sample()
    sample.media = [Media(0, 3, "image")]
    assert invariants.violations(sample) == []


def at_rest(reason: StopReason, finish: str | None) -> Sample:
    """As it comes from a file: an observation behind a turn that finished so."""
    sample = a_sample()
    request = sample.request
    assert request is not None
    sample.turns[0].finish = finish
    sample.turns[0].calls = (ToolCall("calculator", id="a", span=(1, 4)), ToolCall("x", id="b"))
    request.stop_reason, request._status = reason, reason.status
    request.seal()
    return Sample.from_dict(sample.to_dict())


@pytest.mark.parametrize("finish", ["stop", "length", "repetition", "abort", None])
@pytest.mark.parametrize("reason", StopReason)
def test_at_rest_the_reason_is_that_of_the_last_model_turn_where_it_repeats_one(
    reason: StopReason, finish: str | None
) -> None:
    sample = at_rest(reason, finish)
    assert invariants.violations(sample) == []
    if finish in (None, "abort"):
        fits = reason.status is not Status.COMPLETED
    else:
        fits = reason not in ("stop", "length", "repetition") or reason == finish
    found = invariants.violations(sample, at_rest=True)
    assert [violation.code for violation in found] == ([] if fits else ["R3.6"])


@pytest.mark.parametrize("status", [Status.PENDING, Status.GENERATING, Status.TOOL_CALLING])
def test_at_rest_a_request_has_ended(status: Status) -> None:
    sample = at_rest(StopReason.TOOL_STOP, "stop")
    sample._status, sample._stop_reason = status, None
    assert invariants.violations(sample) == []
    (found,) = invariants.violations(sample, at_rest=True)
    assert str(found) == f"R3.6: status {status}: it has not ended"


@pytest.mark.parametrize("span", [(-1, 2), (3, 5), (3, 2), (9, 9)])
def test_at_rest_a_call_lies_in_its_turn(span: tuple[int, int]) -> None:
    sample = at_rest(StopReason.TOOL_STOP, "stop")
    sample.turns[0].calls = (ToolCall("calculator", id="a", span=span),)
    (found,) = invariants.violations(sample, at_rest=True)
    assert str(found) == f"R3.4: turn 0: call 'a' spans {span} of 4 tokens"


def test_at_rest_unequal_lengths_are_all_that_is_told() -> None:
    sample = at_rest(StopReason.LENGTH, "stop")
    sample.turns.pop()
    assert {found.code for found in invariants.violations(sample, at_rest=True)} == {"R3.1"}

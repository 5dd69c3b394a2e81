"""The handed `batch` cases varied: shapes, dtypes, order, what is empty, removed, equal or broken.

Each is named after the case that it varies (`bat-…`) or the fault of another project that it is
made from; several of these trainers take such a batch without a word.
"""

from __future__ import annotations

import itertools
import json
import math
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from fsm_rollout.adapters.advantages import (
    group_advantages,
    importance_ratios,
    masked_mean,
    rollout_mask_sums,
)
from fsm_rollout.adapters.conventions import CONVENTIONS, laid_out
from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.slime import post_process_rewards
from fsm_rollout.adapters.tensors import packed, padded
from fsm_rollout.adapters.trl.rollouts import handed
from fsm_rollout.errors import ConfigError, GuardRefused, HandOverError
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event
from fsm_rollout.turn import Media
from tests.finished import Play, Turn, play
from tests.slime_stub import SlimeSample, Status

torch = pytest.importorskip("torch")

MACHINE = Machine()
F32 = float(np.float32(0.1))
TOO_LARGE = (1e39, -1e39, 10**60)
NO_NUMBERS: tuple[Any, ...] = ("1.0", {"accuracy": 1.0}, [1.0])


def request(
    *,
    index: int = 0,
    group: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    response: int = 2,
    reward: Any = 1.0,
    children: tuple[Any, ...] = (),
    removed: bool = False,
) -> Request:
    """One turn; each child has one token and the reward that is given."""
    one = Request(index=index, group_index=group, limits=Limits(max_context=64))
    families = [(one, prompt, response, reward)]
    families += [(one.spawn("a part"), (3,), 1, earned) for earned in children]
    for member, ids, count, earned in reversed(families):
        member.set_prompt(list(ids))
        MACHINE.fire(Event.GENERATE, member)
        meta = {"finish_reason": "stop"}
        member.append_response_tokens([5] * count, [-1.0] * count, meta_info=meta)
        MACHINE.fire(Event.COMPLETE, member, StopReason.STOP)
        member.reward = earned
    one.sample.remove_sample = removed
    one.seal()
    return one


def sample(**given: Any) -> Sample:
    return request(**given).sample


def group_of(*rewards: Any, group: int = 0) -> list[Sample]:
    first = 100 * group
    return [sample(index=first + n, group=group, reward=r) for n, r in enumerate(rewards)]


# -- bat-001: shapes, widths, pads -----------------------------------------------------------------


@pytest.mark.parametrize("pad_id", [0, 5, -100, np.int64(7), 2**31 - 1])
@pytest.mark.parametrize(
    "lengths", [((1, 1),), ((4, 1), (1, 4)), ((3, 3), (3, 3)), ((1, 0), (2, 3))]
)
def test_bat_001_pads_are_told_by_the_mask_and_never_by_their_id(pad_id: Any, lengths: Any) -> None:
    samples = [sample(index=n, prompt=(5,) * p, response=r) for n, (p, r) in enumerate(lengths)]
    made = padded(samples, pad_id=pad_id)
    P, R = max(p for p, _ in lengths), max(r for _, r in lengths)
    for row, (p, r) in enumerate(lengths):
        seen = [0] * (P - p) + [1] * (p + r) + [0] * (R - r)
        assert made["attention_mask"][row].tolist() == seen
        assert made["response_mask"][row].tolist() == [1] * r + [0] * (R - r)
        assert made["position_ids"][row].tolist() == [
            max(sum(seen[: at + 1]) - 1, 0) for at in range(P + R)
        ]
        assert made["input_ids"][row].tolist() == [5 if one else pad_id for one in seen]


@pytest.mark.parametrize(
    ("multiple", "fixed", "shape"),
    [
        (1, {}, (2, 2)),
        (8, {}, (8, 8)),
        (2, {}, (2, 2)),
        (8, {"prompt_length": 3}, (3, 8)),
        (8, {"response_length": np.int64(9)}, (8, 9)),
        (8, {"prompt_length": 2, "response_length": 2}, (2, 2)),
    ],
)
def test_bat_001_widths_are_fixed_or_bucketed(multiple: int, fixed: Any, shape: Any) -> None:
    made = padded([sample()], pad_id=0, multiple_of=multiple, **fixed)
    assert (made["prompts"].shape[1], made["responses"].shape[1]) == shape


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"multiple_of": 2.5}, "multiple_of must be a whole number >= 1, got 2.5"),
        ({"multiple_of": -8}, "multiple_of must be a whole number"),
        ({"prompt_length": 8.0}, r"prompt_length must be a whole number >= 0, got 8\.0"),
        ({"response_length": -1}, "response_length must be a whole number >= 0, got -1"),
        ({"pad_id": "<pad>"}, "pad_id is '<pad>'"),
        ({"columns": "turns"}, "columns must be a list of names, got 'turns'"),
    ],
)
def test_bat_001_arguments_that_make_no_batch_are_named(arguments: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        padded([sample()], **{"pad_id": 0, **arguments})


@pytest.mark.parametrize("columns", [(), ("turns", "temperatures", "weight_versions")])
def test_bat_001_a_batch_of_nothing_has_its_shapes(columns: Any) -> None:
    made = padded([], pad_id=0, prompt_length=4, response_length=3, columns=columns)
    assert made["input_ids"].shape == (0, 7)
    assert {values.shape[0] for values in made.values()} == {0}
    assert packed([], columns=columns)["cu_seqlens"].tolist() == [0]
    assert group_advantages([]) == rollout_mask_sums([]) == []


# -- bat-002: who is compared with whom ------------------------------------------------------------


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", [int, np.int64])
def test_bat_002_groups_of_equal_prompts_stay_apart(kind: Any, size: int, scale: bool) -> None:
    samples = [s for g in range(3) for s in group_of(*[float(g)] * size, group=kind(g * 2**40))]
    shuffled = samples[::2] + samples[1::2]
    assert group_advantages(shuffled, scale=scale) == [0.0] * 3 * size


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_bat_002_the_baseline_does_not_depend_on_the_order_of_rows(order: Any) -> None:
    """slime#1995: a sub-agent's row may come before its parent's."""
    rows = [*request(reward=1.0, children=(0.25, -1.0)).rows, sample(index=1, reward=0.0)]
    wanted = [0.5, -0.25, -1.5, -0.5]
    found = group_advantages([rows[n] for n in order], scale=False)
    assert found == [wanted[n] for n in order]


# -- bat-004, bat-009: once ------------------------------------------------------------------------


@pytest.mark.parametrize("sample_id", ["a", "", "0-0"])
@pytest.mark.parametrize("use", [lambda s: padded(s, pad_id=0), packed, group_advantages])
def test_bat_004_the_same_sample_is_trained_once_with_and_without_an_id(
    use: Any, sample_id: str
) -> None:
    one, other = sample(), sample(index=1)
    one.sample_id = sample_id
    with pytest.raises(HandOverError, match=r"1 of 3 samples.*came before"):
        use([one, other, one])
    assert sift(s for s in (one, one, other))[0] == [one, other]


# -- bat-005: what is in no baseline ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "empty"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_bat_005_whatever_a_row_that_is_not_trained_earned_its_siblings_do_not_notice(
    at: int, how: str
) -> None:
    aside: dict[str, Any] = {"removed": True} if how == "removed" else {"response": 0}
    rows = group_of(1.0, 0.0)
    rows.insert(at, sample(index=9, reward=-50.0, **aside))
    found = group_advantages(rows, scale=False)
    assert found.pop(at) == 0.0
    assert found == [0.5, -0.5]
    assert rollout_mask_sums(rows)[at] == 0


def test_bat_005_a_group_of_rows_that_are_all_set_aside_trains_nothing() -> None:
    rows = [sample(index=n, reward=float(n), removed=True) for n in range(3)]
    assert group_advantages(rows) == [0.0] * 3
    assert padded(rows, pad_id=0)["response_mask"].sum() == 0


# -- rewards: equal, none, too large, no numbers ---------------------------------------------------


@pytest.mark.parametrize("value", [0.1, F32, np.float32(0.1), 1 / 3, -0.0, True, np.True_, 3e38])
@pytest.mark.parametrize("size", [2, 8])
def test_equal_rewards_have_advantage_zero(value: Any, size: int) -> None:
    """slime#1674: the float32 deviation of 0.1 x 8 is above 0."""
    assert group_advantages(group_of(*[value] * size)) == [0.0] * size
    scores = padded(group_of(value), pad_id=0)["rm_scores"]
    assert scores.tolist() == [[0.0, float(np.float32(value))]]


@pytest.mark.parametrize("value", [True, np.True_, np.float32(0.5), torch.tensor(0.5), 1])
def test_a_reward_of_an_agent_is_a_float_that_a_file_can_hold(value: Any) -> None:
    parent = request(reward=value, children=(value,))
    for row in parent.rows:
        assert type(row.reward) is float
        kept = Sample.from_dict(json.loads(json.dumps(row.to_dict())))
        assert kept.reward == row.reward == value


def test_a_negative_zero_is_a_zero() -> None:
    assert group_advantages(group_of(-0.0, 0.0)) == [0.0, 0.0]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, *TOO_LARGE, *NO_NUMBERS], ids=str)
def test_a_reward_that_is_no_float32_costs_one_sample(value: Any) -> None:
    """slime#2121, miles#1706. As float32, 1e39 is infinite: its group's advantages would be NaN."""
    good, bad, other = group_of(1.0, value, 0.0)
    kept, [refused] = sift([good, bad, other])
    assert kept == [good, other]
    assert (refused.sample, "reward" in refused.why) == (bad, True)
    with pytest.raises(HandOverError, match=r"1 of 3 samples .* sample 1-0: .*reward"):
        group_advantages([good, bad, other])


@pytest.mark.parametrize("value", [None, math.nan, *TOO_LARGE, *NO_NUMBERS], ids=str)
def test_in_trls_rows_it_is_a_row_of_padding(value: Any) -> None:
    rows = handed([request(), request(index=1, reward=value)], pad_id=7)
    assert rows["env_reward"] == [1.0, None]
    assert rows["env_mask"] == [[1, 1], [0]]
    assert rows["completion_ids"] == [[5, 5], [7]]
    assert "reward" in rows["refused"][1]


def test_a_turns_reward_that_is_no_float32_costs_its_sample() -> None:
    with pytest.raises(GuardRefused, match=r"turn 0: reward is 1e\+39, no finite float32"):
        play(Play(turns=(Turn(reward=1e39), Turn())))


# -- bat-007, bat-012: what the mask leaves out ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (0, 3), (2, 0)])
def test_bat_007_a_mean_over_nothing_is_zero(shape: Any, dtype: Any) -> None:
    values = torch.full(shape, float("nan"), requires_grad=True)
    mean = masked_mean(values, torch.zeros(shape, dtype=dtype))
    assert mean.item() == 0.0
    [gradient] = torch.autograd.grad(mean, values)
    assert not gradient.any()


@pytest.mark.parametrize(
    ("mask", "mean"),
    [([1, 1, 0], 2.0), ([[1], [0]], 1.0), ([[0], [1]], 4.0), (1, 2.5), ([1, -100, -100], 1.5)],
    ids=str,
)
def test_bat_007_a_mask_may_be_broadcast_and_only_its_ones_count(mask: Any, mean: float) -> None:
    """-100 is how labels say that a token is not trained."""
    values = torch.arange(6.0).reshape(2, 3)
    assert masked_mean(values, torch.tensor(mask)).item() == mean
    ratios = importance_ratios(values, torch.zeros(2, 3), torch.tensor(mask))
    used = (torch.tensor(mask) == 1).expand(2, 3)
    assert ratios.equal(torch.where(used, values.exp(), 1.0))


@pytest.mark.parametrize("off", [0.0, -3.0, 88.0, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bat_012_a_masked_tokens_ratio_is_one_whatever_it_is(off: float, dtype: Any) -> None:
    log_probs = torch.tensor([-0.5, off], dtype=dtype, requires_grad=True)
    mask = torch.tensor([1, 0])
    ratios = importance_ratios(log_probs, torch.tensor([-0.5, 0.0], dtype=dtype), mask)
    assert ratios.tolist() == [1.0, 1.0]
    [gradient] = torch.autograd.grad(masked_mean(ratios, mask), log_probs)
    assert gradient.tolist() == [1.0, 0.0]


# -- bat-010: no response, no prompt ---------------------------------------------------------------


@pytest.mark.parametrize("trainer", CONVENTIONS)
def test_bat_010_an_empty_response_is_in_every_convention(trainer: str) -> None:
    convention = CONVENTIONS[trainer]
    [row] = laid_out([sample(response=0)], convention)
    assert set(row[convention.mask]) <= {convention.untrained_mask}
    assert len(row[convention.mask]) == len(row[convention.log_probs])


# -- optional columns, some with and some without --------------------------------------------------

ALONE = {
    "both": Play(turns=(Turn(), Turn("observation"), Turn(tokens=1)), top_p=True, experts=True),
    "observed": Play(turns=(Turn("observation", tokens=2), Turn()), top_p=True),
    "none": Play(prompt=5, turns=(Turn(tokens=1),)),
}
COLUMNS = ["rollout_top_p_token_ids", "rollout_routed_experts"]


@pytest.mark.parametrize("order", list(itertools.permutations(ALONE)))
def test_nothing_is_decided_by_the_first_sample(order: Any) -> None:
    """slime#2102, #1559; slime fails where a response starts with an observation."""
    rows = [play(ALONE[name], index=n)[0][0] for n, name in enumerate(order)]
    made, row = padded(rows, pad_id=0, columns=COLUMNS), packed(rows, columns=COLUMNS)
    assert made["has_rollout_top_p_token_ids"].tolist() == [name != "none" for name in order]
    assert made["has_rollout_routed_experts"].tolist() == [name == "both" for name in order]
    starts, P = row["cu_seqlens"].tolist(), made["prompts"].shape[1]
    for b, one in enumerate(rows):
        kept = one.rollout_top_p_token_ids
        spans = made["rollout_top_p_token_offsets"][b, : one.response_length + 1].tolist()
        ids = [i for span in itertools.pairwise(spans) for i in made[COLUMNS[0]][slice(*span)]]
        assert ids == ([] if kept is None else kept.tolist())
        experts = one.rollout_routed_experts
        if experts is not None:
            at = P - one.prompt_length
            assert made[COLUMNS[1]][b, at : at + len(experts)].tolist() == experts.tolist()
            assert row[COLUMNS[1]][starts[b] : starts[b] + len(experts)].tolist() == (
                experts.tolist()
            )


@pytest.mark.parametrize("version", ["epoch-1", "3..5", 2**70, -(2**63) - 1])
def test_a_weight_version_that_is_no_int64_is_named(version: Any) -> None:
    [one] = play(Play(turns=(Turn(version=version),)))[0]
    with pytest.raises(HandOverError, match=f"sample 0-0 has weight version {version!r}"):
        padded([one], pad_id=0, columns=["weight_versions"])


def test_media_spans_are_tokens_like_others_and_never_trained() -> None:
    one = Request(limits=Limits(max_context=64))
    one.set_prompt([1, 8, 8, 8, 2])
    one.sample.media.append(Media(1, 3, "a picture"))
    MACHINE.fire(Event.GENERATE, one)
    one.append_response_tokens([5], [-1.0], meta_info={"finish_reason": "stop"})
    MACHINE.fire(Event.COMPLETE, one, StopReason.STOP)
    one.reward = 1.0
    one.seal()
    made = packed([one.sample, sample(index=1)])
    assert made["input_ids"].tolist() == [1, 8, 8, 8, 2, 5, 1, 2, 5, 5]
    assert made["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1, 1]


# -- slime's samples, of whatever generate function ------------------------------------------------


def slimes(reward: Any, rollout: int, **fields: Any) -> Any:
    values = {"tokens": [1, 2, 3], "response_length": 1, "loss_mask": [1], "reward": reward}
    values |= {"rollout_log_probs": [-1.0], "status": Status.COMPLETED, "group_index": 0}
    return SlimeSample(index=rollout, rollout_id=rollout, **{**values, **fields})


def normalised(*samples: Any) -> list[float]:
    args = Namespace(advantage_estimator="grpo", grpo_std_normalization=False)
    return post_process_rewards(args, samples)[1]


@pytest.mark.parametrize(
    "fields",
    [
        *({"reward": value} for value in TOO_LARGE),
        {"rollout_log_probs": ["a"]},
        {"rollout_log_probs": [None]},
        {"rollout_log_probs": [-9999.0]},
        {"rollout_log_probs": None},
        {"loss_mask": [0]},
        {"group_index": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_of_slimes_samples_costs_itself(fields: dict[str, Any], at: int) -> None:
    samples = [slimes(1.0, 0), slimes(0.0, 1)]
    samples.insert(at, slimes(**{"reward": -50.0, "rollout": 2, **fields}))
    found = normalised(*samples)
    assert found.pop(at) == 0.0
    assert found == [0.5, -0.5]
    assert all(len(one.rollout_log_probs) == one.response_length for one in samples)


def test_slimes_samples_without_log_probs_stay_so_when_one_has_failed() -> None:
    failed = slimes(None, 2)
    samples = [failed, slimes(1.0, 0, rollout_log_probs=None), slimes(0, 1, rollout_log_probs=None)]
    failed.rollout_log_probs = None
    assert normalised(*samples) == [0.0, 0.5, -0.5]
    assert [one.rollout_log_probs for one in samples] == [None] * 3

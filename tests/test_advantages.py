"""Rewards are compared between rollouts of a group; what is not trained is in no mean."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsm_rollout.adapters.advantages import group_advantages, rollout_mask_sums
from fsm_rollout.errors import HandOverError
from fsm_rollout.sample import Sample
from tests.finished import Play, Turn, play

FORKED = (Turn(tokens=3, fork=True), Turn(tokens=2))


def rollouts(*plans: Play, group_index: int = 0, start: int = 0) -> list[Sample]:
    return [
        sample
        for index, plan in enumerate(plans, start)
        for sample in play(plan, index=index, group_index=group_index)[0]
    ]


def rewarded(*rewards: float, group_index: int = 0, start: int = 0) -> list[Sample]:
    return rollouts(*(Play(reward=r) for r in rewards), group_index=group_index, start=start)


def test_the_advantage_is_the_distance_to_the_groups_mean() -> None:
    samples = rewarded(1.0, 0.0, 0.0, 0.0)
    assert group_advantages(samples, scale=False) == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(samples) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6))
def test_it_is_scaled_as_torch_does(rewards: list[float]) -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor(rewards, dtype=torch.float64)
    expected = (given - given.mean()) / (given.std() + 1e-6)
    assert group_advantages(rewarded(*rewards)) == pytest.approx(expected.tolist(), abs=1e-3)


@given(st.floats(0, 1), st.integers(1, 16), st.booleans())
@example(0.1, 3, True)  # whose mean is not 0.1
def test_equal_rewards_give_exactly_zero(reward: float, size: int, scale: bool) -> None:
    samples = rewarded(*[reward] * size)
    assert group_advantages(samples, scale=scale) == [0.0] * size


def test_a_rollout_counts_once_however_many_samples_it_has() -> None:
    samples = rollouts(Play(reward=1.0, turns=FORKED), Play(reward=0.0))
    assert len(samples) == 3
    assert group_advantages(samples, scale=False) == [0.5, 0.5, -0.5]
    assert rollout_mask_sums(samples) == [5, 5, 3]


def test_what_is_removed_is_in_no_mean_and_gets_nothing() -> None:
    samples = rollouts(Play(reward=1.0), Play(reward=0.0), Play(reward=-8.0, removed=True))
    assert group_advantages(samples, scale=False) == [0.5, -0.5, 0.0]
    assert rollout_mask_sums(samples) == [3, 3, 0]
    assert group_advantages(samples[2:]) == [0.0]


def test_groups_are_told_apart_by_their_index_alone() -> None:
    samples = rewarded(1.0, 3.0) + rewarded(10.0, 20.0, group_index=7, start=2)
    mixed = [samples[n] for n in (2, 0, 3, 1)]
    assert group_advantages(mixed, scale=False) == [-5.0, -1.0, 5.0, 1.0]


def test_a_sample_with_a_reward_of_its_own_is_compared_with_the_rollouts() -> None:
    """A sub-agent's, which its agent set: the mean is of what the requests earned."""
    samples = rollouts(Play(reward=1.0, turns=FORKED), Play(reward=0.0))
    samples[1].reward = 0.25
    assert group_advantages(samples, scale=False) == [0.5, -0.25, -0.5]


def test_a_reward_that_is_missing_is_not_zero() -> None:
    samples = rewarded(1.0, 0.0)
    samples[1].reward = None
    with pytest.raises(HandOverError, match="sample 1-0: its reward is None"):
        group_advantages(samples)


def test_the_order_of_rows_changes_no_advantage() -> None:
    samples = rollouts(Play(reward=1.0, turns=FORKED), Play(reward=0.0))
    samples[1].reward, samples[1].is_child = 0.25, True  # a sub-agent's
    found = group_advantages(samples)
    assert group_advantages(samples[::-1]) == found[::-1]


@pytest.mark.parametrize("other", [1.0, math.nextafter(1.0, 2)])
def test_a_sub_agents_own_reward_is_not_divided_by_nothing(other: float) -> None:
    """All requests of its group earned the same, as they do so often."""
    samples = rollouts(Play(reward=1.0, turns=FORKED), Play(reward=other))
    samples[1].reward, samples[1].is_child = 5.0, True
    found = group_advantages(samples)
    assert found == pytest.approx([0.0, math.sqrt(3), 0.0], abs=1e-5)


def test_a_rollout_whose_own_reward_is_missing_is_in_no_mean() -> None:
    samples = rollouts(Play(reward=1.0), Play(reward=0.0), Play(reward=5.0))
    samples[2].is_child = True  # a sub-agent's; its request had no reward, and was set aside
    assert group_advantages(samples, scale=False) == [0.5, -0.5, 4.5]


def test_nearly_equal_rewards_stay_small() -> None:
    up = math.nextafter(0.1, 1)
    assert max(map(abs, group_advantages(rewarded(0.1, up, 0.1, up)))) < 1e-9

"""What trainers take silently is refused by name, and what does not fit says both numbers.

Bad samples are built as a file could hold them: edited rows of `to_dict`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsm_rollout.adapters.conventions import CONVENTIONS, laid_out
from fsm_rollout.adapters.handover import sift
from fsm_rollout.adapters.tensors import packed, padded, tensor
from fsm_rollout.columns import Column
from fsm_rollout.errors import ConfigError, HandOverError
from fsm_rollout.request import Group, Request
from fsm_rollout.sample import Sample
from tests.finished import COLUMNS, Play, Turn, play

torch = pytest.importorskip("torch")

Row = dict[str, Any]
TOOL = (Turn(tokens=3), Turn("observation", tokens=2), Turn(tokens=2))
"""5 sampled tokens of 7; the mask is 1 1 1 0 0 1 1"""
MAKERS: dict[str, Callable[[list[Sample]], object]] = {
    "padded": lambda samples: padded(samples, pad_id=0),
    "packed": packed,
    "laid out": lambda samples: laid_out(samples, CONVENTIONS["verl"]),
}


def good(index: int = 0, *, plan: Play | None = None) -> Sample:
    [sample], _ = play(plan or Play(turns=TOOL), index=index)
    return sample


def tampered(index: int, **changes: Any) -> Sample:
    row = good(index).to_dict()
    for name, change in changes.items():
        row[name] = change(row[name]) if callable(change) else change
    return Sample.from_dict(row)


def put(at: int, value: float) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value if n == at else v for n, v in enumerate(values)]


FAULTS: dict[str, tuple[Sample, str]] = {
    "short log-probs": (tampered(3, rollout_log_probs=lambda v: v[:-1]), "6 rollout_log_probs"),
    "long log-probs": (tampered(3, rollout_log_probs=lambda v: [*v, -1.0]), "8 rollout_log_probs"),
    "log-probs absent": (tampered(3, rollout_log_probs=None), "no log-probs"),
    "short mask": (tampered(3, loss_mask=lambda v: v[:-1]), "6 loss_mask"),
    "empty mask": (tampered(3, loss_mask=[]), "0 loss_mask"),
    "mask of an observation": (
        tampered(3, loss_mask=put(3, 1)),
        "1 trained tokens were not sampled",
    ),
    "mask of 2": (tampered(3, loss_mask=put(0, 2)), "loss_mask holds 2"),
    "log-prob NaN": (tampered(3, rollout_log_probs=put(0, float("nan"))), "nan at 0 of R"),
    "log-prob infinite": (tampered(3, rollout_log_probs=put(1, float("-inf"))), "-inf at 1 of R"),
    "log-prob clamped": (tampered(3, rollout_log_probs=put(1, -9999.0)), "-9999.0 at 1 of R"),
    "log-prob above 0": (tampered(3, rollout_log_probs=put(1, 0.5)), "0.5 at 1 of R"),
    "log-prob of an observation": (tampered(3, rollout_log_probs=put(4, -1.0)), "the first at 4"),
    "no reward": (tampered(3, reward=None), "its reward is None"),
    "reward NaN": (tampered(3, reward=float("nan")), "reward is nan"),
    "aborted": (tampered(3, status="aborted", stop_reason="engine_error"), "engine_error"),
    "not ended": (tampered(3, status="generating", stop_reason=None), "it is generating"),
    "in flight": (Request(index=3).sample, "it is pending"),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_sample_is_refused_by_name(maker: str, fault: str) -> None:
    bad, why = FAULTS[fault]
    with pytest.raises(HandOverError) as raised:
        MAKERS[maker]([good(0), bad, good(1)])
    assert str(raised.value).startswith("1 of 3 samples must not be trained on: sample 3-0: ")
    assert why in str(raised.value)


def test_one_bad_sample_costs_one_sample() -> None:
    every = [good(100), *(bad for bad, _ in FAULTS.values()), good(101)]
    kept, refused = sift(every)
    assert [sample.sample_id for sample in kept] == ["100-0", "101-0"]
    assert len(refused) == len(FAULTS)
    assert padded(kept, pad_id=0)["responses"].shape == (2, 7)


def test_a_row_without_a_mask_is_no_sample() -> None:
    row = good(3).to_dict()
    del row["loss_mask"]
    with pytest.raises(ConfigError, match=r"'3-0'.*`loss_mask`"):
        Sample.from_dict(row)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_sample_that_comes_twice_is_refused(maker: str) -> None:
    sample = good(3)
    with pytest.raises(HandOverError, match="sample 3-0: its sample_id came before"):
        MAKERS[maker]([sample, good(4), sample])


def test_a_width_that_is_too_short_says_for_whom() -> None:
    samples = [good(0), good(1, plan=Play(prompt=5, turns=TOOL))]
    with pytest.raises(HandOverError, match="prompt_length=4 is too short: sample 1-0 has 5"):
        padded(samples, pad_id=0, prompt_length=4)
    with pytest.raises(HandOverError, match=r"response_length=6 .*: sample 0-0 has 7, sample 1-0"):
        padded(samples, pad_id=0, response_length=6)
    made = padded(samples, pad_id=0, prompt_length=6, response_length=8, multiple_of=5)
    assert made["input_ids"].shape == (2, 14)  # fixed widths are not rounded


def test_arguments_that_make_no_batch_are_refused() -> None:
    pad_token_id: Any = None
    with pytest.raises(ConfigError, match="pad_id is None: give any token id"):
        padded([good(0)], pad_id=pad_token_id)
    with pytest.raises(ConfigError, match="multiple_of must be a whole number >= 1, got 0"):
        padded([good(0)], pad_id=0, multiple_of=0)
    taken = good(0, plan=Play(declared=(Column("response_mask"),)))
    with pytest.raises(ConfigError, match="a batch has response_mask already"):
        padded([taken], pad_id=0, columns=["response_mask"])


def test_a_forks_context_that_the_prompt_does_not_hold_stands_in_its_response() -> None:
    plan = Play(turns=(Turn(tokens=3), Turn("observation", tokens=2, fork=True), Turn(tokens=2)))
    first, fork = play(plan)[0]
    made = padded([first, fork], pad_id=0, prompt_length=4)
    assert made["responses"].shape == (2, 5)
    assert made["attention_mask"].tolist() == [[0, 0, *[1] * 7], [1] * 9]
    assert made["input_ids"][1].tolist() == fork.tokens.tolist()
    assert made["position_ids"][1].tolist() == list(range(9))
    assert made["response_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    log_probs = fork.rollout_log_probs
    assert log_probs is not None
    assert made["rollout_log_probs"][1].tolist() == [0, 0, 0, *log_probs.tolist()]
    assert made["rm_scores"][1].tolist() == [0, 0, 0, 0, 1]
    with pytest.raises(HandOverError, match="response_length=4 is too short: sample 0-0 has 5"):
        padded([first, fork], pad_id=0, prompt_length=4, response_length=4)
    for alone in fork, Sample.from_dict(fork.to_dict()):  # a micro-batch, a batch from a file
        row = padded([alone], pad_id=0, prompt_length=4)
        assert all(row[name].equal(made[name][1:]) for name in made)
    nameless = good(0)
    nameless.sample_id = ""
    with pytest.raises(HandOverError, match="prompt_length=1 is too short"):
        padded([nameless], pad_id=0, prompt_length=1)


def test_a_removed_sample_keeps_its_row_and_trains_nothing() -> None:
    removed = good(0, plan=Play(turns=TOOL, removed=True))
    made = padded([removed, good(1)], pad_id=0)
    assert made["response_mask"].tolist() == [[0] * 7, [1, 1, 1, 0, 0, 1, 1]]
    assert packed([removed])["loss_mask"].sum() == 0


def test_samples_without_any_token_have_their_shapes() -> None:
    empty = good(0, plan=Play(prompt=0, turns=(Turn(tokens=0),)))
    made = padded([empty], pad_id=0, columns=["turns", "temperatures"])
    assert {name: tuple(values.shape) for name, values in made.items()} == {
        **dict.fromkeys(made, (1, 0)),
        "has_turns": (1,),
        "has_temperatures": (1,),
    }
    assert padded([], pad_id=0)["input_ids"].shape == (0, 0)
    assert packed([])["cu_seqlens"].tolist() == [0]
    both = padded([empty, good(1)], pad_id=0)
    assert both["rm_scores"].tolist() == [[0] * 7, [0] * 6 + [1]]


def test_a_run_without_log_probs_says_so() -> None:
    [sample], _ = play(Play(turns=TOOL), log_probs=False)
    with pytest.raises(HandOverError, match="no log-probs"):
        padded([sample], pad_id=0)
    assert "rollout_log_probs" not in padded([sample], pad_id=0, log_probs=False)
    assert "rollout_log_probs" not in packed([sample], log_probs=False)


def test_rewards_may_come_from_elsewhere() -> None:
    sample = good(0, plan=Play(turns=TOOL, reward=None))
    assert "rm_scores" not in padded([sample], pad_id=0, rewards=False)
    assert "rewards" not in packed([sample], rewards=False)


def test_a_sealed_sample_is_shared_and_pinned() -> None:
    sample = good(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids, mask = tensor(sample.tokens), tensor(sample.loss_mask)
    assert ids.data_ptr() == sample.tokens.ctypes.data
    assert mask.data_ptr() == sample.loss_mask.ctypes.data
    expected = sample.tokens.tolist()
    del sample
    assert ids.tolist() == expected
    assert tensor(np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("entropy", "no sample has a column 'entropy'; declared are step, teacher_log_probs"),
        ("rollout_routed_experts", "no sample has"),
        ("rollout_top_p_token_ids", "no sample has"),
    ],
)
def test_a_column_that_nobody_has_is_named(name: str, why: str) -> None:
    sample = good(0, plan=Play(declared=COLUMNS))
    with pytest.raises(HandOverError, match=why):
        padded([sample], pad_id=0, columns=[name])


def test_samples_that_disagree_about_a_column_are_named() -> None:
    other = Column("step", "int32")
    samples = [good(0, plan=Play(declared=COLUMNS)), good(1, plan=Play(declared=(other,)))]
    with pytest.raises(HandOverError, match=r"sample 1-0 has .*int32.*an earlier one .*int64"):
        packed(samples, columns=["step"])


def test_a_weight_version_that_is_no_number_is_named() -> None:
    sample = good(0, plan=Play(turns=(Turn(version="epoch-1"),)))
    with pytest.raises(HandOverError, match="sample 0-0 has weight version 'epoch-1'"):
        packed([sample], columns=["weight_versions"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_groups_in_place_of_samples_are_told_how_to_get_them(
    make: Callable[[list[Any]], object],
) -> None:
    for given in ([Group(0, [])], [Request()], [[good()]], good()):
        with pytest.raises(ConfigError, match=r"samples_of\(groups\)"):
            make(given)  # type: ignore[arg-type]


def test_one_name_is_no_list_of_columns() -> None:
    with pytest.raises(ConfigError, match=r"give \['turns'\]"):
        padded([good()], pad_id=0, columns="turns")

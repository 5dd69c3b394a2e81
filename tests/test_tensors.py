"""Batches hold what the samples hold: read back in plain lists by a reader of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.adapters.tensors import packed, padded
from fsm_rollout.sample import Sample
from tests.finished import Plain, batches

torch = pytest.importorskip("torch")

PAD = -7
"""no token's id"""
Rows = list[dict[str, Any]]


def read_padded(batch: dict[str, Any]) -> Rows:
    """Each sample as lists. What stands beside its tokens must be padding."""
    lists = {name: values.tolist() for name, values in batch.items()}
    width = batch["prompts"].shape[1]
    rows = []
    for at, attention in enumerate(lists["attention_mask"]):
        columns = [column for column, seen in enumerate(attention) if seen]
        first, last = (columns[0], columns[-1]) if columns else (width, width - 1)
        assert columns == list(range(first, last + 1))
        assert first <= width <= last + 1
        ids, positions = lists["input_ids"][at], lists["position_ids"][at]
        assert lists["prompts"][at] + lists["responses"][at] == ids
        assert [i for c, i in enumerate(ids) if c not in columns] == [PAD] * ids.count(PAD)
        assert ids.count(PAD) == len(ids) - len(columns)
        running = [max(sum(attention[: c + 1]) - 1, 0) for c in range(len(attention))]
        assert positions == running
        row: dict[str, Any] = {"tokens": ids[first : last + 1]}
        for name, fill in ("response_mask", 0), ("rollout_log_probs", 0.0), ("rm_scores", 0.0):
            if name in lists:
                values = lists[name][at]
                assert set(values[last + 1 - width :]) <= {fill}
                row[name] = values[: last + 1 - width]
        rows.append(row)
    return rows


def read_packed(batch: dict[str, Any]) -> Rows:
    """The same of one long row."""
    lists = {name: values.tolist() for name, values in batch.items()}
    ends = lists["cu_seqlens"]
    assert ends[0] == 0
    assert ends[-1] == len(lists["input_ids"])
    assert batch["cu_seqlens"].dtype == torch.int32
    rows = []
    for start, stop in itertools.pairwise(ends):
        assert lists["position_ids"][start:stop] == list(range(stop - start))
        row = {"tokens": lists["input_ids"][start:stop]}
        for name in ("loss_mask", "rollout_log_probs"):
            if name in lists:
                row[name] = lists[name][start:stop]
        rows.append(row)
    return rows


def has_log_probs(samples: list[Sample]) -> bool:
    return all(sample.rollout_log_probs is not None for sample in samples)


@given(batches(), st.sampled_from([1, 8]))
def test_a_padded_batch_holds_what_the_samples_hold(
    batch: tuple[list[Sample], list[Plain]], multiple_of: int
) -> None:
    samples, plains = batch
    with_log_probs = has_log_probs(samples)
    made = padded(samples, pad_id=PAD, multiple_of=multiple_of, log_probs=with_log_probs)
    assert made["input_ids"].shape[1] % multiple_of == 0
    assert ("rollout_log_probs" in made) is with_log_probs
    for row, plain in zip(read_padded(made), plains, strict=True):
        assert row["tokens"] == [token.id for token in plain.tokens]
        assert row["response_mask"] == plain.trained
        scores = [0.0] * (len(plain.response) - 1) + [plain.reward] * bool(plain.response)
        assert row["rm_scores"] == pytest.approx(scores)
        if with_log_probs:
            assert row["rollout_log_probs"] == [token.log_prob for token in plain.response]
        # design, section 6, on the other side
        for token, is_trained in zip(plain.response, row["response_mask"], strict=True):
            assert token.sampled or not is_trained


@given(batches())
def test_a_packed_batch_holds_what_the_samples_hold(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    with_log_probs = has_log_probs(samples)
    made = packed(samples, log_probs=with_log_probs)
    assert made["rewards"].tolist() == pytest.approx([plain.reward for plain in plains])
    for row, plain in zip(read_packed(made), plains, strict=True):
        assert row["tokens"] == [token.id for token in plain.tokens]
        assert row["loss_mask"] == [0] * len(plain.prompt) + plain.trained
        if with_log_probs:
            assert row["rollout_log_probs"] == [token.log_prob for token in plain.tokens]


@given(batches())
def test_a_packed_batch_is_a_jagged_one_without_a_copy(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    made = packed(samples, log_probs=has_log_probs(samples))
    jagged = torch.nested.nested_tensor_from_jagged(made["input_ids"], made["cu_seqlens"])
    assert jagged.values().data_ptr() == made["input_ids"].data_ptr()
    ids = [row.tolist() for row in jagged.unbind()]
    assert ids == [[token.id for token in plain.tokens] for plain in plains]


OPTIONAL = ("turns", "turn_rewards", "temperatures", "weight_versions")


def expected(plain: Plain, name: str) -> tuple[bool, list[Any]]:
    """Whether a sample has the column, and its values on the response."""
    sampled = [token for token in plain.response if token.sampled]
    match name:
        case "turns":
            return True, [token.turn for token in plain.response]
        case "temperatures":
            has = all(token.temperature is not None for token in sampled)
            return has, [(token.temperature or 1.0) if has else 1.0 for token in plain.response]
        case "weight_versions":
            has = all(token.version is not None for token in sampled)
            return has, [-1 if t.version is None else int(t.version) for t in plain.response]
        case _:
            values = [0.0] * len(plain.response)
            for turn, reward in plain.turn_rewards.items():
                spots = [
                    at
                    for at, (token, is_trained) in enumerate(
                        zip(plain.response, plain.trained, strict=True)
                    )
                    if token.turn == turn and is_trained
                ]
                if spots:
                    values[spots[-1]] += reward
            return bool(plain.turn_rewards), values


FILLS = {"turns": -1, "turn_rewards": 0.0, "temperatures": 1.0, "weight_versions": -1}


@given(batches())
def test_what_the_turns_say_comes_along(batch: tuple[list[Sample], list[Plain]]) -> None:
    samples, plains = batch
    log_probs = has_log_probs(samples)
    wide = padded(samples, pad_id=PAD, log_probs=log_probs, columns=OPTIONAL)
    long = packed(samples, log_probs=log_probs, columns=OPTIONAL)
    ends = long["cu_seqlens"].tolist()
    for name in OPTIONAL:
        for at, plain in enumerate(plains):
            has, values = expected(plain, name)
            assert wide[f"has_{name}"][at] == has
            assert long[f"has_{name}"][at] == has
            padding = [FILLS[name]] * (wide["responses"].shape[1] - len(values))
            assert wide[name][at].tolist() == pytest.approx(values + padding)
            before = [FILLS[name]] * len(plain.prompt)
            assert long[name][ends[at] : ends[at + 1]].tolist() == pytest.approx(before + values)


@given(batches())
def test_turn_rewards_are_placed_and_never_added(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    made = padded(samples, pad_id=PAD, log_probs=has_log_probs(samples), turn_rewards=True)
    for row, plain in zip(read_padded(made), plains, strict=True):
        _, placed = expected(plain, "turn_rewards")
        if not plain.response:
            continue
        assert sum(row["rm_scores"]) == pytest.approx(plain.reward, abs=1e-5)
        spots = [at for at, is_trained in enumerate(plain.trained) if is_trained]
        last = spots[-1] if spots else len(plain.response) - 1
        del placed[last], row["rm_scores"][last]
        assert row["rm_scores"] == pytest.approx(placed)


@given(batches())
def test_declared_columns_come_along_where_there_are_some(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    columns = {column.name: column for plain in plains for column in plain.declared}
    log_probs = has_log_probs(samples)
    wide = padded(samples, pad_id=PAD, log_probs=log_probs, columns=columns)
    long = packed(samples, log_probs=log_probs, columns=columns)
    ends, width = long["cu_seqlens"].tolist(), wide["prompts"].shape[1]
    for name, column in columns.items():
        assert str(wide[name].dtype) == f"torch.{column.dtype}"
        for at, plain in enumerate(plains):
            has = column in plain.declared
            assert wide[f"has_{name}"][at] == long[f"has_{name}"][at] == has
            response = [t.extra[name] if has else column.fill for t in plain.response]
            prompt = [column.fill] * len(plain.prompt)
            assert long[name][ends[at] : ends[at + 1]].tolist() == prompt + response
            row = wide[name][at].tolist()
            if column.per == "T":
                start = width - len(prompt)
                assert row[start : width + len(response)] == prompt + response
                row[start : width + len(response)] = []
            else:
                assert row[: len(response)] == response
                row[: len(response)] = []
            assert set(row) <= {column.fill}


@given(batches())
def test_replay_data_comes_along_where_there_is_some(
    batch: tuple[list[Sample], list[Plain]],
) -> None:
    samples, plains = batch
    log_probs = has_log_probs(samples)
    wanted = [
        *["rollout_top_p_token_ids"] * any(p.top_p for p in plains),
        *["rollout_routed_experts"] * any(p.experts is not None for p in plains),
    ]
    wide = padded(samples, pad_id=PAD, log_probs=log_probs, columns=wanted)
    long = packed(samples, log_probs=log_probs, columns=wanted)
    starts, width = long["cu_seqlens"].tolist(), wide["prompts"].shape[1]
    for at, plain in enumerate(plains):
        if "rollout_top_p_token_ids" in wanted:
            assert wide["has_rollout_top_p_token_ids"][at] == plain.top_p
            kept = [list(token.kept) for token in plain.response]
            offsets = wide["rollout_top_p_token_offsets"][at].tolist()
            padding: list[list[int]] = [[]] * (len(offsets) - 1 - len(kept))
            assert spans(wide["rollout_top_p_token_ids"], offsets) == kept + padding
            offsets = long["rollout_top_p_token_offsets"][starts[at] : starts[at + 1] + 1].tolist()
            before: list[list[int]] = [[]] * len(plain.prompt)
            assert spans(long["rollout_top_p_token_ids"], offsets) == before + kept
        if "rollout_routed_experts" in wanted:
            name, rows = "rollout_routed_experts", plain.experts or []
            assert wide[f"has_{name}"][at] == (plain.experts is not None)
            experts = [[[row], [row + 1]] for row in rows]
            experts += [[[0], [0]]] * (len(plain.tokens) - len(rows))  # never forwarded
            first = width - len(plain.prompt)
            assert wide[name][at][first : first + len(experts)].tolist() == experts
            assert wide[name][at].sum() == sum(2 * row + 1 for row in rows)
            assert long[name][starts[at] : starts[at + 1]].tolist() == experts


def spans(ids: Any, offsets: list[int]) -> list[list[int]]:
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]

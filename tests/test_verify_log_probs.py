"""`recompute_log_probs`: samples of the engine pass, planted faults are found and located."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import fsm_rollout
from fsm_rollout.dataset import write_samples
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.scripted import ScriptedEngine
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.request import samples_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.sample import Sample
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from fsm_rollout.verify import recompute_log_probs, verify_samples
from tests.tiny_llama import VOCABULARY, ids, serve, tiny_llama


async def play(engine: TransformersEngine, temperatures: list[float]) -> Sample:
    """One turn per temperature: sampled tokens, some forced ones, an observation."""
    sample = Sample()
    sample.set_prompt(ids(0, 12))
    for turn, temperature in enumerate(temperatures):
        reply = await engine.generate(
            sample.columns,
            8,
            SamplingParams(temperature=temperature, top_p=0.9, seed=turn, stop_token_ids=(999,)),
            request_id=f"{turn}",
            session_id="s",
        )
        meta = {"temperature": temperature, "top_p": 0.9, "log_prob_kind": reply.log_prob_kind}
        sample.append_response_tokens(reply.token_ids, reply.log_probs, meta_info=meta)
        sample.append_response_tokens(ids(turn, 2), trainable=False, forced=True)
        sample.append_response_tokens(ids(turn, 5), trainable=False)
    return sample


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sample() -> Sample:
    return serve(partial(play, temperatures=[0.5, 1.0, 2.0, 0.0]))


@pytest.fixture
def row(sample: Sample) -> dict[str, Any]:
    return copy.deepcopy(sample.to_dict())


def test_the_engines_log_probs_are_confirmed(row: dict[str, Any], model_dir: Path) -> None:
    report = recompute_log_probs([row, row], model_dir)
    assert (report.samples, report.tokens) == (2, 2 * 4 * 8)
    assert 0 <= report.mean <= report.p99 <= report.largest < 1e-4


def test_masked_out_tokens_are_checked_too(sample: Sample, model_dir: Path) -> None:
    row = copy.deepcopy(sample.to_dict())
    row["loss_mask"] = [0] * len(row["loss_mask"])
    row["rollout_log_probs"][5] += 0.25
    report = recompute_log_probs([sample.to_dict(), row], model_dir)
    assert report.tokens == 2 * 4 * 8
    assert report.largest == pytest.approx(0.25, abs=1e-3)
    worst = report.worst
    assert (worst.sample, worst.turn, worst.position) == (1, 0, 5)
    assert str(worst).startswith("line 2, turn 0, response position 5: recorded ")


def test_log_probs_shifted_by_one_token_are_found(row: dict[str, Any], model_dir: Path) -> None:
    for turn in (turn for turn in row["turns"] if turn["kind"] == "model"):
        start = turn["start"]
        of_turn = row["rollout_log_probs"][start : start + 8]
        row["rollout_log_probs"][start : start + 8] = [*of_turn[1:], of_turn[0]]
    assert recompute_log_probs([row], model_dir).largest > 0.1


def test_an_ignored_temperature_is_found_in_the_turns_it_matters_for(
    row: dict[str, Any], model_dir: Path
) -> None:
    recorded = [turn["temperature"] for turn in row["turns"] if turn["kind"] == "model"]
    for turn in row["turns"]:
        if turn["kind"] == "model":
            turn["temperature"] = 1.0  # as if log_softmax(logits / T) were claimed to be T = 1's
    report = recompute_log_probs([row], model_dir)
    assert report.largest > 1e-3
    assert recorded[report.worst.turn // 2] not in (0.0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_an_infinite_difference(
    row: dict[str, Any], model_dir: Path, value: float
) -> None:
    row["rollout_log_probs"][1] = value
    report = recompute_log_probs([row], model_dir)
    assert report.largest == float("inf")
    assert report.worst.position == 1


def test_nothing_to_compare_is_a_failure(row: dict[str, Any], model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="0 samples without a sampled token"):
        recompute_log_probs([], model_dir)
    row["turns"] = [turn for turn in row["turns"] if turn["kind"] == "observation"]
    with pytest.raises(ConfigError, match="1 samples without a sampled token"):
        recompute_log_probs([row], model_dir)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", None, "sample 0, turn 0: no temperature is recorded"),
        ("log_prob_kind", "processed", "sample 0, turn 0: log-probs of kind 'processed'"),
    ],
)
def test_a_turn_that_cannot_be_recomputed_is_named(
    row: dict[str, Any], model_dir: Path, field: str, value: Any, says: str
) -> None:
    row["turns"][0][field] = value
    with pytest.raises(ConfigError, match=says):
        recompute_log_probs([row], model_dir)


def test_a_sample_without_log_probs_or_a_model_that_is_not_there_is_named(
    row: dict[str, Any], model_dir: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot load the model no-such-directory"):
        recompute_log_probs([row], "no-such-directory")
    row["rollout_log_probs"] = None
    with pytest.raises(ConfigError, match="sample 0: rollout_log_probs has none values for 60"):
        recompute_log_probs([row], model_dir)


@pytest.mark.parametrize("dtype", ["float99", "cuda", "int8", ""])
def test_a_dtype_that_no_model_runs_in_is_named(
    row: dict[str, Any], model_dir: Path, dtype: str
) -> None:
    with pytest.raises(ConfigError, match=f"dtype '{dtype}' is none that a model runs in"):
        recompute_log_probs([row], model_dir, dtype=dtype)


def test_a_model_that_cannot_be_run_on_the_tokens_is_named(
    row: dict[str, Any], model_dir: Path
) -> None:
    row["tokens"][3] = VOCABULARY
    with pytest.raises(ConfigError, match=rf"sample 0: .* the largest is {VOCABULARY}: .*sampled"):
        recompute_log_probs([row], model_dir)


def played(texts: list[str], **changes: Any) -> list[Sample]:
    """Samples of a run with these replies."""
    tokenizer = tiny_tokenizer()
    rollout = Rollout(ScriptedEngine(texts, tokenizer=tokenizer), tokenizer, **changes)
    return samples_of(fsm_rollout.run(rollout.generate(["a", "b"])))


def test_a_file_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = played(["yes"])
    write_samples(path, samples)
    assert verify_samples(path).passed
    write_samples(path, [*samples, samples[0]])
    assert verify_samples(path).violations == ("line 3, sample 0-0: line 1 has the same sample_id",)
    without = played(["yes"], log_probs=False)
    write_samples(path, without)
    assert verify_samples(path).passed
    write_samples(path, [samples[0], without[1]])
    assert verify_samples(path).violations == (
        "line 2, sample 1-0: R3.3: no log-probs, but line 1 has some",
    )


def test_blank_lines_are_counted_and_samples_in_flight_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    row = played(["yes"])[0].to_dict() | {"status": "generating", "stop_reason": None}
    path.write_text("\n\n" + json.dumps(row) + "\n")
    (found,) = verify_samples(path).violations
    assert found == "line 3, sample 0-0: R3.6: status generating: it has not ended"


def test_a_response_is_what_its_tokens_decode_to(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first, second = played(["<think> é , . 你</think>yes .", "no"])
    first.response, second.response = f"{first.response}!", None
    write_samples(path, [first, second])
    report = verify_samples(path, model_dir)
    assert (report.responses, report.violations) == (None, ())
    assert "responses: not checked, no tokenizer" in report.text()
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    tiny_llama().save_pretrained(tmp_path / "model")
    report = verify_samples(path, tmp_path / "model")
    (found,) = report.violations
    assert found.startswith("line 1, sample 0-0: R3.6: the response goes on with '!' at character ")
    assert (report.responses, report.passed) == (1, False)
    first.response = first.response[:-1]
    write_samples(path, [first, second])
    assert verify_samples(path, tmp_path / "model").violations == ()
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert verify_samples(path, tmp_path / "model").responses is None

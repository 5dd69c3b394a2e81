"""examples/train_tiny: what is sampled is what is trained, controls stay put, and it learns."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import LlamaForCausalLM

from examples.train_tiny.boxes import CALL, OpenBox, rows, tokenizer
from examples.train_tiny.plot import plot
from examples.train_tiny.policy import tiny_llama
from examples.train_tiny.train import ARMS, Config, log_probs_of, play_arms, train
from fsm_rollout import run
from fsm_rollout.adapters.tensors import padded
from fsm_rollout.dataset import read_samples
from fsm_rollout.verify import verify_samples

ROOT = Path(__file__).parents[1]
SMALL = Config(steps=2, rows=6, num_samples=4, held_out=12, evaluate_every=1, warm_up_steps=40)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("train_tiny")
    return play_arms(SMALL, out), out


def test_a_call_is_six_tokens_and_its_text_is_kept() -> None:
    words = tokenizer()
    ids = words(CALL.format("red") + "<|im_end|>").input_ids
    assert len(ids) == 6
    assert words.decode(ids) == CALL.format("red") + "<|im_end|>"


def test_no_held_out_prompt_is_trained_on_and_what_a_box_holds_varies() -> None:
    held_out, trained = (
        {str(row.prompt) for row in rows(900, 0, held_out=h)} for h in (True, False)
    )
    assert (len(held_out), len(trained)) == (8, 24)
    assert not held_out & trained
    assert len({row.label for row in rows(900, 0) if row.prompt == "Look into the red box."}) == 8


def test_the_trainer_recomputes_the_rollouts_log_probs(small_run: tuple[Any, Path]) -> None:
    result, _ = small_run
    assert 0 < result["max_log_prob_diff"] < 1e-4


def test_every_arm_starts_from_the_same_weights_and_says_how_it_went(
    small_run: tuple[Any, Path],
) -> None:
    result, _ = small_run
    assert set(result["curves"]) == set(ARMS)
    for name in "reward_first", "reward_last", "reward_last_lr0", "reward_last_no_tool":
        assert 0 <= result[name] <= 1
    for curve in result["curves"].values():
        assert curve["step"] == [0, 1, 2]
        assert len(curve["seconds"]) == len(curve["batch_reward"]) == 2
    trained, lr0 = (result["curves"][arm] for arm in ("trained", "lr0"))
    assert trained["batch_reward"][0] == lr0["batch_reward"][0]  # the same rollouts
    assert set(result["curves"]["no_tool"]["found"]) == {0.0}


def test_the_kept_samples_are_those_of_the_kept_checkpoint(small_run: tuple[Any, Path]) -> None:
    result, out = small_run
    assert (result["samples"], result["checkpoint"]) == (
        str(out / "samples.jsonl"),
        str(out / "checkpoint"),
    )
    report = verify_samples(out / "samples.jsonl", out / "checkpoint", tolerance=1e-4)
    assert report.passed, report.text()
    assert report.samples == SMALL.held_out
    for sample in read_samples(out / "samples.jsonl"):
        assert {version for version, _ in sample.weight_versions} == {SMALL.steps}


def test_the_curves_become_a_picture(small_run: tuple[Any, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot([small_run[0]] * 2, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_at_learning_rate_0_no_bit_of_the_weights_changes(small_run: tuple[Any, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(small_run[1] / "checkpoint")
    before = copy.deepcopy(model.state_dict())

    def changed(lr: float) -> set[str]:
        run(train(model, tokenizer(), SMALL, lr=lr, tool=OpenBox))
        after = model.state_dict()
        return {name for name in before if not torch.equal(before[name], after[name])}

    assert changed(0.0) == set()
    assert changed(1e-3)


def test_a_gap_that_is_no_number_is_not_hidden_by_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps = iter([1e-6, math.nan, 1e-6])
    monkeypatch.setattr("examples.train_tiny.train.learn", lambda *_, **__: next(gaps))
    words, config = tokenizer(), Config(steps=3, rows=1, num_samples=1, held_out=1)
    curve, _ = run(train(tiny_llama(words, 0), words, config, lr=0.0, tool=OpenBox))
    assert math.isnan(curve.max_log_prob_diff)


def test_log_probs_are_recomputed_at_the_temperature_of_the_turn(tmp_path: Path) -> None:
    words = tokenizer()
    model = tiny_llama(words, 2)
    hot = Config(steps=0, held_out=4, temperature=1.7)
    _, samples = run(train(model, words, hot, lr=0.0, tool=OpenBox))
    batch = padded(samples, pad_id=0, columns=["temperatures"])
    with torch.no_grad():
        found = log_probs_of(model, batch)
        cold = log_probs_of(model, batch | {"temperatures": torch.ones_like(batch["temperatures"])})
    gaps = [
        float(((log_probs - batch["rollout_log_probs"]) * batch["response_mask"]).abs().max())
        for log_probs in (found, cold)
    ]
    assert gaps[0] < 1e-4 < 0.1 < gaps[1]


RUN_AND_TELL = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    print(sys.modules["examples.train_tiny.boxes"].__file__)
"""


@pytest.mark.parametrize("name", ["train.py", "trl_loop.py"])
def test_a_script_runs_anywhere_with_what_lies_beside_it(name: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", RUN_AND_TELL, str(ROOT / "examples" / "train_tiny" / name)]
    told = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert "--seed" in told
    assert told.splitlines()[-1] == str(ROOT / "examples" / "train_tiny" / "boxes.py")


def script(name: str, *arguments: str) -> dict[str, Any]:
    file = Path(arguments[-1])
    command = [sys.executable, str(ROOT / "examples" / "train_tiny" / name), *arguments]
    subprocess.run(command, check=True, timeout=280)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [11, 12])
def test_it_learns_to_use_the_tool_and_the_controls_do_not(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "quick.json"
    result = script("train.py", "--quick", "--seed", str(seed), "--json", str(file))
    assert result["reward_last"] > max(0.6, result["reward_first"] + 0.3)
    assert result["tool_use_last"] > 0.8
    assert abs(result["reward_last_lr0"] - result["reward_first"]) < 0.12
    assert result["reward_last_no_tool"] < 0.22  # guessing: 1 in 8
    assert result["max_log_prob_diff"] < 1e-4
    assert verify_samples(tmp_path / "samples.jsonl", tmp_path / "checkpoint").passed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trls_own_loop_learns_too_and_gives_our_ids_and_masks(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result = script("trl_loop.py", "--steps", "4", "--json", str(tmp_path / "trl.json"))
    assert result["trl"]["rows_equal"] == result["trl"]["rows_compared"] == 4 * 256
    for loop in "trl", "fsm_rollout":
        assert result[loop]["reward_last"] > result[loop]["reward_first"] + 0.2

"""The command line, as a user types it: the scripted engine, the tiny tokenizer, real files."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from fsm_rollout import cli
from fsm_rollout.testing.tokenizer import tiny_tokenizer

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6*7?", "label": "42"}\n' * 3)
    (tmp_path / "my_rewards.py").write_text(
        "def exact(request):\n    return float(request.label in request.sample.response)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def config(folder: Path, **changes: Any) -> str:
    values = {
        "rows": "rows.jsonl",
        "engine": {"type": "scripted", "replies": [CALL, "It is 42."]},
        "tokenizer": str(folder / "tokenizer"),
        "tools": ["calculator"],
        "reward": "my_rewards:exact",
        "num_samples": 2,
        "limits": {"max_context": 4096} | changes.pop("limits", {}),
    } | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fsm-rollout", *arguments])
    monkeypatch.setattr(cli.console, "file", sys.stdout)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0, capsys.readouterr().out


def test_run_writes_samples_and_verify_passes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = command(monkeypatch, capsys, "run", config(folder))
    assert code == 0, out
    assert "6 completed" in out
    assert "1.000 (of 6)" in out
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert rows[0]["turns"][1]["kind"] == "observation"
    code, out = command(monkeypatch, capsys, "verify", str(folder / "samples.jsonl"))
    assert (code, "0 violations" in out) == (0, True)


TAMPERED: dict[str, Any] = {
    "observation trained": lambda row: {"loss_mask": [1] * len(row["loss_mask"])},
    "short mask": lambda row: {"loss_mask": row["loss_mask"][:-1]},
    "short log-probs": lambda row: {"rollout_log_probs": row["rollout_log_probs"][:-1]},
    "positive log-prob": lambda row: {"rollout_log_probs": [0.5, *row["rollout_log_probs"][1:]]},
    "token lost": lambda row: {"tokens": row["tokens"][:-1]},
    "reason of another status": lambda row: {"stop_reason": "length"},
    "turns do not tile": lambda row: {"turns": row["turns"][:-1]},
}


@pytest.mark.parametrize("fault", TAMPERED)
def test_verify_finds_a_sample_that_was_tampered_with(
    fault: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, capsys, "run", config(folder))
    path = folder / "samples.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(row | TAMPERED[fault](row)))
    code, out = command(monkeypatch, capsys, "verify", str(path))
    assert code, out
    assert "FAILED" in out or "samples.jsonl:1" in out


def test_verify_fails_on_no_samples_and_on_no_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "samples.jsonl"
    path.write_text("")
    code, out = command(monkeypatch, capsys, "verify", str(path))
    assert (code, "nothing to verify" in out) == (2, True)
    code, out = command(monkeypatch, capsys, "verify", "missing.jsonl")
    assert (code, "no such file" in out) == (2, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_sample": 3}, "unknown key 'num_sample'; did you mean 'num_samples'?"),
        ({"limits": {"max_contxt": 3}}, "unknown key 'limits.max_contxt'; did you mean"),
        ({"engine": {"type": "scripted", "reply": []}}, "'engine.reply'; did you mean 'replies'?"),
        ({"engine": {"type": "sglangg"}}, "sglangg"),
        ({"sampling": {"top_p": 0}}, "top_p must be in (0, 1], got 0"),
        ({"limits": {"max_turns": "many"}}, "limits.max_turns"),
        ({"limits": {"max_prompt": 9000}}, "max_prompt (9000) > max_context (4096)"),
        ({"num_samples": 0}, "num_samples must be >= 1"),
        ({"tools": ["calculater"]}, "calculator"),
        ({"tools": ["my_rewards:Nothing"]}, "my_rewards:Nothing"),
        ({"reward": "my_rewards.exact"}, "module:name"),
        ({"reward": "my_rewards:exakt"}, "exakt"),
        ({"parser": "herms"}, "did you mean"),
        ({"rows": "nowhere.jsonl"}, "no such file"),
    ],
)
def test_a_bad_config_is_one_clear_line(
    changes: dict[str, Any],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out = command(monkeypatch, capsys, "run", config(folder, **changes))
    assert code == 2, out
    assert said in " ".join(out.split())
    assert "Traceback" not in out
    assert not (folder / "samples.jsonl").exists()

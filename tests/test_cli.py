"""The command line, as a user types it: the scripted engine, the tiny tokenizer, real files."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from fsm_rollout import cli
from fsm_rollout.config import ScriptedConfig, load_config
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.testing.tokenizer import tiny_tokenizer
from tests.tiny_llama import tiny_llama

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'

MODULES = {
    "my_rewards": """
import os, signal, time

NUMBER = 3

def exact(request):
    return float(request.label in request.sample.response)

def stop_at_the_third(request):
    if request.index == 2:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(600):  # until the run has ended: nobody waits for this thread
            time.sleep(0.1)
    return 1.0

def always_fails(request):
    raise ValueError("no reward")

def leave_an_object(request):
    if request.index == 1:
        request.sample.extra["seen"] = object()
    return 1.0
""",
    "verifier": """
def exact(request):
    return float(request.label in request.sample.response)

def longest(requests):
    lengths = [len(request.sample.response) for request in requests]
    return [float(length == max(lengths)) for length in lengths]
""",
    "broken": "def (:\n",
    "raising": "1 / 0\n",
    "leaving": "raise SystemExit(0)\n",
}
"""what the configs of these tests import"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6*7?", "label": "42"}\n' * 3)
    for module, source in MODULES.items():
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path)
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
    "where", [{}, pytest.param({"processes": 1}, marks=pytest.mark.slow)], ids=["here", "process"]
)
def test_a_reward_may_be_made_of_parts(
    where: dict[str, int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {
        "turns": 1.0,
        "exact": {"function": "verifier:exact", "weight": 0.5, **where},
        "longest": {"function": "verifier:longest", "group": True},
    }
    given = config(folder, reward=parts)
    if where:  # a process looks for the module where its parent was started
        arguments = [sys.executable, "-m", "fsm_rollout", "run", given]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    else:
        code, out = command(monkeypatch, capsys, "run", given)
        assert code == 0, out
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [row["reward_parts"] for row in rows] == [{"exact": 1.0, "longest": 1.0}] * 6
    assert [row["reward"] for row in rows] == [1.5] * 6


SGLANG = {"type": "sglang", "urls": ["http://a"]}
VLLM = {"type": "vllm", "urls": ["http://a"]}


def test_a_config_says_all_of_an_engine_over_http(folder: Path) -> None:
    given = {
        **VLLM,
        "headers": {"Authorization": "Bearer k"},
        "log_prob_kind": "processed",
        "settings": {"timeout_s": 5},
    }
    engine, _ = cli._engine(load_config(Path(config(folder, engine=given))))
    assert (engine.log_prob_kind, engine.settings) == ("processed", HttpSettings(timeout_s=5.0))
    assert engine._servers.transport._headers == {"Authorization": "Bearer k"}
    assert not {"aiohttp", "torch"} & loaded_by("import fsm_rollout.config")


def loaded_by(statement: str) -> set[str]:
    said = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_sample": 3}, "unknown key 'num_sample'; did you mean 'num_samples'?"),
        ({"limits": {"max_contxt": 3}}, "unknown key 'limits.max_contxt'; did you mean"),
        ({"engine": {"type": "scripted", "reply": []}}, "'engine.reply'; did you mean 'replies'?"),
        ({"engine": {"type": "sglangg"}}, "engine.type is 'sglangg'; did you mean 'sglang'?"),
        ({"engine": {**SGLANG, "settings": {"timeout": 5}}}, "did you mean 'timeout_s'?"),
        ({"engine": {**VLLM, "settings": {"max_trys": 5}}}, "did you mean 'max_tries'?"),
        ({"engine": {**VLLM, "settings": {"max_tries": 0}}}, "HttpSettings.max_tries"),
        ({"engine": {**SGLANG, "settings": 5}}, "engine.settings"),
        ({"engine": {**SGLANG, "header": {}}}, "'engine.header'; did you mean 'headers'?"),
        ({"engine": {**SGLANG, "headers": {"a": 5}}}, "engine.headers"),
        ({"engine": {**SGLANG, "headers": {"a b": "c"}}}, "header 'a b': no name of a header"),
        ({"engine": {**VLLM, "log_prob_kind": "scale"}}, "engine.log_prob_kind is 'scale'; did"),
        ({"engine": {**VLLM, "route": "chat"}}, "route is 'chat'; known: completions, generate"),
        ({"engine": {**VLLM, "urls": ["http://a/v1"]}}, "leave out '/v1'"),
        ({"sampling": {"top_p": 0}}, "top_p must be in (0, 1], got 0"),
        ({"limits": {"max_turns": "many"}}, "limits.max_turns"),
        ({"limits": {"max_prompt": 9000}}, "max_prompt (9000) > max_context (4096)"),
        ({"num_samples": 0}, "num_samples must be >= 1"),
        ({"tools": ["calculater"]}, "calculator"),
        ({"tools": ["my_rewards:Nothing"]}, "my_rewards:Nothing"),
        ({"reward": "my_rewards.exact"}, "module:name"),
        ({"reward": "my_rewards:exakt"}, "exakt"),
        ({"reward": {"a": {"wait": 1}}}, "'reward.a.wait'; did you mean 'weight'"),
        ({"reward": {"a": {"weight": 1}}}, "function"),
        ({"reward": {"a": [1]}}, "reward"),
        ({"reward": {"a": 1.0}}, "give a function"),
        ({"reward": {"tool/calculater": 1.0}}, "did you mean 'calculator'"),
        ({"reward": {"a": "my_rewards:exakt"}}, "exakt"),
        ({"reward": {"a": {"function": "my_rewards:exact", "batch": 0}}}, "batch must be >= 1"),
        ({"parser": "herms"}, "did you mean"),
        ({"parser": "herms", "engine": {"type": "transformers", "model": "no"}}, "did you mean"),
        ({"rows": "nowhere.jsonl"}, "no such file"),
        ({"rows": "a\0b"}, "null byte"),
        ({"engine": {"type": [1], "replies": []}}, "engine.type"),
        ({"engine": {"type": "transformers", "model": "m", "dtype": "float99"}}, "engine.dtype"),
        ({"engine": {"type": "transformers", "model": "m", "max_batch": 0}}, "engine.max_batch"),
        ({"engine": {"type": "transformers", "model": "m", "num_threads": 0}}, "num_threads"),
        ({"engine": {"type": "transformers", "model": "nope"}, "tokenizer": None}, "engine.model"),
        ({"engine": {"type": "transformers", "model": "nope"}}, "cannot load 'nope'"),
        ({"tokenizer": "nope"}, "tokenizer: 'nope' cannot be loaded"),
        ({"reward": "broken:x"}, "reward 'broken:x' is not an importable"),
        ({"reward": "raising:x"}, "division by zero"),
        ({"reward": "leaving:x"}, "SystemExit"),
        ({"reward": "my_rewards:NUMBER"}, "give a function or a RewardPart"),
        ({"samples": "."}, "samples cannot be written there"),
        ({"samples": "rows.jsonl/samples.jsonl"}, "samples cannot be written there"),
        ({"samples": "x" * 300}, "samples cannot be written there"),
        ({"samples": "./rows.jsonl"}, "samples would replace"),
        ({"samples": "config.yaml"}, "samples would replace"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: é".encode("latin-1"), "config.yaml: not UTF-8"),
        (b"rows: 2024-99-99\n", "month must be in 1..12"),
        (b"rows: 2024-01-01\nengine: {type: scripted, replies: [a]}\n", "got `date`"),
        (b"rows: a\nseed: 1\nseed: 2\n", "key 'seed' is given twice; keep one"),
        (b"rows: a\nlimits: {max_turns: 1, max_turns: 2}\n", "key 'max_turns' is given twice"),
        (b"seed: " + b"9" * 5_000, "Exceeds the limit"),
        (b"seed: " + b"[" * 100_000, "nested too deeply"),
        (b"rows: [\n", "not YAML"),
        (b"rows: \0\n", "not YAML"),
    ],
)
def test_a_config_that_is_no_yaml_is_one_clear_line(
    text: bytes,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "config.yaml").write_bytes(text)
    code, out = command(monkeypatch, capsys, "run", "config.yaml")
    assert (code, said in out, "config.yaml" in out) == (2, True, True), out


def test_a_key_may_override_what_its_mapping_is_merged_with(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text("rows: r\nengine: &e {<<: {type: scripted, replies: [a]}, replies: [b]}\n")
    assert load_config(path).engine == ScriptedConfig(replies=["b"])


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not UTF-8": ('{"prompt": "é"}'.encode("latin-1"), "not UTF-8"),
    "no JSON": (b'{"prompt": }', "not JSON"),
    "5,000 digits": (
        b'{"prompt": "x", "label": ' + b"9" * 5_000 + b"}",
        "5000 digits",
    ),
    "100,000 levels": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("fault", BAD_LINES)
@pytest.mark.parametrize("name", ["rows.jsonl", "samples.jsonl"])
def test_a_line_that_cannot_be_read_is_named(
    fault: str,
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, capsys, "run", config(folder))
    line, said = BAD_LINES[fault]
    with (folder / name).open("ab") as file:
        file.write(b"\n" + line + b"\n")
    arguments = ["run", "config.yaml"] if name == "rows.jsonl" else ["verify", name]
    code, out = command(monkeypatch, capsys, *arguments)
    number = {"rows.jsonl": 5, "samples.jsonl": 8}[name]
    assert (code, f"{name}:{number}: " in out, said in out) == (2, True, True), out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x", "tools_kwargs": {"calculater": {}}}, "calculater"),
        ({"prompt": "x", "tools_kwargs": {"calculator": {"create_kwargs": {"x": 1}}}}, "create"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, "usr"),
        ({"prompt": "x", "label": float("nan")}, "NaN is no finite number"),
        ({"prompt": "x", "metadata": {"a": [float("-inf")]}}, "-Infinity is no finite number"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    row: dict[str, Any],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "rows.jsonl").write_text('\n{"prompt": "a"}\n\n' + json.dumps(row) + "\n")
    code, out = command(monkeypatch, capsys, "run", config(folder))
    assert (code, "rows.jsonl:4: " in out, said in out) == (2, True, True), out


def test_only_a_newline_ends_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a\u2028b\u2029c\x85d"
    row = json.dumps({"prompt": prompt, "label": "42"}, ensure_ascii=False)
    (folder / "rows.jsonl").write_text(f"\ufeff{row}\r\n{row}\n")
    code, out = command(monkeypatch, capsys, "run", config(folder, num_samples=1))
    assert code == 0, out
    path = folder / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [sample["prompt"] for sample in samples] == [prompt] * 2
    path.write_text("\n".join(json.dumps(sample, ensure_ascii=False) for sample in samples))
    code, out = command(monkeypatch, capsys, "verify", "samples.jsonl")
    assert code == 0, out


def test_ctrl_c_saves_what_was_played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(folder, reward="my_rewards:stop_at_the_third", max_concurrent=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    try:
        code, out = command(monkeypatch, capsys, "run", given)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130, out
    assert "stopped: 2 of 6 requests were played" in out
    code, out = command(monkeypatch, capsys, "verify", "samples.jsonl")
    assert (code, "2 samples" in out) == (0, True), out
    assert list(folder.glob(".samples*")) == []


def test_an_exception_of_the_engine_saves_what_was_played_and_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def close(self: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("fsm_rollout.engines.scripted.ScriptedEngine.close", close)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        command(monkeypatch, capsys, "run", config(folder))
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 6


def test_a_run_that_cannot_start_leaves_the_older_samples_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "samples.jsonl").write_text("of yesterday")
    code, _ = command(monkeypatch, capsys, "run", config(folder, reward="raising:x"))
    assert code == 2
    assert (folder / "samples.jsonl").read_text() == "of yesterday"
    assert list(folder.glob(".samples*")) == []


def test_a_run_without_a_usable_sample_leaves_the_older_samples_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "samples.jsonl").write_text("of yesterday")
    given = config(folder, reward="my_rewards:always_fails")
    code, out = command(monkeypatch, capsys, "run", given)
    assert (code, "no samples: nothing was written to" in out) == (1, True), out
    assert (folder / "samples.jsonl").read_text() == "of yesterday"
    assert list(folder.glob(".samples*")) == []


def test_samples_that_are_a_link_are_written_where_it_leads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "samples.jsonl").symlink_to("real.jsonl")
    assert command(monkeypatch, capsys, "run", config(folder))[0] == 0
    assert (folder / "samples.jsonl").is_symlink()
    assert len((folder / "real.jsonl").read_text().splitlines()) == 6


def test_a_sample_that_json_cannot_hold_does_not_cost_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(folder, reward="my_rewards:leave_an_object")
    code, out = command(monkeypatch, capsys, "run", given)
    assert (code, "not written: sample 1-0: " in out) == (1, True), out
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 5


def test_a_model_plays_and_verify_confirms_it_from_its_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, model = tiny_tokenizer(), copy.deepcopy(tiny_llama())
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    engine = {"type": "transformers", "model": "model", "max_batch": 2, "num_threads": 1}
    changes: dict[str, Any] = {"engine": engine, "tokenizer": None, "limits": {"max_context": 120}}
    changes |= {"tools": [], "reward": None, "num_samples": 1}
    code, out = command(monkeypatch, capsys, "run", config(folder, **changes))
    assert code == 0, out
    code, out = command(monkeypatch, capsys, "verify", "samples.jsonl", "--model", "model")
    assert (code, "responses: 3 decoded" in out) == (0, True), out
    for option, said in (("float99", "'float99' is none"), ("cuda", "'cuda' is none")):
        arguments = ("samples.jsonl", "--model", "model", "--dtype", option)
        code, out = command(monkeypatch, capsys, "verify", *arguments)
        assert (code, said in out) == (2, True), out
    if not torch.cuda.is_available():
        changes["engine"] = engine | {"device": "cuda"}
        code, out = command(monkeypatch, capsys, "run", config(folder, **changes))
        assert (code, "engine.model: 'model' cannot be loaded" in out) == (2, True), out

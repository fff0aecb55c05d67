"""``burnish serve-reward`` as a process: start, shutdown and kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config.model import ModelConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rewards.base import RewardInput
from burnish.rewards.remote.config import RemoteReward
from burnish.rewards.remote.reward import RemoteScorer
from burnish.serve import reward as serving_module
from burnish.types import Prompt, Sample

ROOT = Path(burnish.__file__).parents[1]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["serve-reward", *(str(a) for a in arguments)])


@pytest.fixture
def start(reward_model: Path) -> Iterator[Callable[..., tuple[Any, str]]]:
    """``start("--max-items", "3")``: (process, URL) of a server that listens. Killed at the end."""
    processes: list[Any] = []

    def started(*options: str) -> tuple[Any, str]:
        command = [fork_server.interpreter(), "-m", "burnish", "serve-reward", str(reward_model)]
        process = subprocess.Popen(
            [*command, "--port", "0", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        found = re.fullmatch(r"serving model at (http://127\.0\.0\.1:\d+/get_reward)\n",
                             process.stdout.readline())  # fmt: skip
        assert found is not None
        return process, found[1]

    yield started
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def items(count: int) -> list[RewardInput]:
    prompt = Prompt("p", (1,), "1+1=")
    sample = Sample("p/0", "p", 0, (1,), (2,), (0.0,), (True,), (0,), "2", "stop")
    return [RewardInput(prompt, sample)] * count


@pytest.mark.slow
def test_sigterm_ends_it_with_exit_code_0(start: Any) -> None:
    process, url = start()
    reward = RemoteScorer(RemoteReward(urls=(url,), retries=0))
    try:
        (score,) = reward.score(items(1))
        assert isinstance(score, float)
    finally:
        reward.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.slow
def test_ctrl_c_right_after_startup_is_handled(start: Any) -> None:
    process, _ = start()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def kill_after(process: Any, passes: list[Any]) -> None:
    """Once the other server has answered a few requests; on a slow machine after 5 seconds."""
    deadline = time.monotonic() + 5
    while len(passes) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()


@pytest.mark.slow
def test_if_a_server_is_killed_the_other_one_answers(
    start: Any, reward_model: Path, serving: Callable[..., Any]
) -> None:
    """The process waits 10 seconds to fill its pass, and the other server has answered some
    requests by then: of four under way some are in the process when it is killed. All items are
    scored nevertheless, each once, with equal scores."""
    process, url = start("--max-wait-ms", "10000")
    with serving() as other:
        urls = (url, f"{other.url}/get_reward")
        reward = RemoteScorer(
            RemoteReward(urls=urls, batch_size=2, max_concurrency=4, backoff_s=0.1)
        )
        try:
            killer = threading.Thread(target=kill_after, args=(process, other.gate.passes))
            killer.start()
            scores = reward.score(items(40))
            killer.join()
            assert all(isinstance(score, float) for score in scores)
            assert len({round(float(score), 4) for score in scores}) == 1  # type: ignore[arg-type]
            counts = reward.take_counts()
            assert counts["requests"] == 20 + counts["retries"] and counts["retries"] >= 1
        finally:
            reward.close()
    assert process.wait(60) == -signal.SIGKILL


def test_it_refuses_to_listen_to_all_without_a_token(reward_model: Path) -> None:
    result = call(reward_model, "--host", "0.0.0.0", "--port", 0)
    assert result.exit_code == 2 and "there is no token" in result.stderr
    result = call(reward_model, "--host", "0.0.0.0", "--token-env", "NO_SUCH_VARIABLE")
    assert result.exit_code == 2 and "NO_SUCH_VARIABLE, which is not set" in result.stderr


def test_a_model_without_a_reward_head_is_refused(tmp_path: Path, scratch: ModelConfig) -> None:
    assert call(tmp_path / "nowhere", "--port", 0).exit_code == 2
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = call(tmp_path / "run", "--port", 0)
    assert result.exit_code == 2 and "--model reward --out DIR" in result.stderr
    load_causal_lm(scratch).save_pretrained(tmp_path / "lm")
    load_tokenizer(scratch).save_pretrained(tmp_path / "lm")
    result = call(tmp_path / "lm", "--port", 0)
    assert result.exit_code == 2 and "without a reward head" in result.stderr


def test_all_problems_of_the_options_are_reported_together(reward_model: Path) -> None:
    result = call(reward_model, "--max-len", 9, "--max-batch-tokens", 8, "--max-queue", 1)
    assert result.exit_code == 2
    assert "max_len=9" in result.stderr and "max_items=1024" in result.stderr


def test_without_its_packages_it_names_the_extra(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = call(reward_model, "--port", 0)
    assert result.exit_code == 2 and "pip install 'burnish[serve]'" in result.stderr


def test_the_options_reach_the_server(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of the command, and the file, is one of ServeOptions' with the same default."""
    seen: list[Any] = []
    monkeypatch.setattr(
        serving_module, "serve_reward", lambda model, options, version: seen.append(options)
    )
    assert call(reward_model).exit_code == 0
    flags = ["--host", "::1", "--port", 7, "--dtype", "bf16", "--device", "cpu", "--append-eos"]
    flags += ["--max-wait-ms", 1, "--overlong", "truncate_left", "--max-request-bytes", 9]
    flags += ["--allowed-host", "a", "--allowed-host", "b", "--max-chars", 8]
    assert call(reward_model, *flags, "--max-len", 3, "--token-env", "T").exit_code == 0
    default, chosen = (vars(options) for options in seen)
    assert default == vars(type(seen[0])())
    changed = {name: value for name, value in chosen.items() if value != default[name]}
    assert changed == {
        "host": "::1", "port": 7, "dtype": "bf16", "device": "cpu", "append_eos": True,
        "max_wait_ms": 1.0, "overlong": "truncate_left", "max_request_bytes": 9, "max_len": 3,
        "token_env": "T", "allowed_hosts": ("a", "b"), "max_chars": 8,
    }  # fmt: skip

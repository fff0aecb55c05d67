"""Jobs that are killed, stopped and starved, and processes to kill.

Child processes come from a server that has the libraries loaded and nothing computed: each starts
in a moment, and all compute alike.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest

import burnish
from burnish.config import JobConfig, load_config

SCRATCH = {
    "alphabet": "0123456789+=",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}
REWARD = """
def share_of_digits(response):
    return sum(c.isdigit() for c in response) / 4
"""
GRPO: dict[str, Any] = {"train": {"train_batch_size": 16, "lr": 1e-2, "ema_decay": 0.9}}
LORA: dict[str, Any] = {
    "model": {"scratch": SCRATCH, "lora": {"lora_dropout": 0.2}},
    "precision": {"rollout_dtype": "bf16"},
}
GAE: dict[str, Any] = {
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "generate_max_len": 4},
    "algorithm": {
        "advantage": "gae",
        "kl": {
            "init_kl_coef": 0.1,
            "placement": "reward",
            "estimator": "k1",
            "adaptive": {"target": 0.02, "horizon": 40},
        },
    },
    "train": {
        "train_batch_size": 4,
        "epochs_per_rollout": 2,
        "lr": 1e-2,
        "lr_scheduler": "cosine",
        "lr_warmup_ratio": 0.2,
    },
}
# 2^24 overflows at first, so the loss scale moves down, and up again after 2 clean steps.
FP16: dict[str, Any] = {
    "precision": {"dtype": "fp16", "fp16": {"initial_scale_power": 24, "loss_scale_window": 2}},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., JobConfig]:
    """``recipe("grpo", "max_steps=12", name="a")``: 24 prompts, 4 a step, saved at every step.

    Kinds: grpo (moving average), lora (dropout; the sampler has a copy of the weights), gae
    (critic, adaptive KL in the reward, several shuffled updates per rollout), fp16 (a loss scale
    that moves), sft.
    """
    rows = [{"prompt": f"{i}=", "label": str(i), "response": str(i)} for i in range(24)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    kinds: dict[str, dict[str, Any]] = {"grpo": GRPO, "lora": LORA, "gae": GAE, "fp16": FP16}

    def make(kind: str, *overrides: str, name: str = "run") -> JobConfig:
        common = {
            "run_dir": str(tmp_path / name),
            "model": {"scratch": SCRATCH},
            "data": {"sources": [str(data)]},
            "checkpoint": {"every_n_steps": 1},
        }
        if kind == "sft":
            train = {"train_batch_size": 4, "lr": 1e-2}
            tree = common | {"job": "sft", "max_epochs": 2, "train": train}
            return load_config(tree, overrides)
        tree = common | {
            "job": "rl",
            "max_steps": 12,
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "generate_max_len": 4,
            },
            "rewards": [
                {"kind": "function", "function": f"{tmp_path / 'my_reward.py'}:share_of_digits"}
            ],
            "train": {"train_batch_size": 16, "lr": 1e-2},
        }
        return load_config(tree | kinds[kind], overrides)

    return make


class Children:
    """Runs jobs in processes of their own."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(fork_server.PRELOADED))

    def start(
        self,
        config: JobConfig,
        *,
        resume: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """A started process that runs ``config``."""
        process = self.context.Process(target=_run, args=(config, resume, environment or {}))
        process.start()
        return process

    def run(self, config: JobConfig, *, resume: Path | None = None) -> None:
        """Run to the end. Fails the test where the job does not end well."""
        process = self.start(config, resume=resume)
        process.join(120)
        assert process.exitcode == 0

    def run_with_kills(self, config: JobConfig, *, kills: int, seed: int) -> list[int]:
        """Start or resume, kill -9 at a random moment after one to five new lines in the log,
        ``kills`` times; then run to the end. Returns the steps in the log at each kill."""
        run_dir, rng = Path(config.run_dir), random.Random(seed)
        seen: list[int] = []
        for _ in range(kills):
            resume = run_dir if (run_dir / "config.yaml").is_file() else None
            process = self.start(config, resume=resume)
            self._wait_for_news(run_dir, process, changes=rng.randint(2, 6))
            time.sleep(rng.uniform(0.0, 0.05))
            process.kill()
            process.join()
            if process.exitcode == 0:
                break
            seen.append(len(_lines(run_dir)))
        self.run(config, resume=run_dir)
        return seen

    def _wait_for_news(self, run_dir: Path, process: Any, *, changes: int) -> None:
        """Until the log has changed so often. (Where a resumed run rewinds it, that is one.)"""
        before = _lines(run_dir)
        while process.is_alive() and changes:
            now = _lines(run_dir)
            if now and now != before:
                before, changes = now, changes - 1
            time.sleep(0.002)


def _run(config: JobConfig, resume: Path | None, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    burnish.run(config, resume=resume)


def _lines(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


@pytest.fixture(scope="session")
def children() -> Children:
    return Children()


@pytest.fixture
def measured() -> Callable[[Path], list[dict[str, Any]]]:
    """Every metric of every line but clocks and memory, exactly as written."""

    def read(run_dir: Path) -> list[dict[str, Any]]:
        clocks = ("time", "memory/", "sync/seconds")
        rates = ("tokens_per_s", "bytes_per_s")
        return [
            {
                name: value
                for name, value in json.loads(line).items()
                if not name.startswith(clocks) and not name.endswith(rates)
            }
            for line in _lines(run_dir)
        ]

    return read


RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
"""Of the cluster and of who joins it."""


class RayCluster:
    """A Ray cluster in processes of its own, and a view of them."""

    environment = RAY_ENVIRONMENT

    def __init__(self, cpus: int) -> None:
        self.cpus = cpus
        self._holder = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "ray_holder.py"), str(cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **RAY_ENVIRONMENT},
        )
        assert self._holder.stdout is not None
        self.address = self._holder.stdout.readline().strip()
        assert self.address, "the cluster did not start"

    def state(self) -> dict[str, Any]:
        """Free CPUs, and the states of the placement groups that are not removed."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write("\n")
        self._holder.stdin.flush()
        state: dict[str, Any] = json.loads(self._holder.stdout.readline())
        return state

    def workers(self, kind: str = "") -> list[psutil.Process]:
        """Processes of this cluster that hold one of our classes."""
        return ray_workers(psutil.Process(), kind)

    def assert_nothing_is_left(self) -> None:
        """No worker, no place, no CPU taken, within a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state = self.state()
            if not self.workers() and not state["places"] and state["free"] == self.cpus:
                return
            time.sleep(0.1)
        raise AssertionError(f"left behind: {self.workers()}, {self.state()}")

    def close(self) -> None:
        """End it."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(60)


def ray_workers(root: psutil.Process, kind: str = "") -> list[psutil.Process]:
    """Processes below ``root`` that hold one of our classes."""
    found = []
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if line.startswith("ray::") and line[5:].startswith(OURS) and kind in line:
                found.append(process)
    return found


OURS = ("TrainWorker", "RolloutWorker", "HeartbeatRegistry")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    cluster = RayCluster(8)
    yield cluster
    cluster.close()


ON_RAY = (
    "cluster.runtime=ray",
    "cluster.policy_ranks=2",
    "cluster.rollout_workers=2",
    "cluster.heartbeat_timeout_s=10",
)


@pytest.fixture
def on_ray(ray_cluster: RayCluster) -> tuple[str, ...]:
    """Overrides for two ranks and two rollout workers on the cluster."""
    return *ON_RAY, f"cluster.ray_address={ray_cluster.address}"


@pytest.fixture
def same_numbers(
    measured: Callable[[Path], list[dict[str, Any]]],
) -> Callable[[Path, Path], None]:
    """Asserts that two runs measured the same, step by step, up to sums over two ranks."""

    def compare(expected: Path, found: Path, *, absolute: float = 2e-6) -> None:
        one, other = measured(expected), measured(found)
        assert [line["step"] for line in one] == [line["step"] for line in other]
        for first, second in zip(one, other, strict=True):
            handed = {name for name in second if name.startswith("sync/")}  # between processes
            assert set(first) == set(second) - handed
            for name, value in first.items():
                # fp32 sums over two ranks instead of one; gaps are of that size themselves
                assert second[name] == pytest.approx(value, rel=1e-4, abs=absolute, nan_ok=True), (
                    first["step"],
                    name,
                )

    return compare

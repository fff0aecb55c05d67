"""Jobs that are killed, stopped and starved, and processes to kill.

Child processes come from a server that has the libraries loaded and nothing computed: each starts
in a moment, and all compute alike.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            "kl_target": 0.02,
            "kl_horizon": 40,
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
    "precision": {"dtype": "fp16", "initial_scale_power": 24, "loss_scale_window": 2},
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
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["burnish.loops.run", "transformers.models.llama"])

    def start(self, config: JobConfig, *, resume: Path | None = None) -> Any:
        """A started process that runs ``config``."""
        process = self._context.Process(
            target=burnish.run, args=(config,), kwargs={"resume": resume}
        )
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
        clocks = ("time", "memory/")
        return [
            {
                name: value
                for name, value in json.loads(line).items()
                if not name.startswith(clocks) and not name.endswith("tokens_per_s")
            }
            for line in _lines(run_dir)
        ]

    return read

"""The golden run: its recipe, what of it is kept, and how it is compared.

Both the test and ``regenerate.py`` use this file, so they cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import burnish
from burnish.config import load_config
from burnish.observe.metrics import read_metrics

GOLDEN = Path(__file__).with_name("grpo_20_steps.json")

TOLERANCES = {
    "reward/mean": 0.012,
    "train/entropy": 0.012,
    "train/kl": 0.03,
    "train/loss": 0.022,
    "train/grad_norm": 0.03,
}
"""Largest absolute difference at any step. See test_golden_run.py for where they come from."""


def golden_recipe(run_dir: Path, data: Path, overrides: Sequence[str] = ()) -> Any:
    """The config: GRPO with KL and entropy terms and two updates per rollout, 20 steps."""
    rows = [{"prompt": f"{a}{b}="} for a in range(10) for b in range(10)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = {
        "job": "rl",
        "run_dir": str(run_dir),
        "max_steps": 20,
        "model": {
            "scratch": {
                "alphabet": "0123456789=",
                "hidden_size": 32,
                "max_position_embeddings": 32,
            }
        },
        "data": {"sources": [{"path": str(data)}]},
        "rollout": {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "generate_max_len": 6},
        "algorithm": {"entropy_coef": 0.01, "kl": {"init_kl_coef": 0.05}},
        "train": {"train_batch_size": 32, "lr": 3e-3, "lr_warmup_ratio": 0.1},
        "checkpoint": {"every_n_steps": 0},
    }
    return load_config(tree, overrides)


def small_digits(response: str) -> float:
    """The share of six places that hold a digit below 5."""
    return sum(c in "01234" for c in response) / 6


def run_golden(folder: Path, overrides: Sequence[str] = ()) -> list[dict[str, float]]:
    """The kept metrics of every step of a new run below ``folder``."""
    config = golden_recipe(folder / "run", folder / "prompts.jsonl", overrides)
    run_dir = burnish.run(config, rewards=small_digits).run_dir
    return [{name: line[name] for name in TOLERANCES} for line in read_metrics(run_dir)]


def differences(
    found: Sequence[Mapping[str, float]], golden: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Metric -> its largest absolute difference over the steps."""
    pairs = list(zip(found, golden, strict=True))
    return {name: max(abs(f[name] - g[name]) for f, g in pairs) for name in TOLERANCES}

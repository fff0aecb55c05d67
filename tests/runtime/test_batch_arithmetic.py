"""Batch sizes at the command line: wrong ones stop a job before anything loads, and the right ones
are printed when it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import burnish
from burnish.cli import app
from burnish.config import JobConfig

NOWHERE = "no-such-model"

# name, sizes, what the message offers
BAD: dict[str, tuple[dict[str, int], str]] = {
    "three that disagree": (
        # 16 / 8 = 2, 16 / 4 = 4, 8 x 4 = 32
        {
            "train_batch_size": 16,
            "micro_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
        },
        "set gradient_accumulation_steps=2 or micro_train_batch_size=4 or train_batch_size=32",
    ),
    "a micro-batch that does not divide": (
        {"train_batch_size": 16, "micro_train_batch_size": 3},
        "nearest valid micro_train_batch_size: 2 or 4, or train_batch_size: 15 or 18",
    ),
    "a rollout that is no whole number of steps": (
        # 4 x 4 = 16 samples; divisors next to 12 are 8 and 16; 12 / gcd(12, 4) = 3 prompts
        {"train_batch_size": 12},
        "nearest train_batch_size: 8 or 16, nearest rollout_batch_size: 3 or 6",
    ),
}


@pytest.fixture
def recipe(tmp_path: Path, sums: str) -> Path:
    """An RL recipe of 4 prompts x 4 samples whose model does not exist, without batch sizes."""
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "model": {"path": str(tmp_path / NOWHERE)},
        "data": {"sources": [sums], "prompt_max_len": 16},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 4},
        "rewards": [{"kind": "math"}],
        "train": {"lr": 1e-3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def overrides(sizes: dict[str, int]) -> list[str]:
    return [f"train.{name}={value}" for name, value in sizes.items()]


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
@pytest.mark.parametrize("kind", BAD)
def test_bad_batch_sizes_and_the_missing_model_are_reported_together(
    kind: str, option: list[str], recipe: Path, tmp_path: Path
) -> None:
    sizes, offered = BAD[kind]
    result = call("rl", recipe, *overrides(sizes), *option)
    assert result.exit_code == 2 and result.stdout == ""
    assert offered in result.stderr
    assert NOWHERE in result.stderr and not (tmp_path / "run").exists()


def test_with_valid_batch_sizes_the_missing_model_is_reported(recipe: Path) -> None:
    for option in ([], ["--dry-run"]):
        result = call("rl", recipe, "train.train_batch_size=16", *option)
        assert result.exit_code == 2 and f"{NOWHERE} does not exist" in result.stderr
    assert "gradient_accumulation_steps" in result.stdout  # the table is printed anyway


GOLDEN = """\
Batch arithmetic

  name                          value        how
 ─────────────────────────────────────────────────────────────────────────────────────────
  train_batch_size (B)          8            samples per optimizer step
  data-parallel ranks (D)       1
  micro_train_batch_size (b)    4            samples per rank and backward pass
  gradient_accumulation_steps   2            B / (b x D)
  rollout_batch_size (P)        4            prompts per rollout
  n_samples_per_prompt (n)      4
  samples per rollout           16           P x n
  epochs_per_rollout            1            passes over the buffer
  optimizer steps per rollout   2            epochs x P x n / B
  rows of data (N)              16
  rows drawn                    4            1 step: 0.25 passes; 12 rows are never drawn
  loss_aggregation              token_mean   the default
"""


def test_a_run_prints_its_batch_arithmetic_before_its_first_step(
    rl: Callable[..., JobConfig],
    reward: Callable[[str], float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 samples in steps of 8 are 2 updates; 8 in passes of 4 are 2 passes."""
    monkeypatch.setenv("COLUMNS", "100")
    config = rl("max_steps=1", "train.train_batch_size=8", "train.micro_train_batch_size=4")
    run_dir = burnish.run(config, rewards=reward).run_dir
    log = (run_dir / "run.log").read_text(encoding="utf-8")
    for text in (capsys.readouterr().out, log):
        plain = "\n".join(line.rstrip() for line in text.splitlines())
        assert GOLDEN in plain
        assert plain.index(GOLDEN) < plain.index("step 1/1")

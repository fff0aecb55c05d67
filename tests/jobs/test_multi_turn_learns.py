"""Episodes learn: recipes/tiny_multi_turn.yaml with two numbers and two guesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from burnish.observe.metrics import read_metrics


def test_a_random_model_learns_not_to_repeat_a_guess(
    run_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """One guess finds half of the numbers at most, and two independent guesses three quarters. The
    random model often responds without a number: 0.36 of the first 192 episodes succeed. The
    standard error of the last 384 is 0.02."""
    run_dir = run_recipe(
        "tiny_multi_turn",
        f"run_dir={tmp_path / 'run'}",
        "model.scratch.alphabet=12?<>",
        "rollout.stop=['1','2']",
        "rollout.n_samples_per_prompt=8",
        "rollout.episodes.options.highest=2",
        "rollout.episodes.max_turns=2",
        "train.train_batch_size=64",
        "max_steps=24",
        "eval=null",
    )
    found = [line["reward/found"] for line in read_metrics(run_dir) if "reward/found" in line]
    assert len(found) == 24
    assert fmean(found[:3]) < 0.5
    assert fmean(found[-6:]) > 0.8

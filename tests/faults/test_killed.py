"""kill -9 at random moments, then resume: the log is that of a run that was never killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config import JobConfig
from burnish.observe.samples import read_samples

pytestmark = pytest.mark.slow

Recipe = Callable[..., JobConfig]
Measured = Callable[[Path], list[dict[str, Any]]]


def _last_weights(run_dir: Path) -> dict[str, bytes]:
    """Every file of weights, moments and moving averages of the last checkpoint."""
    folder = run_dir / "checkpoints" / "step_000012"
    files = list(folder.glob("*/*.safetensors"))
    assert files
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("kind", "seed"), [("grpo", 1), ("lora", 2), ("gae", 3), ("sft", 4), ("fp16", 8)]
)
def test_a_killed_and_resumed_run_has_bit_identical_metrics(
    kind: str, seed: int, recipe: Recipe, children: Any, measured: Measured
) -> None:
    """GRPO: 12 steps x 4 prompts = 2 epochs of 24 rows; each prompt id has its 4 samples, in one
    step."""
    whole, killed = recipe(kind, name="whole"), recipe(kind, name="killed")
    children.run(whole)
    kills = children.run_with_kills(killed, kills=3, seed=seed)
    assert kills, "no kill came in time, so nothing was tried"
    expected = measured(Path(whole.run_dir))
    assert [line["step"] for line in expected] == list(range(1, 13))
    if kind == "fp16":
        assert len({line["train/loss_scale"] for line in expected}) > 2
        assert expected[-1]["train/skipped_total"] > 0
    assert measured(Path(killed.run_dir)) == expected
    samples = read_samples(Path(killed.run_dir))
    assert samples == read_samples(Path(whole.run_dir))
    if kind == "grpo":
        ids = Counter(sample["prompt_id"] for sample in samples)
        assert ids == {f"rows:{row}@{epoch}": 4 for row in range(24) for epoch in range(2)}
        assert len({(sample["prompt_id"], sample["step"]) for sample in samples}) == 48
    assert _last_weights(Path(killed.run_dir)) == _last_weights(Path(whole.run_dir))


def test_sparse_checkpoints_give_bit_identical_metrics(
    recipe: Recipe, children: Any, measured: Measured
) -> None:
    rare = "checkpoint.every_n_steps=3"
    whole, killed = recipe("grpo", rare, name="whole"), recipe("grpo", rare, name="killed")
    children.run(whole)
    kills = children.run_with_kills(killed, kills=3, seed=5)
    assert kills and max(kills) > 3, "no kill came between two checkpoints, so nothing was tried"
    assert measured(Path(killed.run_dir)) == measured(Path(whole.run_dir))


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    recipe: Recipe, children: Any, measured: Measured
) -> None:
    never = "checkpoint.every_n_steps=0"
    whole, killed = recipe("grpo", never, name="whole"), recipe("grpo", never, name="killed")
    children.run(whole)
    kills = children.run_with_kills(killed, kills=1, seed=7)
    assert kills and 0 < kills[0] < 12
    assert measured(Path(killed.run_dir)) == measured(Path(whole.run_dir))

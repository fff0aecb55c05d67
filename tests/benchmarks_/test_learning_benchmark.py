"""benchmarks/learning.py: runs are kept once, and tables are made of what is kept."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fork_server
import pytest

from burnish.rollout.runner import Rollout
from burnish.rollout.source import SyncSource
from burnish.types import Stats

ROOT = Path(__file__).parents[2]


def learning(*words: str) -> subprocess.CompletedProcess[str]:
    """``python benchmarks/learning.py WORDS``."""
    return subprocess.run(
        [fork_server.interpreter(), str(ROOT / "benchmarks" / "learning.py"), *words],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def write_runs(path: Path) -> None:
    """Two seeds of one algorithm; the later seed was finished first."""
    with path.open("w", encoding="utf-8") as file:
        for seed, last in ((1, 0.6), (0, 0.5)):
            lines = [
                {"step": 5 * i, "samples": 320 * i, "cpu_s": 40.0 * i, "accuracy": a}
                for i, a in enumerate((0.1, 0.3, last))
            ]
            run = {"task": "chain_sum", "name": "grpo", "seed": seed, "lines": lines}
            file.write(json.dumps({**run, "rewards": []}) + "\n")


def test_a_table_has_the_mean_and_the_range_over_the_seeds(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs.jsonl")
    done = learning("--out", str(tmp_path / "runs.jsonl"), "table")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| grpo"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "grpo", "2", "0.100", "0.300", "0.550 (0.500 to 0.600)", "640", "80.0",
    ]  # fmt: skip


def test_existing_runs_are_not_repeated(tmp_path: Path) -> None:
    kept = tmp_path / "runs.jsonl"
    write_runs(kept)
    before = kept.read_bytes()
    words = ("run", "--task", "chain_sum", "--names", "grpo", "--seeds", "0", "1")
    done = learning("--out", str(kept), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and kept.read_bytes() == before


def test_stale_samples_have_a_row_per_age_and_a_column_per_correction(tmp_path: Path) -> None:
    """Mean accuracy of the second half of the steps: (0.5 + 0.7) / 2 and (0.8 + 1.0) / 2."""
    path = tmp_path / "runs.jsonl"
    run = {"task": "staleness_sort", "case": "usual", "seed": 0, "kl": [0.0, 0.2]}
    with path.open("w", encoding="utf-8") as file:
        for weights, values in (("none", (0.1, 0.3, 0.5, 0.7)), ("token", (0.1, 0.3, 0.8, 1.0))):
            lines = [{"step": i, "accuracy": a} for i, a in enumerate(values, 1)]
            found = {"name": weights, "age": 8, "weights": weights, "correction_frac": [0, 0.05]}
            file.write(json.dumps(run | found | {"lines": lines}) + "\n")
    done = learning("--out", str(path), "table")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| usual"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["usual", "8", "1", "0.600", "0.900", "0.200", "5.0%"]


def test_a_fixed_age_trains_every_prompt_in_order_with_weights_of_that_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Age 2, two optimizer steps per RL step: steps 1 to 3 train rollouts of version 0 (ages 0, 1,
    2), step 4 one of version 2 (1 RL step), step 5 one of version 4."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from learning_fixed_age import FixedAge

    versions, sampled = [0], itertools.count()

    class Sampler:
        def fill(self, next_prompts: object, count: int) -> Rollout:
            return Rollout((), Stats(sums={"number": next(sampled), "version": versions[0]}))

    prompts = SimpleNamespace(next=None)
    inner = SyncSource(cast(Any, prompts), cast(Any, Sampler()), cast(Any, None), groups_per_step=1)
    source = FixedAge(inner, 2, steps=5, version=lambda: versions[0])
    found = []
    for step in range(1, 6):
        rollout = source.next(step)
        stats = rollout.stats.floats()
        assert rollout.ages is not None
        found.append((stats["number"], stats["version"], rollout.ages[int(stats["version"])]))
        versions[0] += 2
    assert found == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 2, 2), (4, 4, 2)]
    assert next(sampled) == 5

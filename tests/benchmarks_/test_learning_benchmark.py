"""benchmarks/learning.py: runs are kept once, and tables are made of what is kept."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import fork_server

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

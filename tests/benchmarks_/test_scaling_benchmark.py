"""benchmarks/scaling.py with small numbers: it runs, and the controller does what it says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import fork_server
import pytest

from burnish.rollout.base import Request
from burnish.runtime.ray.rollout_engine import _shares
from burnish.runtime.ray.rollout_worker import ANSWERS_PER_S, answer_seconds

ROOT = Path(__file__).parents[2]


def benchmark(*args: str) -> str:
    done = subprocess.run(
        [fork_server.interpreter(), str(ROOT / "benchmarks" / "scaling.py"), *args],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_table_has_a_column_per_number_of_workers_and_the_share_of_a_step() -> None:
    printed = benchmark("--samples", "160", "--workers", "1", "7", "--step-s", "10")
    table = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:2] == "| "]
    assert table[0] == ["workers", "1", "7"]
    assert "share of a step of 10 s" in printed
    rows = {row[0]: row[1:] for row in table[2:]}
    assert {len(cells) for cells in rows.values()} == {2}
    stages = [r for r in rows if not r.startswith(("(", "controller", "share"))]
    assert len(stages) == 8
    for column in range(2):
        total = sum(float(rows[stage][column].split()[0]) for stage in stages)
        # every cell is rounded to 0.01
        assert float(rows["controller, all"][column].split()[0]) == pytest.approx(total, abs=0.05)


@pytest.mark.slow
def test_it_runs_on_real_ray_processes() -> None:
    pytest.importorskip("ray")
    assert "Ray with 2 processes" in benchmark("--samples", "80", "--workers", "5", "--ray", "2")


def test_requests_go_to_the_least_loaded_worker_most_expensive_first() -> None:
    """n = 5, 3, 3, 1 on two workers: 5 -> worker 0, 3 and 3 -> worker 1 (0, then 3 < 5), and the
    last to worker 0 (5 < 6): both end with 6."""
    requests = [Request(f"r{i}", (1,), n) for i, n in enumerate((3, 5, 1, 3))]
    shares = [[r.n for r in share] for share in _shares(requests, [0, 0])]
    assert shares == [[5, 1], [3, 3]]


def test_requests_go_to_the_worker_with_fewer_open_samples() -> None:
    requests = [Request(f"r{i}", (1,), 2) for i in range(3)]
    shares = [[r.n for r in share] for share in _shares(requests, [5, 0])]
    assert shares == [[], [2, 2, 2]]


def test_answers_of_all_workers_are_limited_per_second() -> None:
    for workers in (1, 10, 32, 100, 1000):
        shortest, longest = answer_seconds(workers)
        assert workers / shortest <= ANSWERS_PER_S and longest >= shortest
    assert 1000 / answer_seconds(1000)[0] == pytest.approx(ANSWERS_PER_S)
    assert answer_seconds(2) == (0.02, 0.25), "a turn is not delayed by more than that"

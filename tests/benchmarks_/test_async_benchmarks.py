"""benchmarks/async_throughput.py and async_simulator.py: the tables of given results."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import fork_server

ROOT = Path(__file__).parents[2]


def benchmark(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``python benchmarks/NAME WORDS``."""
    return subprocess.run(
        [fork_server.interpreter(), str(ROOT / "benchmarks" / name), *words],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def write_runs(path: Path) -> None:
    """One repeat of each kind: steps of 100 tokens in 2 s, 1 s and 1.6 s; sampling takes 0.8 s of
    the synchronous 2 s. The plan predicts 1.1 s for the asynchronous step."""
    lines = []
    for kind, step_s in (("sync", 2.0), ("async", 1.0), ("both", 1.6)):
        step = {"time/step_s": step_s, "time/rollout_s": 0.8, "rollout/tokens": 100.0}
        if kind == "async":
            step |= {"time/trainer_idle_frac": 0.03, "time/rollout_idle_frac": 0.1}
            step |= {"rollout/age_mean": 1.0, "rollout/age_max": 3.0}
        run = {"kind": kind, "sigma": 1.0, "balance": 1.0, "repeat": 0, "epochs": 3}
        run |= {"ahead": 2} if kind == "async" else {}
        lines.append({**run, "steps": [step, step], "latencies": [0.5, 2.0]})
    case = {"sigma": 1.0, "balance": 1.0, "ahead": 2, "repeat": 0}
    lines.append({"kind": "plan", **case, "predicted_s": 1.1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def cells(printed: str, begin: str) -> list[list[str]]:
    rows = [line for line in printed.splitlines() if line.startswith(begin)]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_throughput_is_compared_within_a_repeat_and_with_the_plan(tmp_path: Path) -> None:
    """Tokens per second: 100/2 = 50, 100/1 = 100, 100/1.6 = 62.5; ratios 2 and 1.6; training /
    sampling (2 - 0.8)/0.8 = 1.5."""
    write_runs(tmp_path / "runs.jsonl")
    done = benchmark("async_throughput.py", "--out", str(tmp_path / "runs.jsonl"), "table")
    assert done.returncode == 0, done.stderr
    speeds, detail = cells(done.stdout, "| 1 |")
    assert speeds == ["1", "2", "1.50", "1", "50", "100", "62", "2.00", "1.60"]
    assert detail == ["1", "2", "1", "3", "1.00", "3.0", "10.0", "1.00", "3", "1.10", "1.10"]


def test_measured_latencies_drive_the_simulator(tmp_path: Path) -> None:
    """With equal response times, a synchronous step is sampling, training and a load:
    1 + 1 + 0.05; an asynchronous one is limited by sampling and the load, 1 + 0.05: ratio 1.95."""
    write_runs(tmp_path / "runs.jsonl")
    times = tmp_path / "times.txt"
    words = ("latencies", "--sigma", "1", "--to", str(times))
    done = benchmark("async_throughput.py", "--out", str(tmp_path / "runs.jsonl"), *words)
    assert done.returncode == 0, done.stderr
    assert times.read_text(encoding="utf-8").split() == ["0.5", "2.0"]
    times.write_text("1\n1.0\n", encoding="utf-8")
    few = ("--workers", "2", "--stale", "1", "--balance", "1", "--steps", "10")
    done = benchmark("async_simulator.py", "--latencies", str(times), *few)
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout, "| 2 | 1 | times.txt |")[0][-1] == "1.95"


def test_a_file_without_positive_times_is_refused(tmp_path: Path) -> None:
    times = tmp_path / "times.txt"
    times.write_text("1.5\n-2\n", encoding="utf-8")
    done = benchmark("async_simulator.py", "--latencies", str(times))
    assert done.returncode == 1 and "not positive" in done.stderr

"""benchmarks/report_figure.py draws the curves of a run's report."""

import json
import os
import subprocess
from pathlib import Path

import fork_server

ROOT = Path(__file__).parents[2]


def draw(run: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [fork_server.interpreter(), ROOT / "benchmarks" / "report_figure.py", run, "--out", out],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def write_run(folder: Path, **more: float) -> Path:
    folder.mkdir()
    lines = [{"step": i, "time": 0.0, "reward/mean": i / 4, **more} for i in range(4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_the_same_metrics_give_the_same_bytes(tmp_path):
    run = write_run(tmp_path / "run", **{"eval/pass@1": 0.5, "train/entropy": 1.0})
    for name in ("one.svg", "two.svg"):
        assert draw(run, tmp_path / name).returncode == 0
    first, second = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert first == second and first.startswith(b"<?xml") and b"<dc:date>" not in first


def test_a_run_without_one_of_the_curves_is_rejected(tmp_path):
    done = draw(write_run(tmp_path / "run", **{"train/entropy": 1.0}), tmp_path / "out.svg")
    assert done.returncode == 1 and "has no metrics for: Held-out pass rate" in done.stderr
    assert not (tmp_path / "out.svg").exists()

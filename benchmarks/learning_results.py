"""The runs of ``learning.py``: processes that make them, and the file that keeps them (one JSON
object per line, append-only)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]


class Results:
    """The runs of a file. Several processes may add to it: a line is one write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self, task: str) -> list[Run]:
        """Return the runs of a task, by name and seed, whatever order they were made in."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        found = [run for run in map(json.loads, lines) if run["task"] == task]
        return sorted(found, key=lambda run: (run["name"], run["seed"]))

    def has(self, task: str, name: str, seed: int) -> bool:
        """Return whether this run is there."""
        return any(run["name"] == name and run["seed"] == seed for run in self.runs(task))

    def add(self, run: Run) -> None:
        """Keep a run: ``task``, ``name``, ``seed``, and what it measured."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(run).encode() + b"\n")


def run_in_process(out: Path, *words: str) -> None:
    """Call ``learning.py`` with ``words`` in a process of its own, which adds one run to ``out``.
    Raises SystemExit with its last output if it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = str(Path(__file__).with_name("learning.py"))
    done = subprocess.run(
        [sys.executable, script, "--out", str(out), *words],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and from least to most where they differ."""
    mean = statistics.fmean(values)
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return most if least == most else f"{mean:.{digits}f} ({least} to {most})"

"""Measure what a watched page and a tracker cost the training process: ``python
benchmarks/watch_cost.py [--pairs 6]``.

Pairs of runs of ``recipes/tiny_1_sft.yaml``: one alone, and one with TensorBoard, a server of
``burnish watch`` and its page open in Chromium. The figure is the ratio of user-CPU seconds of the
training process, its median over the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from watch_page import opened

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_1_sft.yaml"
STEPS = 200


def train(run_dir: Path, *settings: str) -> float:
    """Run the recipe; return the user-CPU seconds of its process."""
    command = [sys.executable, "-m", "burnish", "sft", str(RECIPE), f"run_dir={run_dir}"]
    command += [f"max_steps={STEPS}", "max_epochs=null", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=environment, cwd=RECIPE.parents[1]
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {' '.join(command)} failed")
    return usage.ru_utime


@contextmanager
def page_of(root: Path) -> Iterator[None]:
    """Keep a page of the run open."""
    with opened(root) as chromium:
        chromium.page.goto(f"{chromium.address}/#/run?run=run")
        yield


def main() -> None:
    """Print the ratio of every pair and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    ratios = []
    for pair in range(parser.parse_args().pairs):
        seconds = {}
        for is_watched in (False, True) if pair % 2 else (True, False):  # first equally often
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                settings = []
                if is_watched:
                    stack.enter_context(page_of(Path(folder)))
                    settings = ["observe.tensorboard=true"]
                seconds[is_watched] = train(Path(folder) / "run", *settings)
        ratios.append(seconds[True] / seconds[False])
        print(f"alone {seconds[False]:.2f} s, watched {seconds[True]:.2f} s, {ratios[-1]:.4f}")
    print(f"median {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()

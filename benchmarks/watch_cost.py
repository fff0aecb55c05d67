"""Measure what a watched page and a tracker cost the training process: ``python
benchmarks/watch_cost.py [--settings train.train_batch_size=64]``.

A run of ``recipes/tiny_1_sft.yaml`` with TensorBoard, a server of ``burnish watch``, and its page
open in Chromium. Every other block of steps is not watched: its steps are not given to the tracker,
and the server is stopped (SIGSTOP). A block and the next one are a pair. The figure is the ratio of
user-CPU seconds of the training process, its median over the pairs. Startup is not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from watch_page import opened

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_1_sft.yaml"


def train(words: list[str], *, server: int, block: int, control: bool) -> None:
    """Run the recipe, and print the seconds of its blocks. ``control``: all blocks are watched."""
    from burnish.cli import main as burnish
    from burnish.driver.trainer import Trainer
    from burnish.observe.tracker import TrackerQueue

    trainers: Any = Trainer
    queues: Any = TrackerQueue
    step, log = trainers._step, queues.log
    seconds: dict[bool, list[float]] = {False: [], True: []}
    done, begun, is_watched = 0, 0.0, True

    def timed_step(trainer: Trainer, loop: Any) -> None:
        nonlocal done, begun, is_watched
        step(trainer, loop)
        done += 1
        if done % block:
            return
        now = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        if done > 2 * block:  # the first pair is not counted
            seconds[is_watched].append(now - begun)
        is_watched = not is_watched
        os.kill(server, signal.SIGCONT if is_watched or control else signal.SIGSTOP)
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime

    def watched_log(queue: TrackerQueue, number: int, metrics: Mapping[str, float]) -> None:
        if is_watched or control:
            log(queue, number, metrics)

    trainers._step, queues.log = timed_step, watched_log
    sys.argv = ["burnish", *words]
    try:
        burnish()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        os.kill(server, signal.SIGCONT)
    pairs = list(zip(seconds[True], seconds[False], strict=False))
    ratios = [watched / alone for watched, alone in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    per_step_ms = 1000 * statistics.median(alone for _, alone in pairs) / block
    more_ms = 1000 * statistics.median(watched - alone for watched, alone in pairs) / block
    print(
        f"{len(pairs)} pairs of {block} steps of {per_step_ms:.0f} ms: median "
        f"{statistics.median(ratios):.4f} (quartiles {quarters[0]:.4f} to {quarters[2]:.4f}), "
        f"{more_ms:+.2f} ms per step",
        file=sys.stderr,
    )


def main() -> None:
    """Print the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=10, help="steps")
    parser.add_argument("--settings", nargs="*", default=[], help="other keys of the recipe")
    parser.add_argument("--control", action="store_true", help="watch all blocks: the noise")
    parser.add_argument("--train", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, server=options.server, block=options.block, control=options.control)
        return
    steps = 2 * options.block * (options.pairs + 1)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as chromium:
        chromium.page.goto(f"{chromium.address}/#/run?run=run")
        words = ["sft", str(RECIPE), f"run_dir={folder}/run", f"max_steps={steps}"]
        words += ["max_epochs=null", "observe.tensorboard=true", "eval=null", *options.settings]
        command = [sys.executable, __file__, "--server", str(chromium.pid)]
        command += ["--control"] * options.control
        command += ["--block", str(options.block), "--train", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=RECIPE.parents[1]
        )


if __name__ == "__main__":
    main()

"""Asynchronous runs under SIGKILL and SIGSTOP: every prompt is trained exactly once per epoch, and
no token is older than the bound, whatever was running, finished or on its way to an engine at that
moment.

On Ray, a rollout worker, the trainer and the controller are killed, and a rollout worker is stopped
(it hangs). ``BURNISH_ASYNC_KILLS=40 pytest tests/faults/test_async_killed.py`` does this 40 times
instead of four, with each kind of weight transfer in turn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from burnish.config import JobConfig
from burnish.observe.samples import read_samples

pytestmark = pytest.mark.slow

STALE = 2
KILLS = int(os.environ.get("BURNISH_ASYNC_KILLS", "4"))
PER_RUN = 4
ON_RAY = [range(i, min(i + PER_RUN, KILLS)) for i in range(0, KILLS, PER_RUN)]
VICTIMS = ("RolloutWorker", "TrainWorker", "controller", "hung RolloutWorker")
SYNCS = ("object_store", "collective", "ipc", "disk")
ASYNC = (
    f"rollout.asynchronous.max_staleness={STALE}",
    "rollout.asynchronous.oversample=1.5",
    "algorithm.correction={}",
    "checkpoint.every_n_steps=2",
)

Recipe = Callable[..., JobConfig]


def check_conservation(run_dir: Path, steps: int) -> None:
    """``steps`` steps of 4 of 24 prompts, 4 samples each: each prompt of each epoch is in one step,
    and the ages reach at least 1 and at most the bound."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    ages = [line["rollout/age_max"] for line in lines]
    assert 1 <= max(ages) <= STALE
    samples = read_samples(run_dir)
    ids = Counter(sample["prompt_id"] for sample in samples)
    assert ids == {f"rows:{row}@{epoch}": 4 for row in range(24) for epoch in range(steps // 6)}
    assert len({(s["prompt_id"], s["step"]) for s in samples}) == 4 * steps
    assert Counter(s["step"] for s in samples) == dict.fromkeys(range(1, steps + 1), 16)


def test_every_prompt_is_trained_once_and_the_bound_holds_across_kills(
    recipe: Recipe, children: Any
) -> None:
    """In one process, with finished groups in the checkpoints and groups that are running."""
    config = recipe("grpo", *ASYNC, "max_steps=12", "rollout.engine.own_weights=true")
    seen = children.run_with_kills(config, kills=4, seed=1)
    assert len(seen) == 4, "the run ended before all kills were tried"
    assert max(seen) > 2, "no kill came after a checkpoint"
    check_conservation(Path(config.run_dir), 12)


class Moment:
    """A random moment: up to half a second after a number of new lines of the log."""

    def __init__(self, draw: random.Random, last: int) -> None:
        self.lines, self.delay, self.last = draw.randint(0, 3), draw.uniform(0, 0.5), last
        self.pick = draw.random()

    def wait(self, run_dir: Path, process: Any, workers: Callable[[], list[Any]]) -> None:
        """Wait until workers of the kind run, and the log has changed so often. A resume that
        rewinds the log is a change."""
        log, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        before, left = _number_of_lines(log), self.lines
        while process.is_alive() and time.monotonic() < deadline:
            now = _number_of_lines(log)
            left -= now != before
            before = now
            if (left <= 0 or now >= self.last) and workers():
                break
            time.sleep(0.01)
        time.sleep(self.delay)
        assert process.is_alive(), "the run ended before the kill"


def _number_of_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", ON_RAY, ids=str)
def test_runs_on_ray_survive_the_loss_of_any_process(  # house: ok fixtures
    kills: range,
    recipe: Recipe,
    children: Any,
    ray_cluster: Any,
    on_ray: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """24 steps, 4 epochs. A worker that is killed, or hangs for 6 s, is replaced; a controller that
    is killed is started again with ``resume``. There is one rollout worker, or two."""
    steps, run = 24, kills.start // PER_RUN
    ray = (*on_ray, "cluster.policy_ranks=1", "cluster.layout=separate", "cluster.max_restarts=8")
    ray = (*ray, "cluster.heartbeat_timeout_s=6", f"cluster.rollout_workers={1 + run % 2}")
    sync = f"sync={{kind: {SYNCS[run % 4]}, timeout_s: 20}}"
    if SYNCS[run % 4] == "disk":
        sync = f"sync={{kind: disk, folder: {tmp_path / 'weights'}}}"
    config = recipe("grpo", *ASYNC, f"max_steps={steps}", *ray, sync)
    module = Path(config.model_dump()["rewards"][0]["function"].partition(":")[0])
    text = module.read_text(encoding="utf-8").replace(
        "    return", "    time.sleep(0.02)\n    return"
    )
    module.write_text("import time\n\n" + text, encoding="utf-8")  # a third of a second per step
    run_dir = Path(config.run_dir)
    process = children.start(config, environment=ray_cluster.environment)
    for kill in kills:
        kind = VICTIMS[kill % 4]
        of_kind = "" if kind == "controller" else kind.removeprefix("hung ")
        moment = Moment(random.Random(kill), steps - 4)
        moment.wait(run_dir, process, lambda of_kind=of_kind: ray_cluster.workers(of_kind))
        if kind != "controller":
            found: list[psutil.Process] = ray_cluster.workers(of_kind)
            found[int(moment.pick * len(found))].send_signal(
                signal.SIGSTOP if of_kind != kind else signal.SIGKILL
            )
            continue
        process.kill()
        process.join()
        ray_cluster.assert_nothing_is_left()
        resume = run_dir if (run_dir / "config.yaml").is_file() else None
        process = children.start(config, resume=resume, environment=ray_cluster.environment)
    process.join(300)
    assert process.exitcode == 0
    check_conservation(run_dir, steps)
    ray_cluster.assert_nothing_is_left()

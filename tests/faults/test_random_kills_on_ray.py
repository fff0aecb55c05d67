"""A run on Ray that loses rollout workers, ranks and its controller at random moments ends with the
numbers of a run that lost nothing, every prompt trained once an epoch, and leaves nothing.

Each run loses up to four processes, one after the other. ``BURNISH_FAULT_RUNS=5 pytest
tests/faults/test_random_kills_on_ray.py`` repeats this with other moments.
"""

from __future__ import annotations

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = int(os.environ.get("BURNISH_FAULT_RUNS", "1"))
LOSSES = (
    ("RolloutWorker", signal.SIGKILL),
    ("TrainWorker", signal.SIGKILL),
    ("controller", signal.SIGKILL),
    ("RolloutWorker", signal.SIGSTOP),
)
STEPS, PROMPTS, SAMPLES = 18, 4, 4

Recipe = Callable[..., JobConfig]


class Moment:
    """A random moment of a run: up to 8 s after its workers have appeared (they start, meet and
    load then), or up to half a second after one to four changes of its log."""

    def __init__(self, rng: random.Random) -> None:
        self.changes = 0 if rng.random() < 0.3 else rng.randint(1, 4)
        self.delay = rng.uniform(0, 8.0) if self.changes == 0 else rng.uniform(0, 0.5)
        self.pick = rng.random()

    def wait(self, log: Path, process: Any, workers: Callable[[], list[Any]]) -> None:
        deadline, before, left = time.monotonic() + 300, _num_lines(log), self.changes
        while process.is_alive() and time.monotonic() < deadline:
            lines = _num_lines(log)
            left -= lines != before  # a rollback is a change
            before = lines
            if (left <= 0 or self._late(log)) and workers():
                break
            time.sleep(0.01)
        moment = time.monotonic() + self.delay
        while time.monotonic() < moment and not self._late(log):
            time.sleep(0.01)

    def _late(self, log: Path) -> bool:
        """Whether hardly any step is left to be disturbed, on a machine that is quick today."""
        return _num_lines(log) >= STEPS - 4

    def victim(self, found: list[psutil.Process]) -> psutil.Process:
        return found[int(self.pick * len(found))]


def _num_lines(log: Path) -> int:
    return len(log.read_bytes().splitlines()) if log.is_file() else 0


def _take_time(config: JobConfig) -> None:
    """Have the reward take 20 ms for each sample, a third of a second a step: on a quick machine
    the run would be over before a moment of it is there."""
    module = Path(config.model_dump()["rewards"][0]["function"].partition(":")[0])
    text = module.read_text(encoding="utf-8")
    later = "\n\nimport time\n\n\n_at_once = share_of_digits\n\n\n"
    later += "def share_of_digits(response):\n    time.sleep(0.02)\n    return _at_once(response)\n"
    module.write_text(text + later, encoding="utf-8")


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_that_loses_processes_has_unchanged_results(  # house: ok fixtures
    seed: int,
    recipe: Recipe,
    children: Any,
    ray_cluster: Any,
    on_ray: tuple[str, ...],
    same_numbers: Callable[[Path, Path], None],
) -> None:
    """18 steps x 4 prompts = 3 epochs of 24 rows; saved every second step."""
    common = (f"max_steps={STEPS}", "checkpoint.every_n_steps=2")
    whole = recipe("grpo", *common, name="whole")
    children.run(whole)
    config = recipe("grpo", *common, *on_ray, "cluster.max_restarts=8", name="disturbed")
    _take_time(config)
    run_dir, rng = Path(config.run_dir), random.Random(seed)
    process = children.start(config, environment=ray_cluster.environment)
    for kind, number in LOSSES:
        of_kind = "" if kind == "controller" else kind
        moment = Moment(rng)
        moment.wait(run_dir / "metrics.jsonl", process, lambda of=of_kind: ray_cluster.workers(of))
        assert process.is_alive(), "the run was over before everything was tried"
        if kind != "controller":
            os.kill(moment.victim(ray_cluster.workers(kind)).pid, number)
            continue
        process.kill()
        process.join()
        ray_cluster.assert_nothing_is_left()
        resume = run_dir if (run_dir / "config.yaml").is_file() else None
        process = children.start(config, resume=resume, environment=ray_cluster.environment)
    process.join(300)
    assert process.exitcode == 0
    same_numbers(Path(whole.run_dir), run_dir)
    ids = Counter(sample["prompt_id"] for sample in read_samples(run_dir))
    assert ids == {f"rows:{row}@{epoch}": SAMPLES for row in range(24) for epoch in range(3)}
    assert "; replaced (" in (run_dir / "run.log").read_text()
    ray_cluster.assert_nothing_is_left()

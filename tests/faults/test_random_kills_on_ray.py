"""A run on Ray that loses a rollout worker, a rank or its controller at a random moment ends with
the numbers of a run that lost nothing, every prompt trained once an epoch, and leaves nothing.

``BURNISH_FAULT_RUNS=20 pytest tests/faults/test_random_kills_on_ray.py`` is the whole proof: that
many SIGKILLs, victims in turn, and a fourth as many SIGSTOPs in addition. Otherwise a few of each.
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

RUNS = int(os.environ.get("BURNISH_FAULT_RUNS", "3"))
VICTIMS = ("RolloutWorker", "TrainWorker", "controller")
KILLS = [(VICTIMS[i % 3], signal.SIGKILL, i) for i in range(RUNS)]
STOPS = [(VICTIMS[i % 2], signal.SIGSTOP, 100 + i) for i in range(max(1, RUNS // 4))]
STEPS, PROMPTS, SAMPLES = 12, 4, 4

Recipe = Callable[..., JobConfig]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the undisturbed run is, once there is one."""
    return {}


class Moment:
    """A random moment of a run: up to 8 s after its workers have appeared (they start, meet and
    load then), or up to half a second after a random line of its log."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.line = 0 if rng.random() < 0.3 else rng.randint(1, STEPS - 4)
        self.delay = rng.uniform(0, 8.0) if self.line == 0 else rng.uniform(0, 0.5)
        self.pick = rng.random()

    def wait(self, run_dir: Path, process: Any, workers: Callable[[], list[Any]]) -> None:
        log = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while process.is_alive() and time.monotonic() < deadline:
            lines = len(log.read_bytes().splitlines()) if log.is_file() else 0
            if lines >= self.line and workers():
                break
            time.sleep(0.01)
        moment = time.monotonic() + self.delay
        while time.monotonic() < moment and not self._late(log):
            time.sleep(0.01)

    def _late(self, log: Path) -> bool:
        """Whether hardly any step is left to be disturbed, on a machine that is quick today."""
        return log.is_file() and len(log.read_bytes().splitlines()) >= STEPS - 4

    def victim(self, found: list[psutil.Process]) -> psutil.Process:
        return found[int(self.pick * len(found))]


def _take_time(config: JobConfig) -> None:
    """Have the reward take 20 ms for each sample, a third of a second a step: on a quick machine
    the run would be over before a moment of it is there."""
    module = Path(config.model_dump()["rewards"][0]["function"].partition(":")[0])
    text = module.read_text(encoding="utf-8")
    later = "\n\nimport time\n\n\n_at_once = share_of_digits\n\n\n"
    later += "def share_of_digits(response):\n    time.sleep(0.02)\n    return _at_once(response)\n"
    module.write_text(text + later, encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "number", "seed"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].name}-{case[2]}") for case in [*KILLS, *STOPS]],
)
def test_a_run_that_loses_a_process_has_unchanged_results(  # house: ok fixtures
    kind: str,
    number: signal.Signals,
    seed: int,
    recipe: Recipe,
    children: Any,
    ray_cluster: Any,
    on_ray: tuple[str, ...],
    expected: dict[str, Path],
    same_numbers: Callable[[Path, Path], None],
) -> None:
    """12 steps x 4 prompts = 2 epochs of 24 rows; saved every second step."""
    common = (f"max_steps={STEPS}", "checkpoint.every_n_steps=2")
    if "whole" not in expected:
        whole = recipe("grpo", *common, name="whole")
        children.run(whole)
        expected["whole"] = Path(whole.run_dir)
    config = recipe("grpo", *common, *on_ray, name="disturbed")
    _take_time(config)
    run_dir = Path(config.run_dir)
    process = children.start(config, environment=ray_cluster.environment)
    of_kind = "" if kind == "controller" else kind
    moment = Moment(seed)
    moment.wait(run_dir, process, lambda: ray_cluster.workers(of_kind))
    assert process.is_alive(), "the run was over before anything was tried"
    if kind == "controller":
        process.kill()
        process.join()
        ray_cluster.assert_nothing_is_left()
        resume = run_dir if (run_dir / "config.yaml").is_file() else None
        process = children.start(config, resume=resume, environment=ray_cluster.environment)
    else:
        os.kill(moment.victim(ray_cluster.workers(kind)).pid, number)
    process.join(300)
    assert process.exitcode == 0
    same_numbers(expected["whole"], run_dir)
    ids = Counter(sample["prompt_id"] for sample in read_samples(run_dir))
    assert ids == {f"rows:{row}@{epoch}": SAMPLES for row in range(24) for epoch in range(2)}
    if kind != "controller":
        assert "replaced (1 of 3)" in (run_dir / "run.log").read_text() or moment.line == 0
    ray_cluster.assert_nothing_is_left()

"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.config import ConfigError, JobConfig
from burnish.observe.metrics import read_metrics
from burnish.train.torch import TorchTrainEngine

MakeConfig = Callable[..., JobConfig]
BACKGROUND = ["checkpoint.in_background=true", "train.engine.sharding=full"]
EVERY_2 = ["max_steps=6", "checkpoint.every_n_steps=2", "checkpoint.keep_last=9"]


class Slow:
    """A save that is whole only when it is told to end, or fails with ``error``."""

    def __init__(self, error: OSError | None) -> None:
        self.error = error
        self.end = threading.Event()

    @property
    def done(self) -> bool:
        return self.end.is_set()

    def wait(self) -> None:
        self.end.set()  # whoever waits has nothing better to do
        if self.error is not None:
            raise self.error


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    """The engine's saves, each of which goes on until somebody waits for it."""
    found: list[Slow] = []

    def save_async(engine: TorchTrainEngine, folder: Path) -> Slow:
        engine.save(folder)
        found.append(Slow(None))
        return found[-1]

    monkeypatch.setattr(TorchTrainEngine, "save_async", save_async)
    return found


def steps_of(run_dir: Path | str) -> list[str]:
    return sorted(path.name for path in (Path(run_dir) / "checkpoints").glob("step_*"))


def watching(run_dir: str, seen: list[list[str]], before: Callable[[int], None]) -> Any:
    """A batch reward that looks at the checkpoints in every step, after ``before(step)``."""

    def score(responses: list[str]) -> list[float]:
        before(len(seen) + 1)
        seen.append(steps_of(run_dir))
        return [sum(c.isdigit() for c in r) / 4 for r in responses]

    return score


def test_a_checkpoint_counts_at_the_end_of_the_step_in_which_it_is_whole(
    rl: MakeConfig, saves: list[Slow]
) -> None:
    config = rl(*BACKGROUND, *EVERY_2)
    seen: list[list[str]] = []

    def end_the_first_in_step_3(step: int) -> None:
        if step == 3:
            saves[0].end.set()

    reward = watching(config.run_dir, seen, end_the_first_in_step_3)
    burnish.run(config, rewards=reward)
    assert seen[2] == [], "begun at the end of step 2, written during step 3"
    assert seen[3] == ["step_000002"]
    assert seen[4] == ["step_000002"], "the save of step 4 is under way"
    assert steps_of(config.run_dir) == [f"step_00000{n}" for n in (2, 4, 6)]
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", keep_last=9, best_mode="max")
    assert store.latest() == store.folder / "step_000006"


def test_a_run_that_resumes_from_such_a_checkpoint_measures_the_same(
    rl: MakeConfig, reward: Any, saves: list[Slow], tmp_path: Path
) -> None:
    def losses(run_dir: Path) -> list[float]:
        return [line["train/loss"] for line in read_metrics(run_dir)]

    whole = burnish.run(rl(*EVERY_2, f"run_dir={tmp_path / 'whole'}"), rewards=reward).run_dir
    config = rl(*BACKGROUND, *EVERY_2)
    seen: list[list[str]] = []

    def crash_in_step_5(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        burnish.run(config, rewards=watching(config.run_dir, seen, crash_in_step_5))
    assert steps_of(config.run_dir) == ["step_000002"], "of step 4's, only a part is written"
    burnish.run(config, rewards=reward, resume=Path(config.run_dir))
    assert losses(Path(config.run_dir)) == losses(whole)


def test_a_signal_ends_the_run_with_a_checkpoint_that_is_whole(
    rl: MakeConfig, saves: list[Slow]
) -> None:
    config = rl(*BACKGROUND, *EVERY_2)

    def stop_in_step_3(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(burnish.Interrupted):
        burnish.run(config, rewards=watching(config.run_dir, [], stop_in_step_3))
    assert steps_of(config.run_dir) == ["step_000002", "step_000003"]


def test_a_save_that_fails_ends_the_run_and_leaves_the_earlier_ones(
    rl: MakeConfig, saves: list[Slow]
) -> None:
    config = rl(*BACKGROUND, *EVERY_2)

    def fail_the_second(step: int) -> None:
        if step == 5:
            saves[1].error = OSError("no space left")
            saves[1].end.set()

    with pytest.raises(CheckpointError, match=r"step_000004 could not be written: no space left"):
        burnish.run(config, rewards=watching(config.run_dir, [], fail_the_second))
    assert steps_of(config.run_dir) == ["step_000002"]
    assert [path.name for path in (Path(config.run_dir) / "checkpoints").iterdir()] == [
        "step_000002"
    ]


@pytest.mark.parametrize(
    "engine", [[], ["train.engine.kind=deepspeed"]], ids=["replicas", "deepspeed"]
)
def test_an_engine_whose_first_rank_writes_for_all_is_refused(
    rl: MakeConfig, engine: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"in_background=true with an engine whose rank 0"):
        rl("checkpoint.in_background=true", *engine)

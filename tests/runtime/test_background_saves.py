"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.config import ConfigError, JobConfig
from burnish.driver.errors import RunError
from burnish.driver.trainer import Trainer
from burnish.observe.metrics import read_metrics
from burnish.rewards.base import RewardError
from burnish.runtime.base import WorkerLostError
from burnish.runtime.inline import InlineRuntime
from burnish.train.torch.engine import TorchTrainEngine
from burnish.user_calls import UserCalls

MakeConfig = Callable[..., JobConfig]
FULL = "train.engine.sharding=full"
EVERY_2 = ["max_steps=6", "checkpoint.every_n_steps=2", "checkpoint.keep_last=9"]


def in_background(config: JobConfig) -> JobConfig:
    """A recipe for one rank, whose engine saves as the test says, with the setting that is refused
    for one rank."""
    checkpoint = config.checkpoint.model_copy(update={"in_background": True})  # type: ignore[union-attr]
    return config.model_copy(update={"checkpoint": checkpoint})


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
    config = in_background(rl(*EVERY_2))
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
    rl: MakeConfig,
    reward: Any,
    saves: list[Slow],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reward ends the run like a kill: calls of the user's code would make an error of it."""
    monkeypatch.setattr(UserCalls, "run", lambda _, function, *arguments: function(*arguments))

    def losses(run_dir: Path) -> list[float]:
        return [line["train/loss"] for line in read_metrics(run_dir)]

    whole = burnish.run(rl(*EVERY_2, f"run_dir={tmp_path / 'whole'}"), rewards=reward).run_dir
    config = in_background(rl(*EVERY_2))
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
    config = in_background(rl(*EVERY_2))

    def stop_in_step_3(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(burnish.Interrupted):
        burnish.run(config, rewards=watching(config.run_dir, [], stop_in_step_3))
    assert steps_of(config.run_dir) == ["step_000002", "step_000003"]


def test_a_save_that_fails_ends_the_run_and_leaves_the_earlier_ones(
    rl: MakeConfig, saves: list[Slow]
) -> None:
    config = in_background(rl(*EVERY_2))

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
    ("settings", "why"),
    [
        pytest.param([], "train.engine.sharding=none: rank 0 writes", id="replicas"),
        pytest.param(
            ["train.engine.kind=deepspeed"],
            "train.engine.kind=deepspeed: the ranks gather every tensor",
            id="deepspeed",
        ),
        pytest.param([FULL], "one rank, whose state is not sharded", id="inline"),
        pytest.param([FULL, "cluster.runtime=ray"], "one rank, whose", id="one rank on Ray"),
    ],
)
def test_where_nothing_is_written_in_the_background_it_is_refused(
    rl: MakeConfig, settings: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"in_background=true .*with {why}"):
        rl("checkpoint.in_background=true", *settings)


def test_ranks_in_shards_may_write_in_the_background(rl: MakeConfig) -> None:
    ranks = ["cluster.runtime=ray", "cluster.policy_ranks=2", "rollout.rollout_batch_size=4"]
    assert rl("checkpoint.in_background=true", FULL, *ranks) is not None


def test_what_is_being_written_when_a_step_fails_is_whole_before_the_workers_go(
    rl: MakeConfig, saves: list[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    wait, close = Slow.wait, InlineRuntime.close

    def waited(save: Slow) -> None:
        order.append("written")
        wait(save)

    def closed(runtime: InlineRuntime) -> None:
        order.append("closed")
        close(runtime)

    monkeypatch.setattr(Slow, "wait", waited)
    monkeypatch.setattr(InlineRuntime, "close", closed)
    config = in_background(rl(*EVERY_2))

    def fail_in_step_3(step: int) -> None:
        if step == 3:
            raise LookupError("the grader's database is gone")

    with pytest.raises(RewardError, match="database is gone"):
        burnish.run(config, rewards=watching(config.run_dir, [], fail_in_step_3))
    assert order == ["written", "closed"]
    assert steps_of(config.run_dir) == ["step_000002"]


class Lost:
    """A save whose workers have gone."""

    done = False

    def wait(self) -> None:
        raise WorkerLostError("rank 0 of the policy died")


@pytest.fixture
def recoveries(rl: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> list[WorkerLostError]:
    """Recoveries of a run whose lost workers come back with the weights of its beginning."""
    found: list[WorkerLostError] = []
    start: dict[str, torch.Tensor] = {}
    run = Trainer.run

    def with_recovery(trainer: Trainer, loop: Any) -> Any:
        weights = dict(loop.run.policy.model.named_parameters())
        start.update({name: weight.detach().clone() for name, weight in weights.items()})

        def recover(error: WorkerLostError) -> None:
            found.append(error)
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(start[name])

        trainer.recover = recover
        return run(trainer, loop)

    monkeypatch.setattr(Trainer, "run", with_recovery)
    return found


def test_workers_lost_in_the_first_save_are_replaced_before_the_first_step(
    rl: MakeConfig, reward: Any, recoveries: list[WorkerLostError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the workers are gone before the first checkpoint is whole, there is none to go back to;
    so no step is made before."""
    saves: list[Slow | Lost] = []

    def save_async(engine: TorchTrainEngine, folder: Path) -> Slow | Lost:
        engine.save(folder)
        saves.append(Slow(None) if saves else Lost())
        return saves[-1]

    monkeypatch.setattr(TorchTrainEngine, "save_async", save_async)
    config = in_background(rl(*EVERY_2))
    seen: list[list[str]] = []
    burnish.run(config, rewards=watching(config.run_dir, seen, lambda step: None))
    assert len(recoveries) == 1
    assert len(seen) == 6 and seen[0] == ["step_000000"]
    assert [line["step"] for line in read_metrics(Path(config.run_dir))] == list(range(1, 7))


def test_without_a_checkpoint_to_go_back_to_the_run_ends(
    rl: MakeConfig, recoveries: list[WorkerLostError]
) -> None:
    config = rl(*EVERY_2)

    def lose_all(step: int) -> None:
        if step == 2:
            for checkpoint in (Path(config.run_dir) / "checkpoints").glob("step_*"):
                shutil.rmtree(checkpoint)
            raise WorkerLostError("rank 0 of the policy died")

    with pytest.raises(RunError, match=r"no checkpoint to restore after the failure at step 1"):
        burnish.run(config, rewards=watching(config.run_dir, [], lose_all))

"""The loop of jobs that learn from a stream of rows: one batch, one update. sft.py,
reward_model.py and preference.py differ in the data and in the loss only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from burnish.checkpoint.state import EXPORT_METADATA, load_state, save_state
from burnish.config.job import SupervisedJob
from burnish.data.preference import PreferenceStream
from burnish.data.sft import SFTStream
from burnish.data.steps import StepsStream
from burnish.data.unpaired import UnpairedStream
from burnish.jobs.base import Functions, Job, Loop, Metrics
from burnish.jobs.degenerate import Finding, NoSignalMonitor
from burnish.jobs.memory_monitor import MemoryMonitor
from burnish.jobs.saving import save_engines
from burnish.jobs.trainer import Trainer
from burnish.jobs.updates import Updates
from burnish.runtime.base import Runtime
from burnish.train.base import Loss, TrainEngine
from burnish.types import Batch, PendingSave, Stats


@dataclass(frozen=True)
class Supervised:
    """The parts of a supervised run."""

    stream: SFTStream | PreferenceStream | UnpairedStream | StepsStream
    engine: TrainEngine
    loss: Loss
    total_steps: int
    batch_size_at: Callable[[int], int]
    """Rows (or pairs) of an optimizer step; the first is 1."""
    measure: Callable[[TrainEngine, Batch], Stats]
    """What evaluation measures on held-out rows, without gradient."""
    eval_batch: Batch | None = None
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    """What a batch needs before its update (preferences: the reference's log-probs)."""
    signal: NoSignalMonitor = field(default_factory=lambda: NoSignalMonitor(None))
    """Counts steps that teach nothing."""
    look: Callable[[Batch], Finding] | None = None
    """Which units of a batch teach nothing. None: all teach."""
    export_metadata: Mapping[str, Any] | None = None
    """What exports write into the model's config, beside what evaluation measured."""


def supervised_step(run: Supervised, step: int) -> Metrics:
    """One batch, one update."""
    batch = run.prepare(run.stream.next(run.batch_size_at(step)).with_global_counts())
    updates = Updates()
    updates.add("train", run.engine.forward_backward(batch, run.loss))
    updates.step("train", run.engine)
    counts = {f"data/{name}": float(value) for name, value in run.stream.counts.items()}
    tokens = {"train/tokens": float(batch.tokens.numel())}
    signal = {} if run.look is None else run.signal.see(run.look(batch))
    return run.signal.checked(updates.checked(updates.metrics() | counts | tokens | signal))


def supervised_eval(run: Supervised) -> Metrics:
    """Return the measures of the held-out rows; nothing if there are none."""
    if run.eval_batch is None:
        return {}
    return run.measure(run.engine, run.eval_batch).floats("eval/")


class SupervisedState:
    """State of a supervised run in its checkpoints. Implements ``base.State``."""

    def __init__(self, run: Supervised) -> None:
        self.run, self.role = run, run.engine.role

    @property
    def num_bytes(self) -> int:
        """About how many bytes a checkpoint takes."""
        return int(1.02 * self.run.engine.state_bytes) + (16 << 20)

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.run.engine.version

    def position(self) -> dict[str, Any]:
        """The position in the data."""
        return self.run.stream.state_dict()

    def save(
        self, folder: Path, position: Mapping[str, Any], *, in_background: bool = False
    ) -> Sequence[PendingSave]:
        """Write the model and ``position``."""
        named = {folder / self.role: self.run.engine}
        pending = save_engines(named, in_background=in_background)
        save_state(folder, "data", position)
        if self.run.export_metadata is not None:
            save_state(folder, EXPORT_METADATA, self.run.export_metadata)
        return pending

    def load(self, folder: Path) -> None:
        """Take back what :meth:`save` wrote."""
        self.run.engine.load(folder / self.role)
        self.run.stream.load_state_dict(load_state(folder, "data"))


class SupervisedLoop:
    """The loop of a supervised run. Implements ``base.Loop``."""

    best_metric = "eval/loss"

    def __init__(self, run: Supervised, *, eval_every_n_steps: int) -> None:
        self.run, self.state = run, SupervisedState(run)
        self.total_steps, self.eval_every_n_steps = run.total_steps, eval_every_n_steps

    def step(self, number: int) -> Metrics:
        """Do one batch and one update."""
        return supervised_step(self.run, number)

    def evaluate(self, number: int) -> Metrics:
        """Measure the held-out rows, if there are any."""
        return supervised_eval(self.run)

    def close(self) -> None:
        """Log how many steps taught nothing."""
        self.run.signal.log_total()


S = TypeVar("S", bound=SupervisedJob)


@dataclass(frozen=True)
class SupervisedTraining(Job[S, Loop]):
    """A job that learns from given rows: its config class and how its parts are built."""

    config_class: type[S]
    build_parts: Callable[[S, Runtime, Path], Supervised]

    def driver(self, config: S, run_dir: Path, memory_monitor: MemoryMonitor) -> Trainer:
        return Trainer(config, run_dir, memory_monitor)

    def build(self, config: S, runtime: Runtime, *, run_dir: Path, functions: Functions) -> Loop:
        run = self.build_parts(config, runtime, run_dir)
        return SupervisedLoop(run, eval_every_n_steps=config.eval_every_n_steps)

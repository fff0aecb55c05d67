"""Training loop of jobs that learn from a stream of rows: one batch and one update per step.
``jobs/sft.py``, ``jobs/reward_model.py``, ``jobs/preference.py`` and ``jobs/distill.py`` supply the
data, the loss and the batch preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from burnish.checkpoint.save import PendingSave
from burnish.checkpoint.state import EXPORT_METADATA, load_state, save_state
from burnish.config.eval_section import eval_prefix
from burnish.config.job import SupervisedJob
from burnish.data.batches import BatchStream
from burnish.driver.base import EvalTimes, Functions, Job, Loop, Metrics, Usable, save_engines
from burnish.driver.memory_monitor import MemoryMonitor
from burnish.driver.trainer import Trainer
from burnish.runtime.base import Runtime
from burnish.steps.moving_reference import MovingReference, load_reference
from burnish.steps.no_signal import NoSignalMonitor, StepSignal
from burnish.steps.updates import Updates
from burnish.train.base import Loss, TrainEngine
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class Supervised:
    """The components of a supervised run."""

    stream: BatchStream
    usable: Usable
    """Rows of the stream that can be used in one epoch."""
    engine: TrainEngine
    loss: Loss
    total_steps: int
    batch_size_at: Callable[[int], int]
    """Return the number of rows (or pairs) of an optimizer step; the first step is 1."""
    measure: Callable[[TrainEngine, Batch], Stats]
    """Measure held-out rows, without gradient."""
    eval_batches: Mapping[str, Batch] = field(default_factory=dict)
    """Held-out rows by the name of their set. The name of ``eval.data`` is empty."""
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    """Add the fields that a batch needs for its update (preferences: the reference's log-probs)."""
    moving: MovingReference | None = None
    """Updates of the reference with the policy's weights. None: it is frozen, or there is none."""
    signal: NoSignalMonitor = field(default_factory=lambda: NoSignalMonitor(None))
    """Counter of steps without learning signal."""
    signal_of: Callable[[Batch], StepSignal] | None = None
    """Count the units of a batch without learning signal. None: no check."""
    export_metadata: Mapping[str, Any] | None = None
    """Metadata that exports write to the model's config, in addition to evaluation results."""


class SupervisedState:
    """State of a supervised run in its checkpoints. Implements ``base.State``."""

    def __init__(self, run: Supervised) -> None:
        self.run, self.role = run, run.engine.role

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes of a checkpoint."""
        reference_bytes = 0 if self.run.moving is None else self.run.moving.num_bytes
        return int(1.02 * self.run.engine.state_bytes) + reference_bytes + (16 << 20)

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self.run.engine.version

    def position(self) -> dict[str, Any]:
        """Return the position in the data."""
        return self.run.stream.state_dict()

    def save(self, folder: Path, *, in_background: bool = False) -> Sequence[PendingSave]:
        """Write the model, and a reference that is not frozen."""
        if self.run.moving is not None:
            self.run.moving.save(folder)
        named = {folder / self.role: self.run.engine}
        return save_engines(named, in_background=in_background)

    def save_position(self, folder: Path, position: Mapping[str, Any]) -> None:
        """Write ``position``."""
        save_state(folder, "data", position)
        if self.run.export_metadata is not None:
            save_state(folder, EXPORT_METADATA, self.run.export_metadata)

    def restart(self) -> None:
        """Do nothing: nothing runs between steps."""

    def load(self, folder: Path) -> None:
        """Restore the state that :meth:`save` wrote."""
        self.run.engine.load(folder / self.role)
        load_reference(self.run.moving, folder)
        self.run.stream.load_state_dict(load_state(folder, "data"))


class SupervisedLoop:
    """The loop of a supervised run. Implements ``base.Loop``."""

    best_metric = "eval/loss"

    def __init__(self, run: Supervised, eval_times: EvalTimes) -> None:
        self.run, self.state = run, SupervisedState(run)
        self.total_steps, self.eval_times = run.total_steps, eval_times
        self.usable = run.usable

    def step(self, number: int) -> Metrics:
        """Train on one batch with one update."""
        if self.run.moving is not None:
            self.run.moving.before_step(number)
        run = self.run
        batch = run.prepare(run.stream.next(run.batch_size_at(number)).with_global_counts())
        updates = Updates()
        updates.add("train", run.engine.forward_backward(batch, run.loss))
        updates.step("train", run.engine)
        counts = {f"data/{name}": float(value) for name, value in run.stream.counts.items()}
        tokens = {"train/tokens": float(batch.tokens.numel())}
        signal = {} if run.signal_of is None else run.signal.observe(run.signal_of(batch))
        return run.signal.checked(updates.checked(updates.metrics() | counts | tokens | signal))

    def evaluate(self, number: int) -> Metrics:
        """Measure the held-out rows of every set; empty if there are none."""
        metrics: Metrics = {}
        for name, batch in self.run.eval_batches.items():
            metrics |= self.run.measure(self.run.engine, batch).floats(eval_prefix(name))
        return metrics

    def close(self) -> None:
        """Log the number of steps without learning signal."""
        self.run.signal.log_total()


S = TypeVar("S", bound=SupervisedJob)


@dataclass(frozen=True)
class SupervisedTraining(Job[S, Loop]):
    """A job that learns from given rows: its config class and the function that builds its
    components."""

    config_class: type[S]
    build_parts: Callable[[S, Runtime, Path], Supervised]

    def driver(self, config: S, run_dir: Path, memory_monitor: MemoryMonitor) -> Trainer:
        return Trainer(config, run_dir, memory_monitor)

    def build(self, config: S, runtime: Runtime, *, run_dir: Path, functions: Functions) -> Loop:
        run = self.build_parts(config, runtime, run_dir)
        times, evaluation = EvalTimes(), config.evaluation
        if evaluation is not None:
            times = EvalTimes(
                every_n_steps=evaluation.every_n_steps,
                delay_steps=evaluation.delay_steps,
                rows_per_period=evaluation.every_n_epochs * (run.usable.num_rows or 0),
                rows_per_step=config.batch_plan().train_batch_size,
            )
        return SupervisedLoop(run, times)

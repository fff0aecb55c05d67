"""Contract of jobs: a job makes a loop from its config, and a driver runs the loop.

A job is one config file, one job file with its ``JOB``, and one line of ``config/registry.py``.
Training jobs build a :class:`Loop`, which ``trainer.Trainer`` runs; ``evaluate`` and ``generate``
have drivers of their own.
"""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from burnish.config import JobConfig
from burnish.jobs.memory_monitor import MemoryMonitor
from burnish.observe.metrics import MetricsLog
from burnish.observe.progress import close_logging, setup_logging
from burnish.observe.timeline import Timeline
from burnish.observe.trackers import open_trackers
from burnish.runtime.base import Runtime
from burnish.types import PendingSave

Metrics = dict[str, float]
Functions = Mapping[str, Callable[..., Any]]
"""Reward functions given to ``burnish.run``, by the names of the recipe's function rewards."""

C = TypeVar("C", bound=JobConfig)
L = TypeVar("L", bound="Closable")


class Closable(Protocol):
    """Built parts that hold processes or connections."""

    def close(self) -> None:
        """Release them."""
        ...


class State(Protocol):
    """Everything of a loop that a checkpoint must hold."""

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes that :meth:`save` writes."""
        ...

    @property
    def version(self) -> int:
        """Updates of the model so far."""
        ...

    def position(self) -> dict[str, Any]:
        """Return what a step changes before it updates any weight: streams, running statistics.
        The values are copies, which later steps do not change."""
        ...

    def save(
        self, folder: Path, position: Mapping[str, Any], *, in_background: bool = False
    ) -> Sequence[PendingSave]:
        """Write all of it, with ``position``. ``in_background``: the returned saves may still be
        writing; they write the state of now."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        ...


class Loop(Closable, Protocol):
    """The steps of a training run. ``trainer.Trainer`` calls it, and measures, logs and saves
    around each step."""

    total_steps: int
    """Steps of the whole run."""
    eval_every_n_steps: int
    """Evaluation every this many steps, beside step 0 and the last. 0: only those two."""
    best_metric: str
    """Metric of the best checkpoint if the recipe names none."""

    @property
    def state(self) -> State:
        """Return the state for checkpoints."""
        ...

    def step(self, number: int) -> Metrics:
        """Do one step; the first is 1. Raises StoppedError, with the step's metrics, if continuing
        makes no sense."""
        ...

    def evaluate(self, number: int) -> Metrics:
        """Measure held-out data after step ``number``. Empty if there is none."""
        ...


class Driver(ABC, Generic[L]):
    """Runs one loop to its end in a run folder. Use as a context manager."""

    def __init__(self, config: JobConfig, run_dir: Path, memory_monitor: MemoryMonitor) -> None:
        self.config, self.run_dir, self.memory_monitor = config, run_dir, memory_monitor
        self.timeline = Timeline(peaks=memory_monitor.peaks)
        self.closing = ExitStack()
        """What happens at the end of the run, in reverse order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.closing.__exit__(kind, error, traceback)

    def attach(self, runtime: Runtime) -> None:
        """Use ``runtime``, which made the engines of the loop."""
        self.memory_monitor.runtime = runtime

    @abstractmethod
    def run(self, loop: L) -> Metrics:
        """Run ``loop`` to its end. Return the last value of every metric."""

    def open(self) -> None:
        """Open log and metrics. Call it once the loop is built: a recipe whose data or model is
        missing leaves an empty folder, in which the corrected recipe can start."""
        setup_logging(self.run_dir)
        self.closing.callback(close_logging)
        self.metrics = MetricsLog(self.run_dir, open_trackers(self.config, self.run_dir))
        self.closing.push(self._close_metrics)
        self.closing.callback(lambda: self.timeline.save(self.run_dir / "timeline.json"))

    def _close_metrics(self, kind: type[BaseException] | None, *_: object) -> None:
        self.metrics.close(ended_by=kind)

    @contextmanager
    def measured_memory(self) -> Iterator[None]:
        """Write the measured memory into the run folder at the end, also after an error."""
        try:
            yield
        finally:
            with suppress(Exception):  # must not hide the error that ended the run
                self.memory_monitor.finish()


class Job(ABC, Generic[C, L]):
    """One job: what is particular to it, and nothing that jobs share."""

    config_class: type[C]
    takes_rewards: bool = False
    """Whether ``burnish.run`` may be given reward functions."""

    def prepare(self, config: C, run_dir: Path, *, resumed: bool) -> Metrics | None:
        """Check what only this job needs, before anything is loaded. Return the metrics of a run
        that is finished; None if there is something left to do."""
        return None

    @abstractmethod
    def driver(self, config: C, run_dir: Path, memory_monitor: MemoryMonitor) -> Driver[L]:
        """Return what runs the loop."""

    @abstractmethod
    def build(self, config: C, runtime: Runtime, *, run_dir: Path, functions: Functions) -> L:
        """Build the loop: data and rewards first, because their errors are the quickest to find,
        then engines, which ``runtime`` makes."""


def seed_everything(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect unreachable cycles less often inside: a step makes millions of small objects without
    any, and collections took half of the time of sampling, scoring and batching 100,000
    (docs/benchmarks.md)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)

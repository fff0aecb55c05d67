"""Contract of jobs: a job builds a loop from its config, and a driver runs the loop.

A job is one config file, one job file with its ``JOB``, and one line of ``config/registry.py``.
Training jobs build a :class:`Loop`, which ``trainer.Trainer`` runs. ``generate`` and ``score`` use
``rows_run.RowsRun``; ``evaluate`` has its own driver. Drivers share the signals that stop a run,
and loops the steps of evaluations and the save of engines.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from burnish.checkpoint.save import PendingSave
from burnish.config import JobConfig
from burnish.config.placement import PlacementGroupSpec, placement_groups
from burnish.distributed.process_group import SINGLE
from burnish.driver.memory_monitor import MemoryMonitor
from burnish.observe.files import TIMELINE_FILE
from burnish.observe.machine import MachineMonitor
from burnish.observe.make_trackers import open_trackers
from burnish.observe.memory import memory_metrics
from burnish.observe.metrics import MetricsLog
from burnish.observe.progress import close_logging, setup_logging, tell
from burnish.observe.public_recipe import recipe_secrets
from burnish.observe.timeline import Timeline
from burnish.runtime.base import Runtime
from burnish.train.base import TrainEngine

Metrics = dict[str, float]
Functions = Mapping[str, Callable[..., Any]]
"""Reward functions given to ``burnish.run``, by the names of the recipe's function rewards."""

C = TypeVar("C", bound=JobConfig)
L = TypeVar("L", bound="Closable")


@dataclass(frozen=True)
class Usable:
    """Usable rows of the training data."""

    num_rows: int | None = None
    """None: unknown, or not counted."""
    notices: tuple[str, ...] = ()
    """Sentences about rows that are left out, and about the number of steps."""


def attention_lines(sentences: Mapping[str, str]) -> list[str]:
    """Return one line for each attention that models have, with the roles of those models.

    >>> attention_lines({"policy": "FlashAttention", "critic": "FlashAttention"})
    ['attention (policy, critic): FlashAttention']
    """
    roles: dict[str, list[str]] = {}
    for role, sentence in sentences.items():
        roles.setdefault(sentence, []).append(role)
    return [f"attention ({', '.join(names)}): {sentence}" for sentence, names in roles.items()]


class Closable(Protocol):
    """Built parts that hold processes or connections."""

    def close(self) -> None:
        """Release the processes and connections."""
        ...


class State(Protocol):
    """State of a loop that a checkpoint must contain."""

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes that :meth:`save` writes."""
        ...

    @property
    def version(self) -> int:
        """Number of model updates so far."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the state that a step changes before it updates any weight: stream positions and
        running statistics. The values are copies that later steps do not change."""
        ...

    def save(self, folder: Path, *, in_background: bool = False) -> Sequence[PendingSave]:
        """Write the models; every rank of the loop calls this. If ``in_background`` is set, the
        returned saves may still be running. They write the state at the time of the call."""
        ...

    def save_position(self, folder: Path, position: Mapping[str, Any]) -> None:
        """Write the rest of the state, with ``position`` as the stream positions and statistics.
        Only one rank calls this."""
        ...

    def restart(self) -> None:
        """Continue before the first checkpoint, after lost workers were replaced by workers with
        the initial weights."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state that :meth:`save` and :meth:`save_position` wrote."""
        ...


class Loop(Closable, Protocol):
    """The steps of a training run. ``trainer.Trainer`` calls the methods, and measures, logs and
    saves around each step."""

    total_steps: int
    """Number of steps of the entire run."""
    usable: Usable
    """Usable rows of the training data, if they were counted."""
    eval_times: EvalTimes
    """Steps after which the run evaluates, in addition to the last one."""
    best_metric: str
    """Metric that selects the best checkpoint if the recipe names none."""

    @property
    def state(self) -> State:
        """Return the state for checkpoints."""
        ...

    def step(self, number: int) -> Metrics:
        """Run step ``number``; the first is 1. Raises StoppedError, with the step's metrics, if
        continuing is pointless."""
        ...

    def evaluate(self, number: int) -> Metrics:
        """Measure held-out data after step ``number``. The result is empty if there is none."""
        ...


class Driver(ABC, Generic[L]):
    """A driver that runs one loop to its end in a run folder. Use it as a context manager."""

    def __init__(self, config: JobConfig, run_dir: Path, memory_monitor: MemoryMonitor) -> None:
        self.config, self.run_dir, self.memory_monitor = config, run_dir, memory_monitor
        self.records_dir = run_dir
        """Folder for metrics, logs and samples: the run folder, except on ranks other than 0."""
        self.read = config
        """The recipe without inputs that the run does not read (a replay)."""
        self.ranks = SINGLE
        """Ranks that run this loop (``runtime.loop_ranks``)."""
        self.attention: Mapping[str, str] = {}
        """Attention of each model (``runtime.attention``)."""
        self.timeline = Timeline(peaks=memory_monitor.peaks)
        self.closing = ExitStack()
        """Callbacks that run at the end of the run, in reverse order."""

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
        """Use ``runtime``, which created the engines of the loop."""
        self.memory_monitor.runtime, self.attention = runtime, runtime.attention
        self.ranks = runtime.loop_ranks

    @abstractmethod
    def run(self, loop: L) -> Metrics:
        """Run ``loop`` to its end. Return the last value of every metric."""

    def open(self) -> None:
        """Open the log and the metrics. Call this after the loop is built: a recipe with missing
        data or a missing model then leaves an empty folder, which the corrected recipe can use."""
        records = self.records_dir
        setup_logging(records, hidden=recipe_secrets(self.config))
        self.closing.callback(close_logging)
        for line in attention_lines(self.attention):
            tell(line)
        first = self.ranks.rank == 0
        self.metrics = MetricsLog(records, open_trackers(self.config, records) if first else None)
        self.closing.push(self._close_metrics)
        self.closing.callback(lambda: self.timeline.save(records / TIMELINE_FILE))
        machine = MachineMonitor(records)
        self.closing.callback(machine.close)
        self._machine = machine

    def log(self, step: int, metrics: Metrics) -> Metrics:
        """Write the metrics of a step, with memory and use of the machine. Return all of them.
        Timeline and memory are written too, if the last time is long ago."""
        metrics = metrics | memory_metrics() | self.memory_monitor.metrics()
        metrics |= self._machine.metrics()
        self.metrics.log(step, metrics)
        if self.timeline.save_at_times(self.records_dir / TIMELINE_FILE):
            self.memory_monitor.write()
        return metrics

    def _close_metrics(self, kind: type[BaseException] | None, *_: object) -> None:
        self.metrics.close(ended_by=kind)

    @contextmanager
    def measured_memory(self) -> Iterator[None]:
        """Write the measured memory to the run folder on exit, even after an error."""
        try:
            yield
        finally:
            with suppress(Exception):  # must not hide the error that ended the run
                self.memory_monitor.finish()


class Job(ABC, Generic[C, L]):
    """A job: its config class, its checks, its driver and how its loop is built."""

    config_class: type[C]
    takes_rewards: bool = False
    """True if ``burnish.run`` accepts reward functions for this job."""

    def counted(self, config: C) -> C:
        """Return ``config`` with the number of its steps, if it follows from the rows. Raises
        DataError if they cannot be counted."""
        return config

    def prepare(self, config: C, run_dir: Path, *, resumed: bool) -> Metrics | None:
        """Run the checks specific to this job, before anything is loaded. Return the metrics of a
        finished run, or None if work is left."""
        return None

    @abstractmethod
    def driver(self, config: C, run_dir: Path, memory_monitor: MemoryMonitor) -> Driver[L]:
        """Return the driver that runs the loop."""

    def placements(self, config: C) -> list[PlacementGroupSpec]:
        """Return the placement groups of the workers on a cluster."""
        return placement_groups(config)

    @abstractmethod
    def build(self, config: C, runtime: Runtime, *, run_dir: Path, functions: Functions) -> L:
        """Build the loop. Data and rewards come first, because their errors are the quickest to
        find; then ``runtime`` creates the engines."""


def seed_everything(seed: int) -> None:
    """Seed the global generators of ``random``, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect unreachable reference cycles less often inside the context. A step creates millions
    of small objects but no cycles. With default thresholds, collections took half of the time of
    sampling, scoring and batching 100,000 samples (docs/benchmarks.md)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class EvalTimes:
    """Steps after which a run evaluates, in addition to the last step."""

    every_n_steps: int = 0
    """0: not by steps."""
    delay_steps: int = 0
    """No evaluation before this step; above 0 also none at step 0."""
    rows_per_period: int = 0
    """Rows between evaluations, for those by epochs. 0: not by epochs."""
    rows_per_step: int = 1

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows ``step``; 0 is the start of the run.

        By epochs, it follows the step that draws the last row of a period.

        >>> by_epoch = EvalTimes(rows_per_period=10, rows_per_step=4)
        >>> [step for step in range(9) if by_epoch.due(step)]
        [0, 3, 5, 8]
        """
        if step < self.delay_steps:
            return False
        if step == 0:
            return True
        if self.every_n_steps and step % self.every_n_steps == 0:
            return True
        rows, period = self.rows_per_step, self.rows_per_period
        return bool(period) and step * rows // period > (step - 1) * rows // period


def save_engines(
    engines: Mapping[Path, TrainEngine], *, in_background: bool
) -> Sequence[PendingSave]:
    """Save each engine into its folder. If ``in_background`` is set, the returned saves may still
    be running; otherwise the result is empty."""
    if in_background:
        return [engine.save_async(folder) for folder, engine in engines.items()]
    for folder, engine in engines.items():
        engine.save(folder)
    return []


class StopSignals:
    """Context manager that stores the first signal in ``asked``. A second signal raises
    KeyboardInterrupt. Handlers are installed only in the main thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` is called with the name of the first signal when it arrives."""
        self.asked: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = number
        self._say(signal.Signals(number).name)

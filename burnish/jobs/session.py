"""A run around its steps: the run folder, metrics, checkpoints, signals. The loops call it once
per step.

Every loop is ``session.run(state, step=..., evaluate=...)``: this file owns the order in which a
step is measured, recorded, saved and interrupted, so that a run killed anywhere goes on from its
last checkpoint and writes the same metrics as one that was never killed.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import yaml

from burnish.checkpoint import CheckpointError, CheckpointStore, PendingCheckpoint
from burnish.checkpoint.state import capture_rng, load_state, restore_rng, save_state
from burnish.config import dump_yaml
from burnish.config.changes import changed_settings
from burnish.config.jobs import TrainingJob
from burnish.config.train import better
from burnish.data.sources import DataError
from burnish.jobs.errors import Interrupted, RunError, StoppedError
from burnish.jobs.memory_monitor import OOM_FILE, MemoryMonitor
from burnish.jobs.signals import StopSignals
from burnish.observe.files import write_text
from burnish.observe.memory import memory_metrics
from burnish.observe.metrics import MetricsLog, read_metrics
from burnish.observe.progress import FILE_ONLY, Progress, close_logging, setup_logging
from burnish.observe.samples import drop_samples_after
from burnish.observe.spikes import SpikeAlarm
from burnish.observe.timeline import Timeline
from burnish.observe.trackers import open_trackers
from burnish.rewards.base import RewardError
from burnish.runtime.base import WorkerLostError
from burnish.types import PendingSave

log = logging.getLogger("burnish")

Metrics = dict[str, float]
STOPPED_FILE = "stopped.txt"


class State(Protocol):
    """Everything of a job that a checkpoint must hold."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes :meth:`save` writes."""
        ...

    @property
    def version(self) -> int:
        """Updates of the model so far."""
        ...

    def position(self) -> dict[str, Any]:
        """What a step moves before it updates anything: streams, running statistics. Plain values
        of now, that later steps do not change."""
        ...

    def save(
        self, folder: Path, position: Mapping[str, Any], *, in_background: bool = False
    ) -> Sequence[PendingSave]:
        """Write all of it, with ``position``; ``in_background``: what is returned may be written
        later, as of now."""
        ...

    def load(self, folder: Path) -> None: ...


def seed_everything(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Python looks for unreachable cycles less often inside: a step makes millions of small objects
    without any, and looking at them took half of the time of sampling, scoring and batching
    100,000 (docs/benchmarks.md)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class _PreStepState:
    """What there was before a step, of what a step may change without an update."""

    version: int
    position: Mapping[str, Any]
    rng: Mapping[str, Any]


class Session:
    """One run of a training job. Use as a context manager."""

    def __init__(
        self, config: TrainingJob, run_dir: Path, *, best_metric: str, memory_monitor: MemoryMonitor
    ) -> None:
        self.config, self.run_dir, self.memory_monitor = config, run_dir, memory_monitor
        self.best_metric = config.checkpoint.best_metric or best_metric
        self.best_mode = config.checkpoint.best_mode or better(self.best_metric) or "max"
        self.step = self.total_steps = 0
        """Steps done, and steps in the whole run."""
        self.timeline = Timeline(peaks=memory_monitor.peaks)
        self.store = CheckpointStore(
            run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            best_mode=self.best_mode,
        )
        self._opened = False
        self._signals = StopSignals(self._announce_stop)
        self._last: Metrics = {}
        self._measured_step = -1
        """The step at which the best metric was last measured."""
        self._evaluated_step = -1
        """The step at which held-out rows were last measured."""
        self._saved_step = -1
        self._saved_at = 0.0
        """By the monotonic clock: the last checkpoint, or the start of the first step."""
        self._pending: PendingCheckpoint | None = None
        """The checkpoint of that step, while it is written in the background."""
        self._spikes = SpikeAlarm()
        self.recover: Callable[[WorkerLostError], None] | None = None
        """Brings workers back after some were lost; None: nothing can be lost."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._opened:
            if kind is None or issubclass(kind, Exception):  # else: at once
                self._try_finish_pending_checkpoint()
            self.timeline.save(self.run_dir / "timeline.json")
            self.progress.close()
            self.metrics.close(ended_by=kind)
            close_logging()

    def _open(self, total_steps: int) -> None:
        """Log and metrics. Not before the parts are built: a recipe whose data or
        model is missing leaves an empty folder, in which the mended recipe can start."""
        self.total_steps = total_steps
        setup_logging(self.run_dir)
        self.metrics = MetricsLog(self.run_dir, open_trackers(self.config, self.run_dir))
        self.progress = Progress(total_steps, every=self.config.observe.log_every_n_steps)
        self._opened = True
        self.progress.table(
            "Batch arithmetic", ("name", "value", "how"), self.config.launch_table()
        )

    # ---- the order of a run ------------------------------------------------------------------

    def run(
        self,
        state: State,
        *,
        total_steps: int,
        step: Callable[[int], Metrics],
        evaluate: Callable[[int], Metrics] | None = None,
        eval_every: int = 0,
    ) -> Metrics:
        """Steps until ``total_steps``; evaluation at step 0, every ``eval_every`` and at the end;
        checkpoints.

        Returns the last value of every metric. Raises Interrupted after a signal, once the step
        under way is finished and saved; a second signal ends the process at once. Raises
        StoppedError, once the step is saved, where a step says that going on makes no sense.
        """
        self._open(total_steps)
        for warning in self.config.warnings():  # told when the recipe was loaded
            log.warning(warning, extra=FILE_ONLY)
        self._run_with_recovery(state, lambda: self._restore(state))
        if self.config.checkpoint.best_metric and self.config.checkpoint.best_mode is None:
            which = "smallest" if self.best_mode == "min" else "largest"
            self.progress.message(
                f"the checkpoint with the {which} {self.best_metric} is kept as the best "
                "(checkpoint.best_mode changes that)"
            )
        # Only now is it sure that this recipe and the run in the folder belong together.
        self._log_config_diff()
        write_text(self.run_dir / "config.yaml", dump_yaml(self.config))
        self.metrics.start_trackers()
        self._saved_at = time.monotonic()
        with self._signals, rare_garbage_collection(), self._watched():
            while not self._run_with_recovery(state, lambda: self._begin(state, evaluate)):
                pass
            while self.step < self.total_steps:
                self._run_with_recovery(
                    state, lambda: self._step_and_save(state, step, evaluate, eval_every)
                )
        self._stop_if_mostly_skipped(state)
        if self.config.checkpoint.best_metric and self._measured_step < 0:
            log.warning(
                "checkpoint.best_metric=%s was never measured; metrics of this run: %s",
                self.best_metric,
                ", ".join(sorted(self._last)),
            )
        return self._last

    def _log_config_diff(self) -> None:
        """What a resumed run does otherwise from now on."""
        saved = self.run_dir / "config.yaml"
        if self._saved_step < 0 or not saved.is_file():
            return
        then = yaml.safe_load(saved.read_text(encoding="utf-8"))
        changed = changed_settings(then, yaml.safe_load(dump_yaml(self.config)))
        changed.pop("run_dir", None)
        if changed:
            told = "; ".join(f"{key}: {what}" for key, what in changed.items())
            self.progress.message(f"with other settings: {told}")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Afterwards what was measured of memory is in the run folder."""
        try:
            yield
        finally:
            with suppress(Exception):  # what ended the run is not to be hidden by this
                self.memory_monitor.finish()

    def _stop_if_mostly_skipped(self, state: State) -> None:
        """End as stopped if most steps of the run were skipped, the last one too; warn if that one
        was not, or if the loss scale was still looking for its place."""
        last = self._last
        skipped = last.get("train/skipped_total", 0.0)
        if skipped <= self.step / 2:
            return
        why = (
            f"{skipped:.0f} optimizer steps were skipped because the loss or the gradient was not "
            "finite: this run has learned little (see train/skipped_steps in the report)"
        )
        if last.get("train/skipped_steps") and not last.get("train/overflows"):
            more = "; try a lower learning rate, or look at the data and rewards"
            self._stop(state, StoppedError(why + more, last))
        log.warning(why)

    def _begin(self, state: State, evaluate: Callable[[int], Metrics] | None) -> None:
        """What comes before the first step."""
        if self._saved_step >= 0:  # step 0 is in the log already
            return
        if evaluate is not None:
            self._record(0, evaluate(0))
        if self.recover is not None:  # where to go back to from the first steps
            self._save(state)
            self._finish_pending_checkpoint()

    def _run_with_recovery(self, state: State, action: Callable[[], None]) -> bool:
        """Do ``action``; where a worker is lost in it, back to the newest checkpoint instead, and
        False."""
        try:
            action()
        except (WorkerLostError, CheckpointError) as error:
            self._rollback(state, error)
            return False
        return True

    def _step_and_save(
        self,
        state: State,
        step: Callable[[int], Metrics],
        evaluate: Callable[[int], Metrics] | None,
        eval_every: int,
    ) -> None:
        if self._pending is not None and self._pending.done:
            self._finish_pending_checkpoint()
        self._stop_if_asked(state)
        before = _PreStepState(state.version, state.position(), capture_rng())
        try:
            self._one_step(state, step, evaluate, eval_every)
        except (RewardError, DataError):
            self._save_pre_step_state(state, before)
            raise
        if self._checkpoint_due():
            self._save(state)
        if self.step == self.total_steps:
            self._finish_pending_checkpoint()

    def _one_step(
        self,
        state: State,
        step: Callable[[int], Metrics],
        evaluate: Callable[[int], Metrics] | None,
        eval_every: int,
    ) -> None:
        started, number = time.perf_counter(), self.step + 1
        try:
            metrics = step(number)
        except StoppedError as stop:
            self.step = number
            self._record(number, stop.metrics)
            self._stop(state, stop)
        due = number == self.total_steps or (eval_every and number % eval_every == 0)
        if due and evaluate is not None:
            metrics |= evaluate(number)
        metrics["time/step_s"] = time.perf_counter() - started
        self.step = number
        self._record(number, metrics)
        self.progress.step(number, metrics)

    def _stop(self, state: State, stop: StoppedError) -> NoReturn:
        """Save if there is something worth saving, say why, and raise."""
        try:
            self._save(state)
            self._finish_pending_checkpoint()
            saved = "The run is saved"
        except CheckpointError as error:
            saved = f"This step is not saved: {error}"
        more = " max_steps=MORE" if self.step == self.total_steps else ""
        why = (
            f"stopped at step {self.step} of {self.total_steps}: {stop}. {saved}; go on with other "
            f"settings by --resume {self.run_dir} KEY=VALUE{more}"
        )
        write_text(self.run_dir / STOPPED_FILE, why + "\n")
        log.info(why)
        raise StoppedError(why, stop.metrics) from stop

    def _record(self, step: int, metrics: Metrics) -> None:
        if "train/loss" in metrics:
            metrics["train/loss_spike"] = self._spikes.check(metrics["train/loss"])
        seconds = self.timeline.collect()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        for phase in ("rollout", "train"):
            if f"{phase}/tokens" in metrics and seconds.get(phase):
                metrics[f"{phase}/tokens_per_s"] = metrics[f"{phase}/tokens"] / seconds[phase]
        metrics |= memory_metrics() | self.memory_monitor.metrics()
        self.metrics.log(step, metrics)
        self._last |= metrics
        if self.best_metric in metrics:
            self._measured_step = step
        if any(name.startswith("eval/") for name in metrics):
            self._evaluated_step = step

    # ---- checkpoints -------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        every, minutes = self.config.checkpoint.every_n_steps, self.config.checkpoint.every_minutes
        if self.step == self.total_steps or not every:
            return self.step == self.total_steps
        late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return late or self.step % every == 0

    def _save_pre_step_state(self, state: State, before: _PreStepState) -> None:
        """The run as it was before a step that something outside of it ended, and how to go on."""
        if self.step == 0 or state.version != before.version:
            return
        try:
            self._save(state, before)
            self._finish_pending_checkpoint()
        except CheckpointError as error:  # what ended the run is not to be hidden by this
            log.warning(error)
            return
        self.progress.message(
            f"step {self.step} is saved: once this is mended, go on by --resume {self.run_dir}"
        )

    def _save(self, state: State, before: _PreStepState | None = None) -> None:
        """Save the run as it is, or as it was ``before`` the step under way."""
        if self._saved_step == self.step:
            return
        self._finish_pending_checkpoint()
        in_background = self.config.checkpoint.in_background

        def write(folder: Path) -> Sequence[PendingSave]:
            position = state.position() if before is None else before.position
            pending = state.save(folder, position, in_background=in_background)
            told = {"step": self.step, "evaluated_step": self._evaluated_step, "last": self._last}
            rng = capture_rng() if before is None else before.rng
            save_state(folder, "session", told | {"rng": rng})
            return pending

        # A value measured at an earlier step says nothing about these weights.
        fresh = self._measured_step == self.step
        metric = self._last[self.best_metric] if fresh else None
        with self.timeline.span("checkpoint"):
            self._pending = self.store.begin(
                self.step, write, metric=metric, num_bytes=state.num_bytes
            )
        self._saved_step, self._saved_at = self.step, time.monotonic()
        if not in_background:
            self._finish_pending_checkpoint()

    def _finish_pending_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._pending is None:
            return
        pending_checkpoint, self._pending = self._pending, None
        with self.timeline.span("checkpoint"):
            path = pending_checkpoint.finish()
        log.info("checkpoint %s", path)

    def _try_finish_pending_checkpoint(self) -> None:
        """Where something else has gone wrong already, which is not to be hidden."""
        try:
            self._finish_pending_checkpoint()
        except CheckpointError as error:
            log.warning(error)

    def _restore(self, state: State) -> None:
        for about_the_last_time in (STOPPED_FILE, OOM_FILE):
            (self.run_dir / about_the_last_time).unlink(missing_ok=True)
        newest = self.store.latest()
        if newest is None and self.store.all():
            raise RunError(
                f"none of the checkpoints in {self.store.folder} is good (the warnings above say "
                "why); move that folder away to start this run from step 0"
            )
        if newest is None and self.step > 0:
            raise RunError(
                f"there is no checkpoint in {self.store.folder} to go back to from step "
                f"{self.step}; start the run anew"
            )
        if newest is None:
            self._saved_step = -1
            self.metrics.rewind(-1)
            drop_samples_after(self.run_dir, -1)
            return
        try:
            state.load(newest)
        except ValueError as error:
            raise RunError(f"{newest} does not fit this recipe: {error}") from error
        session = load_state(newest, "session")
        self.step = self._saved_step = session["step"]
        self._evaluated_step = session.get("evaluated_step", -1)
        self._last = dict(session["last"])
        self.metrics.rewind(self.step)
        self._spikes = SpikeAlarm()
        logged = read_metrics(self.run_dir)
        self._spikes.replay(line["train/loss"] for line in logged if "train/loss" in line)
        drop_samples_after(self.run_dir, self.step)
        restore_rng(session["rng"])
        self.progress.message(f"resumed from {newest} at step {self.step} of {self.total_steps}")

    def _rollback(self, state: State, error: Exception) -> None:
        """Have lost workers replaced, and go on from the newest checkpoint; once more where some
        are lost meanwhile (``recover`` ends that). Raises ``error`` where it is about something
        else."""
        lost = error if isinstance(error, WorkerLostError) else error.__cause__
        if self.recover is None or not isinstance(lost, WorkerLostError):
            raise error
        self._try_finish_pending_checkpoint()
        while lost is not None:
            self.progress.message(f"{lost}; going back to the newest checkpoint")
            try:
                self.recover(lost)
                self._restore(state)
                lost = None
            except WorkerLostError as again:
                lost = again

    # ---- signals -----------------------------------------------------------------------------

    def _announce_stop(self, name: str) -> None:
        self.progress.message(
            f"{name}: saving after the step under way, then stopping; once more stops at once "
            "without saving"
        )

    def _stop_if_asked(self, state: State) -> None:
        if self._signals.asked is not None:
            self._save(state)
            self._finish_pending_checkpoint()
            raise Interrupted(self.run_dir, self._signals.asked)

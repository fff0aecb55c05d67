"""Driver of training runs: metrics, evaluation, checkpoints, recovery and signals around each step.

:meth:`Trainer.run` defines the order in which a step is measured, recorded, saved and interrupted.
A run killed at any point continues from its last checkpoint and writes the same metrics as an
uninterrupted run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from burnish.checkpoint import CheckpointError
from burnish.config.job import TrainingJob
from burnish.data.sources import DataError
from burnish.driver.base import Driver, Loop, Metrics, StopSignals, rare_garbage_collection
from burnish.driver.checkpointing import Checkpointing, PreStepState, RunPosition
from burnish.driver.digests import weights_record
from burnish.driver.early_stopping import StopCounters
from burnish.driver.errors import Interrupted, RunError, StoppedError
from burnish.driver.memory_monitor import OOM_FILE, MemoryMonitor
from burnish.driver.records import drop_records_after
from burnish.observe.files import write_text
from burnish.observe.metrics import read_metrics
from burnish.observe.progress import FILE_ONLY, ProgressDisplay
from burnish.observe.public_recipe import CONFIG_FILE, write_recipe
from burnish.observe.resumes import changes_since_start, record_resume
from burnish.observe.samples import drop_samples_after
from burnish.observe.spikes import SpikeAlarm
from burnish.rewards.base import RewardError
from burnish.runtime.base import Runtime, WorkerLostError
from burnish.runtime.ray.runtime import RayRuntime

log = logging.getLogger("burnish")

STOPPED_FILE = "stopped.txt"


class Trainer(Driver[Loop]):
    """Driver of a training loop."""

    config: TrainingJob
    read: TrainingJob

    def __init__(self, config: TrainingJob, run_dir: Path, memory_monitor: MemoryMonitor) -> None:
        super().__init__(config, run_dir, memory_monitor)
        self.position = RunPosition()
        self.recover: Callable[[WorkerLostError], None] | None = None
        """Function that replaces lost workers. None: the runtime has no workers to lose."""
        self._signals = StopSignals(self._announce_stop)
        self._spikes = SpikeAlarm()

    def attach(self, runtime: Runtime) -> None:
        super().attach(runtime)
        self.recover = runtime.recover if isinstance(runtime, RayRuntime) else None

    # ---- order of a run ----------------------------------------------------------------------

    def run(self, loop: Loop) -> Metrics:
        """Run the steps of ``loop``, with checkpoints. Evaluate at its ``eval_times``, and at the
        end. Return the last value of every metric.

        Raises Interrupted after a signal, once the current step is finished and saved. A second
        signal ends the process immediately. Raises StoppedError, once the step is saved, if a step
        reports that continuing is pointless.
        """
        self.checkpoints = Checkpointing(
            self.config,
            self.run_dir,
            self.timeline,
            best_metric=loop.best_metric,
            weights=partial(weights_record, self.read, self.run_dir),
            ranks=self.ranks,
        )
        self._open_records(loop)
        with self._recovery(loop):
            self._restore(loop)
        self._log_best_mode()
        # A successful restore proves that this recipe and the run in the folder match.
        self._log_config_diff(loop.total_steps)
        write_recipe(self.config, self.records_dir)
        self.metrics.start_trackers()
        self.checkpoints.start_clock()
        with self._signals, rare_garbage_collection(), self.measured_memory():
            begun = False
            while not begun:
                with self._recovery(loop):
                    self._begin(loop)
                    begun = True
            while not self._ended(loop):
                with self._recovery(loop):
                    self._step(loop)
        self._report_early_stop(loop)
        self._stop_if_mostly_skipped(loop)
        self._warn_if_best_was_never_measured()
        return self.position.last

    def _open_records(self, loop: Loop) -> None:
        self.open()
        self.progress = ProgressDisplay(
            loop.total_steps, every=self.config.observe.log_every_n_steps
        )
        self.closing.callback(self.progress.close)
        self.closing.push(self._finish_pending_checkpoint)
        self.progress.table(
            "Batch arithmetic",
            ("name", "value", "how"),
            self.config.launch_table(loop.usable.num_rows),
        )
        for notice in loop.usable.notices:
            log.warning(notice)
        for warning in self.config.warnings():  # printed when the recipe was loaded
            log.warning(warning, extra=FILE_ONLY)

    def _finish_pending_checkpoint(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # otherwise exit immediately
            self.checkpoints.try_finish()

    def _begin(self, loop: Loop) -> None:
        """Evaluate at step 0 and, if workers can be lost, save the first checkpoint."""
        if self.checkpoints.saved_step >= 0:  # step 0 is already in the log
            return
        if loop.eval_times.due(0) and (metrics := loop.evaluate(0)):
            self.position.stop_counters = self._counted(metrics)
            self._record(0, metrics)
        if self.recover is not None:  # the first steps need a checkpoint to roll back to
            self._save_now(loop)

    def _step(self, loop: Loop) -> None:
        """Run one step, record it, and save if a checkpoint is due."""
        self.checkpoints.poll()
        asked = self._signals.asked
        if self.ranks.any(asked is not None):  # a signal may reach only some of the ranks
            numbers = [number for number in self.ranks.gather(asked) if number is not None]
            self._save_now(loop)
            raise Interrupted(self.run_dir, numbers[0])
        before = PreStepState.of(loop.state)
        started, number = time.perf_counter(), self.position.step + 1
        try:
            metrics = loop.step(number)
            evaluated = number == loop.total_steps or loop.eval_times.due(number)
            if evaluated:
                metrics |= loop.evaluate(number)
            counters = self._counted(metrics)
            if self._stop_reason(counters) is not None and not evaluated:
                metrics |= loop.evaluate(number)  # as every last step
        except StoppedError as stop:
            self.position.step = number
            self._record(number, stop.metrics)
            self._stop(loop, stop)
        except (RewardError, DataError):
            self._save_pre_step_state(loop, before)
            raise
        metrics["time/step_s"] = time.perf_counter() - started
        self.position.step, self.position.stop_counters = number, counters
        self._record(number, metrics)
        self.progress.step(number, metrics)
        ended = self._ended(loop)
        if ended or self.checkpoints.due(number, loop.total_steps):
            self.checkpoints.save(loop.state, self.position)
        if ended:
            self.checkpoints.finish()

    def _ended(self, loop: Loop) -> bool:
        """Return whether the last step is done, or early stopping ends the run."""
        done = self.position.step >= loop.total_steps
        return done or self._stop_reason(self.position.stop_counters) is not None

    def _counted(self, metrics: Metrics) -> StopCounters:
        """Return the counters of early stopping after a step with ``metrics``: those of rank 0 on
        all ranks, because a metric may differ between ranks."""
        config, counters = self.config.early_stopping, self.position.stop_counters
        if config is None:
            return counters
        return self.ranks.from_first(lambda: counters.after(config, metrics))

    def _stop_reason(self, counters: StopCounters) -> str | None:
        config = self.config.early_stopping
        return None if config is None else counters.reason(config)

    def _record(self, step: int, metrics: Metrics) -> None:
        run = self.position
        if "train/loss" in metrics:
            metrics["train/loss_spike"] = self._spikes.check(metrics["train/loss"])
        seconds = self.timeline.collect()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        if "wait" in seconds and "time/step_s" in metrics:  # samples in all phases
            metrics["time/trainer_idle_frac"] = seconds["wait"] / metrics["time/step_s"]
            seconds = {**seconds, "rollout": metrics["time/step_s"]}
        for phase in ("rollout", "train"):
            if f"{phase}/tokens" in metrics and seconds.get(phase):
                metrics[f"{phase}/tokens_per_s"] = metrics[f"{phase}/tokens"] / seconds[phase]
        metrics = self.log(step, metrics)
        run.last |= metrics
        if self.checkpoints.best_metric in metrics:
            run.best_measured_step = step
        if any(name.startswith("eval/") for name in metrics):
            run.evaluated_step = step

    # ---- restoring and recovery --------------------------------------------------------------

    @contextmanager
    def _recovery(self, loop: Loop) -> Iterator[None]:
        """If a worker is lost inside the context, replace it and roll back to the newest
        checkpoint."""
        try:
            yield
        except (WorkerLostError, CheckpointError) as error:
            self._rollback(loop, error)

    def _rollback(self, loop: Loop, error: Exception) -> None:
        """Replace lost workers and restore the newest checkpoint. Repeat if more workers are lost
        meanwhile; ``recover`` limits the number of restarts. Raises ``error`` if its cause is not a
        lost worker."""
        lost = error if isinstance(error, WorkerLostError) else error.__cause__
        if self.recover is None or not isinstance(lost, WorkerLostError):
            raise error
        self.checkpoints.try_finish()
        while lost is not None:
            self.progress.message(f"{lost}; rolling back to the newest checkpoint")
            try:
                self.recover(lost)
                if not self._restore(loop):
                    loop.state.restart()
                lost = None
            except WorkerLostError as again:
                lost = again

    def _restore(self, loop: Loop) -> bool:
        """Restore the newest checkpoint, and truncate metrics, samples and records to its step.
        Return whether there is one."""
        for old_report in (STOPPED_FILE, OOM_FILE):
            (self.records_dir / old_report).unlink(missing_ok=True)
        newest = self.checkpoints.restore(loop.state, self.position)
        step = -1 if newest is None else self.position.step
        self.metrics.rewind(step)
        drop_samples_after(self.records_dir, step)
        drop_records_after(self.records_dir, step)
        if newest is None:
            return False
        self._spikes = SpikeAlarm()
        logged = read_metrics(self.records_dir)
        self._spikes.replay(line["train/loss"] for line in logged if "train/loss" in line)
        self.progress.message(f"resumed from {newest} at step {step} of {loop.total_steps}")
        return True

    def _log_config_diff(self, total_steps: int) -> None:
        """Log and record the settings that a resumed run changed. Raises RunError if they change
        the length of the run and no step is left."""
        saved = self.records_dir / CONFIG_FILE
        if self.checkpoints.saved_step < 0 or not saved.is_file():
            return
        changed = changes_since_start(self.config, self.records_dir)
        limits = ("max_steps", "max_epochs")
        keys = [key for key in limits if self.config.value_of(key) is not None]
        lengths = [f"{key}: {changed[key]}" for key in keys if key in changed]
        done = self.position.step
        if done >= total_steps:
            more = "set max_steps (or max_epochs, if both are set) to a larger number to train on"
            if lengths:
                raise RunError(
                    f"the run {self.run_dir} has done {done} steps, and with {'; '.join(lengths)} "
                    f"it has {total_steps}, so no step is left; {more}"
                )
            log.warning("the run is finished at step %d, so nothing is trained; %s", done, more)
        if changed:
            listed = "; ".join(f"{key}: {change}" for key, change in changed.items())
            self.progress.message(f"changed settings: {listed}")
        if done < total_steps:
            record_resume(self.records_dir, done, changed)

    # ---- ends --------------------------------------------------------------------------------

    def _save_now(self, loop: Loop) -> None:
        self.checkpoints.save(loop.state, self.position)
        self.checkpoints.finish()

    def _save_pre_step_state(self, loop: Loop, before: PreStepState) -> None:
        """Save the state from before a step that an external failure ended, and print how to
        resume."""
        run = self.position
        if run.step == 0 or loop.state.version != before.version:
            return
        if self.ranks.size > 1:  # the other ranks may be in the step and cannot take part
            return
        try:
            self.checkpoints.save(loop.state, run, before)
            self.checkpoints.finish()
        except CheckpointError as error:  # must not hide the error that ended the run
            log.warning(error)
            return
        self.progress.message(
            f"step {run.step} is saved; correct the cause and resume with --resume {self.run_dir}"
        )

    def _stop(self, loop: Loop, stop: StoppedError) -> NoReturn:
        """Save the run, write the reason to a file and the log, and raise StoppedError."""
        step, total = self.position.step, loop.total_steps
        try:
            self._save_now(loop)
            saved = "The run is saved"
        except CheckpointError as error:
            saved = f"This step could not be saved: {error}"
        more = " max_steps=MORE" if step == total else ""
        why = (
            f"stopped at step {step} of {total}: {stop}. {saved}; resume with other settings: "
            f"--resume {self.run_dir} KEY=VALUE{more}"
        )
        write_text(self.records_dir / STOPPED_FILE, why + "\n")
        log.info(why)
        raise StoppedError(why, stop.metrics) from stop

    def _report_early_stop(self, loop: Loop) -> None:
        """Write the reason of an early stop to a file and the log. Warn if the metric was never
        measured."""
        config, step, total = self.config.early_stopping, self.position.step, loop.total_steps
        if config is None:
            return
        reason = self._stop_reason(self.position.stop_counters)
        if reason is not None and step < total:
            why = (
                f"stopped early at step {step} of {total}: {reason}. The run is complete and saved;"
                f" to train on: --resume {self.run_dir} early_stopping=null, or with other settings"
            )
            write_text(self.records_dir / STOPPED_FILE, why + "\n")
            self.progress.message(why)
        elif config.metric is not None and config.metric.name not in self.position.last:
            log.warning(
                "early_stopping.metric=%s was never measured; metrics of this run: %s",
                *(config.metric.name, ", ".join(sorted(self.position.last))),
            )

    def _stop_if_mostly_skipped(self, loop: Loop) -> None:
        """Stop the run if most of its steps were skipped, including the last. Only warn if the last
        step was not skipped, or if it was skipped by a search for the loss scale."""
        last = self.position.last
        skipped = last.get("train/skipped_total", 0.0)
        if skipped <= self.position.step / 2:
            return
        why = (
            f"{skipped:.0f} optimizer steps were skipped because the loss or the gradient was not "
            "finite, so this run has learned little (see train/skipped_steps in the report)"
        )
        if last.get("train/skipped_steps") and not last.get("train/overflows"):
            more = "; try a lower learning rate, or check the data and rewards"
            self._stop(loop, StoppedError(why + more, last))
        log.warning(why)

    # ---- messages ----------------------------------------------------------------------------

    def _announce_stop(self, name: str) -> None:
        self.progress.message(
            f"{name}: saving after the current step, then stopping; a second signal stops "
            "immediately without saving"
        )

    def _log_best_mode(self) -> None:
        if self.config.checkpoint.best_metric and self.config.checkpoint.best_mode is None:
            which = "smallest" if self.checkpoints.best_mode == "min" else "largest"
            self.progress.message(
                f"the checkpoint with the {which} {self.checkpoints.best_metric} is kept as the "
                "best; checkpoint.best_mode changes this"
            )

    def _warn_if_best_was_never_measured(self) -> None:
        if self.config.checkpoint.best_metric and self.position.best_measured_step < 0:
            log.warning(
                "checkpoint.best_metric=%s was never measured; metrics of this run: %s",
                self.checkpoints.best_metric,
                ", ".join(sorted(self.position.last)),
            )

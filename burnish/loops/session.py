"""A run around its steps: the run folder, metrics, checkpoints, signals. The loops call it once per step.

Every loop is ``session.run(state, step=..., evaluate=...)``: this file owns the order in which a step is
measured, recorded, saved and interrupted, so that a run killed anywhere goes on from its last checkpoint
and writes the same metrics as one that was never killed.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from burnish.checkpoint import CheckpointStore
from burnish.checkpoint.state import capture_rng, load_state, restore_rng, save_state
from burnish.config import dump_yaml
from burnish.config.jobs import TrainingJob
from burnish.observe.memory import memory_metrics
from burnish.observe.metrics import MetricsLog
from burnish.observe.progress import Progress, close_logging, setup_logging
from burnish.observe.samples import drop_samples_after
from burnish.observe.timeline import Timeline

log = logging.getLogger("burnish")

Metrics = dict[str, float]


class RunError(RuntimeError):
    """A run that cannot start or go on. Says why and what to do."""


class Interrupted(Exception):  # noqa: N818  (not an error: the user asked)
    """A run that stopped on a signal, after saving. ``run_dir`` says where to resume."""

    def __init__(self, run_dir: Path, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; resume with --resume {run_dir}")
        self.run_dir, self.signal_number = run_dir, signal_number


class State(Protocol):
    """Everything of a job that a checkpoint must hold."""

    num_bytes: int
    """About how many bytes :meth:`save` writes."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def prepare_run_dir(config: TrainingJob, resume: Path | None) -> Path:
    """The run folder, made if it is new. Raises RunError where it holds another run and nothing is resumed."""
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise RunError(f"--resume {resume}: there is no config.yaml, so this is not a run folder")
        return resume
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_dir = Path(config.run_dir.replace("{job}", config.job).replace("{time}", stamp))
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise RunError(
            f"the run folder {run_dir} is not empty; go on with that run by --resume {run_dir}, or choose another "
            "folder with run_dir=... ({time} in it is filled in)"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


class Session:
    """One run of a training job. Use as a context manager."""

    def __init__(self, config: TrainingJob, run_dir: Path, *, total_steps: int, best_metric: str) -> None:
        self.config, self.run_dir, self.total_steps = config, run_dir, total_steps
        self.best_metric = config.checkpoint.best_metric or best_metric
        default_mode = "min" if self.best_metric.endswith("loss") else "max"
        self.step = 0
        """Steps done."""
        self.timeline = Timeline()
        (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        setup_logging(run_dir)
        self.metrics = MetricsLog(run_dir, tensorboard=config.observe.tensorboard)
        self.progress = Progress(total_steps, every=config.observe.log_every_n_steps)
        self.store = CheckpointStore(
            run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            best_mode=config.checkpoint.best_mode or default_mode,
        )
        self._signal: int | None = None
        self._last: Metrics = {}
        self._saved_step = -1

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.timeline.save(self.run_dir / "timeline.json")
        self.progress.close()
        self.metrics.close()
        close_logging()

    # ---- the order of a run ------------------------------------------------------------------

    def run(
        self,
        state: State,
        *,
        step: Callable[[int], Metrics],
        evaluate: Callable[[int], Metrics] | None = None,
        eval_every: int = 0,
    ) -> Metrics:
        """Steps until ``total_steps``; evaluation at step 0, every ``eval_every`` and at the end; checkpoints.

        Returns the last value of every metric. Raises Interrupted after a signal, once the step under way
        is finished and saved; a second signal ends the process at once.
        """
        self._restore(state)
        with self._signals():
            if self.step == 0 and evaluate is not None:
                self._record(0, evaluate(0))
            while self.step < self.total_steps:
                self._stop_if_asked(state)
                self._one_step(self.step + 1, step, evaluate, eval_every)
                if self._checkpoint_due():
                    self._save(state)
            self._stop_if_asked(state)
        return self._last

    def _one_step(
        self,
        number: int,
        step: Callable[[int], Metrics],
        evaluate: Callable[[int], Metrics] | None,
        eval_every: int,
    ) -> None:
        started = time.perf_counter()
        metrics = step(number)
        due = number == self.total_steps or (eval_every and number % eval_every == 0)
        if due and evaluate is not None:
            metrics |= evaluate(number)
        metrics["time/step_s"] = time.perf_counter() - started
        self.step = number
        self._record(number, metrics)
        self.progress.step(number, metrics)

    def _record(self, step: int, metrics: Metrics) -> None:
        seconds = self.timeline.collect()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        for phase in ("rollout", "train"):
            if f"{phase}/tokens" in metrics and seconds.get(phase):
                metrics[f"{phase}/tokens_per_s"] = metrics[f"{phase}/tokens"] / seconds[phase]
        metrics |= memory_metrics()
        self.metrics.log(step, metrics)
        self._last |= metrics

    # ---- checkpoints -------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every_n_steps
        return self.step == self.total_steps or bool(every and self.step % every == 0)

    def _save(self, state: State) -> None:
        if self._saved_step == self.step:
            return

        def write(folder: Path) -> None:
            state.save(folder)
            save_state(folder, "session", {"step": self.step, "rng": capture_rng(), "last": self._last})

        with self.timeline.span("checkpoint"):
            path = self.store.save(
                self.step,
                write,
                metric=self._last.get(self.best_metric),
                num_bytes=state.num_bytes,
            )
        self._saved_step = self.step
        log.info("checkpoint %s", path)

    def _restore(self, state: State) -> None:
        newest = self.store.latest()
        if newest is None and self.store.all():
            raise RunError(
                f"none of the checkpoints in {self.store.folder} is good (the warnings above say why); move that "
                "folder away to start this run from step 0"
            )
        if newest is None:
            self.metrics.rewind(-1)
            drop_samples_after(self.run_dir, -1)
            return
        state.load(newest)
        session = load_state(newest, "session")
        self.step = self._saved_step = session["step"]
        self._last = dict(session["last"])
        self.metrics.rewind(self.step)
        drop_samples_after(self.run_dir, self.step)
        restore_rng(session["rng"])
        self.progress.message(f"resumed from {newest} at step {self.step} of {self.total_steps}")

    # ---- signals -----------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for a stop after the step; only the main thread can be asked."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number
        name = signal.Signals(number).name
        self.progress.message(
            f"{name}: finishing step {self.step + 1}, then saving; once more stops at once without saving"
        )

    def _stop_if_asked(self, state: State) -> None:
        if self._signal is not None:
            self._save(state)
            raise Interrupted(self.run_dir, self._signal)


def phase_totals(timeline: Timeline) -> Mapping[str, float]:
    """Seconds per phase over the whole run, longest first."""
    return dict(sorted(timeline.totals.items(), key=lambda item: -item[1]))

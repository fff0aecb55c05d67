"""Decide when a training run saves, write the trainer's own state, and restore a run from a
checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from burnish.checkpoint import CheckpointError, CheckpointStore, PendingCheckpoint
from burnish.checkpoint.save import PendingSave
from burnish.checkpoint.state import (
    UNFITTING,
    WeightsRecord,
    capture_rng,
    load_state,
    restore_rng,
    save_state,
)
from burnish.config.job import TrainingJob
from burnish.config.train import better
from burnish.distributed.process_group import SINGLE, OtherRankError, RankGroup
from burnish.driver.base import Metrics, State
from burnish.driver.early_stopping import StopCounters
from burnish.driver.errors import RunError
from burnish.observe.timeline import Timeline

log = logging.getLogger("burnish")

T = TypeVar("T")


@dataclass
class RunPosition:
    """Progress of a run: completed steps, the last metrics, and the steps of the last
    measurements."""

    step: int = 0
    last: Metrics = field(default_factory=dict)
    """The last value of every metric."""
    best_measured_step: int = -1
    """Step at which the best metric was last measured; -1: never."""
    evaluated_step: int = -1
    """Step at which held-out data was last measured; -1: never."""
    stop_counters: StopCounters = StopCounters()
    """Counters of early stopping."""


@dataclass(frozen=True)
class PreStepState:
    """State before a step, of the parts that the step may change without an update."""

    version: int
    position: Mapping[str, Any]
    rng: Mapping[str, Any]

    @classmethod
    def of(cls, state: State) -> PreStepState:
        """Capture the current state."""
        return cls(state.version, state.position(), capture_rng())


class Checkpointing:
    """The checkpoints of one training run."""

    def __init__(
        self,
        config: TrainingJob,
        run_dir: Path,
        timeline: Timeline,
        *,
        best_metric: str,
        weights: Callable[[Path | None], WeightsRecord] = lambda checkpoint: {},
        ranks: RankGroup = SINGLE,
    ) -> None:
        """``best_metric``: default if the recipe names none. ``weights``: compares the weights that
        a checkpoint (None: the start of a run) does not contain, and returns their record.
        ``ranks``: the ranks that run the loop. All of them call the methods; rank 0 decides and
        owns the folders."""
        self.ranks = ranks
        self._weights_after, self._weights = weights, WeightsRecord()
        self.config, self.timeline = config.checkpoint, timeline
        self.best_metric = config.checkpoint.best_metric or best_metric
        self.best_mode = config.checkpoint.best_mode or better(self.best_metric) or "max"
        self.store = CheckpointStore(
            run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            best_mode=self.best_mode,
            keep=config.checkpoint.keep,
        )
        self.saved_step = -1
        """Step of the newest checkpoint; -1 if there is none."""
        self._saved_at = 0.0
        """Monotonic time of the last save, or of the start of the first step."""
        self._pending: PendingCheckpoint | None = None
        """Checkpoint of ``saved_step`` while it is being written in the background."""

    def start_clock(self) -> None:
        """Start the clock that ``every_minutes`` measures."""
        self._saved_at = time.monotonic()

    def due(self, step: int, total_steps: int) -> bool:
        """Return whether a checkpoint is due after ``step``."""
        every, minutes = self.config.every_n_steps, self.config.every_minutes
        if step == total_steps or not every:
            return step == total_steps
        if step % every == 0 or minutes is None:
            return step % every == 0
        return self.ranks.from_first(lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    def save(self, state: State, run: RunPosition, before: PreStepState | None = None) -> None:
        """Save the current state of the run, or the state ``before`` the current step. Raises
        CheckpointError."""
        if self.saved_step == run.step:
            return
        self.finish()
        in_background = self.config.in_background
        announced = False

        def write(folder: Path) -> Sequence[PendingSave]:
            nonlocal announced
            announced = True
            self.ranks.from_first(lambda: str(folder))
            position = state.position() if before is None else before.position
            pending = state.save(folder, in_background=in_background)
            state.save_position(folder, position)
            counts = {"step": run.step, "evaluated_step": run.evaluated_step, "last": run.last}
            counts["stop_counters"] = run.stop_counters.state_dict()
            counts |= {"weights": self._weights} if self._weights else {}
            rng = capture_rng() if before is None else before.rng
            save_state(folder, "session", counts | {"rng": rng})
            return pending

        def begin() -> PendingCheckpoint:
            try:
                return self.store.begin(run.step, write, metric=metric, num_bytes=num_bytes)
            except CheckpointError as error:
                if not announced:  # the other ranks still wait for the folder
                    reason = str(error)
                    self.ranks.from_first(lambda: _raise(reason))
                raise

        def join() -> PendingCheckpoint:
            folder = Path(self.ranks.from_first(str))
            return PendingCheckpoint(
                state.save(folder, in_background=in_background), lambda: folder
            )

        # A value from an earlier step does not describe these weights.
        fresh = run.best_measured_step == run.step
        metric = run.last[self.best_metric] if fresh else None
        num_bytes = state.num_bytes
        with self.timeline.span("checkpoint"):
            self._pending = self._together(begin if self.ranks.rank == 0 else join)
        self.saved_step, self._saved_at = run.step, time.monotonic()
        if not in_background:
            self.finish()

    def poll(self) -> None:
        """Publish the pending checkpoint if it is completely written."""
        if self._pending is not None and not self.ranks.any(not self._pending.done):
            self.finish()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one. Raises CheckpointError."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self.timeline.span("checkpoint"):
            path = self._together(pending.finish)
        log.info("checkpoint %s", path)

    def _together(self, action: Callable[[], T]) -> T:
        """Return the result of ``action`` on this rank. If it fails on any rank, raise
        CheckpointError on all of them."""
        problem: CheckpointError | None = None
        result: T | None = None
        try:
            result = action()
        except (CheckpointError, OtherRankError, OSError, ValueError) as error:
            if self.ranks.size == 1:
                raise
            problem = CheckpointError(str(error))
            problem.__cause__ = error
        problems = [text for text in self.ranks.gather(problem and str(problem)) if text]
        if problems:
            raise CheckpointError(problems[0]) from problem
        return result  # type: ignore[return-value]

    def try_finish(self) -> None:
        """Finish like :meth:`finish`, but only log a failure, because another error already ends
        the run and must not be hidden."""
        try:
            self.finish()
        except CheckpointError as error:
            log.warning(error)

    def restore(self, state: State, run: RunPosition) -> Path | None:
        """Restore ``state`` and ``run`` from the newest valid checkpoint and return its folder.
        Return None if there is no checkpoint and no step was done. Raises RunError if no checkpoint
        is valid, if the valid ones contain only weights, if none exists after a step was done, if
        weights that it does not contain changed, or if it does not fit the recipe."""
        newest, exist, reduced = self.ranks.from_first(
            lambda: (
                self.store.latest(resumable=True),
                self.store.all(),
                self.store.only_weights(),
            )
        )
        if newest is None and reduced:
            raise RunError(
                f"no checkpoint in {self.store.folder} can be resumed: {reduced[-1].name} contains "
                "only weights, without the optimizer's state (checkpoint.keep=weights), and there "
                "is no valid full checkpoint. To train on from these weights with a new optimizer, "
                f"run: burnish export {reduced[-1]} --out DIR, and start a new run with "
                "model.path=DIR"
            )
        if newest is None and exist:
            raise RunError(
                f"no checkpoint in {self.store.folder} is valid (the warnings above give the "
                "reasons); move that folder away to start this run from step 0"
            )
        if newest is None and run.step > 0:
            raise RunError(
                f"{self.store.folder} contains no checkpoint to restore after the failure at step "
                f"{run.step}; start a new run"
            )
        self._weights = self.ranks.from_first(lambda: self._weights_after(newest))
        if newest is None:
            self.saved_step = -1
            return None
        try:
            state.load(newest)
        except UNFITTING as error:
            known = isinstance(error, ValueError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise RunError(
                f"the checkpoint {newest} does not match this recipe: {reason}"
            ) from error
        self._restore_session(newest, run)
        self.saved_step = run.step
        return newest

    def _restore_session(self, folder: Path, run: RunPosition) -> None:
        """Restore ``run`` and the random generators from a checkpoint. Raises RunError if it
        belongs to another step than its folder's name, or does not contain a session."""
        saved = load_state(folder, "session")
        try:
            if folder.name.rpartition("_")[2] != f"{saved['step']:06d}":
                raise ValueError(f"it was saved at step {saved['step']}")
            run.step = saved["step"]
            run.evaluated_step = saved.get("evaluated_step", -1)
            run.last = dict(saved["last"])
            if not all(isinstance(value, int | float) for value in run.last.values()):
                raise TypeError("its metrics are not numbers")
            run.stop_counters = StopCounters.of_state(saved.get("stop_counters", {}))
            restore_rng(saved["rng"])
        except (*UNFITTING, RuntimeError) as error:
            raise RunError(
                f"the checkpoint {folder} does not contain the session of its step "
                f"({type(error).__name__}: {error}); move it away to resume from an earlier one"
            ) from error


def _raise(reason: str) -> NoReturn:
    raise CheckpointError(reason)

"""Exceptions of a run that ends early: rejected, stopped by itself, or stopped by a signal. Imports
nothing heavy."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from burnish.config.launch import resume_command
from burnish.errors import BurnishError


class RunError(BurnishError, RuntimeError):
    """A run that cannot start or continue. The message gives the reason and a fix."""


class StoppedError(RunError):
    """A run that stopped after a completed step, because continuing is pointless. ``metrics`` are
    the step's metrics."""

    exit_code = 3

    def __init__(self, why: str, metrics: Mapping[str, float]) -> None:
        super().__init__(why)
        self.metrics = dict(metrics)


class Interrupted(BurnishError):
    """A run that stopped on a signal, after saving. ``run_dir`` is the folder to resume."""

    def __init__(self, run_dir: Path, signal_number: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name}; resume with --resume {run_dir}"
        )
        self.run_dir, self.signal_number = run_dir, signal_number
        self.exit_code = 128 + int(signal_number)

    def text_for(self, job: str) -> str:
        return (
            f"stopped by {signal.Signals(self.signal_number).name}; the run is saved. "
            f"Resume with: {resume_command(job, self.run_dir)}"
        )

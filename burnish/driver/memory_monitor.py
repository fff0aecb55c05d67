"""Memory of a running job: peaks per phase in the metrics, a comparison with the plan in the run
folder, and the report after an out-of-memory error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from burnish.checkpoint import CheckpointStore
from burnish.config.job import JobConfig
from burnish.observe.files import MEMORY_JSON, write_text
from burnish.observe.memory import MemoryPeak, PhasePeaks, peak_metrics
from burnish.plan.memory_plan import Plan
from burnish.plan.oom import Failure, RunOutOfMemoryError, oom_text
from burnish.plan.plan_vs_actual import (
    MEMORY_FILE,
    MeasuredPeak,
    PlanVsActual,
    plan_vs_actual,
    plan_vs_actual_text,
    to_json,
)
from burnish.runtime.base import Runtime

OOM_FILE = "oom.txt"


class MemoryMonitor:
    """Monitor of the memory of one run."""

    def __init__(self, config: JobConfig, run_dir: Path, plan: Plan | None) -> None:
        self.config, self.run_dir, self.plan = config, run_dir, plan
        self.peaks = PhasePeaks()
        """Peaks of this process. The run's timeline updates them."""
        self.runtime: Runtime | None = None
        """Runtime that collects the peaks of all processes; None until it is created."""
        self._most: dict[tuple[str, str, int], MemoryPeak] = {}

    def metrics(self) -> dict[str, float]:
        """Return ``memory/<phase>/...`` since the last call."""
        peaks = [] if self.runtime is None else self.runtime.peaks()
        for process in peaks:
            for phase, peak in process.phases.items():
                key = (process.role, phase, process.rank)
                self._most[key] = peak | self._most[key] if key in self._most else peak
        return peak_metrics(peaks)

    def lines(self) -> list[PlanVsActual]:
        """Return planned and measured memory of all phases so far."""
        return plan_vs_actual(
            self.plan,
            (
                MeasuredPeak(role, rank, phase, peak.host, peak.allocated, peak.reserved)
                for (role, phase, rank), peak in self._most.items()
            ),
        )

    def finish(self) -> None:
        """Collect the last measurements, and write all of them."""
        self.metrics()
        self.write()

    def write(self) -> None:
        """Write the measurements of :meth:`metrics` to ``memory.txt`` and ``memory.json``."""
        lines = self.lines()
        if lines:
            write_text(self.run_dir / MEMORY_FILE, plan_vs_actual_text(lines) + "\n")
            write_text(self.run_dir / MEMORY_JSON, to_json(lines) + "\n")

    def out_of_memory(self, error: BaseException) -> RunOutOfMemoryError:
        """Return the report of a run that ended with ``error``, and write it to ``oom.txt``."""
        phase = self.peaks.phase or "load"
        with suppress(Exception):  # write the report even without the last peaks
            self.finish()
        store = CheckpointStore(self.run_dir / "checkpoints", keep_last=1, best_mode="max")
        failure = Failure(error, phase, self.run_dir, store.latest())
        text = oom_text(self.config, failure, self.lines())
        write_text(self.run_dir / OOM_FILE, text + "\n")
        return RunOutOfMemoryError(f"{text}\n(This report is also in {self.run_dir / OOM_FILE}.)")

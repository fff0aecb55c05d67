"""Run the stages of a probe, each in new processes. A stage that is predicted not to fit is
skipped, and ends the probe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.job import JobConfig
from burnish.errors import BurnishError
from burnish.plan.hardware import Hardware
from burnish.plan.launch import hardware_of
from burnish.plan.probe_stages import PlannedPeak, ProbeStage, planned, probe_stages
from burnish.plan.shapes import PlanError

ROOM = 0.92
"""Largest predicted share of memory at which a stage is still run."""
Factors = dict[str, float]
_HEAD = f"  {'phase':<17}{'planned':>9}{'measured':>10}{'meas./plan':>12}{'reserved':>10}{'s':>9}"


@dataclass(frozen=True)
class Correction:
    """Measured / planned memory of a stage."""

    factors: Factors = field(default_factory=dict)
    """By phase."""
    of_process: frozenset[str] = frozenset()
    """Phases whose factor is that of the process; of the others, of the tensors."""

    def corrected(self, phase: str, plan: PlannedPeak, *, least: float = 0.0) -> float:
        """Return the bytes of a phase, corrected by its factor, or by ``least`` if that is
        larger."""
        factor = max(least, self.factors.get(phase, 1.0))
        if phase in self.of_process:
            return factor * (plan.overhead + plan.tensors)
        return plan.overhead + factor * plan.tensors


@dataclass(frozen=True)
class Probed:
    """Result of a probe."""

    factors: Factors
    """Measured / planned memory of the last completed stage, by phase."""
    completed: bool
    """True if the last stage, the recipe's full size, was completed."""


def probe_recipe(config: JobConfig, say: Callable[[str], None]) -> Probed:
    """Probe a recipe on this machine and print the result of each stage. Raises PlanError."""
    hardware = hardware_of(config)
    if hardware is None:
        raise PlanError(
            "--probe measures this machine, which has none of the recipe's GPUs; run it on a node "
            "with GPUs, or remove --probe to get the plan"
        )
    limit = _free(hardware)
    say(f"probe on {hardware}; {limit / 1e9:.2f} GB free, of which stages may use {ROOM:.0%}")
    correction = Correction()
    stages = probe_stages(config, hardware)
    full_size = planned(stages[-1], hardware)
    for number, stage in enumerate(stages, 1):
        plans = _savable(planned(stage, hardware), say)
        say(f"\nstage {number} of {len(stages)}: {stage.name} ({' '.join(stage.overrides)})")
        ranks = stage.ranks if hardware.gpu is None else 1  # in the same memory
        need = max(
            correction.corrected(phase, plan, least=1.0) * (1 if plan.alone else ranks)
            for phase, plan in plans.items()
        )
        if need > ROOM * limit:
            say(f"  skipped: predicted {need / 1e9:.2f} of {limit / 1e9:.2f} GB")
            return _summary(correction, full_size, say, completed=False)
        measured = _run(stage, plans, on_gpu=hardware.gpu is not None)
        if isinstance(measured, str):
            say(f"  {measured} (predicted: {need / 1e9:.2f} of {limit / 1e9:.2f} GB)")
            return _summary(correction, full_size, say, completed=False)
        correction = _measurements(plans, measured, say)
    return _summary(correction, full_size, say, completed=True)


def _summary(
    correction: Correction,
    full_size: Mapping[str, PlannedPeak],
    say: Callable[[str], None],
    *,
    completed: bool,
) -> Probed:
    """Print the correction factors of the last stage, and the corrected memory of the recipe's full
    size."""
    if correction.factors:
        words = ", ".join(f"{phase} {value:.2f}" for phase, value in correction.factors.items())
        say(f"\ncorrection factors (measured / planned, last completed stage): {words}")
        sizes = {phase: correction.corrected(phase, plan) for phase, plan in full_size.items()}
        words = ", ".join(f"{phase} {_gb(size)}" for phase, size in sizes.items())
        say(f"corrected plan at the recipe's full size, GB per rank: {words}")
    say(f"the probe {'completed' if completed else 'stopped before'} the recipe's full size")
    return Probed(correction.factors, completed)


def _savable(
    plans: Mapping[str, PlannedPeak], say: Callable[[str], None]
) -> Mapping[str, PlannedPeak]:
    """Return the phases whose files fit into the folder for temporary files."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    large = [phase for phase, plan in plans.items() if plan.disk > ROOM * free]
    for phase in large:
        say(
            f"{phase} is not measured: it writes {plans[phase].disk / 1e9:.2f} GB, and "
            f"{tempfile.gettempdir()} has {free / 1e9:.2f} GB; set TMPDIR to a larger file system"
        )
    return {phase: plan for phase, plan in plans.items() if phase not in large}


def _free(hardware: Hardware) -> float:
    if hardware.gpu is not None:
        return hardware.gpu.bytes
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:  # includes memory that the system can reclaim (Linux)
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":") for line in text.splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return min(float(available), hardware.host_bytes)


def _run(
    stage: ProbeStage, plans: Mapping[str, PlannedPeak], *, on_gpu: bool
) -> dict[str, Any] | str:
    """Run the phases of ``plans`` and return the maximum over all ranks, by phase; or an error
    message."""
    with tempfile.TemporaryDirectory() as folder:
        base = {
            "config": stage.config.model_dump(mode="json"),
            "job": stage.config.job,
            "size": stage.ranks,
            "gpu": on_gpu,
            "phases": [phase for phase, plan in plans.items() if not plan.alone],
            "folder": folder,
            "engine_alone": False,
        }
        started: list[subprocess.Popen[str]] = []
        try:
            started += [_start({**base, "rank": rank}) for rank in range(stage.ranks)]
            ranks = [_result(process) for process in started]
            result: dict[str, Any] = {}
            for phase, values in ranks[0].items():
                by_name = {name: [rank[phase][name] for rank in ranks] for name in values}
                result[phase] = {
                    name: max((value for value in measured if value is not None), default=None)
                    for name, measured in by_name.items()
                }
            if any(plan.alone for plan in plans.values()):
                alone = {**base, "rank": 0, "size": 1, "engine_alone": True}
                started.append(_start(alone))
                result = {**_result(started[-1]), **result}
            return result
        except _FailedError as error:
            return str(error)
        finally:
            for process in started:
                process.kill()
                process.wait()


class _FailedError(BurnishError):
    """A rank that returned no measurement."""


def _start(task: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if not task["gpu"]:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish.plan.probe_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if task["rank"] else None,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()  # kept open until this process exits
    return process


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.startswith("{")]
    code = process.wait()
    if not lines:
        raise _FailedError(
            f"a rank was killed by signal {-code}, probably because host memory ran out"
            if code < 0
            else f"a rank failed with exit code {code}"
        )
    result: dict[str, Any] = json.loads(lines[-1])
    if "out_of_memory" in result:
        raise _FailedError(f"out of memory: {result['out_of_memory']}")
    if "refused" in result:
        raise _FailedError(f"not run: {result['refused']}")
    return result


def _measurements(
    plans: Mapping[str, PlannedPeak], phases: Mapping[str, Any], say: Callable[[str], None]
) -> Correction:
    """Print the measurements and return measured / planned by phase."""
    factors: Factors = {}
    some = any(values["tensors"] is not None for values in phases.values())
    say(f"  GB of {'tensors (*: of the process, resident)' if some else 'the process (resident)'}")
    say(_HEAD)
    for phase, values in phases.items():
        plan, counted = plans[phase], values["tensors"] is not None
        measured = values["tensors"] if counted else values["host"]
        expected = plan.tensors if counted else plan.tensors + plan.overhead
        factors[phase] = measured / expected if expected else 1.0  # nothing to correct
        name = f"{phase} *" if some and not counted else phase
        say(
            f"  {name:<17}{_gb(expected):>9}{_gb(measured):>10}{factors[phase]:>12.2f}"
            f"{_gb(values['reserved']):>10}{values['seconds']:>9.3f}"
        )
    of_process = {phase for phase, values in phases.items() if values["tensors"] is None}
    return Correction(factors, frozenset(of_process))


def _gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.3g}"

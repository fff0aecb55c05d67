"""Run the stages of a probe, each in new processes. A stage that is predicted not to fit is
skipped, and ends the probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    factors: Factors = {}
    stages = probe_stages(config, hardware)
    full_size = planned(stages[-1], hardware)
    for number, stage in enumerate(stages, 1):
        plans = planned(stage, hardware)
        say(f"\nstage {number} of {len(stages)}: {stage.name} ({' '.join(stage.overrides)})")
        need = _predicted(plans, factors, sharing=stage.ranks if hardware.gpu is None else 1)
        if need > ROOM * limit:
            say(f"  skipped: predicted {need / 1e9:.2f} of {limit / 1e9:.2f} GB")
            return _summary(factors, full_size, say, completed=False)
        found = _run(stage, list(plans), on_gpu=hardware.gpu is not None)
        if isinstance(found, str):
            say(f"  {found} (predicted: {need / 1e9:.2f} of {limit / 1e9:.2f} GB)")
            return _summary(factors, full_size, say, completed=False)
        factors = _measurements(plans, found, say)
    return _summary(factors, full_size, say, completed=True)


def _summary(
    factors: Factors,
    full_size: Mapping[str, PlannedPeak],
    say: Callable[[str], None],
    *,
    completed: bool,
) -> Probed:
    """Print the correction factors of the last stage, and the corrected memory of the recipe's full
    size."""
    if factors:
        words = ", ".join(f"{phase} {value:.2f}" for phase, value in factors.items())
        say(f"\ncorrection factors (measured / planned, last completed stage): {words}")
        sizes = {p: x.overhead + x.tensors * factors.get(p, 1.0) for p, x in full_size.items()}
        words = ", ".join(f"{phase} {_gb(size)}" for phase, size in sizes.items())
        say(f"corrected plan at the recipe's full size, GB per rank: {words}")
    say(f"the probe {'completed' if completed else 'stopped before'} the recipe's full size")
    return Probed(factors, completed)


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


def _predicted(plans: Mapping[str, PlannedPeak], factors: Factors, *, sharing: int) -> float:
    """Return the largest predicted memory of any phase. Correction factors of the last stage apply
    if they are above 1. ``sharing``: number of ranks in the same memory."""
    each = [
        p.overhead + p.tensors * max(1.0, factors.get(phase, 1.0)) for phase, p in plans.items()
    ]
    return sharing * max(each)


def _run(stage: ProbeStage, phases: list[str], *, on_gpu: bool) -> dict[str, Any] | str:
    """Run a stage and return the maximum over all ranks, by phase; or an error message."""
    with tempfile.TemporaryDirectory() as folder:
        base = {
            "config": stage.config.model_dump(mode="json"),
            "job": stage.config.job,
            "size": stage.ranks,
            "gpu": on_gpu,
            "phases": phases,
            "folder": folder,
        }
        started: list[subprocess.Popen[str]] = []
        try:
            started += [_start({**base, "rank": rank}) for rank in range(stage.ranks)]
            return _most([_result(process) for process in started])
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
    found: dict[str, Any] = json.loads(lines[-1])
    if "out_of_memory" in found:
        raise _FailedError(f"out of memory: {found['out_of_memory']}")
    return found


def _most(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        phase: {
            name: max((r[phase][name] for r in ranks if r[phase][name] is not None), default=None)
            for name in values
        }
        for phase, values in ranks[0].items()
    }


def _measurements(
    plans: Mapping[str, PlannedPeak], found: Mapping[str, Any], say: Callable[[str], None]
) -> Factors:
    """Print the measurements and return measured / planned by phase."""
    factors: Factors = {}
    counted = all(values["tensors"] is not None for values in found.values())
    say(f"  GB of {'tensors' if counted else 'the process (resident)'}")
    say(_HEAD)
    for phase, values in found.items():
        plan = plans[phase]
        measured = values["tensors"] if counted else values["host"]
        expected = plan.tensors if counted else plan.tensors + plan.overhead
        factors[phase] = measured / expected
        say(
            f"  {phase:<17}{_gb(expected):>9}{_gb(measured):>10}{factors[phase]:>12.2f}"
            f"{_gb(values['reserved']):>10}{values['seconds']:>9.3f}"
        )
    return factors


def _gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.3g}"

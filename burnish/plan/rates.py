"""Measured speeds and response lengths of a run, for the time estimate of another recipe.

A run's median seconds of each phase are divided by the estimate for the run's own recipe and
response lengths on the same hardware. The estimate of another recipe with these lengths is
multiplied by these factors.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config import load_config
from burnish.observe.metrics import read_metrics
from burnish.observe.timeline import SCORING
from burnish.plan.hardware import Hardware
from burnish.plan.plan_vs_actual import PLANNED_AS
from burnish.plan.shapes import PlanError
from burnish.plan.time import Rates, ResponseLengths, estimate, rate_key

_NOT_IN_A_STEP = frozenset({"load", "wait", "eval", "checkpoint", "rollout_sync"})
"""Spans of the plan that no step of the estimate contains."""


def measured_rates(run_dir: Path, hardware: Hardware) -> Rates:
    """Return the speeds of the run in ``run_dir``, which was made on ``hardware``. The first step
    is not counted if there are others. Raises PlanError if the folder has no recipe or no measured
    step, ConfigError if its recipe is invalid."""
    recipe = run_dir / "config.yaml"
    if not recipe.is_file():
        raise PlanError(
            f"--rates {run_dir} is not a run folder: it has no config.yaml; give the folder of a "
            "run that made some steps"
        )
    try:
        lines = read_metrics(run_dir)
    except ValueError as error:
        raise PlanError(f"--rates {run_dir}: {error}") from error
    steps = [line for line in lines if line.get("time/step_s", 0) > 0]
    steps = steps[1:] or steps
    if not steps:
        raise PlanError(
            f"--rates {run_dir}: its metrics.jsonl has no step with a measured time; give the "
            "folder of a run that made some steps"
        )
    lengths = _response_lengths(steps)
    estimated: dict[tuple[str, str], float] = {}
    for part in estimate(load_config(recipe), hardware, Rates({}, _ASSUMED, lengths)).parts:
        key = rate_key(part)
        estimated[key] = estimated.get(key, 0.0) + part.seconds
    factors = {
        key: seconds / estimated[key]
        for key, seconds in _measured(steps, estimated).items()
        if seconds and estimated.get(key)
    }
    count = f"{len(steps)} step{'s' * (len(steps) > 1)} of {run_dir}"
    unit = "times"
    if lengths is not None:
        unit += (
            f" and response lengths (mean {lengths.mean:.0f}, longest of a step "
            f"{lengths.longest:.0f} tokens)"
        )
    return Rates(factors, f"the measured {unit} of {count}, else from {_ASSUMED}", lengths)


_ASSUMED = "peak speeds and assumed efficiencies"


def _response_lengths(steps: Sequence[Mapping[str, Any]]) -> ResponseLengths | None:
    """Return the median lengths over the steps, or None for a run that samples no responses."""
    names = ("rollout/response_len", "rollout/response_len_max")
    if any(line.get(name) is None for line in steps for name in names):
        return None
    mean, longest = (statistics.median(line[name] for line in steps) for name in names)
    return ResponseLengths(float(mean), float(longest))


def _measured(
    steps: Sequence[Mapping[str, Any]], estimated: Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Return median seconds by (role, phase)."""
    medians: dict[tuple[str, str], float] = {}
    for span, (role, phase) in PLANNED_AS.items():
        if span in _NOT_IN_A_STEP:
            continue
        key = (role, phase)
        if key == ("reference", "log-probs") and key not in estimated:
            key = ("policy", "log-probs")  # the base of a LoRA policy is the reference
        seconds = statistics.median(_seconds(line, span) for line in steps)
        medians[key] = medians.get(key, 0.0) + seconds
    return medians


def _seconds(line: Mapping[str, Any], span: str) -> float:
    """Return the seconds of a span in one step. In a run whose sampling overlaps with training,
    sampling takes the time in which requests are open."""
    idle = line.get("time/rollout_idle_frac")
    if span == "rollout" and idle is not None:
        return float((1.0 - idle) * line["time/step_s"])
    return float(line.get(f"time/{span}_s") or line.get(f"time/{SCORING}/{span}_s") or 0.0)

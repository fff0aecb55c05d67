"""``burnish plan``: the printed text or JSON, the written recipe, and the speeds of a measured run
(``--rates``).

A run's median seconds of each phase are divided by the estimate for the run's own recipe and
response lengths on the same hardware. The estimate of another recipe with these lengths is
multiplied by these factors."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from burnish.config import dump_yaml, load_config
from burnish.config.job import JobConfig
from burnish.config.load import changed_config
from burnish.observe.metrics import read_metrics
from burnish.observe.timeline import SCORING
from burnish.plan.faster import faster
from burnish.plan.fit import fewer_ranks, fit, split_text, splits
from burnish.plan.hardware import (
    GB,
    Hardware,
    Tables,
    load_tables,
    parse_cluster,
    this_machine,
)
from burnish.plan.launch import hardware_of
from burnish.plan.plan_vs_actual import PLANNED_AS
from burnish.plan.predict import make_plan
from burnish.plan.shapes import PlanError
from burnish.plan.time import Rates, ResponseLengths, estimate, rate_key

_NOT_IN_A_STEP = frozenset({"load", "wait", "eval", "checkpoint", "rollout_sync"})
"""Spans of the plan that no step of the estimate contains."""
_ASSUMED = "counted work and the rates of hardware.yaml"


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command."""

    cluster: str | None = None
    gpus: Path | None = None
    """File with additional GPUs."""
    host_gb: float | None = None
    network_gbs: float | None = None
    assume: Sequence[str] = ()
    as_json: bool = False
    details: bool = False
    fit: bool = False
    write: Path | None = None
    """File for the fastest recipe that fits."""
    rates: Path | None = None
    """Run folder whose measured speeds are used."""


def check_probe_options(options: PlanOptions) -> None:
    """Raise PlanError if ``--probe`` is combined with an option that it would ignore."""
    defaults = asdict(PlanOptions())
    changed = [name for name, value in asdict(options).items() if value != defaults[name]]
    if changed:
        names = ", ".join("--" + name.removeprefix("as_").replace("_", "-") for name in changed)
        raise PlanError(
            f"--probe measures the recipe on this machine, so {names} would have no effect; "
            f"remove {'it' if len(changed) == 1 else 'them'}, or remove --probe to get the plan"
        )


def plan_text(
    config: JobConfig, options: PlanOptions, notes: Sequence[str] = ()
) -> tuple[str, bool]:
    """Return the text of the plan, and whether the recipe fits. Raises PlanError."""
    _check(options)
    tables = load_tables(options.gpus)
    hardware = _hardware(config, options, tables)
    ranks = fewer_ranks(config, hardware) if options.fit else []
    if ranks:
        config = changed_config(config, ranks)
    plan = make_plan(config, hardware, assume=options.assume)
    rates = None if options.rates is None else measured_rates(options.rates, hardware)
    fitting = fit(config, hardware, assume=options.assume, rates=rates) if options.fit else None
    if fitting is not None:
        fitting = fitting.with_overrides(ranks)
    time = estimate(config, hardware, rates)
    changes = faster(config, hardware, plan, time.seconds, assume=options.assume, rates=rates)
    if options.write is not None and fitting is not None and fitting.proposals:
        _write(options.write, fitting.proposals[0].config, cluster=options.cluster)
    if options.as_json:
        tree = json.loads(plan.to_json())
        tree["seconds_per_step"], tree["samples_per_s"] = time.seconds, time.samples_per_s
        if time.overlap is not None:
            tree["asynchronous"] = time.overlap.to_dict()
            tree["splits"] = [vars(split) for split in splits(config, hardware, rates)]
        if fitting is not None:
            tree["proposals"] = [
                {"overrides": p.overrides, "seconds_per_step": p.seconds, "reason": p.reason}
                for p in fitting.proposals
            ]
            tree["smallest_cluster"] = fitting.smallest
        tree["faster"] = [asdict(change) for change in changes]
        tree["models"] = list(notes)
        return json.dumps(tree, indent=1), plan.fits
    times = [time.to_text()]
    if best := split_text(config, hardware, rates, time.seconds):
        times.append(f"  {best}")
    if changes:
        times += ["  settings that would save most:", *(f"    {change}" for change in changes)]
    parts = [plan.to_text(details=options.details), "\n".join(times)]
    parts += ["\n".join(["models", *(f"  {note}" for note in notes)])] if notes else []
    if fitting is not None:
        parts.append(fitting.to_text())
        if options.write is not None and fitting.proposals:
            parts[-1] += f"\nwrote the first as a complete recipe: {options.write}"
    elif not plan.fits:
        parts.append("To find settings that fit, repeat the command with --fit.")
    return "\n\n".join(parts), plan.fits


def _check(options: PlanOptions) -> None:
    """Raise PlanError if an option has no effect or cannot take effect."""
    if options.write is None:
        return
    if not options.fit:
        raise PlanError(
            "--write writes the first recipe that --fit finds, but --fit is not given; add --fit"
        )
    if options.write.is_dir() or not options.write.absolute().parent.is_dir():
        why = "is a folder" if options.write.is_dir() else "is in a folder that does not exist"
        raise PlanError(f"--write {options.write} {why}; give a file in an existing folder")


def _write(file: Path, config: JobConfig, *, cluster: str | None) -> None:
    """Write the recipe, with the cluster of ``--cluster``."""
    if cluster is not None:
        cluster_config = config.cluster.model_copy(update={"hardware": cluster})
        config = config.model_copy(update={"cluster": cluster_config})
    try:
        file.write_text(dump_yaml(config), encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"--write {file} cannot be written: {error.strerror}; give a writable file"
        ) from error


def _hardware(config: JobConfig, options: PlanOptions, tables: Tables) -> Hardware:
    """Return the hardware of ``--cluster``, else of the recipe's ``cluster.hardware``, else this
    machine."""
    text, source = options.cluster, "--cluster "
    if text is None:
        text, source = config.cluster.hardware, "cluster.hardware="
    if text is not None:
        return parse_cluster(
            text,
            tables=tables,
            host_gb=options.host_gb,
            network_gbs=options.network_gbs,
            source=source,
        )
    hardware = hardware_of(config) or this_machine(tables)
    if options.host_gb is not None:
        hardware = replace(hardware, host_bytes=options.host_gb * GB)
    if options.network_gbs is not None:
        hardware = replace(hardware, network_gbs=options.network_gbs)
    return hardware


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

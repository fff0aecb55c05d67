"""``burnish plan``: what the command prints and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.config import dump_yaml
from burnish.config.jobs import JobConfig
from burnish.memory.fit import Fitting, fit
from burnish.memory.hardware import Hardware, Tables, load_tables, parse_cluster, this_machine
from burnish.memory.launch import hardware_of
from burnish.memory.predict import make_plan
from burnish.memory.time import estimate


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command."""

    cluster: str | None = None
    gpus: Path | None = None
    """A file with more GPUs."""
    host_gb: float | None = None
    network_gbs: float | None = None
    assume: Sequence[str] = ()
    as_json: bool = False
    details: bool = False
    fit: bool = False
    write: Path | None = None
    """Where the fastest recipe that fits is written."""


def plan_text(config: JobConfig, options: PlanOptions) -> tuple[str, bool]:
    """What is printed, and whether the recipe fits. Raises PlanError."""
    tables = load_tables(options.gpus)
    hardware = _hardware(config, options, tables)
    plan = make_plan(config, hardware, assume=options.assume)
    found = fit(config, hardware, assume=options.assume) if options.fit else None
    time = estimate(config, hardware)
    if options.write is not None and found is not None and found.proposals:
        options.write.write_text(dump_yaml(found.proposals[0].config), encoding="utf-8")
    if options.as_json:
        tree = json.loads(plan.to_json())
        tree["seconds_per_step"], tree["samples_per_s"] = time.seconds, time.samples_per_s
        if found is not None:
            tree["proposals"] = [
                {"overrides": p.overrides, "seconds_per_step": p.seconds, "reason": p.reason}
                for p in found.proposals
            ]
            tree["smallest_cluster"] = found.smallest
        return json.dumps(tree, indent=1), plan.fits
    parts = [plan.to_text(details=options.details), time.to_text()]
    if found is not None:
        parts.append(_fit_text(found, options.write))
    elif not plan.fits:
        parts.append("what would fit: the same command with --fit")
    return "\n\n".join(parts), plan.fits


def _fit_text(found: Fitting, written: Path | None) -> str:
    text = found.to_text()
    if written is not None and found.proposals:
        text += f"\nwrote the first as a whole recipe: {written}"
    return text


def _hardware(config: JobConfig, options: PlanOptions, tables: Tables) -> Hardware:
    if options.cluster is not None:
        return parse_cluster(
            options.cluster,
            tables=tables,
            host_gb=options.host_gb,
            network_gbs=options.network_gbs,
        )
    return hardware_of(config) or this_machine(tables)

"""Memory plan that every run makes before it loads anything.

A run that cannot fit is rejected. Errors in the planner itself never stop a run.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

from burnish.config.job import JobConfig
from burnish.config.placement import placement_groups
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.plan.hardware import Hardware, parse_cluster, this_machine, visible_gpus
from burnish.plan.memory_plan import Plan
from burnish.plan.predict import make_plan

log = logging.getLogger("burnish")

PLAN_FILE = "plan.txt"


class DoesNotFitError(BurnishError, RuntimeError):
    """A run that cannot fit into memory. The message contains the summary of the plan and a
    suggested fix."""


def check_memory(config: JobConfig, run_dir: Path, *, force: bool = False) -> Plan | None:
    """Plan the run and write ``plan.txt`` to the run folder. Return None if no plan could be made.

    Raises DoesNotFitError if the run cannot fit, unless ``force``.
    """
    try:
        hardware = hardware_of(config)
        if hardware is None and config.cluster.hardware is not None:
            hardware = parse_cluster(config.cluster.hardware)
        if hardware is None:
            raise LookupError(
                "this process cannot detect the workers' GPUs; set cluster.hardware to get a plan"
            )
        plan = make_plan(config, hardware)
        text = plan.to_text(details=True)
    except Exception as error:  # the plan is optional: a run must not fail without it
        log.info("no memory plan: %s", library_text(error))
        (run_dir / PLAN_FILE).write_text(f"no plan: {error}\n", encoding="utf-8")
        return None
    (run_dir / PLAN_FILE).write_text(text + "\n", encoding="utf-8")
    if not plan.cannot_run:
        return plan
    if not force:
        raise DoesNotFitError(
            f"this run does not fit into memory; nothing was loaded.\n{plan.verdict()}\n"
            f"Full plan: {run_dir / PLAN_FILE}. To find settings that fit: burnish plan RECIPE "
            "--fit. To run anyway: --force (Python: burnish.run(..., force=True))"
        )
    log.warning("this run does not fit according to its plan; --force: %s", plan.verdict())
    return plan


def hardware_of(config: JobConfig) -> Hardware | None:
    """Return the hardware that the run will use, as visible from this process; None if it is not
    visible."""
    cluster = config.cluster
    if cluster.runtime == "inline":
        gpus = None if config.resolve().device == "cpu" else visible_gpus()
        return gpus or this_machine()
    if cluster.runtime == "spmd":
        visible = None if config.resolve().device == "cpu" else visible_gpus()
        if visible is None:
            return this_machine()
        return visible_gpus(nodes=math.ceil(cluster.policy_ranks / visible.gpus_per_node))
    need = sum(p.count * p.gpus for p in placement_groups(config))
    if not need:  # on CPUs: this machine, unless the cluster runs elsewhere
        return None if cluster.ray_address else this_machine()
    visible = visible_gpus()
    if visible is None:
        return None
    nodes = math.ceil(need / visible.gpus_per_node) if cluster.ray_address else 1
    return visible_gpus(nodes=nodes)

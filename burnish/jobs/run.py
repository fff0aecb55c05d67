"""``burnish.run``: one job from its config to its end. The Python API, and what the command line
calls."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config import JobConfig
from burnish.config.placement import placement_groups
from burnish.config.registry import REGISTRY
from burnish.jobs.base import Job, seed_everything
from burnish.jobs.errors import RunError, StoppedError
from burnish.jobs.families import check_families
from burnish.jobs.inputs import check_inputs
from burnish.jobs.memory_monitor import MemoryMonitor
from burnish.jobs.parallelism import check_head_divisibility
from burnish.jobs.run_dir import prepare_run_dir
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.oom import is_out_of_memory
from burnish.plan.launch import check_memory
from burnish.runtime.base import Runtime
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.ray import RayRuntime

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class RunResult:
    """Where a run is and how it ended."""

    run_dir: Path
    metrics: dict[str, float]
    """The last value of every metric."""


def run(
    config: JobConfig,
    *,
    resume: Path | str | None = None,
    rewards: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    force: bool = False,
) -> RunResult:
    """Run a job to its end.

    ``rewards``: a callable, or several by the names of the recipe's function rewards. ``resume``:
    the folder of a run to go on with. ``force``: run even where the memory plan (``plan.txt`` in
    the run folder) says that it cannot fit. Raises RunError, DoesNotFitError, DataError,
    ModelError, RewardError or CheckpointError with what to do; Interrupted after a signal, and
    StoppedError if numbers that are not finite, or steps that teach nothing, make going on
    pointless (the run is saved in both cases); RunOutOfMemoryError with what to change, also in
    ``oom.txt``.
    """
    functions = {"": rewards} if callable(rewards) else dict(rewards or {})
    job = job_of(config)
    if resume is not None and not REGISTRY[config.job].resumable:
        raise RunError(
            f"the job {config.job} is done in one go and cannot be resumed; leave resume out"
        )
    if functions and not job.takes_rewards:
        raise RunError(f"the job {config.job} takes no rewards; leave rewards out")
    check_inputs(config, resumed=resume is not None)
    check_head_divisibility(config, download=True)
    check_families(config, download=True)
    seed_everything(config.seed)
    run_dir = prepare_run_dir(config, Path(resume) if resume is not None else None)
    done = job.prepare(config, run_dir, resumed=resume is not None)
    if done is not None:
        log.warning("the run %s is finished; there is nothing left to do", run_dir)
        return RunResult(run_dir, done)
    memory_monitor = MemoryMonitor(config, run_dir, check_memory(config, run_dir, force=force))
    with (
        _report(run_dir, memory_monitor),
        ExitStack() as stack,  # workers may be writing until the driver is at its end
        job.driver(config, run_dir, memory_monitor) as driver,
    ):
        runtime = _runtime(config, config.resolve().device, driver.timeline)
        stack.callback(runtime.close)
        driver.attach(runtime)
        with closing(job.build(config, runtime, run_dir=run_dir, functions=functions)) as loop:
            metrics = driver.run(loop)
    return RunResult(run_dir, metrics)


def job_of(config: JobConfig) -> Job[Any, Any]:
    """Return the job that a config is for. Its module is imported here, when it is first used."""
    job = vars(importlib.import_module(REGISTRY[config.job].module))["JOB"]
    assert isinstance(job, Job)
    return job


@contextmanager
def _report(run_dir: Path, memory_monitor: MemoryMonitor) -> Iterator[None]:
    """Write ``report.html`` at the end of the run, also if the run stopped itself. An out-of-memory
    error becomes a RunOutOfMemoryError."""
    try:
        yield
    except StoppedError:
        _write_report(run_dir)  # its curves are what the user looks at next
        raise
    except Exception as error:
        if not any(map(is_out_of_memory, filter(None, (error, error.__cause__)))):
            raise
        report = memory_monitor.out_of_memory(error)
        _write_report(run_dir, may_lack_steps=True)
        raise report from error
    _write_report(run_dir)


def _write_report(run_dir: Path, *, may_lack_steps: bool = False) -> None:
    """Write ``report.html``. ``may_lack_steps``: a run that failed before its first step has none.

    The import is here because training does not need plotly (10 MB), which this page does. Without
    it the run ends as it would with it, and a warning gives the command that writes the page.
    """
    try:
        from burnish.observe.report import ReportError, build_report
    except ModuleNotFoundError as error:
        log.warning("no report.html: %s. Install it and run: burnish report %s", error, run_dir)
        return
    with suppress(ReportError) if may_lack_steps else nullcontext():
        build_report(run_dir)


def _runtime(config: JobConfig, device: str, timeline: Timeline) -> Runtime:
    tokenizer = load_tokenizer(config.model)
    if config.cluster.runtime == "ray":
        return RayRuntime(
            tokenizer,
            config.model,
            config.cluster,
            placements=placement_groups(config),
            precision=config.precision,
            timeline=timeline,
        )
    return InlineRuntime(tokenizer, precision=config.precision, device=device, timeline=timeline)

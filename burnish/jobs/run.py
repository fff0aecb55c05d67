"""``burnish.run``: one job from its config to its end. The Python API, and what the command line
calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config import (
    DistillConfig,
    EvaluateConfig,
    GenerateConfig,
    JobConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from burnish.config.jobs import SupervisedJob
from burnish.config.model import PrecisionConfig
from burnish.config.placement import placement_groups
from burnish.jobs.build import (
    build_evaluation,
    build_generation,
    build_rl,
    build_supervised,
)
from burnish.jobs.build_distill import build_distill
from burnish.jobs.build_preference import build_preference
from burnish.jobs.errors import RunError, StoppedError
from burnish.jobs.evaluate import EvaluateRun
from burnish.jobs.families import check_families
from burnish.jobs.generate import GenerateRun, check_output, check_same_recipe, finished
from burnish.jobs.inputs import check_inputs
from burnish.jobs.memory_monitor import MemoryMonitor
from burnish.jobs.parallelism import check_head_divisibility
from burnish.jobs.rl import RLState, rl_step
from burnish.jobs.run_dir import prepare_run_dir
from burnish.jobs.session import Session, seed_everything
from burnish.jobs.supervised import SupervisedState, supervised_eval, supervised_step
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
    if resume is not None and isinstance(config, EvaluateConfig):
        raise RunError("an evaluation is done in one go and cannot be resumed; leave resume out")
    if functions and not isinstance(config, (RLConfig, EvaluateConfig, GenerateConfig)):
        raise RunError(f"the job {config.job} takes no rewards; leave rewards out")
    check_inputs(config, resumed=resume is not None)
    check_head_divisibility(config, download=True)
    check_families(config, download=True)
    seed_everything(config.seed)
    run_dir = prepare_run_dir(config, Path(resume) if resume is not None else None)
    if isinstance(config, GenerateConfig):
        check_output(config, run_dir, resumed=resume is not None)
        if resume is not None:
            check_same_recipe(config, run_dir)
            done = finished(config, run_dir)
            if done is not None:
                log.warning("the run %s is finished; there is nothing left to do", run_dir)
                return RunResult(run_dir, done)
    memory_monitor = MemoryMonitor(config, run_dir, check_memory(config, run_dir, force=force))
    try:
        metrics = _run_job(config, run_dir, functions, memory_monitor)
    except StoppedError:
        _write_report(run_dir)  # its curves are where the user looks next
        raise
    except Exception as error:
        if not any(map(is_out_of_memory, filter(None, (error, error.__cause__)))):
            raise
        report = memory_monitor.out_of_memory(error)
        _write_report(run_dir, may_lack_steps=True)
        raise report from error
    _write_report(run_dir)
    return RunResult(run_dir, metrics)


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


def _run_job(
    config: JobConfig, run_dir: Path, functions: Mapping[str, Any], memory_monitor: MemoryMonitor
) -> dict[str, float]:
    if isinstance(config, RLConfig):
        return _run_rl(config, run_dir, functions, memory_monitor)
    if isinstance(config, EvaluateConfig):
        return _run_evaluate(config, run_dir, functions, memory_monitor)
    if isinstance(config, GenerateConfig):
        return _run_generate(config, run_dir, functions, memory_monitor)
    assert isinstance(config, SupervisedJob)
    return _run_supervised(config, run_dir, memory_monitor)


def _run_rl(
    config: RLConfig, run_dir: Path, functions: Mapping[str, Any], memory_monitor: MemoryMonitor
) -> dict[str, float]:
    metric = "eval/pass@1" if config.eval is not None else "reward/mean"
    with (
        ExitStack() as stack,  # workers may be writing until the session is at its end
        Session(config, run_dir, best_metric=metric, memory_monitor=memory_monitor) as session,
    ):
        runtime = memory_monitor.runtime = _runtime(
            config, config.train.engine.device, session.timeline
        )
        stack.callback(runtime.close)
        session.recover = runtime.recover if isinstance(runtime, RayRuntime) else None
        parts, evaluator = build_rl(config, runtime, functions, run_dir)
        try:
            return session.run(
                RLState(parts),
                total_steps=config.max_steps,
                step=_with_gap_warning(config.precision, lambda step: rl_step(parts, step)),
                evaluate=evaluator.evaluate if evaluator is not None else None,
                eval_every=config.eval.every_n_steps if config.eval is not None else 0,
            )
        finally:
            parts.signal.log_total()
            parts.runner.rewards.close()
            parts.runner.engine.close()


def _with_gap_warning(
    precision: PrecisionConfig, step: Callable[[int], dict[str, float]]
) -> Callable[[int], dict[str, float]]:
    """``step``, which says at its first call how far trainer and sampler are apart, where they
    compute in two formats."""
    said = precision.sampler_dtype == precision.dtype

    def measured(number: int) -> dict[str, float]:
        nonlocal said
        metrics = step(number)
        if not said and "train/mismatch_abs" in metrics:
            said = True
            log.warning(
                "precision.rollout_dtype: measured at step %d, log-probs of the trainer (%s) and "
                "of the rollout engine (%s) differ by %.2g nats per token on average and %.2g at "
                "most, k3 KL %.2g",
                number,
                precision.dtype,
                precision.sampler_dtype,
                metrics["train/mismatch_abs"],
                metrics["train/mismatch_max"],
                metrics["train/mismatch_k3"],
            )
        return metrics

    return measured


def _run_supervised(
    config: SupervisedJob, run_dir: Path, memory_monitor: MemoryMonitor
) -> dict[str, float]:
    with (
        ExitStack() as stack,
        Session(config, run_dir, best_metric="eval/loss", memory_monitor=memory_monitor) as session,
    ):
        runtime = memory_monitor.runtime = _runtime(
            config, config.train.engine.device, session.timeline
        )
        stack.callback(runtime.close)
        session.recover = runtime.recover if isinstance(runtime, RayRuntime) else None
        if isinstance(config, PreferenceConfig):
            parts, total = build_preference(config, runtime, run_dir)
        elif isinstance(config, DistillConfig):
            parts, total = build_distill(config, runtime)
        else:
            assert isinstance(config, (SFTConfig, RewardModelConfig))
            parts, total = build_supervised(config, runtime)
        held_out = parts.eval_batch is not None
        try:
            return session.run(
                SupervisedState(parts),
                total_steps=total,
                step=lambda step: supervised_step(parts, step),
                evaluate=(lambda step: supervised_eval(parts, step)) if held_out else None,
                eval_every=config.eval_every_n_steps,
            )
        finally:
            parts.signal.log_total()


def _run_evaluate(
    config: EvaluateConfig,
    run_dir: Path,
    functions: Mapping[str, Any],
    memory_monitor: MemoryMonitor,
) -> dict[str, float]:
    with ExitStack() as stack:
        runtime = memory_monitor.runtime = _runtime(
            config, config.device, Timeline(peaks=memory_monitor.peaks)
        )
        stack.callback(runtime.close)
        evaluator = build_evaluation(config, runtime, functions, run_dir)
        stack.callback(evaluator.runner.engine.close)
        stack.callback(evaluator.runner.rewards.close)
        with EvaluateRun(config, run_dir, memory_monitor, runtime.timeline) as session:
            return session.run(evaluator)


def _run_generate(
    config: GenerateConfig,
    run_dir: Path,
    functions: Mapping[str, Any],
    memory_monitor: MemoryMonitor,
) -> dict[str, float]:
    with ExitStack() as stack:
        runtime = memory_monitor.runtime = _runtime(
            config, config.device, Timeline(peaks=memory_monitor.peaks)
        )
        stack.callback(runtime.close)
        parts = build_generation(config, runtime, functions)
        stack.callback(parts.runner.engine.close)
        stack.callback(parts.runner.rewards.close)
        with GenerateRun(parts, run_dir, memory_monitor, runtime.timeline) as session:
            return session.run()


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

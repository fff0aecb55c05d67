"""``burnish.run``: run one job from its config. This is the Python API, which the command line also
calls."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from burnish.config import JobConfig, RLConfig
from burnish.config.placement import PlacementGroupSpec
from burnish.config.registry import REGISTRY
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.driver.base import Job, seed_everything
from burnish.driver.digests import check_same_rows, check_weights_of_run, record_user_code
from burnish.driver.errors import RunError, StoppedError
from burnish.driver.memory_monitor import MemoryMonitor
from burnish.driver.run_dir import date_of, locked_outputs, locked_run_dir
from burnish.models.load import load_tokenizer
from burnish.observe.ending import recorded_end
from burnish.observe.progress import keeping_early_records
from burnish.observe.timeline import Timeline
from burnish.oom import is_out_of_memory
from burnish.plan.launch import check_memory
from burnish.plan.memory_plan import Plan
from burnish.preflight.inputs import preflight, recorded_run
from burnish.preflight.launch import check_before_run
from burnish.publish.export import check_export_folder, export_at_end
from burnish.report.build import ReportError, build_report
from burnish.rewards.build import named_functions
from burnish.runtime.base import Runtime
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.ray.runtime import RayRuntime
from burnish.runtime.spmd.runtime import Ranks, SpmdRuntime, connected, records_folder
from burnish.templates import date_of_run

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class RunResult:
    """Folder and final metrics of a run."""

    run_dir: Path
    metrics: dict[str, float]
    """The last value of every metric."""


def run(
    config: JobConfig,
    *,
    resume: Path | str | None = None,
    replay: Path | str | None = None,
    rewards: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    force: bool = False,
) -> RunResult:
    """Run a job to its end.

    ``rewards``: a callable, or several by the names of the recipe's function rewards. ``resume``:
    the folder of the run to resume. ``replay``: the folder of a run of the job rl with recorded
    rollouts, to train from its groups without sampling; a replay that is resumed continues with the
    same recording. ``force``: run even if the memory plan predicts that the job does not fit, and
    resume even if the rows of a data file changed.

    Raises RunError, DoesNotFitError, DataError, ModelError, RewardError or CheckpointError, each
    with a suggested fix. Raises Interrupted after a signal. Raises StoppedError if the run stopped
    itself because of non-finite numbers or steps without a learning signal. Before either error the
    run is saved. Raises RunOutOfMemoryError with suggested changes, which are also in ``oom.txt``.
    """
    replays = _recording_of(resume, replay) is not None
    preflight(config, resumed=resume is not None, replays=replays, download=True)
    return run_checked(config, resume=resume, replay=replay, rewards=rewards, force=force)


@keeping_early_records()
def run_checked(
    config: JobConfig,
    *,
    resume: Path | str | None = None,
    replay: Path | str | None = None,
    rewards: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    force: bool = False,
) -> RunResult:
    """Run a job as :func:`run` does, after its ``preflight``."""
    functions = named_functions(rewards)
    replayed, resumed = _recording_of(resume, replay), resume is not None
    job = job_of(config)
    config = job.counted(config)
    if replayed is not None:
        job = _replay_job(replayed, config)
    if resumed and not REGISTRY[config.job].resumable:
        raise RunError(f"the job {config.job} has no steps and cannot be resumed; remove resume")
    if functions and not job.takes_rewards:
        raise RunError(f"the job {config.job} takes no rewards; remove rewards")
    read = config if replayed is None else config.inputs_of_replay()
    with (
        connected(config, resumed=resumed) as launched,
        date_of_run() as fix_date,
        ExitStack() as lock,
    ):
        ranks = SINGLE if launched is None else launched.group
        run_dir = ranks.from_first(lambda: _folder(config, resume, lock))
        if ranks.rank == 0:
            lock.enter_context(recorded_end(run_dir))  # before the folder is unlocked
        fix_date(ranks.from_first(lambda: date_of(run_dir, resumed=resumed)))
        done = job.prepare(config, run_dir, resumed=resumed)
        if done is not None:
            return _finished(run_dir, done, ranks)
        check = partial(_checked, config, read, run_dir, resumed, force=force)
        plan = check() if launched is None else launched.from_first("the check of the rows", check)
        seed_everything(config.seed)  # after the rewards were called on one row
        with records_folder(run_dir, ranks) as records:
            memory_monitor = MemoryMonitor(config, records, plan)
            with (
                _report(run_dir, memory_monitor) if ranks.rank == 0 else nullcontext(),
                ExitStack() as stack,  # closes the runtime after the driver: workers may write
                job.driver(config, run_dir, memory_monitor) as driver,
                nullcontext() if launched is None else launched.monitor.reported(),
            ):
                driver.records_dir, driver.read = records, read
                runtime = _runtime(config, job.placements(config), driver.timeline, launched)
                stack.callback(runtime.close)
                driver.attach(runtime)
                loop = job.build(config, runtime, run_dir=run_dir, functions=functions)
                with closing(loop):
                    metrics = driver.run(loop)
        if config.training is not None and ranks.rank == 0:  # the engines are closed
            export_at_end(config.training, run_dir)
    return RunResult(run_dir, metrics)


def _folder(config: JobConfig, resume: Path | str | None, lock: ExitStack) -> Path:
    """Create the run folder, or check that of the run to resume. Keep it locked until ``lock``
    ends. Return its path."""
    resume = None if resume is None else Path(resume)
    run_dir = lock.enter_context(locked_run_dir(config, resume))
    lock.enter_context(locked_outputs(config.output_locks(run_dir)))
    if config.training is not None:
        check_export_folder(config.training, run_dir)
    return run_dir


def _finished(run_dir: Path, metrics: dict[str, float], ranks: RankGroup) -> RunResult:
    """Return the result of a run that was finished before. Write its report if it was killed after
    it wrote its output."""
    log.warning("the run %s is already finished", run_dir)
    if ranks.rank == 0 and not (run_dir / "report.html").exists():
        _write_report(run_dir)
    return RunResult(run_dir, metrics)


def _checked(
    config: JobConfig, read: JobConfig, run_dir: Path, resumed: bool, *, force: bool
) -> Plan | None:
    """Check the memory plan, which takes less time than the rows, then the data and the rewards of
    ``read``, the config of the inputs. Return the plan."""
    plan = check_memory(config, run_dir, force=force)
    check_before_run(read, resumed=resumed)
    record_user_code(read, run_dir, resumed=resumed)
    if read.training is not None:
        check_same_rows(read.training, run_dir, resumed=resumed, force=force)
        if resumed:
            check_weights_of_run(read.training, run_dir)
    return plan


def job_of(config: JobConfig) -> Job[Any, Any]:
    """Return the job for a config. Its module is imported here, on first use."""
    job = importlib.import_module(REGISTRY[config.job].module).JOB
    assert isinstance(job, Job)
    return job


def _recording_of(resume: Path | str | None, replay: Path | str | None) -> Path | None:
    """Return the run whose recorded rollouts a run trains from; None if it samples. Raises RunError
    if ``resume`` is not a replay and ``replay`` is given."""
    recording = None if resume is None else recorded_run(Path(resume))
    if resume is not None and replay is not None and recording is None:
        raise RunError(
            f"--resume {resume}: that run samples its groups and cannot continue with those of "
            "--replay; omit --replay, or omit --resume to start a replay in a new folder"
        )
    return recording if replay is None else Path(replay)


def _replay_job(recorded: Path, config: JobConfig) -> Job[Any, Any]:
    """Return the job for a replay. Raises RunError if the recording cannot be replayed."""
    if not REGISTRY[config.job].replayable:
        raise RunError(
            f"the job {config.job} cannot be replayed; only rl records its groups; remove --replay"
        )
    from burnish.jobs.replay import ReplayJob, open_recording

    return ReplayJob(open_recording(recorded, cast(RLConfig, config)))


@contextmanager
def _report(run_dir: Path, memory_monitor: MemoryMonitor) -> Iterator[None]:
    """Write ``report.html`` at the end of the run, even if the run stopped itself. Convert an
    out-of-memory error to a RunOutOfMemoryError."""
    try:
        yield
    except StoppedError:
        _write_report(run_dir)  # its curves help to find the cause
        raise
    except Exception as error:
        if not any(map(is_out_of_memory, filter(None, (error, error.__cause__)))):
            raise
        report = memory_monitor.out_of_memory(error)
        _write_report(run_dir, may_lack_steps=True)
        raise report from error
    _write_report(run_dir)


def _write_report(run_dir: Path, *, may_lack_steps: bool = False) -> None:
    """Write ``report.html``. ``may_lack_steps``: accept a run that failed before its first
    step."""
    with suppress(ReportError) if may_lack_steps else nullcontext():
        build_report(run_dir)


def _runtime(
    config: JobConfig,
    placements: list[PlacementGroupSpec],
    timeline: Timeline,
    launched: Ranks | None,
) -> Runtime:
    tokenizer = load_tokenizer(config.model)
    if launched is not None and config.training is None:  # each rank has other rows
        inline = InlineRuntime(
            tokenizer, precision=config.precision, device=launched.device, timeline=timeline
        )
        inline.loop_ranks = launched.group
        return inline
    if launched is not None:
        return SpmdRuntime(
            tokenizer,
            launched,
            precision=config.precision,
            timeline=timeline,
            model=config.model,
        )
    if config.cluster.runtime == "ray":
        return RayRuntime(
            tokenizer,
            config.model,
            config.cluster,
            placements=placements,
            precision=config.precision,
            timeline=timeline,
        )
    return InlineRuntime(
        tokenizer,
        precision=config.precision,
        device=config.resolve().device,
        timeline=timeline,
        cluster=config.cluster,
    )

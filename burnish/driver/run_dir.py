"""Create and lock the folder of a run, or reject it if it contains something else or another run
writes to it."""

from __future__ import annotations

import getpass
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from burnish.config.base import LOCK_FILE
from burnish.config.job import JobConfig
from burnish.config.registry import REGISTRY
from burnish.data_files.arrow_files import is_utf8
from burnish.driver.digests import CODE_FILE, DIGESTS_FILE
from burnish.driver.errors import RunError
from burnish.driver.memory_monitor import OOM_FILE
from burnish.file_lock import WAIT_S, FileLock, holder_and_ways_out, lock_file, locked_output
from burnish.observe.ending import END_FILE
from burnish.observe.files import MEMORY_JSON, REPLAY_FILE, write_text
from burnish.observe.metrics import METRICS_FILE
from burnish.observe.public_recipe import read_recipe
from burnish.observe.tensorboard import TENSORBOARD_DIR
from burnish.observe.wandb import STATE_FILE, WANDB_DIR
from burnish.plan.launch import PLAN_FILE
from burnish.plan.plan_vs_actual import MEMORY_FILE
from burnish.small_files import read_small

REFERENCE_FILE = "reference_logprobs.safetensors"
"""File of the reference log-prob cache (``steps/reference_cache.py``), written before the policy is
loaded."""
DATE_FILE = "date.txt"
"""File with the time at which the run began."""


@contextmanager
def locked_run_dir(config: JobConfig, resume: Path | None) -> Iterator[Path]:
    """Yield the run folder, which no other run can enter until the end of the block. Create it if
    it is new.

    Raises RunError if another run writes to the folder, if the folder contains another run and
    nothing is resumed, or if the run to resume does not exist or belongs to another job. Raises
    RunError if the folder cannot be created or written, or if it cannot have the checkpoints of a
    job that trains.
    """
    run_dir, lock = _new_folder(config) if resume is None else _resumed_folder(config, resume)
    try:
        yield run_dir
    finally:
        lock.release()


def _resumed_folder(config: JobConfig, resume: Path) -> tuple[Path, FileLock]:
    if not (resume / "config.yaml").is_file():
        raise RunError(f"--resume {resume}: there is no config.yaml, so this is not a run folder")
    job = read_recipe(resume)[1].get("job")
    if job != config.job:
        raise RunError(
            f"--resume {resume}: this is a run of the job {job!r}, but the recipe is for "
            f"{config.job!r}; resume it with 'burnish {job} --resume {resume}', or omit "
            "--resume to start a new run"
        )
    _check_path(config, resume, "rename it")
    _check_writable(resume)
    _check_kinds(resume)
    lock = lock_run_dir(resume, wait_s=WAIT_S)
    if lock is None:
        raise in_use(resume, resumed=True)
    return resume, lock


def _new_folder(config: JobConfig) -> tuple[Path, FileLock]:
    """Create and lock the folder. If ``{time}`` is in its path and another run has the folder of
    this second, append the next free number to the time."""
    if not config.run_dir.strip():
        raise RunError("run_dir is empty; give the path of a new folder, such as run_dir=runs/one")
    stamp, is_timed = time.strftime("%Y%m%d-%H%M%S"), "{time}" in config.run_dir
    template = config.run_dir.replace("{job}", config.job)
    number = 1
    while True:
        run_dir = Path(template.replace("{time}", stamp if number == 1 else f"{stamp}-{number}"))
        lock = _lock_new(config, run_dir, wait_s=0 if is_timed else WAIT_S)
        if isinstance(lock, FileLock):
            return run_dir, lock
        if not is_timed:
            raise lock
        number += 1


def _lock_new(config: JobConfig, run_dir: Path, *, wait_s: float) -> FileLock | RunError:
    """Create and lock a folder. Return the error if another run has it, or if it is not empty."""
    _check_path(config, run_dir, "choose another one with run_dir=...")
    if run_dir.is_dir() and not (run_dir / LOCK_FILE).exists() and _holds_something(run_dir):
        return _not_empty(config, run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise RunError(f"the run folder {run_dir} is a file; choose another path with run_dir=...")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the run folder {run_dir} cannot be created: {error.strerror}; choose another one "
            "with run_dir=..."
        ) from error
    _check_writable(run_dir)
    lock = lock_run_dir(run_dir, wait_s=wait_s)
    if lock is None:
        return in_use(run_dir, resumed=False)
    if _holds_something(run_dir):
        lock.release()
        return _not_empty(config, run_dir)
    return lock


def _not_empty(config: JobConfig, run_dir: Path) -> RunError:
    resumable = REGISTRY[config.job].resumable
    or_resume = f"resume that run with --resume {run_dir}, or " if resumable else ""
    return RunError(
        f"the run folder {run_dir} is not empty; {or_resume}choose another folder with "
        "run_dir=... ({time} in it is replaced by the current time)"
    )


def date_of(run_dir: Path, *, resumed: bool) -> datetime:
    """Return the time at which the run began. A new run, and one that is resumed without a record
    of it, gets the present time, which is recorded in its folder.

    Chat templates write this date, so that a resumed run has the same prompts."""
    path = run_dir / DATE_FILE
    if not resumed or not path.exists():
        now = datetime.now().replace(microsecond=0)
        write_text(path, f"{now.isoformat()}\n")
        return now
    try:
        return datetime.fromisoformat(read_small(path).decode().strip())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} does not contain a date ({error}); write the day on which the run began in "
            "it, such as 2026-01-31, or remove it to continue with today's date"
        ) from error


def _check_path(config: JobConfig, run_dir: Path, fix: str) -> None:
    """Raise RunError if the job writes checkpoints, which it cannot write to this path."""
    if config.training is not None and not is_utf8(run_dir):
        raise RunError(
            f"the run folder {str(run_dir)!a} has a path that is not UTF-8, in which safetensors "
            f"cannot write checkpoints; {fix}"
        )


def _check_writable(run_dir: Path) -> None:
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise RunError(
            f"the run folder {run_dir} is not writable for user {getpass.getuser()}; change its "
            "permissions, or choose another one with run_dir=..."
        )


_FILES = (".json", ".jsonl", ".yaml", ".html", ".log", ".txt")
"""Suffixes of the files that a run writes."""


def _check_kinds(run_dir: Path) -> None:
    """Raise RunError if the folder contains a pipe or a device, which opening may block forever, or
    a folder or a link to nothing in place of a file."""
    for path in sorted(run_dir.iterdir()):
        is_link_to_nothing = path.is_symlink() and not path.exists()
        if is_link_to_nothing or (path.is_dir() and path.suffix in _FILES):
            raise RunError(f"{path} is not a file; move it away to resume the run")
        mode = path.stat().st_mode if path.exists() else 0
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise RunError(f"{path} is a pipe or a device, not a file; remove it to resume the run")


def _holds_something(folder: Path) -> bool:
    """Return whether the folder contains more than the files of a run that was rejected, or that
    failed before its first measurement."""
    hidden = (".*.tmp", ".*.lock")
    names = {p.name for p in folder.iterdir() if not any(fnmatchcase(p.name, h) for h in hidden)}
    metrics = folder / METRICS_FILE
    failed_at_start = metrics.is_file() and metrics.stat().st_size == 0
    left = {LOCK_FILE, DATE_FILE, END_FILE, PLAN_FILE, OOM_FILE, DIGESTS_FILE, CODE_FILE}
    left |= {REFERENCE_FILE, f".{REFERENCE_FILE}.part"}
    if failed_at_start:
        left |= {METRICS_FILE, "config.yaml", "run.log", "timeline.json", REPLAY_FILE}
        left |= {MEMORY_FILE, MEMORY_JSON, TENSORBOARD_DIR, WANDB_DIR, STATE_FILE}
    return bool(names - left)


def lock_run_dir(run_dir: Path, *, wait_s: float) -> FileLock | None:
    """Return the lock on a folder; None if another run still has it after ``wait_s``.

    Raises RunError if its file cannot be written.
    """
    try:
        return lock_file(run_dir / LOCK_FILE, wait_s=wait_s)
    except OSError as error:
        raise RunError(
            f"the run folder {run_dir} cannot be locked by its file {LOCK_FILE}: {error.strerror}; "
            "correct this, or choose another folder with run_dir=..."
        ) from error


def in_use(run_dir: Path, *, resumed: bool) -> RunError:
    """Return the error for a folder whose lock another run has."""
    holder, stop, gone = holder_and_ways_out(run_dir / LOCK_FILE)
    other = ", then resume" if resumed else ", or choose another folder with run_dir=..."
    return RunError(
        f"the run folder {run_dir} is in use by a run: {holder}; wait until it ends, or {stop}"
        f"{other}{gone}"
    )


@contextmanager
def locked_outputs(locks: Mapping[str, Path]) -> Iterator[None]:
    """Lock what a run writes outside of its folder until the end of the block. ``locks``: the lock
    files by the keys of the recipe. The folders that contain them are created.

    Raises RunError if another process has a lock, or if a file cannot be written.
    """
    with ExitStack() as held:
        for key, path in locks.items():
            lock = locked_output(
                path,
                RunError,
                unwritable=f"{key}: {path} cannot be written",
                in_use=f"{key}: another run writes there",
                other=f"another path with {key}=...",
            )
            held.enter_context(lock)
        yield

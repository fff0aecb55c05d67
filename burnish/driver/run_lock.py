"""One writer per run folder, and per output of a run elsewhere.

run_dir/.lock            while a run writes: its process, host and start
FOLDER/.rows.jsonl.lock  the same for FOLDER/rows.jsonl, an output elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from burnish.config.base import LOCK_FILE
from burnish.driver.errors import RunError
from burnish.file_lock import FileLock, holder_and_ways_out, lock_file


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
            held.callback(_locked_output(key, path).release)
        yield


def _locked_output(key: str, path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path)
    except OSError as error:
        raise RunError(
            f"{key}: {path} cannot be written: {error.strerror}; choose another path with {key}=..."
        ) from error
    if lock is None:
        holder, stop, gone = holder_and_ways_out(path)
        raise RunError(
            f"{key}: another run writes there (lock file {path}): {holder}; wait until it ends, "
            f"{stop}, or choose another path with {key}=...{gone}"
        )
    return lock

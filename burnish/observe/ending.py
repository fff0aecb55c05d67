"""``end.json``: how a run ended, and what a run folder shows of a run that did not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from burnish.config.base import LOCK_FILE
from burnish.errors import BurnishError
from burnish.file_lock import holder_of
from burnish.observe.files import write_text
from burnish.observe.metrics import END_OF_TIME, METRICS_FILE
from burnish.observe.progress import LOG_FILE
from burnish.secret import without_secrets
from burnish.small_files import read_small

END_FILE = "end.json"
_FINISHED, _STOPPED, _FAILED = "finished", "stopped", "failed"
_SILENT_S = 600.0
"""Seconds without a line in metrics or log after which a run of another host counts as silent."""
_LONGEST = 500

Kind = Literal["running", "silent", "finished", "stopped", "failed", "died", "ended"]
"""silent: a process of another host has the folder, and nothing was written for ten minutes. died:
its process ended without a word. ended: it has no record of its end (an older version)."""


@dataclass(frozen=True)
class RunState:
    """State of a run: it runs, or how it ended."""

    kind: Kind
    reason: str = ""
    """Reason of a stop or failure, in one line; of a run that runs, its process."""
    changed: float | None = None
    """Time of the last sign of life, in Unix seconds."""


@contextmanager
def recorded_end(run_dir: Path) -> Iterator[None]:
    """Write how the block ended to the file ``end.json``, which is removed at its beginning. If
    the block fails and no metrics were written (a refused resume), the earlier record stays."""
    earlier, metrics = _read(run_dir), _changed(run_dir / METRICS_FILE)
    (run_dir / END_FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        if earlier is not None and metrics == _changed(run_dir / METRICS_FILE):
            _write(run_dir, earlier)
            raise
        # An error with an exit code of its own ends a run on purpose (a signal, a stopped run).
        is_own = isinstance(error, BurnishError) and error.exit_code != BurnishError.exit_code
        is_stop = is_own or not isinstance(error, Exception)
        _write(run_dir, _record(_STOPPED if is_stop else _FAILED, error))
        raise
    _write(run_dir, _record(_FINISHED, None))


def _record(kind: str, error: BaseException | None) -> dict[str, Any]:
    first = next(iter(str(error or "").strip().splitlines()), "")
    reason = first if isinstance(error, BurnishError) else f"{type(error).__name__}: {first}"
    shown = "" if error is None else without_secrets(reason)[:_LONGEST]
    return {"kind": kind, "reason": shown, "time": round(time.time(), 3)}


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    with suppress(OSError):  # (a folder that was removed, a full disk: the error itself is raised)
        write_text(run_dir / END_FILE, json.dumps(record) + "\n")


def state_of(run_dir: Path) -> RunState:
    """Return the state of a run from its folder, which may be a copy from another machine."""
    times = (_changed(run_dir / name) for name in (METRICS_FILE, LOG_FILE))
    changed = max(filter(None, times), default=None)
    holder = holder_of(run_dir / LOCK_FILE)
    if holder is not None:
        pid, host = holder
        is_silent = changed is None or time.time() - changed > _SILENT_S
        is_here = host == socket.gethostname()
        return RunState(
            "silent" if is_silent and not is_here else "running",
            f"process {pid} on {host}",
            changed,
        )
    end = _read(run_dir)
    if end is not None:
        return RunState(end["kind"], str(end.get("reason", "")), float(end["time"]))
    return RunState("died" if (run_dir / LOCK_FILE).exists() else "ended", "", changed)


def _changed(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _read(run_dir: Path) -> dict[str, Any] | None:
    """Return the record of the end; None if there is none that can be read."""
    path = run_dir / END_FILE
    try:
        record = json.loads(read_small(path))
        is_time = 0 <= float(record["time"]) < END_OF_TIME
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    if not is_time:
        return None
    return record if record.get("kind") in (_FINISHED, _STOPPED, _FAILED) else None

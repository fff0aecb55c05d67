"""The checkpoint store of one run: atomic ``step_000010`` folders.

A checkpoint is written to a hidden temporary folder, given its manifest, fsynced, and renamed into
place. Before deletion it is renamed to a hidden name. Every ``step_*`` folder is therefore
complete, even if the process is killed at any point:

    .tmp-step_000010-<pid>    being written; removed by the next save if that process is dead
    .replaced-step_000010     the earlier checkpoint of a step that is saved again, between two
                              renames; it counts as step 10 while ``step_000010`` does not exist
    .trash-step_000010-<hex>  being deleted; removed by the next save

The metric that selects the best checkpoint is stored only in the manifests (``extra.metric``). Only
one process may save into a folder at a time; any number may read.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from burnish.checkpoint.errors import CheckpointError, UnstorableError
from burnish.checkpoint.manifest import (
    Record,
    fsync,
    read_manifest,
    sync_tree,
    verify,
    write_manifest,
)
from burnish.checkpoint.reduce import has_only_weights, reduce_to_weights
from burnish.checkpoint.retention import BestMode, Entry, to_delete
from burnish.file_lock import is_alive

logger = logging.getLogger("burnish")

_NOT_OF_DISK = (UnstorableError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of the values that are saved, or of the code that saves them."""

Keep = Literal["full", "weights"]
"""Contents of the checkpoints that are kept in addition to the newest."""

_STEP = re.compile(r"step_(\d{6,})")
_TEMPORARY = re.compile(r"\.tmp-step_\d{6,}-(\d{1,9})")
_REPLACED = re.compile(r"\.replaced-step_(\d{6,})")
_TRASH = re.compile(r"\.trash-.*")


class PendingSave(Protocol):
    """A part of a checkpoint that may be written in the background."""

    @property
    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        ...

    def wait(self) -> None:
        """Wait until the save is complete. Raises its error if it failed."""
        ...


class FinishedSave:
    """A part that was written synchronously. Implements :class:`PendingSave`."""

    done = True

    def wait(self) -> None:
        """Return at once, because the save is complete."""


class PendingCheckpoint:
    """A checkpoint that is still being written."""

    def __init__(self, pending: Sequence[PendingSave], finish: Callable[[], Path]) -> None:
        self._pending = pending
        self.finish = finish
        """() -> folder: wait for all parts and publish the checkpoint. Raises CheckpointError."""

    @property
    def done(self) -> bool:
        """Return whether all parts are written, so that :attr:`finish` does not wait for them."""
        return all(part.done for part in self._pending)


class CheckpointStore:
    """Saves, finds and deletes the checkpoints in ``folder``, which the first save creates."""

    def __init__(
        self, folder: Path, *, keep_last: int, best_mode: BestMode, keep: Keep = "full"
    ) -> None:
        """Keep the ``keep_last`` newest checkpoints and the one with the largest (``max``) or
        smallest (``min``) metric. With ``keep="weights"`` all of them except the newest are reduced
        to their weights."""
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last={keep_last}: at least 1 must be kept")
        self.folder = folder
        self.keep_last = keep_last
        self.best_mode = best_mode
        self.keep = keep

    def save(
        self,
        step: int,
        write: Callable[[Path], Sequence[PendingSave] | None],
        *,
        metric: float | None = None,
        num_bytes: int | None = None,
        records: Mapping[str, Record] = MappingProxyType({}),
    ) -> Path:
        """Save the checkpoint of ``step``, whose files ``write`` creates, and return its folder.

        See :meth:`begin`.
        """
        return self.begin(step, write, metric=metric, num_bytes=num_bytes, records=records).finish()

    def begin(
        self,
        step: int,
        write: Callable[[Path], Sequence[PendingSave] | None],
        *,
        metric: float | None = None,
        num_bytes: int | None = None,
        records: Mapping[str, Record] = MappingProxyType({}),
    ) -> PendingCheckpoint:
        """Start saving the checkpoint of ``step``: call ``write`` with a temporary folder.

        The saves that ``write`` returns may continue writing there in the background. The
        checkpoint exists after :meth:`PendingCheckpoint.finish`; do not begin another one before.
        An earlier checkpoint of the same step is replaced once the new one is complete.

        ``metric`` selects the best checkpoint; with None, NaN or infinity this one is never the
        best. ``num_bytes`` is the expected size, which is compared with the free space first. None:
        1.1 times the newest checkpoint. ``records``: that of
        :func:`~burnish.checkpoint.manifest.write_manifest`; ``write`` may fill it.

        Both methods raise CheckpointError, chained to the cause, on any failure. The temporary
        folder is then removed, and existing checkpoints are unchanged.
        """
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        final = self.folder / f"step_{step:06d}"
        temporary = self.folder / f".tmp-{final.name}-{os.getpid()}"
        self._prepare(final, num_bytes)
        with self._atomic(temporary, final):
            temporary.mkdir()
            pending = tuple(write(temporary) or ())
        if metric is not None:
            metric = float(metric) if math.isfinite(metric) else None

        def finish() -> Path:
            with self._atomic(temporary, final):
                for part in pending:
                    part.wait()
                write_manifest(temporary, step=step, extra={"metric": metric}, records=records)
                sync_tree(temporary)
                self._publish(temporary, final)
            self._retire()
            return final

        return PendingCheckpoint(pending, finish)

    @contextmanager
    def _atomic(self, temporary: Path, final: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            is_explained = isinstance(error, CheckpointError | OSError)
            cause = str(error) if is_explained else f"{type(error).__name__}: {error}"
            failure = f"checkpoint {final} could not be written: {cause}"
            consequence = "Its partial files are removed, older checkpoints are unchanged."
            if isinstance(error, _NOT_OF_DISK):
                raise CheckpointError(
                    f"{failure}\n{consequence} The disk is not the cause."
                ) from error
            raise CheckpointError(
                f"{failure} ({_free_space_text(self.folder)} free now). {consequence} If the "
                "disk is full, free some space, lower checkpoint.keep_last or move run_dir to a "
                "larger disk."
            ) from error

    def all(self) -> list[Path]:
        """Return every checkpoint folder, good or bad, oldest step first."""
        return list(self._by_step().values())

    def latest(self, *, resumable: bool = False) -> Path | None:
        """Return the newest good checkpoint, after verifying all checksums; None if there is none.

        ``resumable``: ignore checkpoints that were reduced to their weights. Logs a warning for
        each newer bad checkpoint, with its problem and the one used instead.
        """
        bad: list[tuple[Path, str]] = []
        used: Path | None = None
        for path in reversed(self.all()):
            problems = verify(path)
            if not problems and resumable and has_only_weights(path):
                continue
            if not problems:
                used = path
                break
            bad.append((path, "; ".join(problems)))
        for path, problem in bad:
            logger.warning(
                "checkpoint %s is not usable: %s. %s",
                path,
                problem,
                f"Using {used} instead." if used else "There is no good checkpoint to use instead.",
            )
        return used

    def only_weights(self) -> list[Path]:
        """Return the good checkpoints that were reduced to their weights, oldest step first."""
        good = (path for path in self.all() if not verify(path, checksums=False))
        return [path for path in good if has_only_weights(path)]

    def _by_step(self) -> dict[int, Path]:
        paths: dict[int, Path] = {}
        for pattern in (_REPLACED, _STEP):  # a published step overrides the one it replaces
            paths |= {int(match[1]): path for match, path in self._matching(pattern)}
        return dict(sorted(paths.items()))

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
        if not self.folder.is_dir():
            return []
        named = [(pattern.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return [(match, path) for match, path in named if match and path.is_dir()]

    def _prepare(self, final: Path, num_bytes: int | None) -> None:
        """Create the folder, remove leftovers of dead processes and check the free space."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final} could not be written: {self.folder} is not writable "
                f"({error}). Move run_dir to a folder that this user may write to."
            ) from error
        existing = self.all()
        if num_bytes is None and existing:
            sizes = (path.stat().st_size for path in existing[-1].rglob("*") if path.is_file())
            num_bytes = math.ceil(1.1 * sum(sizes))
        free = shutil.disk_usage(self.folder).free
        if num_bytes is not None and num_bytes > free:
            raise CheckpointError(
                f"no space for checkpoint {final}: it needs {_size_text(num_bytes)} and "
                f"{_size_text(free)} are free. Nothing was written, older checkpoints are "
                f"unchanged. Free {_size_text(num_bytes - free)}, lower checkpoint.keep_last (now "
                f"{self.keep_last}) or move run_dir to a larger disk."
            )

    def _tidy(self) -> None:
        """Clean up after killed processes: restore or delete replaced folders, remove leftovers."""
        for match, path in self._matching(_REPLACED):
            published = self.folder / f"step_{match[1]}"
            if published.exists():
                self._discard(path)
            else:
                os.rename(path, published)
        for match, path in self._matching(_TEMPORARY):
            if not _other_process_lives(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)
        for _, path in self._matching(_TRASH):
            shutil.rmtree(path, ignore_errors=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Rename ``temporary`` to ``final``.

        A rename cannot replace a non-empty folder, so an earlier checkpoint is renamed first.
        """
        replaced = self.folder / f".replaced-{final.name}"
        if final.exists():
            os.rename(final, replaced)
        try:
            os.rename(temporary, final)
        except BaseException:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        fsync(self.folder)
        if replaced.exists():
            self._discard(replaced)

    def _retire(self) -> None:
        """Delete the checkpoints that retention does not keep, and reduce those that it keeps to
        their weights if the store does so, except the newest. Failures are only logged, because the
        new checkpoint is already complete."""
        paths = self._by_step()
        entries = []
        for step, path in paths.items():
            # Only names and sizes: verifying checksums on every save would read all checkpoints.
            good = not verify(path, checksums=False)
            metric = read_manifest(path).extra.get("metric") if good else None
            entries.append(Entry(step, metric, good=good))
        for step in to_delete(entries, keep_last=self.keep_last, best_mode=self.best_mode):
            try:
                self._discard(paths[step])
            except OSError as error:
                logger.warning("old checkpoint %s could not be deleted: %s", paths[step], error)
        if self.keep == "weights":
            kept = [path for path in self.all() if not verify(path, checksums=False)]
            for path in kept[:-1]:
                try:
                    reduce_to_weights(path)
                except (OSError, CheckpointError) as error:
                    logger.warning("old checkpoint %s could not be reduced: %s", path, error)

    def _discard(self, path: Path) -> None:
        """Rename to a hidden name, then delete, so that a partially deleted folder is never taken
        for a checkpoint."""
        trash = self.folder / f".trash-{path.name.removeprefix('.')}-{uuid.uuid4().hex[:8]}"
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)  # the next save removes leftovers


def _other_process_lives(pid: int) -> bool:
    """Return whether ``pid`` is a running process other than this one, which writes only one
    checkpoint at a time."""
    return pid != os.getpid() and is_alive(pid)


def _free_space_text(folder: Path) -> str:
    try:
        return _size_text(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown amount"


def _size_text(num_bytes: int) -> str:
    """Format a size in powers of 1000. ``_size_text(1_500_000)`` is ``1.50 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power = min(int(math.log10(num_bytes)) // 3, 5)
    return f"{num_bytes / 1000**power:.2f} {' KMGTP'[power]}B"

"""The checkpoints of one run: ``step_000010`` folders, each complete or not there at all.

A checkpoint is written into a hidden temporary folder, flushed, given its manifest, and renamed
into place; what is deleted is renamed out of sight first. So whenever the process dies, every
``step_*`` folder is whole:

    .tmp-step_000010-<pid>    being written; removed at the next save once that process is dead
    .replaced-step_000010     the earlier checkpoint of a step that is saved again, for the moment
                              between two renames; it is step 10 while ``step_000010`` is not there
    .trash-step_000010-<hex>  being deleted; removed at the next save

What "best" means is in the manifests (``extra.metric``); no other file has to agree with them. One
process saves into a folder at a time; any number may read.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from burnish.checkpoint.errors import CheckpointError
from burnish.checkpoint.manifest import fsync, read_manifest, sync_tree, verify, write_manifest
from burnish.checkpoint.retention import BestMode, Entry, best_step, to_delete
from burnish.types import PendingSave

logger = logging.getLogger("burnish")

_STEP = re.compile(r"step_(\d{6,})")
_TEMPORARY = re.compile(r"\.tmp-step_\d{6,}-(\d{1,9})")
_REPLACED = re.compile(r"\.replaced-step_(\d{6,})")
_TRASH = re.compile(r"\.trash-.*")


class PendingCheckpoint:
    """A checkpoint that is not there yet."""

    def __init__(self, pending: Sequence[PendingSave], finish: Callable[[], Path]) -> None:
        self._pending = pending
        self.finish = finish
        """Waits for all parts and makes the checkpoint: its folder. Raises CheckpointError."""

    @property
    def done(self) -> bool:
        """Return whether :attr:`finish` need not wait."""
        return all(part.done for part in self._pending)


class CheckpointStore:
    """Saves, finds and retires the checkpoints below ``folder`` (made at the first save)."""

    def __init__(self, folder: Path, *, keep_last: int, best_mode: BestMode) -> None:
        """Keep the ``keep_last`` newest and the best by metric, more or less being better."""
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last={keep_last}: at least 1 must be kept")
        self.folder = folder
        self.keep_last = keep_last
        self.best_mode = best_mode

    def save(
        self,
        step: int,
        write: Callable[[Path], Sequence[PendingSave] | None],
        *,
        metric: float | None = None,
        num_bytes: int | None = None,
    ) -> Path:
        """Have ``write`` fill a folder and make it the checkpoint of ``step``; see :meth:`begin`.
        Returns the checkpoint's folder."""
        return self.begin(step, write, metric=metric, num_bytes=num_bytes).finish()

    def begin(
        self,
        step: int,
        write: Callable[[Path], Sequence[PendingSave] | None],
        *,
        metric: float | None = None,
        num_bytes: int | None = None,
    ) -> PendingCheckpoint:
        """Have ``write`` fill a folder; what it returns may go on writing there. The checkpoint of
        ``step`` is there after :meth:`PendingCheckpoint.finish`; begin no other one before.

        An earlier checkpoint of the same step is replaced; it stays until the new one is whole.
        ``metric``: what "best" goes by; None, NaN or infinite: never best. ``num_bytes``: expected
        size, checked against the free space first; None: 1.1 times the newest checkpoint. Both
        raise CheckpointError, from the original, for anything that goes wrong: nothing half-written
        stays and the checkpoints that were there are as they were.
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
                write_manifest(temporary, step=step, extra={"metric": metric})
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
            raise CheckpointError(
                f"checkpoint {final} could not be written: {error} "
                f"({_free_space_text(self.folder)} free "
                "now). What was written of it is removed, older checkpoints are as they were. If "
                "the disk is full, free some space, lower checkpoint.keep_last or move run_dir to "
                "a larger disk."
            ) from error

    def all(self) -> list[Path]:
        """Every checkpoint folder, oldest step first, whether or not it is good."""
        return list(self._by_step().values())

    def latest(self) -> Path | None:
        """The newest checkpoint that is good, every byte checked. None: there is none.

        Each newer one that is not good is warned about by name, with what is wrong and which one is
        used.
        """
        return self._first_good(list(reversed(self.all())))

    def best(self) -> Path | None:
        """The good checkpoint with the best metric, every byte checked. None: none has a metric.

        A better one that is not good is warned about by name.
        """
        paths = self._by_step()
        entries = [_entry(step, path) for step, path in paths.items()]
        ranked: list[Path] = []
        while (step := best_step(entries, self.best_mode)) is not None:
            ranked.append(paths[step])
            entries = [entry for entry in entries if entry.step != step]
        return self._first_good(ranked)

    def _by_step(self) -> dict[int, Path]:
        found: dict[int, Path] = {}
        for pattern in (_REPLACED, _STEP):  # a published step stands before the one it replaced
            found |= {int(match[1]): path for match, path in self._matching(pattern)}
        return dict(sorted(found.items()))

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
        if not self.folder.is_dir():
            return []
        named = [(pattern.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return [(match, path) for match, path in named if match and path.is_dir()]

    def _first_good(self, paths: Sequence[Path]) -> Path | None:
        bad: list[tuple[Path, str]] = []
        used: Path | None = None
        for path in paths:
            problems = verify(path)
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

    def _prepare(self, final: Path, num_bytes: int | None) -> None:
        """Make the folder, clear away what dead processes left and check the free space."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final} could not be written: {self.folder} cannot be changed "
                f"({error}). Move run_dir to a folder that this user may write to."
            ) from error
        existing = self.all()
        if num_bytes is None and existing:
            num_bytes = math.ceil(1.1 * _folder_bytes(existing[-1]))
        free = shutil.disk_usage(self.folder).free
        if num_bytes is not None and num_bytes > free:
            raise CheckpointError(
                f"no space for checkpoint {final}: it needs {_size_text(num_bytes)} and "
                f"{_size_text(free)} are free. Nothing was written, older checkpoints are as they "
                f"were. Free {_size_text(num_bytes - free)}, lower checkpoint.keep_last (now "
                f"{self.keep_last}) or move run_dir to a larger disk."
            )

    def _tidy(self) -> None:
        """Finish what a killed process began: settle replaced folders, remove its leftovers."""
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
        """Rename into place. No rename can replace a full folder, so an earlier one steps aside."""
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
        """Delete what retention does not keep. The new checkpoint is safe: failures only warn."""
        paths = self._by_step()
        entries = [_entry(step, path) for step, path in paths.items()]
        for step in to_delete(entries, keep_last=self.keep_last, best_mode=self.best_mode):
            try:
                self._discard(paths[step])
            except OSError as error:
                logger.warning("old checkpoint %s could not be deleted: %s", paths[step], error)

    def _discard(self, path: Path) -> None:
        """Rename out of sight, then delete: a half-deleted folder is never seen as a checkpoint."""
        trash = self.folder / f".trash-{path.name.removeprefix('.')}-{uuid.uuid4().hex[:8]}"
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)  # what stays is removed at the next save


def _entry(step: int, path: Path) -> Entry:
    """Return the retention entry of a checkpoint.

    Names and sizes only are checked: hashing old checkpoints at every save would read them all.
    """
    if verify(path, checksums=False):
        return Entry(step, None, good=False)
    return Entry(step, read_manifest(path).extra.get("metric"), good=True)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _other_process_lives(pid: int) -> bool:
    """Return whether ``pid`` runs and is not this process, which writes one checkpoint at a
    time."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_space_text(folder: Path) -> str:
    try:
        return _size_text(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown amount"


def _size_text(num_bytes: int) -> str:
    """Bytes for people, in powers of 1000. ``_size_text(1_500_000)`` is ``1.50 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power = min(int(math.log10(num_bytes)) // 3, 5)
    return f"{num_bytes / 1000**power:.2f} {' KMGTP'[power]}B"

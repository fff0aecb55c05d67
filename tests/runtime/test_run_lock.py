"""The lock on a run folder: file systems without locks, full disks, files left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config.base import LOCK_FILE
from burnish.driver.errors import RunError
from burnish.driver.run_dir import in_use, lock_run_dir
from burnish.file_lock import FileLock


def _lock(folder: Path) -> FileLock:
    lock = lock_run_dir(folder, wait_s=0.1)
    assert lock is not None
    return lock


def _failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_gives_one_warning(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fcntl, "flock", _failing(number))
    _lock(tmp_path).release()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(os, "pwrite", errno.ENOSPC), (os, "ftruncate", errno.EDQUOT), (fcntl, "flock", errno.EIO)],
)
def test_a_file_that_cannot_be_written_or_locked_refuses_the_run_and_locks_nothing(
    module: Any, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, _failing(number))
        with pytest.raises(RunError, match=os.strerror(number)):
            lock_run_dir(tmp_path, wait_s=0)
    _lock(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"\xff\0" * 300, b"process 1 on host gone since never\n"])
def test_a_file_that_a_killed_run_left_behind_has_no_effect(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the user cannot write the file: it is of a read-only copy, or of another user."""
    (tmp_path / LOCK_FILE).write_bytes(content)
    real = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and path.exists() and path.read_bytes() == content:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    lock = _lock(tmp_path)
    assert lock_run_dir(tmp_path, wait_s=0) is None
    assert f"process {os.getpid()} on host" in str(in_use(tmp_path, resumed=True))
    lock.release()


def test_the_holder_of_another_host_or_of_unknown_text_is_not_taken_for_this_one(
    tmp_path: Path,
) -> None:
    lock, path = _lock(tmp_path), tmp_path / LOCK_FILE
    path.write_text("process 12 on host elsewhere since 2026-01-01T00:00:00+00:00\n")
    text = str(in_use(tmp_path, resumed=False))
    assert "process 12 on host elsewhere" in text and f"remove {path}" in text
    path.write_bytes(b"process 12 on host a\x1b[2J since now\n")
    text = str(in_use(tmp_path, resumed=False))
    assert "another process" in text and text.isprintable() and "kill" not in text
    path.unlink()  # the way out that the first message gives
    _lock(tmp_path).release()
    lock.release()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_anything_but_a_file_in_place_of_the_lock_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / LOCK_FILE)
    with pytest.raises(RunError, match=LOCK_FILE):
        lock_run_dir(tmp_path, wait_s=0)


def test_a_run_whose_folder_was_removed_does_not_end_the_lock_of_the_next_run_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    removed = _lock(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    lock = _lock(folder)
    removed.release()
    assert lock_run_dir(folder, wait_s=0) is None
    lock.release()


def test_a_fork_of_the_run_can_release_nothing(tmp_path: Path) -> None:
    lock = _lock(tmp_path)
    if (pid := os.fork()) == 0:
        lock.release()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert lock_run_dir(tmp_path, wait_s=0) is None
    lock.release()
    assert list(tmp_path.iterdir()) == []

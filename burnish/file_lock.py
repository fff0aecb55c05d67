"""Locks by files: the process that holds the lock on a file is the only writer of what it is for.

The kernel releases the lock when that process ends, also on SIGKILL, so a file that is left behind
has no effect. A child that outlives the process does not keep the lock: an exec closes the
descriptor (PEP 446), and a fork without exec closes it here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger("burnish")

WAIT_S = 1.0
"""Time for which a lock is tried: a process that was just killed needs a moment to release its."""
_POLL_S = 0.02
_HOLDER = re.compile(r"process (\d{1,10}) on host ([\w.:-]{1,253}) since ([\w.:+-]{1,40})\n")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without locks."""


class FileLock:
    """The lock on one file, until :meth:`release` or the end of this process."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open the file without waiting for its lock."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        self._path, self._descriptor = path, os.open(path, flags, 0o666)
        self._is_held = False
        _open_locks.add(self)

    def acquire(self) -> bool:
        """Lock the file. Return False if another run has the lock, or if the path no longer leads
        to the open file: its holder removed it at the end, or a user removed the folder."""
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "the file system of %s has no locks (%s): start or resume no other run that writes "
                "there until this run ends, since it would not be refused",
                self._path.parent,
                error.strerror,
            )
        self._is_held = self._is_in_place()
        return self._is_held

    def write_holder(self) -> None:
        """Write into the file which process has the lock, for the message to others."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = f"process {os.getpid()} on host {socket.gethostname()} since {since}\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Remove the file and close it, which releases the lock. No effect in a fork."""
        if self not in _open_locks:
            return
        with suppress(OSError):  # a file that stays has no effect
            if self._is_held and self._is_in_place():
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Close the file. A process that was forked from this one keeps its lock."""
        _open_locks.discard(self)
        os.close(self._descriptor)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False


_open_locks: set[FileLock] = set()


def _close_in_fork() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_fork)


def lock_file(path: Path, *, wait_s: float = WAIT_S) -> FileLock | None:
    """Return the lock on the file ``path``, which is created; None if another process still has it
    after ``wait_s``. Raises OSError if the file cannot be written."""
    deadline = time.monotonic() + wait_s
    while (lock := _try_lock(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return lock


def _try_lock(path: Path) -> FileLock | None:
    try:
        lock, is_writable = FileLock(path, os.O_RDWR | os.O_CREAT), True
    except PermissionError:
        if not path.exists():
            raise
        lock, is_writable = FileLock(path, os.O_RDONLY), False
    try:
        if lock.acquire():
            if is_writable:
                lock.write_holder()
                return lock
            path.unlink()  # left behind, of a copy or another user: the next try creates the file
    except BaseException:
        lock.release()
        raise
    lock.close()
    return None


@contextmanager
def locked_output(
    path: Path, error_class: type[Exception], *, unwritable: str, in_use: str, other: str
) -> Iterator[None]:
    """Lock an output by the file ``path`` until the end of the block. Its folder is created.

    Raises ``error_class`` if the file cannot be written, or if another process has the lock. Its
    message begins with ``unwritable`` or ``in_use``. ``other``: what to choose in place of the
    output.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path)
    except OSError as error:
        raise error_class(f"{unwritable}: {error.strerror}; choose {other}") from error
    if lock is None:
        holder, stop, gone = holder_and_ways_out(path)
        raise error_class(
            f"{in_use} (lock file {path}): {holder}; wait until it ends, {stop}, or choose "
            f"{other}{gone}"
        )
    try:
        yield
    finally:
        lock.release()


def holder_of(path: Path) -> tuple[int, str] | None:
    """Return (process, host) of a lock that is held, without waiting and without a write; None if
    the file ``path`` is missing, or no process of this host has its lock.

    The lock of another host may be invisible here (a copied folder), so its file counts as held. On
    a file system without locks, the process that the file names is looked for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    match, here, is_free = None, socket.gethostname(), True
    try:
        match = _HOLDER.fullmatch(os.pread(descriptor, 512, 0).decode(errors="replace"))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    except OSError as error:
        is_free = error.errno not in _NO_LOCKS or match is None or not is_alive(int(match[1]))
    finally:
        os.close(descriptor)
    holder = (int(match[1]), str(match[2])) if match else (0, here)
    return None if is_free and holder[1] == here else holder


def is_alive(process: int) -> bool:
    """Return whether a process of this machine runs, also under another user."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def holder_and_ways_out(path: Path) -> tuple[str, str, str]:
    """Return which process has the lock on the file ``path``, how it is stopped, and what to do if
    its host is down ("" on this host)."""
    text, holder = "", None
    with suppress(OSError):  # that process has just ended
        with path.open("rb") as file:
            text = file.read(512).decode(errors="replace")
        holder = _HOLDER.fullmatch(text)
    if holder is None:
        return "another process has it", "stop that process", ""
    pid, host, since = holder.groups()
    name, stop = f"process {pid} on host {host} has had it since {since}", "stop that process"
    if host == socket.gethostname():
        return name, f"{stop} (kill {pid})", ""
    gone = f"; if {host} is down and the file system keeps its lock, remove {path}"
    return name, f"{stop} (kill {pid})", gone

"""Names in shared memory that say whose they are, so that what a killed process left is found.

``burnish-weights-4711-9f02c41b77aa-k3x0``: what it is, its owner's process id, a number of the
machine since it was started and of the namespace in which that id counts (containers may share
/dev/shm and number their processes alike, and machines a folder), and a random end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
from pathlib import Path

_NAME = re.compile(r"burnish-[a-z]+-(\d+)-([0-9a-f]{12})-.*")


def prefix(kind: str) -> str:
    """How the names that this process makes begin. ``kind``: letters alone."""
    return f"burnish-{kind}-{os.getpid()}-{_whereabouts()}-"


def sweep(kind: str, *folders: Path) -> None:
    """Remove the files and folders of this kind whose owners have ended."""
    found = [path for folder in folders for path in folder.glob(f"burnish-{kind}-*")]
    for left in [path for path in found if owner_has_ended(path.name)]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # another user's, or another sweep was quicker
                left.unlink()


def owner_has_ended(name: str) -> bool:
    """Return whether the process in a name is gone. False where that cannot be known: a name of
    another form, an id of another machine or namespace."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] != _whereabouts():
        return False
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, as another user
        return False
    return False


@functools.cache
def _whereabouts() -> str:
    """Return an identifier of the machine since its start (its name if that cannot be read) and of
    its namespace of process ids (the same number on all machines, outside of containers)."""
    machine, namespace = socket.gethostname(), 0
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{machine} {namespace}".encode()).hexdigest()[:12]

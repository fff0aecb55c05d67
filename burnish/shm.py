"""Shared memory names that identify their owner, so that leftovers of killed processes are found.

A name such as ``burnish-weights-4711-9f02c41b77aa-k3x0`` consists of the kind, the owner's process
id, a hash of the machine's boot id and the PID namespace, and a random suffix. The hash is needed
because containers may share /dev/shm and reuse process ids, and machines may share a folder.
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

from burnish.file_lock import is_alive

_NAME = re.compile(r"burnish-[a-z]+-(\d+)-([0-9a-f]{12})-.*")


def prefix(kind: str) -> str:
    """Return the prefix of this process's names. ``kind`` must consist of lowercase letters."""
    return f"burnish-{kind}-{os.getpid()}-{_whereabouts()}-"


def sweep(kind: str, *folders: Path) -> None:
    """Remove the files and folders of this kind whose owner process has ended."""
    leftovers = [path for folder in folders for path in folder.glob(f"burnish-{kind}-*")]
    for left in [path for path in leftovers if owner_has_ended(path.name)]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # another user's, or another sweep was quicker
                left.unlink()


def owner_has_ended(name: str) -> bool:
    """Return whether the owner process of a name has ended.

    Return False if this cannot be determined: the name has another form, or the process id belongs
    to another machine or namespace.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[2] != _whereabouts():
        return False
    return not is_alive(int(match[1]))


@functools.cache
def _whereabouts() -> str:
    """Return a hash of the machine's boot id and the PID namespace.

    The host name is used if the boot id cannot be read. Outside containers the namespace has the
    same number on all machines.
    """
    machine, namespace = socket.gethostname(), 0
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{machine} {namespace}".encode()).hexdigest()[:12]

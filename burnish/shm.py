"""Names in shared memory that say whose they are, so that what a killed process left is found.

``burnish-weights-4711-4026531836-k3x0``: what it is, its owner's process id, the namespace in which
that id counts (containers may share /dev/shm and number their processes alike), and a random end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"burnish-[a-z]+-(\d+)-(\d+)-.*")


def prefix(kind: str) -> str:
    """How the names that this process makes begin. ``kind``: letters alone."""
    return f"burnish-{kind}-{os.getpid()}-{_namespace()}-"


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
    """Whether the process in a name is gone. False where that cannot be known: a name of another
    form, an id of another namespace."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[2]) != _namespace():
        return False
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, as another user
        return False
    return False


def _namespace() -> int:
    """A number of the namespace of process ids; 0 where there is none to be seen."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0

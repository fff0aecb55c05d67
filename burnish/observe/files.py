"""Atomic file writes: a process killed during a write leaves the previous file in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPLAY_FILE = "replay.json"
"""File in the folder of a replay, with the folder of the recorded run."""
TIMELINE_FILE = "timeline.json"
"""File of the run with its spans of time."""
MEMORY_JSON = "memory.json"
"""File of a run folder with the bytes of every process and phase."""


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a scratch path in the folder of ``path``; after the block, rename it to ``path``.
    ``private``: only this user can read it.

    The folder is created if needed. If the block raises, ``path`` is unchanged and the scratch file
    is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    create_new(scratch, private=private)
    try:
        yield scratch
        with scratch.open("rb") as f:
            os.fsync(f.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def create_new(path: Path, *, private: bool = False) -> None:
    """Create an empty file at ``path``, after removing any existing file. ``private``: only this
    user can read it.

    An existing file is never opened: in a folder that others can write to, it may be a link to any
    file of this user.
    """
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
    os.close(os.open(path, flags, 0o600 if private else 0o666))


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace ``path`` by ``text`` in UTF-8, atomically. Unpaired surrogates become ``?``.
    ``private``: only this user can read the file."""
    with replacing(path, private=private) as scratch:
        scratch.write_bytes(text.encode("utf-8", errors="replace"))

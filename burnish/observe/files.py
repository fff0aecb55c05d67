"""Files that are either complete or absent: a kill in the middle of a write leaves the old one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a scratch path beside ``path``; after the block the finished file takes the place of
    ``path``.

    The folder is made. If the block raises, ``path`` is untouched and the scratch file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    create_new(scratch)
    try:
        yield scratch
        with scratch.open("rb") as f:
            os.fsync(f.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def create_new(path: Path) -> None:
    """Make an empty file at ``path``. What has this name is removed and never written through: in
    a folder that others can write to, it may be a link to any file of this user."""
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
    os.close(os.open(path, flags, 0o666))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8; half a surrogate pair (never valid text) becomes
    ``?``.
    """
    with replacing(path) as scratch:
        scratch.write_bytes(text.encode("utf-8", errors="replace"))

"""Files of a bounded size in folders that somebody else may have written."""

from __future__ import annotations

from pathlib import Path

from burnish.errors import BurnishError

LARGEST = 256 << 20
"""Bytes of the largest JSON file that a run or a checkpoint writes, by far."""


class UnreadableFileError(BurnishError, ValueError):
    """A file that would block its reader, or exhaust the memory."""


def read_small(path: Path, *, limit: int = LARGEST) -> bytes:
    """Return the content of a file. Raises UnreadableFileError, before it is opened, for a pipe or
    a device and for more than ``limit`` bytes; OSError."""
    size = path.stat().st_size
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UnreadableFileError(f"{path} is not a regular file; move it away")
    if size > limit:
        raise UnreadableFileError(
            f"{path} has {size} bytes, but such a file never has more than {limit}; move it away"
        )
    return path.read_bytes()

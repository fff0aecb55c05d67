"""The one error of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the path, the cause and what to
    do."""

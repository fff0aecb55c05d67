"""The errors of this package."""

from __future__ import annotations

from burnish.errors import BurnishError


class CheckpointError(BurnishError, RuntimeError):
    """A checkpoint cannot be written or read. The message contains the path, the cause and a
    fix."""


class UnstorableError(CheckpointError):
    """A value of the state cannot be stored, however much space the disk has."""

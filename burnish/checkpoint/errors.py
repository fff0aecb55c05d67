"""The one error of this package."""

from __future__ import annotations

from burnish.errors import BurnishError


class CheckpointError(BurnishError, RuntimeError):
    """A checkpoint cannot be written or read. The message contains the path, the cause and a
    fix."""

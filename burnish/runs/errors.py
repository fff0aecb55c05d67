"""Errors of reading runs."""

from __future__ import annotations

from burnish.errors import BurnishError


class RunFolderError(BurnishError, ValueError):
    """A folder that contains no run, or a run that cannot be read."""

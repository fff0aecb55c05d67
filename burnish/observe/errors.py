"""Errors of this package, importable without heavy dependencies."""

from __future__ import annotations

from burnish.errors import BurnishError


class TrackerError(BurnishError, RuntimeError):
    """A tracker of the recipe cannot be used. The message contains a fix."""

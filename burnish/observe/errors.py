"""Errors of this package. Imports nothing heavy."""

from __future__ import annotations

from burnish.errors import BurnishError


class TrackerError(BurnishError, RuntimeError):
    """A tracker that the recipe asks for and that cannot be used. Says what to do."""

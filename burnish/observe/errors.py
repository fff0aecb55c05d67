"""Errors of this package, importable without heavy dependencies."""

from __future__ import annotations

from burnish.errors import BurnishError


class SavedRecipeError(BurnishError, ValueError):
    """The saved recipe of a run cannot be read. The message contains a fix."""


class TrackerError(BurnishError, RuntimeError):
    """A tracker of the recipe cannot be used. The message contains a fix."""


class RemovedError(BurnishError, RuntimeError):
    """The folder of a run was removed while the run wrote to it."""

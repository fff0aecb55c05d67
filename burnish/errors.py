"""The root of this project's exceptions. Imports nothing."""

from __future__ import annotations


class BurnishError(Exception):
    """An error whose message is written for the user: the wrong value, the cause, the fix.

    The command line prints the message without a traceback and exits with ``exit_code``.
    """

    exit_code: int = 2
    """Exit code of a command that ends with this error."""

    def text_for(self, job: str) -> str:
        """Return what the command line prints. ``job``: the command that resumes the run."""
        return f"error: {self}"

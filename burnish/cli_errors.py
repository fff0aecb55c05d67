"""Convert the exception that ended a command to its message and exit code.

Exit codes: 0 done; 1 any other error, with a traceback; 2 an error with a known cause, with a
message on stderr; 3 stopped by itself (non-finite numbers, diverged weights, no learning signal),
after saving unless the weights are unusable; 4 a plan that does not fit; 128 + n stopped by signal
n, after saving if the job trains or generates. docs/commands.md also lists them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from burnish.config import JOBS
from burnish.config.launch import LaunchError, launched_rank
from burnish.errors import BurnishError


class CommandGroup(TyperGroup):
    """Command group that converts an exception of any command to a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # no run has installed its handlers yet: nothing to save
            raise typer.Exit(128 + signal.SIGINT) from None
        except BurnishError as error:
            command = ctx.invoked_subcommand
            text = error.text_for(command if command in JOBS else "rl")
            if text:
                typer.echo(_rank_prefix() + text, err=True)
            if ctx.params.get("debug"):
                raise
            raise typer.Exit(error.exit_code) from None


@contextmanager
def printing_on_first_rank() -> Iterator[None]:
    """If a launcher started several ranks, let ranks other than 0 print only errors."""
    rank = launched_rank()
    if rank is None or rank.rank == 0:
        yield
        return
    from burnish.observe.progress import silenced

    with silenced():
        yield


def _rank_prefix() -> str:
    """Return the prefix of errors of ranks other than 0, if a launcher started several."""
    try:
        rank = launched_rank()
    except LaunchError:  # it is the error that is printed
        return ""
    return f"[rank {rank.rank}] " if rank is not None and rank.rank > 0 else ""

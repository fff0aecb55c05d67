"""From the exception that ended a command to its message and exit code.

Exit codes: 0 done; 1 anything else, with a traceback; 2 an error with a known cause, with a message
on stderr; 3 stopped by itself after saving (numbers not finite, nothing to learn); 4 a plan that
does not fit; 128 + n stopped by signal n, after saving if the job trains or generates.
(docs/commands.md lists them too.)"""

from __future__ import annotations

import importlib
import signal
from typing import Any

import typer
from typer.core import TyperGroup

from burnish.config import JOBS


class CommandGroup(TyperGroup):
    """The commands; turns an exception of any of them into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (
            KeyboardInterrupt
        ):  # before a run has installed its own handlers: nothing to save yet
            raise typer.Exit(128 + signal.SIGINT) from None
        except Exception as error:
            code = _explain(error, command=ctx.invoked_subcommand or "")
            if code is None or ctx.params.get("debug"):
                raise
            raise typer.Exit(code) from None


def _explain(error: Exception, *, command: str) -> int | None:
    """Say on stderr what a project error means and return its exit code; None for any other
    exception.

    An exception class that this package defines is one whose message is written for the user.
    """
    module, name = type(error).__module__, type(error).__name__
    if module.partition(".")[0] != "burnish":
        return None
    if (module, name) == ("burnish.loops.session", "Interrupted"):
        interrupted = importlib.import_module(module).Interrupted
        assert isinstance(error, interrupted)
        number, run_dir = error.signal_number, error.run_dir
        job = command if command in JOBS else "rl"
        typer.echo(
            f"stopped by {signal.Signals(number).name}; the run is saved. "
            f"Go on with: burnish {job} --resume {run_dir}",
            err=True,
        )
        return 128 + int(number)
    typer.echo(f"error: {error}", err=True)
    return 3 if name == "StoppedError" else 2

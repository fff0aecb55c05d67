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

from burnish.config import JOBS, ConfigError
from burnish.config.equivalents import advice_on, command_of
from burnish.config.launch import LaunchError, launched_rank
from burnish.errors import BurnishError
from burnish.messages import visible


class CommandGroup(TyperGroup):
    """Command group that converts an exception of any command to a message and an exit code.

    Commands and options of other frameworks are errors that name their replacement."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # shell completion, which ignores errors
            return super().resolve_command(ctx, args)
        if args and args[0] not in self.commands and (job := command_of(args[0])):
            raise ConfigError(
                f"there is no command {args[0]!r}: use burnish {job}. docs/compare.md lists the "
                "keys that replace the flags of other frameworks"
            )
        name, command, rest = super().resolve_command(ctx, args)
        if name in JOBS and command is not None:
            options = {option for parameter in command.params for option in parameter.opts}
            _refuse_other_flags(name, [word for word in rest if word not in options])
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # no run has installed its handlers yet: nothing to save
            raise typer.Exit(128 + signal.SIGINT) from None
        except BurnishError as error:
            command = ctx.invoked_subcommand
            text = error.text_for(command if command in JOBS else "rl")
            if text:
                typer.echo(_rank_prefix() + visible(text), err=True)
            if ctx.params.get("debug"):
                raise
            raise typer.Exit(error.exit_code) from None


def _refuse_other_flags(job: str, words: list[str]) -> None:
    """Raise ConfigError if a word is a flag of another framework."""
    lines = []
    for word in words:
        flag = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and (advice := advice_on(flag, job)):
            lines.append(f"{word.partition('=')[0]}: {advice}")
    if lines:
        raise ConfigError(
            "\n".join(lines) + "\nKeys are set in the recipe, or as KEY=VALUE behind it: burnish "
            f"{job} recipe.yaml train.lr=1e-6. docs/compare.md lists the keys that replace the "
            "flags of other frameworks"
        )


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

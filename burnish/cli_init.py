"""The command ``burnish init``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from burnish.config import ConfigError
from burnish.config.explain import nearest
from burnish.config.shipped import SHIPPED, shipped_recipes
from burnish.starter.folder import TINY, Answers, check_model, choice_for, write_folder
from burnish.starter.jobs import STARTERS
from burnish.starter.questions import ask


def init(  # house: ok typer makes the options from the signature
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Folder to write. Default: my-JOB.", show_default=False
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help=f"One of {', '.join(STARTERS)}. Default: rl, or the job that --data fits.",
            autocompletion=lambda: list(STARTERS),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A folder, a hub name, or tiny: random weights, for a CPU. Default: tiny.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rows to train on. Default: a sample is written."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: use the defaults of missing options.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the recipes of the package instead.")
    ] = False,
) -> None:
    """Write a folder with a recipe that runs, and its data. Asks three questions: the kind of
    training, the model, and the data. Without a terminal it asks nothing, as with --yes."""
    if list_recipes:
        _list_recipes()
        return
    if job is not None and job not in STARTERS:
        raise ConfigError(f"--job {job}: use one of {', '.join(STARTERS)}{nearest(job, STARTERS)}")
    if model is not None:
        check_model(model)
    if data is not None:
        data = os.path.expanduser(data)
        job = job or choice_for(data)
        if not STARTERS[job].columns:
            raise ConfigError("--data has no effect with an environment, which makes the tasks")
    if yes or sys.stdin is None or not sys.stdin.isatty():
        answers = Answers(job or "rl", model or TINY, data)
    else:
        answers = _asked(job, model, data)
    folder = folder or Path(f"my-{answers.choice}")
    for line in write_folder(folder, answers, force=force):
        typer.echo(line)
    typer.echo(_next_steps(folder, answers))


def _list_recipes() -> None:
    """Print each recipe of the package with the first sentence of its comment, tiny ones first."""
    for path in sorted(shipped_recipes(), key=lambda path: not path.name.startswith("tiny_")):
        purpose = path.read_text(encoding="utf-8").partition("\n#\n")[0].replace("\n# ", " ")
        sentence = re.split(r"(?<!Dr)\. ", purpose.removeprefix("# "))[0].removesuffix(".")
        typer.echo(f"{SHIPPED.name}/{path.name}\n    {sentence}.")


def _asked(job: str | None, model: str | None, data: str | None) -> Answers:
    try:
        return ask(job, model, data)
    except (KeyboardInterrupt, typer.Abort):  # Ctrl-C at any place, or the end of the input
        typer.echo("\nnothing was written", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


def _next_steps(folder: Path, answers: Answers) -> str:
    """Return the commands that check and start the recipe."""
    starter = STARTERS[answers.choice]
    is_quick = answers.model == TINY and answers.data is None
    commands = {} if folder.resolve() == Path.cwd() else {f"cd {shlex.quote(str(folder))}": ""}
    if starter.code is not None:
        commands[f"python -m doctest {starter.code}"] = "test it; no output if it passes"
    commands["burnish check recipe.yaml"] = "read every row; load no weights"
    commands[f"burnish {starter.job} recipe.yaml"] = "train" + ", in less than a minute" * is_quick
    commands["burnish runs"] = "list the runs; each has a report.html"
    width = max(map(len, commands))
    lines = [f"{command:<{width}}  {'# ' * bool(text)}{text}" for command, text in commands.items()]
    return "\n".join(line.rstrip() for line in lines)

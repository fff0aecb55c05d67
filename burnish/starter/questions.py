"""Ask for the answers that no option gave. Ctrl-C and the end of the input write nothing."""

from __future__ import annotations

import os

import typer

from burnish.errors import BurnishError
from burnish.starter.folder import TINY, Answers, check_model, recipe_text
from burnish.starter.jobs import STARTERS


def ask(choice: str | None, model: str | None, data: str | None) -> Answers:
    """Return the answers. A wrong one is explained and asked again."""
    choice = choice or _ask_choice()
    model = model or _ask_model()
    if data is None and STARTERS[choice].columns:
        data = _ask_data(choice, model)
    return Answers(choice, model, data)


def _ask_choice() -> str:
    typer.echo("What should the model learn?")
    for number, (name, starter) in enumerate(STARTERS.items(), 1):
        typer.echo(f"  {number}. {name}: {starter.question}")
    names = list(STARTERS)
    while True:
        answer = str(typer.prompt("Number or name", default="rl")).strip()
        if answer in STARTERS:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]
        typer.echo(f"  {answer!r} is neither a number from 1 to {len(names)} nor one of the names")


def _ask_model() -> str:
    typer.echo(f"Which model? A folder, a hub name, or {TINY} (random weights, for a CPU).")
    while True:
        model = os.path.expanduser(str(typer.prompt("Model", default=TINY)).strip())
        try:
            check_model(model)
        except BurnishError as error:
            typer.echo(f"  {error}")
        else:
            return model


def _ask_data(choice: str, model: str) -> str | None:
    typer.echo("Which rows? A file (.jsonl, .json, .csv, .parquet), or sample (written for you).")
    while True:
        data = os.path.expanduser(str(typer.prompt("Data", default="sample")).strip())
        if data == "sample":
            return None
        try:
            recipe_text(Answers(choice, model, data))
        except BurnishError as error:
            typer.echo(f"  {error}")
        else:
            return data

"""Ask for the answers that no option gave. Ctrl-C and the end of the input write nothing."""

from __future__ import annotations

import os
import select
import signal
import sys

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
        answer = _answer("Number or name", default="rl")
        if answer in STARTERS:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]
        typer.echo(f"  {answer!r} is neither a number from 1 to {len(names)} nor one of the names")


def _ask_model() -> str:
    typer.echo(f"Which model? A folder, a hub name, or {TINY} (random weights, for a CPU).")
    while True:
        model = os.path.expanduser(_answer("Model", default=TINY))
        try:
            check_model(model)
        except BurnishError as error:
            typer.echo(f"  {error}")
        else:
            return model


def _ask_data(choice: str, model: str) -> str | None:
    typer.echo("Which rows? A file (.jsonl, .json, .csv, .parquet), or sample (written for you).")
    while True:
        data = os.path.expanduser(_answer("Data", default="sample"))
        if data == "sample":
            return None
        try:
            recipe_text(Answers(choice, model, data))
        except BurnishError as error:
            typer.echo(f"  {error}")
        else:
            return data


def _answer(question: str, *, default: str) -> str:
    """Return the line that is typed, without white space at its ends; ``default`` if it is empty.
    Raises KeyboardInterrupt on Ctrl-C, and typer.Abort at the end of the input."""
    typer.echo(f"{question} [{default}]: ", nl=False)
    line = _typed_line()
    if not line:
        raise typer.Abort
    return line.strip() or default


def _typed_line() -> str:
    """Return a line of the standard input. Raises KeyboardInterrupt on Ctrl-C.

    ``input`` loses a Ctrl-C that arrives after its question and before it waits for a line: then it
    waits. Here the signal makes a pipe readable, so no order of the two is lost.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        while sys.stdin not in select.select([sys.stdin, reader], [], [])[0]:
            os.read(reader, 64)  # of a signal that raised nothing
        return sys.stdin.readline()
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)

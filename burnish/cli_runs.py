"""Commands that show runs in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burnish.cli_arguments import AllowedHost, ServerHost, ServerPort, ServerTokenEnv


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs, or a run.")
    ] = Path("runs"),
) -> None:
    """List runs: state, age, job, model, step and headline metric."""
    from burnish.runs.errors import RunFolderError
    from burnish.runs.folder import find_runs
    from burnish.runs.tables import console, print_damage, runs_table

    listed = find_runs(folder)
    if not listed:
        problem = "contains no run" if folder.is_dir() else "is no folder"
        raise RunFolderError(
            f"{folder} {problem}; give the folder that contains run folders (runs/ by default)"
        )
    screen = console()
    screen.print(runs_table(listed, folder, width=screen.width))
    print_damage(screen, listed)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Two or more runs.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A metric, or a pattern such as 'reward/*'. May be repeated."),
    ] = None,
) -> None:
    """Compare runs: the keys that differ, and their metrics."""
    from burnish.runs.compare import metric_rows, recipe_difference
    from burnish.runs.errors import RunFolderError
    from burnish.runs.folder import load_run
    from burnish.runs.tables import console, difference_table, metrics_table, print_damage

    loaded = [load_run(path) for path in runs]
    if len(loaded) < 2:
        raise RunFolderError("give two or more runs to compare")
    screen, difference = console(), recipe_difference(loaded)
    rows = metric_rows(loaded, metric or ())
    screen.print(difference_table(loaded, difference) if difference else "The recipes are equal.")
    if metric and not rows:
        raise RunFolderError(f"no run has a metric that matches {', '.join(metric)}")
    screen.print(metrics_table(loaded, rows))
    print_damage(screen, loaded)


def watch(  # house: ok typer makes the options from the signature
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs, or a run.")
    ] = Path("runs"),
    host: ServerHost = "127.0.0.1",
    port: ServerPort = 8600,
    allowed_host: AllowedHost = None,
    token_env: ServerTokenEnv = None,
    text: Annotated[
        bool, typer.Option("--text", help="Show the runs in the terminal, without a server.")
    ] = False,
) -> None:
    """Show runs in the browser, live: curves, samples, tokens, time."""
    if text:
        from burnish.runs.follow import follow

        follow(folder)
        return
    from burnish.serve.base import ListenOptions
    from burnish.watch.server import watch

    hosts = tuple(allowed_host or ())
    watch(folder, ListenOptions(host, port, allowed_hosts=hosts, token_env=token_env))

"""Commands that show runs in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs, or a run.")
    ] = Path("runs"),
) -> None:
    """List runs: state, age, job, model, step and headline metric."""
    from burnish.runs.folder import RunFolderError, find_runs
    from burnish.runs.tables import console, runs_table

    listed = find_runs(folder)
    if not listed:
        problem = "contains no run" if folder.is_dir() else "is no folder"
        raise RunFolderError(
            f"{folder} {problem}; give the folder that contains run folders (runs/ by default)"
        )
    screen = console()
    screen.print(runs_table(listed, folder, width=screen.width))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Two or more runs.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A metric, or a pattern such as 'reward/*'. May be repeated."),
    ] = None,
) -> None:
    """Compare runs: the keys that differ, and their metrics."""
    from burnish.runs.compare import metric_rows, recipe_difference
    from burnish.runs.folder import RunFolderError, load_run
    from burnish.runs.tables import console, difference_table, metrics_table

    loaded = [load_run(path) for path in runs]
    if len(loaded) < 2:
        raise RunFolderError("give two or more runs to compare")
    screen, difference = console(), recipe_difference(loaded)
    rows = metric_rows(loaded, metric or ())
    screen.print(difference_table(loaded, difference) if difference else "The recipes are equal.")
    if metric and not rows:
        raise RunFolderError(f"no run has a metric that matches {', '.join(metric)}")
    screen.print(metrics_table(loaded, rows))

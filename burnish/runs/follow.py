"""``burnish watch --text``: runs in the terminal, drawn again while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from burnish.messages import visible
from burnish.observe.headline import Headline, headlines
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import Run, find_runs, is_run
from burnish.runs.tables import console, runs_table, sparkline

_EVERY_S = 2.0
_COURSE = 48
_ACTIVE = ("running", "silent")


def follow(folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Print the runs in a folder, or the headline metrics of the run that it is, again every two
    seconds until none of them runs or Ctrl-C. Without a terminal they are printed once.

    Raises RunFolderError if the folder contains no run.
    """
    screen = console()
    if not screen.is_terminal:
        screen.print(_shown(folder, screen)[0])
        return
    shown, is_active = _shown(folder, screen)
    with Live(shown, console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while is_active:
                sleep(_EVERY_S)
                shown, is_active = _shown(folder, screen)
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            return


def _shown(folder: Path, screen: Console) -> tuple[RenderableType, bool]:
    """Return what is printed, and whether a run still runs."""
    runs = find_runs(folder)
    if not runs:
        problem = "contains no run" if folder.is_dir() else "is no folder"
        raise RunFolderError(
            f"{folder} {problem}; give a run folder, or the folder that contains run folders "
            "(runs/ by default)"
        )
    is_active = any(run.state.kind in _ACTIVE for run in runs)
    if len(runs) == 1 and is_run(folder):
        return _one_run(runs[0], width=screen.width), is_active
    return runs_table(runs, folder, width=screen.width), is_active


def _one_run(run: Run, *, width: int) -> RenderableType:
    """Return the facts of a run and a row per headline metric."""
    facts = Text(visible(f"{run.name}: {run.job}, {run.model}, {run.state.kind}"))
    if run.state.reason and run.state.kind not in _ACTIVE:
        facts.append(f" ({visible(run.state.reason)})")
    if run.step is not None:
        planned = run.recipe.get("max_steps")
        facts.append(f", step {run.step:,}" + (f"/{planned:,}" * isinstance(planned, int)))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for headline in headlines(run.curves):
        table.add_row(*_row(run, headline, max(8, min(_COURSE, width - 50))))
    return Group(facts, table)


def _row(run: Run, headline: Headline, width: int) -> Sequence[Text]:
    values = run.curves[headline.metric].values
    change = " → ".join(map(headline.shown, [values[0], values[-1]] if values[1:] else values))
    return Text(headline.label), Text(change), Text(sparkline(values, width))

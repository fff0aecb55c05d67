"""Differences of runs: keys of their recipes, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from burnish.observe.headline import headlines
from burnish.runs.folder import Run

_MISSING = "(not set)"
_PLACES = ("run_dir",)
"""Keys that differ between all runs."""


@dataclass(frozen=True)
class MetricRow:
    """A metric of several runs: last, smallest and largest value of each; None if it has none."""

    metric: str
    values: tuple[tuple[float, float, float] | None, ...]


def recipe_difference(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return key -> its value in each run, for the keys of recipes that differ, in the order of the
    recipe. Lists are values, and secrets are ``***``. Raises RunFolderError if a recipe cannot be
    read."""
    saved = [dict(_flat(run.saved[1])) for run in runs]
    public = [dict(_flat(run.recipe)) for run in runs]
    keys = dict.fromkeys(key for values in saved for key in values)
    return {
        key: tuple(values.get(key, _MISSING) for values in public)
        for key in keys
        if key not in _PLACES and len({values.get(key, _MISSING) for values in saved}) > 1
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, str(value)


def metric_rows(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[MetricRow]:
    """Return the rows of metrics that match one of ``patterns`` (``reward/*``); without patterns,
    of the headlines of the runs."""
    names = list(dict.fromkeys(name for run in runs for line in run.lines for name in line))
    if patterns:
        chosen = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    else:
        chosen = [headline.metric for headline in headlines(names)]
    return [MetricRow(name, tuple(_summary(run, name) for run in runs)) for name in chosen]


def _summary(run: Run, metric: str) -> tuple[float, float, float] | None:
    values = run.curve(metric)[1]
    return (values[-1], min(values), max(values)) if values else None

"""Differences of runs: keys of their recipes, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import yaml

from burnish.observe.headline import headlines

if TYPE_CHECKING:
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
        key: tuple(_shown(values[key]) if key in values else _MISSING for values in public)
        for key in keys
        if key not in _PLACES and len({repr(values.get(key, _MISSING)) for values in saved}) > 1
    }


def _shown(value: Any) -> str:
    """Return a value as YAML has it: a text that could be another value has quotes.

    >>> _shown(None), _shown("None"), _shown("null"), _shown(0.5), _shown("0.5")
    ('null', 'None', "'null'", '0.5', "'0.5'")
    """
    if value == "***":
        return value
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def metric_rows(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[MetricRow]:
    """Return the rows of the metrics that :func:`chosen_metrics` returns."""
    names = chosen_metrics(runs, patterns)
    return [MetricRow(name, tuple(_summary(run, name) for run in runs)) for name in names]


def chosen_metrics(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[str]:
    """Return the metrics of runs that match one of ``patterns`` (``reward/*``); without patterns,
    the headlines of the runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    if patterns:
        return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    return [headline.metric for headline in headlines(names)]


def _summary(run: Run, metric: str) -> tuple[float, float, float] | None:
    values = run.curve(metric).values
    return (values[-1], min(values), max(values)) if values else None


def short_names(runs: Sequence[Run]) -> list[str]:
    """Return the last parts of the paths of runs, as many as tell them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run.folder) for run in runs]

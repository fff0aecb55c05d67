"""Replies to the page as JSON values: functions of the library and of the parameters of a
request.

Each raises a BurnishError with the message that the page shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.data_files.arrow_files import READ_ERRORS
from burnish.errors import BurnishError
from burnish.observe.headline import headlines
from burnish.observe.samples import (
    read_sample_file,
    read_tokens,
    sample_files,
    samples_of_step,
    samples_with_tokens,
    split_of,
)
from burnish.report.samples import sample_entry
from burnish.runs.compare import recipe_difference, short_names
from burnish.runs.folder import Run
from burnish.watch.lanes import lanes_of
from burnish.watch.library import Library
from burnish.watch.metric_log import MetricLog
from burnish.watch.step_rows import COLUMNS, chosen_rows, finite

Parameters = Mapping[str, Sequence[str]]
_MAX_RUNS = 20
_POINTS = 2000
_PER_PAGE = 64
_MAX_BYTES = 128 << 20
"""Decoded bytes of one sample file, beyond which its further samples are left out."""
_LONGEST_TEXT = 1 << 20
"""Characters of a text that the page of a sample shows."""
_TOKEN_METRICS = ("rollout/tokens", "train/tokens")


class RequestError(BurnishError, ValueError):
    """A request whose parameters are not understood, or for something that does not exist."""


def _one(parameters: Parameters, name: str, default: str = "") -> str:
    return parameters.get(name, [default])[-1]


def _integer(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = _one(parameters, name)
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{name}={text[:100]!r} is not a whole number") from None


def run_page(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return the data of the page of a run."""
    return library.page(_one(parameters, "run"))


def curves(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return a metric of several runs: ``{"metric", "metrics": names of all, "runs": [{"id",
    "name", "x", "values", "mean_of"}]}``. ``x``: step, cumulative tokens, or seconds since the
    start. ``mean_of``: lines that a point averages. Without a metric it is the headline."""
    chosen = _runs(library, parameters)
    logs = [library.log(identifier) for identifier, _ in chosen]
    names = list(dict.fromkeys(name for log in logs for name in log.names()))
    usual = next((headline.metric for headline in headlines(names)), names[0] if names else "")
    metric = _one(parameters, "metric") or usual
    axis = _one(parameters, "x", "step")
    if axis not in ("step", "tokens", "time"):
        raise RequestError(f"x={axis[:50]!r}; x is step, tokens or time")
    lines = []
    for (identifier, _), name, log in zip(
        chosen, short_names([run for _, run in chosen]), logs, strict=True
    ):
        x, values, size = _curve(log, metric, axis)
        lines.append({"id": identifier, "name": name, "x": x, "values": values, "mean_of": size})
    return {"metric": metric, "metrics": sorted(names), "x": axis, "runs": lines}


def _runs(library: Library, parameters: Parameters) -> list[tuple[str, Run]]:
    identifiers = list(dict.fromkeys(parameters.get("run", ())))
    if not identifiers or len(identifiers) > _MAX_RUNS:
        raise RequestError(f"choose 1 to {_MAX_RUNS} runs")
    return [(identifier, library.run(identifier)) for identifier in identifiers]


def _curve(log: MetricLog, metric: str, axis: str) -> tuple[list[float], list[float], int]:
    """Return at most :data:`_POINTS` points of a metric, means of neighbors, and the number of
    neighbors."""
    xs = _axis(log, axis)
    points = [(xs[line], value) for line, value in log.points(metric)]
    points.sort(key=lambda point: point[0])
    stride = max(1, -(-len(points) // _POINTS))
    groups = [points[i : i + stride] for i in range(0, len(points), stride)]
    x = [math.fsum(p[0] / len(group) for p in group) for group in groups]
    values = [math.fsum(p[1] / len(group) for p in group) for group in groups]
    return x, values, stride


def _axis(log: MetricLog, axis: str) -> Sequence[float]:
    if axis == "step":
        return log.steps
    if axis == "time":
        start = log.times[0] if log.times else 0.0
        return [moment - start for moment in log.times]
    sums, total = [0.0] * len(log.steps), 0.0
    column = next((log.columns[n] for n in _TOKEN_METRICS if n in log.columns), None)
    of_line = {} if column is None else dict(zip(column.lines, column.values, strict=True))
    for line in range(len(sums)):
        total += of_line.get(line, 0.0)
        sums[line] = total
    return sums


def compare(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return the keys in which recipes differ: ``{"names", "keys": [[key, value per run]]}``."""
    runs = [run for _, run in _runs(library, parameters)]
    difference = recipe_difference(runs)
    return {"names": short_names(runs), "keys": [[key, *vs] for key, vs in difference.items()]}


def steps(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return the steps whose samples a run kept, newest first: ``{"steps": [[step, [split]]]}``."""
    run = library.run(_one(parameters, "run"))
    splits: dict[int, list[str]] = {}
    for step, path in sample_files(run.folder):
        splits.setdefault(step, []).append(split_of(path))
    return {"steps": [[step, sorted(splits[step])] for step in sorted(splits, reverse=True)]}


def _samples(run: Run, step: int, split: str) -> tuple[Path, list[dict[str, Any]]]:
    path = samples_of_step(run.folder, step).get(split)
    if path is None:
        raise RequestError(
            f"the run has no samples of step {step} ({split}); observe.samples_per_step says how "
            "many are kept"
        )
    try:
        return path, read_sample_file(path, max_bytes=_MAX_BYTES)
    except READ_ERRORS as error:
        raise RequestError(f"{path.name} cannot be read: {error}") from error


def step(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return a page of the samples of a step, filtered and sorted."""
    run = library.run(_one(parameters, "run"))
    number, split = _integer(parameters, "step"), _one(parameters, "split", "train")
    path, samples = _samples(run, number, split)
    sort, page = _one(parameters, "sort"), max(0, _integer(parameters, "page", 0))
    rows = chosen_rows(
        samples, _one(parameters, "q"), sort=sort, descending=_one(parameters, "desc") == "1"
    )
    parts = sorted({f"parts.{name}" for row in rows for name in row["parts"]})
    shown = rows[page * _PER_PAGE : (page + 1) * _PER_PAGE]
    return {
        "step": number,
        "split": split,
        "splits": list(samples_of_step(run.folder, number)),
        "columns": [*COLUMNS, *parts],
        "total": len(samples),
        "found": len(rows),
        "page": page,
        "pages": max(1, -(-len(rows) // _PER_PAGE)),
        "rows": shown,
        "groups": {id_: _group(samples, id_) for id_ in {row["group"] for row in shown}},
        "with_tokens": samples_with_tokens(path),
    }


def _group(samples: Sequence[Mapping[str, Any]], group: Any) -> dict[str, Any]:
    """Return facts of a complete group, whichever of its samples are shown."""
    of_group = [finite(row["reward"]) for row in samples if row["group_id"] == group]
    rewards = [reward for reward in of_group if reward is not None]
    return {
        "samples": len(of_group),
        "mean_reward": math.fsum(reward / len(rewards) for reward in rewards) if rewards else None,
        "is_equal": len(rewards) > 1 and len(set(rewards)) == 1,
    }


def sample(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return a sample with its complete conversation, and its tokens if they were kept."""
    run = library.run(_one(parameters, "run"))
    number, split = _integer(parameters, "step"), _one(parameters, "split", "train")
    identifier = _one(parameters, "sample")
    path, samples = _samples(run, number, split)
    index = next((i for i, s in enumerate(samples) if s["sample_id"] == identifier), None)
    if index is None:
        raise RequestError(f"step {number} ({split}) has no sample {identifier[:200]!r}")
    row = samples[index]
    group = [s["sample_id"] for s in samples if s["group_id"] == row["group_id"]]
    whole = {name: (row[name] or "")[:_LONGEST_TEXT] for name in ("prompt", "response")}
    return {
        "sample": sample_entry(row, number) | whole,
        "group": group,
        "tokens": _tokens(path, identifier),
    }


def _tokens(path: Path, identifier: str) -> dict[str, Any] | None:
    """Return the columns of tokens that a sample has, with None for numbers that are not finite;
    None if its tokens are not saved or cannot be read."""
    try:
        columns = read_tokens(path, identifier)
    except READ_ERRORS:
        return None
    if columns is None:
        return None
    return {
        name: [finite(x) if isinstance(x, float) else x for x in value]
        if isinstance(value, list)
        else value
        for name, value in columns.items()
        if value is not None
    }


def prompt_of(run: Run, step: str, split: str, identifier: str) -> str:
    """Return the prompt of a sample."""
    number = _integer({"step": [step]}, "step")
    for row in _samples(run, number, split)[1]:
        if row["sample_id"] == identifier:
            return str(row["prompt"])
    raise RequestError(f"step {number} ({split}) has no sample {identifier[:200]!r}")


def lanes(library: Library, parameters: Parameters) -> dict[str, Any]:
    """Return the lanes of time of a run; empty before the first timeline is written."""
    run = library.run(_one(parameters, "run"))
    return lanes_of(run.folder) or {"lanes": [], "seconds": 0.0, "note": ""}

"""One run's folder as an object, and the run folders below a folder."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.observe.ending import END_FILE, RunState, state_of
from burnish.observe.errors import SavedRecipeError
from burnish.observe.headline import Headline, headlines, model_title
from burnish.observe.metrics import METRICS_FILE, damaged_lines, readable_metrics
from burnish.observe.progress import LOG_FILE
from burnish.observe.public_recipe import CONFIG_FILE, public_yaml, read_recipe
from burnish.observe.samples import (
    read_sample_file,
    read_tokens,
    sample_files,
    samples_of_step,
    samples_with_tokens,
    split_of,
)
from burnish.runs.curves import Curve, curves_of, is_finite
from burnish.runs.errors import RunFolderError
from burnish.secret import without_secret_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TOKEN_COLUMNS = {
    "token": ("tokens", "object"),
    "id": ("token_ids", "int64"),
    "row": ("row_numbers", "int64"),
    "turn": ("turns", "Int64"),
    "mask": ("action_mask", "bool"),
    "version": ("versions", "Int64"),
    "sampler_logprob": ("sampler_logprobs", "float64"),
    "trainer_logprob": ("trainer_logprobs", "float64"),
    "entropy": ("entropies", "float64"),
    "advantage": ("token_advantages", "float64"),
    "ref_logprob": ("ref_logprobs", "float64"),
    "teacher_logprob": ("teacher_logprobs", "float64"),
    "value": ("values", "float64"),
}
"""Column of :meth:`Run.tokens` -> (column of the file, type)."""
_DEPTH = 4
"""Folders between a folder and the runs in it."""


def load_run(path: Path | str) -> Run:
    """Return the run in a folder, running or ended. Its parts are read when they are asked for.

    Raises RunFolderError if the folder has neither a recipe nor metrics.
    """
    folder = Path(path)
    try:
        has_run = is_run(folder)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror}") from error
    if not has_run:
        problem = "does not exist"
        if folder.is_dir():
            inside = [run.name for run in find_runs(folder)][:3]
            known = f"; it contains runs, such as {', '.join(inside)}" if inside else ""
            problem = f"has no {METRICS_FILE}, {END_FILE} or {LOG_FILE}{known}"
        elif folder.exists():
            problem = "is a file"
        raise RunFolderError(
            f"{folder} is not a run folder: it {problem}; give the folder that a job wrote "
            "(run_dir in its recipe, printed when the job starts)"
        )
    return Run(folder)


def is_run(folder: Path) -> bool:
    """Return whether a folder contains metrics, the record of an end, or a recipe with the log of
    its run. Raises OSError if it cannot be entered."""
    has_log = (folder / CONFIG_FILE).is_file() and (folder / LOG_FILE).is_file()
    return has_log or any((folder / name).is_file() for name in (METRICS_FILE, END_FILE))


def find_runs(folder: Path | str) -> list[Run]:
    """Return the runs in a folder and up to four folders below it, by path. A folder that cannot be
    read is left out, and links are not followed."""
    return [Run(path) for path in sorted(_run_folders(Path(folder), _DEPTH))]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if is_run(folder):
            yield folder
            return
        inside = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
    except OSError:
        return
    for path in inside if depth > 0 else ():
        if not path.name.startswith("."):
            yield from _run_folders(path, depth - 1)


def _parsed(row: dict[str, Any]) -> dict[str, Any]:
    for column in ("reward_parts", "episode"):
        row[column] = None if row[column] is None else json.loads(row[column])
    return row


class Run:
    """A run and what its folder has: state, recipe, metrics, samples.

    What was read is kept; :meth:`reload` reads a run again that still runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def reload(self) -> Run:
        """Return the run with the present content of its folder."""
        return Run(self.folder)

    @cached_property
    def state(self) -> RunState:
        """Its state: it runs, or how it ended."""
        return state_of(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, as nested dictionaries with ``***`` in place of secrets; empty if
        the folder has none. Raises RunFolderError if it cannot be read."""
        public: dict[str, Any] = without_secret_values(self.saved[1])
        return public

    @property
    def recipe_text(self) -> str:
        """The recipe as YAML, with ``***`` in place of secrets."""
        text, tree = self.saved
        return public_yaml(tree, text)

    @cached_property
    def saved(self) -> tuple[str, dict[str, Any]]:
        """The recipe with its secrets, as text and as nested dictionaries."""
        if not (self.folder / CONFIG_FILE).is_file():
            return "", {}
        try:
            return read_recipe(self.folder)
        except SavedRecipeError as error:
            raise RunFolderError(str(error)) from error

    @property
    def job(self) -> str:
        """The job: sft, rl, ..."""
        return str(self.recipe.get("job", "run"))

    @property
    def model(self) -> str:
        """The name of its model."""
        return model_title(self.recipe, self.folder)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``, without damaged ones. Raises RunFolderError if the file
        cannot be read."""
        return self._read[0]

    @property
    def damage(self) -> str:
        """A sentence with the number of damaged lines of ``metrics.jsonl``; empty if none is."""
        return damaged_lines(self._read[1])

    @cached_property
    def _read(self) -> tuple[list[dict[str, Any]], int]:
        try:
            return readable_metrics(self.folder)
        except (ValueError, OSError) as error:
            raise RunFolderError(str(error)) from error

    @property
    def step(self) -> int | None:
        """The last step with metrics; None before the first."""
        return max((int(line["step"]) for line in self.lines), default=None)

    @property
    def seconds(self) -> float:
        """Time between the first and the last metrics."""
        return float(self.lines[-1]["time"]) - float(self.lines[0]["time"]) if self.lines else 0.0

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per step with metrics, a column per metric, and ``time`` (Unix seconds). NaN: not
        measured in this step. If a step has several lines, the last number of each metric
        counts."""
        import pandas as pd

        steps: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            row = steps.setdefault(int(line["step"]), {})
            row.update({k: v for k, v in line.items() if k not in row or is_finite(v)})
        frame = pd.DataFrame([steps[step] for step in sorted(steps)])
        if frame.empty:
            return pd.DataFrame(index=pd.Index([], name="step"))
        return frame.set_index("step")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Metric -> its curve, for the metrics with a finite value."""
        return curves_of(self.lines)

    def curve(self, metric: str) -> Curve:
        """Return (steps, finite values) of a metric."""
        return self.curves.get(metric, Curve([], []))

    @property
    def headline(self) -> Headline | None:
        """The metric by which the run is judged; None if it has none of the usual ones."""
        return next(iter(headlines(self.curves)), None)

    def plot(self, *metrics: str, others: Sequence[Run] = ()) -> Figure:
        """Return a matplotlib figure of metrics, a panel each: names or patterns (``reward/*``);
        without any, the headlines. The runs ``others`` are drawn too. In a notebook, the last line
        ``run.plot()`` of a cell shows it.

        Raises RunFolderError if no run has such a metric, and without matplotlib.
        """
        from burnish.runs.plot import plot_runs

        return plot_runs([self, *others], metrics)

    def samples(self, *, step: int | None = None, split: str | None = None) -> pd.DataFrame:
        """Return the kept samples, of all steps or of one, and of all splits or of one (``train``,
        ``dropped``, ``eval``). ``reward_parts`` and ``episode`` are dictionaries.

        Raises RunFolderError if a file is damaged.
        """
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for at, path in sample_files(self.folder):
            if step not in (None, at) or split not in (None, split_of(path)):
                continue
            try:
                rows += map(_parsed, read_sample_file(path))
            except (ValueError, OSError) as error:  # (pyarrow's are ValueErrors)
                raise RunFolderError(f"{path} cannot be read: {error}; remove it") from error
        return pd.DataFrame(rows)

    def tokens(self, step: int, sample_id: str, *, split: str | None = None) -> pd.DataFrame:
        """Return the tokens of a sample, a row per token: ``token`` (text), ``id``, ``row``,
        ``turn``, ``mask``, ``version``, ``sampler_logprob``, ``trainer_logprob``, ``difference``
        (trainer minus sampler), ``ratio`` (its exponential), ``entropy``, ``advantage``,
        ``ref_logprob``, ``teacher_logprob`` and ``value``.

        ``split``: that of the sample, as in :meth:`samples`. None: ``train`` if it has the sample,
        else another; samples of files with one name can have equal ids. Numbers are NaN outside of
        the mask, and in columns that the run does not compute. Raises RunFolderError if the step
        has no such sample with tokens, or if a file is damaged.
        """
        import numpy as np
        import pandas as pd

        saved: list[str] = []
        for name, path in samples_of_step(self.folder, step).items():
            if split not in (None, name):
                continue
            try:
                columns = read_tokens(path, sample_id)
                saved += samples_with_tokens(path)
            except (ValueError, OSError) as error:
                raise RunFolderError(f"{path} cannot be read: {error}; remove it") from error
            if columns is None:
                continue
            count = len(columns["tokens"])
            frame = pd.DataFrame(
                {
                    key: pd.Series(columns[column] or [None] * count, dtype=dtype)
                    for key, (column, dtype) in _TOKEN_COLUMNS.items()
                }
            )
            difference = frame["trainer_logprob"] - frame["sampler_logprob"]
            frame.insert(8, "difference", difference)
            frame.insert(9, "ratio", np.exp(difference))
            return frame
        known = f"; it has those of {', '.join(saved[:3])}" if saved else ""
        raise RunFolderError(
            f"step {step} of {self.folder} has no tokens of the sample {sample_id!r}{known}. The "
            "first observe.samples_with_tokens samples of a step are saved with their tokens"
        )

    def __repr__(self) -> str:
        return f"<Run {self.name}: {', '.join(filter(None, self._facts().values()))}>"

    def _repr_html_(self) -> str:
        """Return a table of facts, for notebooks."""
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self._facts().items()
            if text
        )
        return f"<table><caption>{html.escape(self.name)}</caption>{rows}</table>"

    def _facts(self) -> Mapping[str, str]:
        headline = self.headline
        last = "" if headline is None else headline.shown(self.curve(headline.metric).last)
        changed = self.state.changed
        when = None if changed is None else datetime.fromtimestamp(changed)
        return {
            "job": self.job,
            "model": self.model,
            "state": self.state.kind + (f" ({self.state.reason})" if self.state.reason else ""),
            "changed": "" if when is None else f"{when:%Y-%m-%d %H:%M}",
            "step": "" if self.step is None else str(self.step),
            headline.label if headline else "headline": last,
            "metrics": self.damage,
        }

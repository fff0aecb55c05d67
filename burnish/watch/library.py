"""The runs that the page shows, by identifiers that a link can contain."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from burnish.messages import visible
from burnish.observe.ending import END_FILE
from burnish.observe.files import MEMORY_JSON, TIMELINE_FILE
from burnish.observe.headline import HEADLINES
from burnish.observe.metrics import METRICS_FILE, damaged_lines
from burnish.observe.progress import LOG_FILE
from burnish.observe.public_recipe import CONFIG_FILE
from burnish.observe.samples import SAMPLES_DIR
from burnish.report.page import page_of
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import Run, find_runs
from burnish.watch.metric_log import MetricLog

_KEPT_LOGS = 24
"""Logs of metrics in memory: more than can be compared."""
_KEPT_PAGES = 4
_SPARK = 60
_WATCHED = (METRICS_FILE, END_FILE, LOG_FILE, CONFIG_FILE, MEMORY_JSON, TIMELINE_FILE, SAMPLES_DIR)
_READ_FOLDERS = (".", SAMPLES_DIR)


class UnknownRunError(RunFolderError):
    """An identifier of no run below the folder."""


class Library:
    """The runs in a folder and below it, or the one run that the folder is.

    :meth:`scan` finds the runs again. A run is addressed by its path below the folder, with
    percent signs; only paths that a scan found are ever read. Not safe for several threads.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, Run] = {}
        self._logs: OrderedDict[str, MetricLog] = OrderedDict()
        self._headlines: dict[str, MetricLog] = {}
        """Identifier -> the metrics of the table of runs."""
        self._rows: dict[str, tuple[object, dict[str, Any]]] = {}
        self._pages: OrderedDict[str, tuple[object, dict[str, Any]]] = OrderedDict()

    def scan(self) -> list[str]:
        """Find the runs; return their identifiers, by path."""
        self._runs = {self._identifier(run.folder): run for run in find_runs(self.root)}
        for cache in (self._rows, self._headlines, self._logs, self._pages):
            for gone in cache.keys() - self._runs.keys():
                del cache[gone]
        return list(self._runs)

    def _identifier(self, folder: Path) -> str:
        inside = folder.relative_to(self.root if folder != self.root else self.root.parent)
        return quote(os.fsencode(inside), safe="/")

    def run(self, identifier: str) -> Run:
        """Return a run as it is now. Raises UnknownRunError; RunFolderError for a run with files
        that are links out of the folder."""
        if identifier not in self._runs:
            self.scan()
        run = self._runs.get(identifier)
        if run is None or not run.folder.is_dir():
            raise UnknownRunError(
                f"there is no run {identifier[:200]!r} below {self.root}; it may have been removed "
                "or renamed"
            )
        if not run.folder.resolve().is_relative_to(self.root.resolve()):
            raise RunFolderError(f"{visible(str(run.folder))} is a link out of {self.root}")
        _check_files(run.folder, self.root.resolve())
        return run.reload()

    def log(self, identifier: str) -> MetricLog:
        """Return the metrics of a run, up to date. Raises as :meth:`run` does."""
        run = self.run(identifier)
        log = self._logs.pop(identifier, None) or MetricLog(run.folder)
        self._logs[identifier] = log
        while len(self._logs) > _KEPT_LOGS:
            self._logs.popitem(last=False)
        log.refresh()
        return log

    def page(self, identifier: str) -> dict[str, Any]:
        """Return the data of the page of a run as JSON values. Raises as :meth:`run` does, and if
        the recipe or the metrics cannot be read."""
        run, signature = self.run(identifier), self.signature(identifier)
        known = self._pages.pop(identifier, None)
        if known is None or known[0] != signature:
            known = signature, page_of(run).as_json()
        self._pages[identifier] = known
        while len(self._pages) > _KEPT_PAGES:
            self._pages.popitem(last=False)
        return known[1]

    def signature(self, identifier: str) -> object:
        """Return a value that changes with the state, metrics and samples of a run."""
        run = self._runs.get(identifier)
        if run is None:
            return None
        files = tuple(_status(run.folder / name) for name in _WATCHED)
        return files, run.reload().state

    def row(self, identifier: str) -> Mapping[str, Any]:
        """Return what the table of runs shows of a run. A run that cannot be read has the key
        ``error``."""
        row: dict[str, Any] = {"id": identifier, "name": visible(_path_of(identifier))}
        try:
            run = self.run(identifier)
            signature = self.signature(identifier)
            cached = self._rows.get(identifier)
            if cached is not None and cached[0] == signature:
                return cached[1]
            new = MetricLog(run.folder, only=HEADLINES)
            log = self._headlines.setdefault(identifier, new)
            log.refresh()
            row |= _facts(run, log)
        except (RunFolderError, OSError, ValueError) as error:
            return row | {"error": str(error)}
        self._rows[identifier] = signature, row
        return row


def _facts(run: Run, log: MetricLog) -> dict[str, Any]:
    """Return the row of a run. ``log``: its headlines, up to date."""
    state, headline = run.state, log.headline
    damage = damaged_lines(log.num_bad_lines)
    planned = run.recipe.get("max_steps")
    facts: dict[str, Any] = {
        "state": state.kind,
        "reason": "; ".join(filter(None, (state.reason, damage))),
        "changed": state.changed,
        "job": run.job,
        "model": run.model,
        "step": max(log.steps, default=None),
        "planned": planned if type(planned) is int else None,
    }
    if headline is not None:
        values = [value for _, value in log.points(headline.metric)]
        stride = max(1, -(-len(values) // _SPARK))
        facts["headline"] = {
            "metric": headline.metric,
            "label": headline.label,
            "first": headline.shown(values[0]),
            "last": headline.shown(values[-1]),
            "spark": [*values[:-1:stride], values[-1]],
        }
    return facts


def _status(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _path_of(identifier: str) -> str:
    return os.fsdecode(unquote_to_bytes(identifier))


def _check_files(folder: Path, root: Path) -> None:
    """Raise RunFolderError if an entry of a run is a link that leads out of ``root``, or a pipe or
    device, which would be waited for."""
    for name in _READ_FOLDERS:
        try:
            entries = os.scandir(folder / name)
        except OSError:
            continue
        with entries:
            for entry in entries:
                if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
                    raise RunFolderError(
                        f"{visible(entry.path)} is a link to a file outside of {root}, which is "
                        "not read; copy the file in its place"
                    )
                if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
                    raise RunFolderError(f"{visible(entry.path)} is no regular file; move it away")

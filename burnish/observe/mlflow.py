"""MLflow as a tracker. The only file that imports mlflow.

``mlflow.json`` in the run folder contains the id of the tracker's run and its last step. A resumed
run continues it, and sends only steps that are not recorded yet, because MLflow appends values.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.observe import MlflowConfig
from burnish.observe.errors import TrackerError
from burnish.observe.files import write_text
from burnish.small_files import read_small

if TYPE_CHECKING:
    from burnish.observe.tracker import Samples

STATE_FILE = "mlflow.json"
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
_MAX_NAME_CHARS = 250
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Environment variables of MLflow's client, unless they are set. Its own values (7 retries, 120 s)
exceed the time that a run waits for a tracker at its end, so that a server that refuses connections
would not be reported with a reason."""
_PER_REQUEST = 1000
"""Maximum metrics of one request of MLflow's API."""


def check_mlflow() -> Any:
    """Return the package. Raises TrackerError if it cannot be imported."""
    try:
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise TrackerError(
            f"observe.mlflow needs the package mlflow, and importing it failed ({error}); install "
            "it with: pip install 'burnish[mlflow]', or leave observe.mlflow out (metrics.jsonl is "
            "always written)"
        ) from error


@dataclass(frozen=True)
class _State:
    """Content of ``mlflow.json``."""

    run_id: str
    step: int = -1
    """Last step that MLflow has."""


class MlflowTracker:
    """A new or resumed run of MLflow. Samples are ignored. ``eval/pass@1`` becomes
    ``eval/pass_1``, because MLflow does not allow ``@`` in names; names that would be equal get a
    digest."""

    name = "mlflow"

    def __init__(self, config: MlflowConfig, run_dir: Path, recipe: str) -> None:
        """``recipe``: YAML text without secrets, an artifact of the run. Raises TrackerError like
        :func:`check_mlflow`."""
        self._mlflow = check_mlflow()
        self._config, self._run_dir, self._recipe = config, run_dir.absolute(), recipe
        self._client: Any = None
        self._state: _State | None = None

    def start(self) -> None:
        """Create the run, or continue the one of ``mlflow.json``."""
        for name, value in _HTTP.items():
            os.environ.setdefault(name, value)
        self._client = self._mlflow.MlflowClient(tracking_uri=self._config.tracking_uri)
        file = self._run_dir / STATE_FILE
        if file.is_file():
            self._continue(file)
            return
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        number = (
            self._client.create_experiment(self._config.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(number, run_name=self._config.name or self._run_dir.name)
        self._keep(_State(run.info.run_id))
        self._client.log_text(run.info.run_id, self._recipe, "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        """Record a step, unless MLflow has it."""
        assert self._state is not None
        if step <= self._state.step:
            return
        now = int(1000 * time.time())
        values = [
            self._mlflow.entities.Metric(name, float(value), now, step)
            for name, value in zip(_names(metrics), metrics.values(), strict=True)
        ]
        for begin in range(0, len(values), _PER_REQUEST):
            part = values[begin : begin + _PER_REQUEST]
            self._client.log_batch(self._state.run_id, metrics=part)
        self._keep(replace(self._state, step=step))

    def _continue(self, file: Path) -> None:
        """Continue the run of ``mlflow.json``. Raises TrackerError if that is not possible."""
        try:
            self._state = _State(**json.loads(read_small(file)))
            if not (isinstance(self._state.run_id, str) and isinstance(self._state.step, int)):
                raise TypeError("run_id must be text, and step an integer")
        except (ValueError, TypeError, RecursionError) as error:
            raise TrackerError(
                f"{file} cannot be read ({error}); remove it to start a new run of MLflow"
            ) from error
        try:
            self._client.update_run(self._state.run_id, status="RUNNING")
        except self._mlflow.MlflowException as error:
            raise TrackerError(
                f"the run {self._state.run_id} of {file} cannot be continued: {error}. If it was "
                "deleted, or is in another store, remove the file to start a new run"
            ) from error

    def rewind(self, step: int) -> int:
        """Return the last step that MLflow has, at most ``step``."""
        assert self._state is not None
        return min(step, self._state.step)

    def close(self, *, failed: bool) -> None:
        assert self._state is not None
        self._client.set_terminated(self._state.run_id, status="FAILED" if failed else "FINISHED")

    def _keep(self, state: _State) -> None:
        self._state = state
        write_text(self._run_dir / STATE_FILE, json.dumps(asdict(state)) + "\n")


def _names(metrics: Mapping[str, float]) -> list[str]:
    """Return a name that MLflow allows for each metric, and another one for each.

    MLflow reads names as paths, and refuses all values of a request if one name is invalid.
    """
    names: dict[str, None] = {}
    for metric in metrics:
        name = _as_path(metric)
        if name in names or (name != metric and name in metrics) or len(name) > _MAX_NAME_CHARS:
            digest = hashlib.sha256(metric.encode("utf-8", "replace")).hexdigest()[:8]
            name = f"{name[: _MAX_NAME_CHARS - 9]}_{digest}"
        names[name] = None
    return list(names)


def _as_path(metric: str) -> str:
    """Return a metric name as a relative path without the characters that MLflow refuses.

    >>> _as_path("eval/pass@1"), _as_path("/a//../b:c")
    ('eval/pass_1', '_/a/_/_/b_c')
    """
    parts = _NOT_IN_NAMES.sub("_", metric).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)

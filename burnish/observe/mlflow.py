"""MLflow as a tracker. The only file that imports mlflow.

``mlflow.json`` in the run folder contains the id of the tracker's run and its last step. A resumed
run continues it, and sends only steps that are not recorded yet, because MLflow appends values.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from burnish.observe.tracker import Samples

STATE_FILE = "mlflow.json"
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
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
    ``eval/pass_1``, because MLflow does not allow ``@`` in names."""

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
            self._state = _State(**json.loads(file.read_text(encoding="utf-8")))
            self._client.update_run(self._state.run_id, status="RUNNING")
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
            self._mlflow.entities.Metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step)
            for name, value in metrics.items()
        ]
        for begin in range(0, len(values), _PER_REQUEST):
            part = values[begin : begin + _PER_REQUEST]
            self._client.log_batch(self._state.run_id, metrics=part)
        self._keep(replace(self._state, step=step))

    def rewind(self, step: int) -> int:
        """Return the last step that MLflow has, at most ``step``."""
        assert self._state is not None
        return min(step, self._state.step)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        assert self._state is not None
        self._client.set_terminated(self._state.run_id, status="FAILED" if failed else "FINISHED")

    def _keep(self, state: _State) -> None:
        self._state = state
        write_text(self._run_dir / STATE_FILE, json.dumps(asdict(state)) + "\n")

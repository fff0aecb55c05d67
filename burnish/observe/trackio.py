"""Trackio as a tracker: its database on this machine. The only file that imports trackio.

Steps are written with the calls that Trackio's own logging thread makes. ``trackio.init`` would ask
the hub for the user's name, print, keep steps in another thread, and only warn about lost ones.
``trackio.json`` in the run folder contains the id of the run in the database, so that a resumed run
continues it. The last step is read from the database, and each step has an id in it, so that no
step is recorded twice.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from burnish.config.observe import TrackioConfig
from burnish.observe.errors import TrackerError
from burnish.observe.files import write_text
from burnish.observe.progress import tell
from burnish.small_files import read_small

if TYPE_CHECKING:
    from burnish.observe.tracker import Samples

STATE_FILE = "trackio.json"
MIN_VERSION = Version("0.43")
"""The version that is tested. Earlier ones were not run."""
_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID")
_INSTALL = "pip install 'burnish[trackio]'"


def check_trackio(config: TrackioConfig) -> None:
    """Raise TrackerError if the package is missing, too old or cannot be imported, if its
    environment variables name another machine, or if it reserves the name of the project."""
    try:
        version = metadata.version("trackio")
    except metadata.PackageNotFoundError:
        raise TrackerError(
            f"observe.trackio needs the package trackio, which is not installed; {_INSTALL}, or "
            "leave observe.trackio out (metrics.jsonl is always written)"
        ) from None
    if Version(version) < MIN_VERSION:
        raise TrackerError(
            f"observe.trackio: trackio {version} is older than {MIN_VERSION}, the first version "
            f"that was tested; {_INSTALL}"
        )
    for name in _REMOTE:
        if os.environ.get(name):
            raise TrackerError(
                f"observe.trackio writes to this machine only, and {name} is set; unset it, and "
                "upload after the run: trackio sync --project PROJECT --space-id SPACE"
            )
    try:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    except Exception as error:  # house: ok its import reads settings of the user
        raise TrackerError(
            f"observe.trackio: importing trackio {version} failed ({error}); reinstall it: "
            f"{_INSTALL}"
        ) from error
    try:
        storage.validate_project_name(config.project)
    except ValueError as error:
        raise TrackerError(f"observe.trackio.project: {error}") from error


@dataclass(frozen=True)
class _State:
    """Content of ``trackio.json``."""

    run_id: str
    project: str
    name: str


class TrackioTracker:
    """A new or resumed run of Trackio. Samples are ignored."""

    name = "trackio"

    def __init__(self, config: TrackioConfig, run_dir: Path, recipe: Mapping[str, Any]) -> None:
        """``recipe``, without secrets, becomes the config of the run. Raises TrackerError like
        :func:`check_trackio`."""
        check_trackio(config)
        self._utils: Any = importlib.import_module("trackio.utils")
        self._fragments: Any = importlib.import_module("trackio.fragments")
        self._storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self._run_dir = run_dir.absolute()
        self._recipe: Mapping[str, Any] | None = recipe
        """None: the database has it."""
        self._state = _State(secrets.token_hex(16), config.project, config.name or run_dir.name)
        self._step = -1
        """Last step in the database."""
        self._inbox: Any = None
        """Writer of files that Trackio imports later, if its folder is on a network file system,
        where it does not use its database."""

    def start(self) -> None:
        """Continue the run of ``trackio.json`` if it has this project and name."""
        self._load_state()
        if self._utils.get_storage_mode() == "jsonl":
            self._inbox = self._fragments.FragmentWriter()
        last = self._storage.get_max_step_for_run(self._state.project, run_id=self._state.run_id)
        self._step = -1 if last is None else last
        tell(
            f"Trackio: recorded in {self._utils.TRACKIO_DIR}; show it with: "
            f"trackio show --project {self._state.project}"
        )

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        """Record a step, unless the database has it."""
        if step <= self._step:
            return
        values = {self._column(name): float(value) for name, value in metrics.items()}
        config = None if self._recipe is None else dict(self._recipe) | {"_Created": _now()}
        log_id = f"{self._state.run_id}-{step}"
        if self._inbox is not None:
            record = {"metrics": values, "step": step, "config": config, "log_id": log_id}
            self._write(self._fragments.metric_record, record)
        else:
            self._storage.bulk_log(
                project=self._state.project,
                run=self._state.name,
                run_id=self._state.run_id,
                metrics_list=[values],
                steps=[step],
                config=config,
                log_ids=[log_id],
            )
        self._step, self._recipe = step, None

    def rewind(self, step: int) -> int:
        """Return the last step of the database. :meth:`log` skips steps up to it."""
        return self._step

    def close(self, *, failed: bool) -> None:
        """Record an alert if the run failed: Trackio has no state of a run."""
        if not failed:
            return
        title, step, alert_id = (
            "The run ended with an error",
            max(0, self._step),
            secrets.token_hex(),
        )
        if self._inbox is not None:
            record = {"title": title, "level": "error", "step": step, "alert_id": alert_id}
            self._write(self._fragments.alert_record, record)
            return
        self._storage.bulk_alert(
            project=self._state.project,
            run=self._state.name,
            run_id=self._state.run_id,
            titles=[title],
            texts=[None],
            levels=["error"],
            steps=[step],
            alert_ids=[alert_id],
        )

    def _write(self, encode: Any, record: Mapping[str, Any]) -> None:
        """Write a record to the inbox, which Trackio imports when its page is opened."""
        run = {"project": self._state.project, "run": self._state.name}
        run |= {"run_id": self._state.run_id, "timestamp": _now()}
        self._inbox.write_local([encode({**run, **record})])

    def _column(self, metric: str) -> str:
        """Return the name that Trackio gives a metric, and one that is valid UTF-8."""
        name = metric.encode("utf-8", "replace").decode()
        reserved = name in self._utils.RESERVED_KEYS or name.startswith("__")
        return f"__{name}" if reserved else name

    def _load_state(self) -> None:
        path = self._run_dir / STATE_FILE
        if path.is_file():
            try:
                saved = _State(**json.loads(read_small(path)))
                if not all(isinstance(value, str) for value in asdict(saved).values()):
                    raise TypeError("all values must be text")
            except (ValueError, TypeError, RecursionError) as error:
                raise TrackerError(
                    f"{path} cannot be read ({error}); remove it to start a new run of Trackio"
                ) from error
            if (saved.project, saved.name) == (self._state.project, self._state.name):
                self._state = saved
                return
        write_text(path, json.dumps(asdict(self._state)) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat()

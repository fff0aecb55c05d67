"""Weights & Biases as a tracker. The only file that imports wandb.

Steps on the server are those of the run. Weights & Biases keeps the first values of a step and does
not support replacing them. After resuming from a checkpoint, only steps that are not yet recorded
are therefore sent. ``wandb.json`` in the run folder contains the id of the tracker's run and its
last step, so that a resumed run continues it, online or offline.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from burnish.config.observe import WandbConfig
from burnish.observe.errors import TrackerError
from burnish.observe.files import write_text
from burnish.observe.progress import tell
from burnish.observe.samples import DROPPED
from burnish.secret import without_secrets, without_texts
from burnish.small_files import read_small

if TYPE_CHECKING:
    from wandb import Run, Table

    from burnish.observe.tracker import Samples

WANDB_DIR = "wandb"
"""Name of the folder that wandb creates in ``dir``."""
STATE_FILE = "wandb.json"
MIN_VERSION = (0, 31)
"""First version that can resume offline runs: ``wandb sync`` appends their parts instead of
replacing the run."""
MAX_TEXT_CHARS = 10_000
"""Longer texts are truncated in tables. wandb warns about cells above 100,000 bytes."""

_INSTALL = "pip install 'burnish[wandb]'"
_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline"}

_log = logging.getLogger("burnish.tracker")


def wandb_mode(config: WandbConfig) -> Literal["online", "offline", "disabled"]:
    """Return the mode of the recipe, else of WANDB_MODE, else online.

    Raises TrackerError if the variable has an unknown value.
    """
    if config.mode is not None:
        return config.mode
    mode = os.environ.get("WANDB_MODE") or "online"
    if mode == "disabled":
        return "disabled"
    if mode not in _MODES:
        raise TrackerError(
            f"WANDB_MODE={mode}: observe.wandb supports online, offline and disabled; change the "
            "environment variable, or set observe.wandb.mode"
        )
    return "offline" if _MODES[mode] == "offline" else "online"


def check_wandb(config: WandbConfig) -> None:
    """Raise TrackerError if the package is missing, too old or cannot be imported, or if an online
    run has no credentials."""
    mode = wandb_mode(config)
    if mode == "disabled":
        return
    wandb = _import()
    if mode == "offline" or wandb.run is not None:  # with an active run, the caller is logged in
        return
    wandb.setup(settings=wandb.Settings(silent=True, mode="online"))  # overrides WANDB_MODE
    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise TrackerError(f"observe.wandb: {without_secrets(str(error))}") from error
    if not logged_in:
        raise TrackerError(
            "observe.wandb: Weights & Biases has no API key on this machine; set the environment "
            "variable WANDB_API_KEY (never in the recipe), run 'wandb login' once, or use "
            "observe.wandb.mode=offline"
        )


def _import() -> Any:
    try:
        version = metadata.version("wandb")
    except metadata.PackageNotFoundError:
        raise TrackerError(
            f"observe.wandb needs the package wandb, which is not installed; {_INSTALL}, or leave "
            "observe.wandb out (metrics.jsonl is always written)"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        raise TrackerError(
            f"observe.wandb: wandb {version} cannot resume offline runs; install {least} or newer: "
            f"{_INSTALL}"
        )
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise TrackerError(
            f"observe.wandb: importing wandb {version} failed ({error}); reinstall it: {_INSTALL}"
        ) from error


@dataclass(frozen=True)
class _State:
    """Content of ``wandb.json``."""

    id: str
    project: str
    entity: str | None
    step: int = -1
    """Last step that was passed to wandb."""


class WandbTracker:
    """A new or resumed run of Weights & Biases."""

    name = "wandb"

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        recipe: Mapping[str, Any],
        *,
        hidden: Collection[str] = (),
    ) -> None:
        """Prepare the run; ``recipe``, without secrets, becomes its config. ``hidden``: secrets of
        the recipe, which the arguments of this process may contain. Raises TrackerError like
        :func:`check_wandb`."""
        check_wandb(config)
        self._wandb = _import()
        self._config, self._run_dir, self._recipe = config, run_dir.absolute(), recipe
        self._hidden = hidden
        self._run: Run | None = None
        self._state = self._saved_state()
        self._num_skipped = 0

    def start(self) -> None:
        """Open the run; offline if the server is not reachable."""
        mode = wandb_mode(self._config)
        try:
            self._run = self._init(mode)
        except (self._wandb.Error, TimeoutError) as error:
            if mode == "offline" or self._wandb.run is not None:
                raise
            _log.warning(
                "observe.wandb: the server could not be reached, or refused (%s); the run is "
                "recorded offline instead",
                without_secrets(str(error)),
            )
            self._wandb.teardown()  # the service process keeps the id of the failed run
            self._run = self._init("offline")
        self._run.config.update(dict(self._recipe), allow_val_change=True)
        if self._run.resumed:
            self._state = _State(
                **asdict(self._state) | {"step": max(self._state.step, self._run.starting_step - 1)}
            )
        if self._run.offline:
            folder = self._run_dir / WANDB_DIR
            tell(f"Weights & Biases: recorded offline; upload with: wandb sync {folder}")
        else:
            tell(f"Weights & Biases: {self._run.url}")

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        """Record a step, unless it is already recorded."""
        if step <= self._state.step:
            if not self._num_skipped:
                _log.info(
                    "observe.wandb: steps up to %d are recorded already, and are not sent again",
                    self._state.step,
                )
            self._num_skipped += 1
            return
        assert self._run is not None
        tables = {f"samples/{split}": self._table(rows) for split, rows in samples.items()}
        self._run.log({**metrics, **tables}, step=step, commit=True)
        self._save_state(step)

    def rewind(self, step: int) -> int:
        """Return the last recorded step. :meth:`log` skips steps up to it."""
        return self._state.step

    def close(self, *, failed: bool) -> None:
        """Finish the upload. Raises TrackerError if it takes longer than ``timeout_s``."""
        assert self._run is not None
        part = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=int(failed))
        except TimeoutError as error:
            raise TrackerError(
                f"not everything was uploaded within {self._config.timeout_s:g} s; upload the rest "
                f"with: wandb sync --include-online {part}"
            ) from error

    def _init(self, mode: str) -> Run:
        self._save_state(self._state.step)
        config, timeout_s = self._config, self._config.timeout_s
        with _public_arguments(self._hidden):
            run: Run = self._wandb.init(
                project=self._state.project,
                entity=config.entity,
                name=config.name or self._run_dir.name,
                group=config.group,
                tags=config.tags or None,
                job_type=str(self._recipe.get("job", "")) or None,
                id=self._state.id,
                dir=str(self._run_dir),
                mode=mode,
                resume="allow",
                reinit="create_new",  # does not affect a run of the calling program
                settings=self._wandb.Settings(
                    console="off",  # the terminal belongs to the progress bar
                    silent=True,
                    init_timeout=timeout_s,
                    finish_timeout=timeout_s,
                    finish_timeout_raises=True,
                ),
            )
        return run

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        columns = [name for name in rows[0] if name not in ("split", DROPPED)]
        cells = [[_truncated(row[name]) for name in columns] for row in rows]
        table: Table = self._wandb.Table(columns=columns, data=cells)
        return table

    # ---- wandb.json --------------------------------------------------------------------------

    def _saved_state(self) -> _State:
        """Return the state in the run folder; a new one if there is none, or if the recipe has
        another project or entity."""
        project = self._config.project or os.environ.get("WANDB_PROJECT") or "burnish"
        new = _State(secrets.token_hex(8), project, self._config.entity)
        path = self._run_dir / STATE_FILE
        if not path.is_file():
            return new
        try:
            saved = _State(**json.loads(read_small(path)))
            if not (isinstance(saved.id, str) and isinstance(saved.step, int)):
                raise TypeError("id must be text, and step an integer")
        except (ValueError, TypeError, RecursionError) as error:
            raise TrackerError(
                f"{path} cannot be read ({error}); remove it to start a new run of Weights & Biases"
            ) from error
        return saved if (saved.project, saved.entity) == (new.project, new.entity) else new

    def _save_state(self, step: int) -> None:
        self._state = _State(**asdict(self._state) | {"step": step})
        write_text(self._run_dir / STATE_FILE, json.dumps(asdict(self._state)) + "\n")


def _truncated(cell: Any) -> Any:
    if isinstance(cell, str) and len(cell) > MAX_TEXT_CHARS:
        return f"{cell[:MAX_TEXT_CHARS]} [{len(cell) - MAX_TEXT_CHARS} more characters]"
    return cell


@contextmanager
def _public_arguments(hidden: Collection[str]) -> Iterator[None]:
    """Replace the secrets in the arguments of this process, which wandb records and uploads."""
    arguments = sys.argv
    sys.argv = [without_texts(argument, hidden) for argument in arguments]
    try:
        yield
    finally:
        sys.argv = arguments

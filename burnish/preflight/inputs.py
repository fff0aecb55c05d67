"""Check the inputs of a job before any heavy import: files, model folders, first rows.

This module imports neither torch nor transformers, so that a misspelled path fails immediately. The
messages are those of the code that reads the inputs later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from burnish.config import ConfigError
from burnish.config.job import JobConfig
from burnish.config.paths import model_problems, models_of
from burnish.config.sources import SourceConfig
from burnish.data.config import DataConfig
from burnish.data.forms import form_of_row, in_columns
from burnish.data.messages import as_messages
from burnish.data.reader import reader_of
from burnish.data.sources import DataError, Row, first_rows
from burnish.driver.errors import RunError
from burnish.environments.importing import LoadError, check_file
from burnish.errors import BurnishError
from burnish.models.paths import ModelError, check_path
from burnish.observe.files import REPLAY_FILE
from burnish.observe.make_trackers import check_trackers
from burnish.preflight.families import check_families, check_head_divisibility
from burnish.small_files import read_small


def recorded_run(run_dir: Path) -> Path | None:
    """Return the run that the run in ``run_dir`` replays; None if it is not a replay. Raises
    RunError if the file that names it cannot be read."""
    path = run_dir / REPLAY_FILE
    if not path.is_file():
        return None
    try:
        folder = json.loads(read_small(path))["run"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(_no_recorded_run(path, repr(error))) from error
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise RunError(_no_recorded_run(path, f"its run is {folder!r:.80}, which is no path"))
    return Path(folder)


def _no_recorded_run(path: Path, reason: str) -> str:
    return (
        f"{path} does not name the recorded run ({reason}); write it again, as the JSON object "
        '{"run": FOLDER} with the absolute path of that run'
    )


def preflight(
    config: JobConfig, *, resumed: bool = False, replays: bool = False, download: bool = False
) -> list[str]:
    """Check the inputs and the models of a job before anything is loaded. Return one sentence about
    how each model runs.

    ``replays``: its groups are those of a recorded run. ``download``: allow downloading configs of
    models from the hub. Raises the errors of :func:`check_inputs`, and ModelError if a model does
    not run as the recipe requests.
    """
    read = config.inputs_of_replay() if replays else config
    check_inputs(read, resumed=resumed)  # before torch is imported
    check_head_divisibility(read, download=download)
    return check_families(read, download=download)


def check_inputs(config: JobConfig, *, resumed: bool = False) -> None:
    """Raise one error for all unusable inputs: missing files, folders, functions and packages, and
    sources whose first row has no usable content.

    Raises DataError, ModelError, LoadError or TrackerError if all problems are of that kind, and
    RunError for several kinds. A resumed run that writes rows is not checked, because it may be
    finished and need no input.
    """
    errors = input_errors(config, resumed=resumed)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else RunError
        lines = "\n".join(f"  - {error}" for error in errors)
        raise kind(f"{len(errors)} problems of the inputs\n{lines}")


def input_errors(config: JobConfig, *, resumed: bool = False) -> list[BurnishError]:
    """Return the errors of all unusable inputs, see :func:`check_inputs`."""
    errors: list[BurnishError] = []
    for check in _checks(config, resumed=resumed):
        try:
            check()
        except BurnishError as error:
            errors.append(error)
    return errors


def with_input_errors(
    error: ConfigError, *, resumed: bool = False, replays: bool = False
) -> ConfigError:
    """Return an error that also lists the unusable inputs of the recipe that ``error`` rejects, as
    far as its invalid keys leave them known."""
    config = error.corrected
    if config is not None and replays:
        config = config.inputs_of_replay()
    errors = [] if config is None else input_errors(config, resumed=resumed)
    if not errors:
        return error
    problems = [*error.problems, *map(str, errors)]
    return ConfigError.listing(error.where, problems, error.corrected)


def _checks(config: JobConfig, *, resumed: bool) -> Iterator[Callable[[], None]]:
    """Yield one function per input. Each raises if the input is unusable."""
    yield partial(check_trackers, config)
    if resumed and config.writes_rows:
        return
    errors = {key: _code_error(spec) for key, spec in config.all_user_code()}
    broken = {key: error for key, error in errors.items() if error is not None}
    yield from (partial(_raise, LoadError(f"{key}: {error}")) for key, error in broken.items())
    for data in config.nodes_of(DataConfig):
        sources = [s for s in data.sources if not any(_code_error(c) for _, c in s.user_code)]
        yield from (partial(check_source, source, data) for source in sources)
    # On a cluster, the other models are read by workers, which may have other folders.
    ray = config.cluster.runtime == "ray"
    problems = [p for p in model_problems(config) if not ray or p.startswith("model.")]
    yield from (partial(_raise, ModelError(problem)) for problem in problems)
    for _, model in models_of(config):
        if not problems and model.path is not None and (not ray or model is config.model):
            yield partial(check_path, model)


def _raise(error: BurnishError) -> None:
    raise error


def _code_error(spec: str) -> LoadError | None:
    """Return the error of code that cannot be loaded, as far as it shows without running it."""
    try:
        check_file(spec.removeprefix("trl:"))
    except LoadError as error:
        return error
    return None


def check_source(source: SourceConfig, data: DataConfig) -> None:
    """Raise DataError if a source cannot be opened, or if all of its first rows are unusable. A
    single one is reported with the other rows, unless the recipe does not check them."""
    strict = data.on_bad_row == "fail"
    rows = first_rows(source) if strict else first_rows(source, 1)
    form = form_of_row(rows[0], data) if rows else "columns"
    errors = []
    for row in rows if strict else ():
        try:
            _check_row(in_columns(row, form, data), data)
        except DataError as error:
            errors.append(error)
    if errors and (len(errors) == len(rows) or data.validate == "off"):
        many = len(rows) > 1 and len(errors) == len(rows)
        also = f" (all of the first {len(rows)} rows are unusable)" if many else ""
        raise DataError(f"{errors[0]}{also}") from errors[0]


def _check_row(row: Row, data: DataConfig) -> None:
    """Raise DataError, with the location, if a row has no usable content. Checks that need a
    tokenizer run when the row is encoded."""
    try:
        for content in reader_of(data).contents(row):
            if not isinstance(content, str):
                as_messages(content)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error

"""Digests of the data files of a training run, by which a resumed run notices that rows changed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.job import TrainingJob
from burnish.config.older import present_path
from burnish.data.config import DataConfig
from burnish.data.files import content_digest
from burnish.driver.errors import RunError
from burnish.observe.files import write_text
from burnish.small_files import read_small

log = logging.getLogger("burnish")

DIGESTS_FILE = "data_digests.json"
"""File in the run folder: section and source -> digest of the bytes of its files."""


def check_same_rows(config: TrainingJob, run_dir: Path, *, resumed: bool, force: bool) -> None:
    """Write the digests of the data files of a run. Raises RunError if a resumed run would read
    other bytes than before, unless ``force`` is set. Sections with ``validate: off`` are not
    compared."""
    now, file = _digests(config), run_dir / DIGESTS_FILE
    if resumed and file.is_file():
        then = _in_present_sections(saved_digests(file), type(config))
        changed = [source for source in then if source in now and then[source] != now[source]]
        change = f"the rows of {', '.join(changed)} changed since the run {run_dir} was started"
        if changed and not force:
            raise RunError(
                f"{change}, so a resumed run would train or evaluate other rows than it counted; "
                "restore the files, start a new run, or continue with the new rows with --force "
                "(burnish.run: force=True)"
            )
        if changed:
            log.warning("%s; the run continues with the new rows (--force)", change)
    write_text(file, json.dumps(now, indent=1) + "\n")


def saved_digests(file: Path) -> dict[str, Any]:
    """Return the digests of an earlier start. Raises RunError."""
    try:
        saved = json.loads(read_small(file))
        if not isinstance(saved, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read ({error}), so changes would not be noticed; remove "
            "it to resume without this comparison"
        ) from error
    return saved


def _in_present_sections(saved: dict[str, Any], job: type[TrainingJob]) -> dict[str, Any]:
    """Return digests of an earlier start with the present names of their sections."""
    sections = {source: source.partition(" ")[0] for source in saved}
    return {
        present_path(section, job) + source.removeprefix(section): saved[source]
        for source, section in sections.items()
    }


def _digests(config: TrainingJob) -> dict[str, str]:
    checked = [(n, data) for n, data in config.paths_of(DataConfig) if data.validate != "off"]
    files = [(n, s.source_name, s.files) for n, data in checked for s in data.sources]
    return {f"{name} ({source})": _digest(paths) for name, source, paths in files if paths}


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(content_digest(path))
    return digest.hexdigest()

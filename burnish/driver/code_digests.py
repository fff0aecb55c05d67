"""Digests of the files of the user's code that a run calls (rewards, environments, tools, agents,
commands), by which a resumed run notices that code changed. Changed code is allowed, since a run
may be resumed to correct it, but never silent."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from burnish.config.episodes import CommandEpisodes, McpServerConfig
from burnish.config.job import JobConfig
from burnish.config.paths import code_file
from burnish.driver.data_digests import saved_digests
from burnish.driver.errors import RunError
from burnish.observe.files import write_text

log = logging.getLogger("burnish")

CODE_FILE = "code_digests.json"
"""File in the run folder: file of the user -> list of its contents at the starts of the run, each
with ``sha256`` and the time ``since`` which it was used."""


def record_user_code(config: JobConfig, run_dir: Path, *, resumed: bool) -> list[Path]:
    """Write the digests of the files of the user's code. Return the files that changed since the
    last start of a resumed run, after a warning. Files that they import are not compared. Raises
    RunError."""
    file = run_dir / CODE_FILE
    history = saved_digests(file) if resumed and file.is_file() else {}
    since, changed = datetime.now().isoformat(timespec="seconds"), dict[Path, str]()
    for path, keys in _user_files(config).items():
        digest = _digest(path)
        contents = history.setdefault(str(path), [])
        if not isinstance(contents, list) or not all(isinstance(c, dict) for c in contents):
            raise RunError(f"{file} is corrupt: {path} has no list of contents; remove the file")
        if contents and contents[-1].get("sha256") == digest:
            continue
        if contents:
            changed[path] = f"{path} ({', '.join(keys)})"
        contents.append({"sha256": digest, "since": since})
    if changed:
        log.warning(
            "code of this run changed since it was started, and the steps from here on use the new "
            "code: %s; restore it if this is not intended (%s in the run folder has the digests)",
            "; ".join(changed.values()),
            CODE_FILE,
        )
    if history:
        write_text(file, json.dumps(history, indent=1) + "\n")
    return list(changed)


def _user_files(config: JobConfig) -> dict[Path, list[str]]:
    """Return the existing files of the user's code, with the keys that name them."""
    files: dict[Path, list[str]] = {}
    for key, path in _named_files(config):
        if path.is_file():
            files.setdefault(path, []).append(key)
    return files


def _named_files(config: JobConfig) -> Iterator[tuple[str, Path]]:
    for key, spec in config.all_user_code():
        file = code_file(spec)
        yield from ((key, path) for path in ([Path(file)] if file else _module_files(spec)))
    commands = [(key, node.command) for key, node in config.paths_of(CommandEpisodes)]
    commands += [(key, node.command or ()) for key, node in config.paths_of(McpServerConfig)]
    for key, command in commands:
        yield from ((f"{key}.command", Path(word)) for word in command if Path(word).suffix)


def _module_files(spec: str) -> Iterator[Path]:
    """Yield the places where the module of ``package.module:name`` may be, without importing its
    package."""
    top, *rest = spec.rpartition(":")[0].split(".")
    try:
        package = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return  # the call reports it
    if package is None:
        return
    if not rest and package.origin is not None:
        yield Path(package.origin)
    for folder in package.submodule_search_locations or ():
        path = Path(folder, *rest)
        yield path.with_suffix(".py") if rest else path / "__init__.py"
        yield path / "__init__.py"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(
            f"the file {path} of the recipe's code cannot be read ({error.strerror}); make it "
            "readable for this user"
        ) from error

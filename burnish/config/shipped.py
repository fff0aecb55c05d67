"""Find recipes that are installed with the package, and the files that they name.

``burnish/recipes`` is the folder recipes/ of the repository, so ``recipes/tiny_1_sft.yaml`` works
in every working directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("burnish")

SHIPPED = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes of the package."""


def shipped_recipes() -> list[Path]:
    """Return the recipes of the package, in the order of their names."""
    return sorted(SHIPPED.glob("*.yaml"))


def existing_path(path: Path) -> Path:
    """Return ``path``, or the file of the package if ``path`` is ``recipes/...`` and exists only
    there."""
    if path.parts[:1] != (SHIPPED.name,) or ".." in path.parts:
        return path
    shipped = SHIPPED.joinpath(*path.parts[1:])
    try:
        return shipped if shipped.is_file() and not path.exists() else path
    except (ValueError, OSError):  # a NUL, or a name that is too long
        return path


def use_shipped_files(tree: dict[str, Any], recipe: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of ``recipe`` in which files named ``recipes/...`` that exist only in the
    package have their full path. A log line names them, and the recipe if it is one of them."""
    used = [] if isinstance(recipe, Mapping) or existing_path(recipe) == recipe else [str(recipe)]
    tree = _with_full_paths(tree, used)
    if used:
        names = ", ".join(dict.fromkeys(used))
        _log.warning("notice: read from the installed package (%s): %s", SHIPPED, names)
    return tree


def _with_full_paths(tree: Any, used: list[str]) -> Any:
    """Return :func:`use_shipped_files`, and add the names of the files to ``used``. Code may have a
    name behind its file: ``recipes/rewards/sort_reward.py:ascending``."""
    if isinstance(tree, Mapping):
        return {key: _with_full_paths(value, used) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_full_paths(value, used) for value in tree]
    if not isinstance(tree, str) or not tree.startswith(f"{SHIPPED.name}/"):
        return tree
    file, colon, name = tree.partition(":")
    path = existing_path(Path(file))
    if path.is_absolute():
        used.append(file)
    return f"{path}{colon}{name}" if path.is_absolute() else tree

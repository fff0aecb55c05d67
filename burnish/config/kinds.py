"""The folder of a kind: the config that a recipe selects, and the code that belongs to it."""

from __future__ import annotations

import importlib
from typing import Any

from burnish.config.base import Node


def module_of(config: Node, name: str) -> Any:
    """Return the module ``name`` in the folder of the class of ``config``, imported now. Configs
    import neither torch nor the code of their kind."""
    folder = type(config).__module__.rpartition(".")[0]
    return importlib.import_module(f"{folder}.{name}")

"""The in-process link of ``memory_link.py`` as fixtures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "memory_link", Path(__file__).with_name("memory_link.py")
)
assert _SPEC is not None and _SPEC.loader is not None
memory_link: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["memory_link"] = memory_link
_SPEC.loader.exec_module(memory_link)


@pytest.fixture(scope="session")
def memory_link_type() -> Any:
    """``MemoryLink(bucket_bytes)``."""
    return memory_link.MemoryLink


@pytest.fixture(scope="session")
def weights_type() -> Any:
    """``Weights({name: tensor}, version)``."""
    return memory_link.Weights

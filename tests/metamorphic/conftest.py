"""Makes this folder importable as ``metamorphic``, and ends the processes of relations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[1])
if FOLDER not in sys.path:
    sys.path.append(FOLDER)


@pytest.fixture(scope="module", autouse=True)
def workers_end() -> Iterator[None]:
    """Close the worker processes of relations after each file."""
    yield
    from metamorphic.base import CLOSERS

    while CLOSERS:
        CLOSERS.pop()()

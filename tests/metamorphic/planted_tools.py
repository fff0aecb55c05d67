"""Mistakes for the relations of tools."""

from __future__ import annotations

import re
from typing import Any

import pytest

import burnish.environments.docstrings as docstrings
import burnish.tool_arguments as tool_arguments

Patch = pytest.MonkeyPatch


def declarations_are_dropped(patch: Patch) -> None:
    """Each tool is shown without its draft."""
    patch.setattr(tool_arguments, "_read_alike", lambda schema, other: True)


def entries_have_no_types(patch: Patch) -> None:
    """Only ``name: text`` is read as the entry of a parameter."""
    patch.setattr(docstrings, "_ENTRY", re.compile(r"(\w+):(?:\s+(.*)|$)"))


PLANTED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "schemas_mean_what_their_draft_says": (declarations_are_dropped, tuple(range(200))),
    "docstrings_lose_no_word": (entries_have_no_types, tuple(range(24))),
}

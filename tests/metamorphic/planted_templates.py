"""Mistakes for the relations of chat templates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plain_jinja
import pytest

Patch = pytest.MonkeyPatch


def missing_values_are_lists(patch: Patch) -> None:
    """The filter trim gets a list of the items of a value that can be iterated."""
    _, limited = plain_jinja.environments()
    trim = limited.filters["trim"]

    def trim_items(value: Any, *arguments: Any) -> Any:
        is_items = isinstance(value, Iterable) and not isinstance(value, str | dict)
        return trim(list(value) if is_items else value, *arguments)

    patch.setitem(limited.filters, "trim", trim_items)


PLANTED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "limits_change_no_rendering": (missing_values_are_lists, tuple(range(200))),
}

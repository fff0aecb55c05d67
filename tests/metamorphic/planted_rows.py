"""Mistakes for the relations of rows."""

from __future__ import annotations

from typing import Any

import pytest
from metamorphic import relations_rows

import burnish.config.held_out as held_out
import burnish.data.files as files
from burnish.data.base import Row, columnar_row
from burnish.driver.base import Usable

Patch = pytest.MonkeyPatch


def steps_count_all_rows(patch: Patch) -> None:
    """Rows that are left out count for the number of steps."""
    patch.setattr(relations_rows, "usable_rows", lambda config, num: Usable(num))


def splits_are_not_compared(patch: Patch) -> None:
    """Two splits of one file are accepted."""
    patch.setattr(held_out, "_same_split", lambda *_: iter(()))


def cells_lose_a_character(patch: Patch) -> None:
    """Cells of Parquet are stripped of a character."""

    def shortened(values: Any, where: str) -> Row:
        cut = {k: v[1:] if isinstance(v, str) else v for k, v in values.items()}
        return columnar_row(cut, where)

    patch.setattr(files, "columnar_row", shortened)


PLANTED = {
    "planned_rows_are_trained": (steps_count_all_rows, tuple(range(12))),
    "held_out_rows_are_not_trained": (splits_are_not_compared, tuple(range(24))),
    "forms_of_files_are_equal": (cells_lose_a_character, tuple(range(12))),
}

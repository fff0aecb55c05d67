"""Mistakes for the relations of columns and of an adapter's folder."""

from __future__ import annotations

from typing import Any

import pytest

import burnish.config.model as model
import burnish.data.rows as rows
import burnish.data.sources as sources
import burnish.data_files.arrow_files as arrow_files
from burnish.episodes import runner

Patch = pytest.MonkeyPatch


def labels_stay_numbers(patch: Patch) -> None:
    """Class labels are read as they are stored."""
    for module in (sources, arrow_files):
        patch.setattr(module, "with_class_names", lambda values, *_, **__: values)


def only_integers_are_seeds(patch: Patch) -> None:
    """A seed in another form is replaced by a derived one."""

    def integer(value: Any) -> int | None:
        return value if type(value) is int else None

    patch.setattr(runner, "integer_seed", integer)


def adapters_have_no_files(patch: Patch) -> None:
    """Only weights are read from the folder of an adapter."""
    patch.setattr(model, "has_tokenizer", lambda folder: False)
    patch.setattr(model.ModelConfig, "template_file", None)


def reasons_follow_names_alone(patch: Patch) -> None:
    """Only columns named after that of a response are about it."""
    patch.setattr(rows, "_written_beside", lambda row, key, field, suffix: f"{key}_{suffix}")


PLANTED = {
    "names_of_columns_change_no_row": (reasons_follow_names_alone, tuple(range(24))),
    "class_labels_are_their_names": (labels_stay_numbers, tuple(range(12))),
    "seeds_have_one_value_in_all_files": (only_integers_are_seeds, tuple(range(12))),
    "files_of_an_adapter_are_settings": (adapters_have_no_files, tuple(range(12))),
}

"""Mistakes that the relations of memory plans find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import burnish.plan.shapes as shapes

Patch = pytest.MonkeyPatch


def saved_modules_are_not_counted(patch: Patch) -> None:
    """Adapters are counted without the copies of saved modules."""
    own = shapes.add_adapters

    def adapters_only(model: Any, config: Any) -> None:
        own(model, config.model_copy(update={"modules_to_save": ()}))

    patch.setattr(shapes, "add_adapters", adapters_only)


def sizes_have_one_name(patch: Patch) -> None:
    """A config is read under the names of Llama's only."""
    heads = property(lambda shape: shape.text.to_dict()["num_attention_heads"])
    patch.setattr(shapes.ModelShape, "heads", heads)


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "planned_parameters": (saved_modules_are_not_counted, tuple(range(24))),
    "plan_of_a_family": (sizes_have_one_name, (21, 45)),
}

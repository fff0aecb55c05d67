"""Mistakes that the relations of numerics find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import burnish.config.adapters as adapters
import burnish.models.islands as islands
import burnish.models.routing as routing
import burnish.models.shrink as shrink_module

Patch = pytest.MonkeyPatch


def unknown_settings_are_ignored(patch: Patch) -> None:
    """An adapter's config is read for the known keys only."""
    patch.setattr(adapters, "adapter_problem", lambda settings: None)


def the_largest_logits_are_counted(patch: Patch) -> None:
    """Experts are counted by the router's logits."""
    real = routing.RoutingRecorder.routing

    def by_logits(self: Any) -> routing.Routing:
        found = real(self)
        top = found.logits.topk(found.chosen.shape[-1], dim=-1).indices
        return routing.Routing(found.logits, top)

    patch.setattr(routing.RoutingRecorder, "routing", by_logits)


def every_weight_is_rounded(patch: Patch) -> None:
    """Half precision has no weights in fp32."""
    patch.setattr(islands, "fp32_names", lambda model, dtype: frozenset())


def a_copy_has_eight_positions(patch: Patch) -> None:
    """The copy of a scaled model has the positions of its ratio."""
    patch.setattr(shrink_module, "FEWEST_POSITIONS", 8)


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "peft_setting": (unknown_settings_are_ignored, tuple(range(24))),
    "counted_experts": (the_largest_logits_are_counted, tuple(range(12))),
    "half_precision": (every_weight_is_rounded, tuple(range(12))),
    "odd_config": (a_copy_has_eight_positions, tuple(range(12))),
}

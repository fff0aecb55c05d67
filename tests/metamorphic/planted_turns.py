"""Mistakes for the relations of episodes of one turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from burnish.types import Sample

Patch = pytest.MonkeyPatch


def the_status_is_the_end_of_the_response(patch: Patch) -> None:
    """The last response of every episode counts as cut."""
    patch.setattr(Sample, "is_cut", property(lambda sample: sample.episode is not None))


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "one_turn_is_a_single_response": (the_status_is_the_end_of_the_response, tuple(range(12))),
}

"""Named evaluation sets: data sections besides the first one, whose metrics are
``eval/NAME/...``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from burnish.data.config import DataConfig

D = TypeVar("D", bound=DataConfig)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_USED = ("reward",)
"""Second parts of metrics of an evaluation, such as ``eval/reward/exact``."""


def eval_prefix(name: str) -> str:
    """Return the beginning of the metrics of a set. The first set has no name.

    >>> eval_prefix(""), eval_prefix("math")
    ('eval/', 'eval/math/')
    """
    return f"eval/{name}/" if name else "eval/"


def eval_sections(first: D | None, sets: Mapping[str, D], *, keys: tuple[str, str]) -> dict[str, D]:
    """Return the evaluation sections by their place in the recipe. ``keys``: places of the first
    section and of the mapping of sets."""
    sections = {} if first is None else {keys[0]: first}
    return sections | {f"{keys[1]}.{name}": data for name, data in sets.items()}


def with_sets(names: Iterable[str], sets: Iterable[str]) -> frozenset[str]:
    """Return the names after ``eval/`` of the metrics of all sets. ``names``: those of one set."""
    once = frozenset(names)
    return once.union(*({f"{set_name}/{name}" for name in once} for set_name in sets))


def eval_set_rules(
    first: DataConfig | None, sets: Mapping[str, DataConfig], *, keys: tuple[str, str]
) -> Iterator[str]:
    """Yield an error for each set whose name cannot be part of a metric, and if there is no first
    set. ``keys``: as for :func:`eval_sections`."""
    if sets and first is None:
        yield (
            f"{keys[1]} adds evaluation sets to {keys[0]}, which is not set; move one of them to "
            f"{keys[0]} (its metrics have no name and select the best checkpoint)"
        )
    for name in sets:
        if not _NAME.fullmatch(name):
            yield (
                f"{keys[1]}: the name {name!r} is part of metrics (eval/NAME/...); use letters, "
                "digits, _ and -"
            )
        elif name in _USED:
            yield f"{keys[1]}: the name {name!r} is that of metrics eval/{name}/...; change it"

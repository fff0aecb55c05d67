"""The section ``eval`` of a job: held-out data, named sets, and when they are evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from pydantic import Field

from burnish.config.base import Node, OlderKeys, switched_by
from burnish.data.config import DataConfig

D = TypeVar("D", bound=DataConfig, covariant=True)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_USED = ("reward",)
"""Second parts of metrics of an evaluation, such as ``eval/reward/exact``."""


class EvalSection(Node, Generic[D]):
    """Held-out data and the steps at which they are evaluated."""

    data: D
    """Held-out data. Read once, in order. ``data.held_out`` sets it too."""
    sets: dict[str, D] = Field(default_factory=dict)
    """Further held-out data by name, with metrics ``eval/NAME/...``. All sets of an evaluation are
    measured with the same weights."""
    every_n_steps: int = Field(0, ge=0)
    """Steps between evaluations. 0: evaluate only at step 0 and at the end, as every run does."""
    delay_steps: int = Field(0, ge=0)
    """Do not evaluate before this step. Above 0: also not at step 0."""

    @property
    def by_name(self) -> dict[str, D]:
        """Data by the name of their set. The name of ``data`` is empty."""
        return {"": self.data, **self.sets}

    @property
    def sections(self) -> dict[str, D]:
        """Data sections by their place in the recipe."""
        return {eval_place(name): data for name, data in self.by_name.items()}

    def rules(self) -> Iterator[str]:
        for name in self.sets:
            if not _NAME.fullmatch(name):
                yield (
                    f"sets: the name {name!r} is part of metrics (eval/NAME/...); use letters, "
                    "digits, _ and -"
                )
            elif name in _USED:
                yield f"sets: the name {name!r} is that of metrics eval/{name}/...; change it"


class SupervisedEval(EvalSection[D], Generic[D]):
    """An evaluation of a job that trains on given rows."""

    every_n_epochs: int = Field(0, ge=0)
    """Passes over the training data between evaluations. 0: by ``every_n_steps``."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.every_n_epochs and self.every_n_steps:
            yield (
                f"every_n_epochs={self.every_n_epochs} and every_n_steps={self.every_n_steps} are "
                "two intervals of one evaluation; remove one of them"
            )


OLDER_EVAL_KEYS = OlderKeys(
    "eval",
    "",
    switched_by("data"),
    {
        "eval_data": ("data", None),
        "eval_sets": ("sets", {}),
        "eval_every_n_steps": ("every_n_steps", 0),
        "eval_every_n_epochs": ("every_n_epochs", 0),
        "eval_delay_steps": ("delay_steps", 0),
    },
)
"""Keys of earlier versions next to the other keys of a job."""


def eval_prefix(name: str) -> str:
    """Return the beginning of the metrics of a set. The first set has no name.

    >>> eval_prefix(""), eval_prefix("math")
    ('eval/', 'eval/math/')
    """
    return f"eval/{name}/" if name else "eval/"


def eval_place(name: str) -> str:
    """Return the place of a set in the recipe. The first set has no name.

    >>> eval_place(""), eval_place("math")
    ('eval.data', 'eval.sets.math')
    """
    return f"eval.sets.{name}" if name else "eval.data"


def with_sets(names: Iterable[str], sets: Iterable[str]) -> frozenset[str]:
    """Return the names after ``eval/`` of the metrics of all sets. ``names``: those of one set."""
    once = frozenset(names)
    return once.union(*({f"{set_name}/{name}" for name in once} for set_name in sets))

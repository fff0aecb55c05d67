"""Base class of config nodes: frozen, no unknown keys, docstrings as help, rules.

Reading order of this package: base, model, rewards, algorithm, rollout, train, sync, job, the
jobs, arithmetic, load; then schema, overrides, explain and docs, which inspect these classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

N = TypeVar("N", bound="Node")

_NUMBERS = (int, float, int | None, float | None)


PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a name; ``~`` is expanded to the home folder."""


class Node(BaseModel):
    """A frozen config node. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        """Convert booleans in numeric fields to text, so that ``lr: true`` is refused instead of
        read as 1."""
        if not isinstance(data, dict):
            return data
        numbers = {n for n, field in cls.model_fields.items() if field.annotation in _NUMBERS}
        found = {n: str(v).lower() for n, v in data.items() if n in numbers and isinstance(v, bool)}
        return {**data, **found}

    def is_own(self, field: str) -> bool:
        """Return whether a field differs from its default. Unlike ``model_fields_set``, this
        survives a dump, which writes every field."""
        default = type(self).model_fields[field].get_default(call_default_factory=True)
        return bool(vars(self)[field] != default)

    def rules(self) -> Iterator[str]:
        """Yield one sentence for each broken rule between fields of this node (what, why, what to
        do)."""
        yield from ()

    def advice(self) -> Iterator[str]:
        """Yield one sentence for each setting of this node that is valid but rarely intended."""
        yield from ()

    def broken_rules(self) -> list[str]:
        """Return the broken rules of this node and all nodes below it, each prefixed with its
        dotted path."""
        return [f"{path or 'recipe'}: {p}" for path, node in self._nodes() for p in node.rules()]

    def warnings(self) -> list[str]:
        """Return the advice of this node and all nodes below it, each prefixed with its dotted
        path."""
        return [f"{path or 'recipe'}: {p}" for path, node in self._nodes() for p in node.advice()]

    def nodes_of(self, kind: type[N]) -> list[N]:
        """Return the nodes of class ``kind`` at and below this one."""
        return [node for _, node in self._nodes() if isinstance(node, kind)]

    def paths_of(self, kind: type[N]) -> list[tuple[str, N]]:
        """Return (dotted path, node) of the nodes of class ``kind`` at and below this one."""
        return [(path, node) for path, node in self._nodes() if isinstance(node, kind)]

    def _nodes(self, path: str = "") -> Iterator[tuple[str, Node]]:
        """Yield (dotted path, node) for this node and all below it."""
        yield path, self
        for name, value in self:
            yield from _nodes_below(value, f"{path}.{name}" if path else name)


def _nodes_below(value: Any, path: str) -> Iterator[tuple[str, Node]]:
    if isinstance(value, Node):
        yield from value._nodes(path)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _nodes_below(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _nodes_below(item, f"{path}.{key}")

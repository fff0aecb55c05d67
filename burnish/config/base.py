"""What every config node shares: frozen, no unknown keys, docstrings as help, rules.

Reading order of this package: base, model, data, rewards, algorithm, rollout, train, jobs,
arithmetic, load; then schema, overrides, explain and docs, which read these classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

_NUMBERS = (int, float, int | None, float | None)


PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a name; ``~`` is the home folder."""


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
        """Refuse ``lr: true``, which pydantic would read as 1."""
        fields = cls.model_fields if isinstance(data, dict) else {}
        for name, field in fields.items():
            if isinstance(data.get(name), bool) and field.annotation in _NUMBERS:
                raise ValueError(f"{name} must be a number, and {str(data[name]).lower()} is none")
        return data

    def rules(self) -> Iterator[str]:
        """Yield one sentence for each broken rule between fields of this node (what, why, what to
        do)."""
        yield from ()

    def broken_rules(self, path: str = "") -> list[str]:
        """Broken rules of this node and all nodes below it, each with the dotted path in front."""
        found = [f"{path or 'recipe'}: {problem}" for problem in self.rules()]
        for name, value in self:
            below = f"{path}.{name}" if path else name
            found += _rules_below(value, below)
        return found


def _rules_below(value: Any, path: str) -> list[str]:
    if isinstance(value, Node):
        return value.broken_rules(path)
    if isinstance(value, (list, tuple)):
        return [p for i, item in enumerate(value) for p in _rules_below(item, f"{path}[{i}]")]
    return []

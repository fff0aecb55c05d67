"""What every config node shares: frozen, no unknown keys, docstrings as help, rules that are all reported.

Reading order of this package: base, model, data, rewards, algorithm, rollout, train, jobs, arithmetic, load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """A frozen config node. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )

    def rules(self) -> Iterator[str]:
        """Yield one sentence for each broken rule between fields of this node (what, why, what to do)."""
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

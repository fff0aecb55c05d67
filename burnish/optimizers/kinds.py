"""The registry of optimizers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from burnish.optimizers.adafactor.config import Adafactor
from burnish.optimizers.adamw.config import AdamW
from burnish.optimizers.adamw_8bit.config import AdamW8bit, PagedAdamW8bit
from burnish.optimizers.muon.config import Muon


def _adamw_unless_named(value: Any) -> Any:
    """Expand ``optimizer: muon`` to ``{kind: muon}``; use AdamW if no kind is given."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "adamw", **value} if isinstance(value, dict) else value


OptimizerConfig = Annotated[
    Annotated[AdamW | Muon | AdamW8bit | PagedAdamW8bit | Adafactor, Field(discriminator="kind")],
    BeforeValidator(_adamw_unless_named),
]

"""The registry of optimizers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from burnish.config.base import named_kind
from burnish.optimizers.adafactor.config import Adafactor
from burnish.optimizers.adamw.config import AdamW
from burnish.optimizers.adamw_8bit.config import AdamW8bit, PagedAdamW8bit
from burnish.optimizers.muon.config import Muon

OptimizerConfig = Annotated[
    Annotated[AdamW | Muon | AdamW8bit | PagedAdamW8bit | Adafactor, Field(discriminator="kind")],
    named_kind("adamw"),
]

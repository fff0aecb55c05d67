"""Config of AdamW."""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.optimizers.config import AdamOptimizer


class AdamW(AdamOptimizer):
    """AdamW (arXiv 1711.05101) with fp32 moments: 8 bytes per trained weight."""

    kind: Literal["adamw"] = "adamw"
    state_format: ClassVar[str] = "adamw"
    entry_bytes: ClassVar[float | None] = 8.0

"""Recipe of the job ``sft``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.data import (
    SFTDataConfig,
    held_out_advice,
)
from burnish.config.eval_sets import with_sets
from burnish.config.job import SupervisedJob


class SFTConfig(SupervisedJob):
    """``burnish sft``: supervised fine-tuning on demonstrations."""

    job: Literal["sft"] = "sft"
    """Job of the recipe."""
    data: SFTDataConfig
    """Demonstrations."""
    eval_data: SFTDataConfig | None = None
    """Held-out demonstrations. None: no evaluation."""
    eval_sets: dict[str, SFTDataConfig] = Field(default_factory=dict)
    """Further held-out data by name, with metrics ``eval/NAME/...``. Needs eval_data."""

    @property
    def rows(self) -> SFTDataConfig:
        """Training data."""
        return self.data

    @property
    def eval_metrics(self) -> frozenset[str]:
        """Names after ``eval/`` of the metrics of an evaluation; empty if there is none."""
        return frozenset() if self.eval_data is None else with_sets({"loss"}, self.eval_sets)

    def advice(self) -> Iterator[str]:
        for name, data in self.eval_sections.items():
            yield from held_out_advice(self.data, data, name)

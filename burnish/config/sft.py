"""Recipe of the job ``sft``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from burnish.config.data import (
    SFTDataConfig,
    held_out_advice,
)
from burnish.config.job import SupervisedJob


class SFTConfig(SupervisedJob):
    """``burnish sft``: supervised fine-tuning on demonstrations."""

    job: Literal["sft"] = "sft"
    """Job of the recipe."""
    data: SFTDataConfig
    """Demonstrations."""
    eval_data: SFTDataConfig | None = None
    """Held-out demonstrations. None: no evaluation."""

    @property
    def rows(self) -> SFTDataConfig:
        """Training data."""
        return self.data

    @property
    def eval_metrics(self) -> frozenset[str]:
        """Names after ``eval/`` of the metrics of an evaluation; empty if there is none."""
        return frozenset() if self.eval_data is None else frozenset({"loss"})

    def advice(self) -> Iterator[str]:
        yield from held_out_advice(self.data, self.eval_data, "eval_data")

"""Recipe of the job ``sft``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.eval_section import SupervisedEval, with_sets
from burnish.config.held_out import held_out_advice
from burnish.config.job import SupervisedJob
from burnish.data.demonstrations.config import SFTDataConfig


class SFTEval(SupervisedEval[SFTDataConfig]):
    """Evaluation on held-out rows."""


class SFTConfig(SupervisedJob):
    """``burnish sft``: supervised fine-tuning on demonstrations."""

    job: Literal["sft"] = "sft"
    """Job of the recipe."""
    data: SFTDataConfig
    """Demonstrations."""
    eval: SFTEval | None = None
    """Held-out evaluation. None: none."""

    loss: Literal["nll", "dft"] = "nll"
    """nll: negative log-likelihood. dft: the same times each token's probability (dynamic
    fine-tuning, arXiv 2508.05629). Evaluations measure nll."""
    neftune_noise_alpha: float = Field(0.0, ge=0)
    """Noise of alpha / sqrt(tokens x width) on the input embeddings in training (NEFTune, arXiv
    2310.05914)."""

    @property
    def rows(self) -> SFTDataConfig:
        return self.data

    @property
    def evaluation(self) -> SFTEval | None:
        return self.eval

    @property
    def eval_metrics(self) -> frozenset[str]:
        return frozenset() if self.eval is None else with_sets({"loss"}, self.eval.sets)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        size = self.train.engine.sequence_parallel_size
        if self.neftune_noise_alpha and size > 1:
            yield (
                f"neftune_noise_alpha={self.neftune_noise_alpha:g} with train.engine."
                f"sequence_parallel_size={size}: no rank has the entire row; use "
                "tensor_parallel_size, or neftune_noise_alpha=0"
            )

    def advice(self) -> Iterator[str]:
        yield from super().advice()
        yield from held_out_advice(self.data, self.eval)

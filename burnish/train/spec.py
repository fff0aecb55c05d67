"""Settings of one train engine: its role in the job, and the options that engines read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.models.attention_kernel import Choice, Use, choose_kernel
from burnish.models.distill import DistillTarget
from burnish.models.logprobs import EntropyOrder, chunk_tokens
from burnish.models.sdpa import kernels_of
from burnish.models.teacher import DistillTargetSpec
from burnish.train.batching import Layout, RowSplit


@dataclass(frozen=True)
class EngineSpec:
    """All inputs of an engine except the model itself."""

    role: TrainRole
    """Its model may be loaded in any number format: trained fp32 weights become the masters
    unchanged."""
    micro_batch_size: int | None = None
    """Rows (units) per pass; None with a token budget, or for a single pass over all rows."""
    total_steps: int = 1
    """Total optimizer steps of the run, for the schedule."""
    temperature: float = 1.0
    """Sampling temperature at which log-probs are computed."""
    entropy_order: EntropyOrder = 1
    """Order of entropies without gradient. 1: Shannon; 2: collision (Renyi)."""
    distill_target: DistillTargetSpec | None = None
    """Distillation target of a student."""
    seed: int = 0
    """Seed of the run, for new adapters and for dropout on a cluster's workers."""
    recipe_model: ModelConfig | None = None
    """The model with the path of the recipe, if that of ``role`` has absolute paths instead.
    Checkpoints contain this, so that they can move together with the folder of the recipe and the
    base of a LoRA."""
    output_weights: Mapping[str, float] | None = None
    """Weight of each output of a frozen reward model in the reward, by name. None: those in the
    model's config."""
    neftune_noise_alpha: float = 0.0
    """Noise on the embeddings of training passes. 0: none."""

    @property
    def saved_model(self) -> dict[str, Any]:
        """Model and compute dtype, as checkpoints contain them. They also contain the adapter, so
        its folder is left out."""
        model = (self.recipe_model or self.role.model).without_adapter_path()
        return {"model": model.model_dump(mode="json"), "dtype": self.role.precision.dtype}

    def choose_attention(
        self, config: PretrainedConfig | None, device: torch.device, layout: Layout
    ) -> Choice:
        """Return the attention of the model with this ``config`` (None: unknown) on ``device``.
        Raises ModelError if the recipe wants one that cannot be used."""
        use = Use(
            self.role.precision.dtype,
            kernels_of(device),
            layout=layout,
            dropout=self.role.trainable and self.role.dropout,
            deterministic=self.role.train.deterministic,
            device=device,
        )
        return choose_kernel(self.role.train.attention, config, use)

    def row_split(self, ranks: int, layout: Layout) -> RowSplit:
        """Return the split of batches over ``ranks`` data-parallel ranks and micro-batches."""
        budget = self.role.train.max_tokens_per_micro_batch
        return RowSplit(ranks, self.micro_batch_size, budget, layout)

    def load_distill_target(self, device: torch.device) -> DistillTarget | None:
        """Return :attr:`distill_target` with the teacher's output projection on ``device``, or
        None."""
        chunk = chunk_tokens(self.role.train.logprob_chunk_tokens, device.type)
        return (
            None
            if self.distill_target is None
            else self.distill_target.load(device, chunk_tokens=chunk)
        )

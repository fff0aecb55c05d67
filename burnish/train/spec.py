"""The settings of one train engine: its role, its model, and the options that engines read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.models.distill import DistillTarget
from burnish.models.logprobs import chunk_tokens
from burnish.models.teacher import DistillTargetSpec
from burnish.train.base import Role


@dataclass(frozen=True)
class EngineSpec:
    """All that an engine is built from, except the model itself."""

    role: Role
    train: TrainConfig
    model: ModelConfig
    """Where the model comes from."""
    micro_batch_size: int | None = None
    """Rows (units) per pass; None with a token budget, or to take all at once."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the schedule."""
    lr: float | None = None
    """Peak learning rate. None: ``train.lr``."""
    temperature: float = 1.0
    """Sampling temperature at which log-probs are computed."""
    with_entropy: bool = True
    """Compute the entropy in forward_backward."""
    trainable: bool = True
    """False: no optimizer (reference and reward models)."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats and loss scaling. The model may come in any format: trained weights in fp32
    become the masters as they are."""
    dtype: Dtype | None = None
    """Compute format of a frozen model that has its own. None: the precision's."""
    distill_target: DistillTargetSpec | None = None
    """What a student learns from."""
    seed: int = 0
    """Of the run: new adapters and dropout on a cluster's workers."""
    recipe_model: ModelConfig | None = None
    """The model as the recipe names it, where ``model`` has full paths instead. Checkpoints hold
    this, so that they may move with the folder that holds the recipe and the base of a LoRA."""
    dropout: bool = True
    """Whether training passes have the dropout and router noise of the model's own config."""

    def with_precision(self, precision: PrecisionConfig) -> EngineSpec:
        """The spec with the job's number formats, or its own."""
        own = precision if self.dtype is None else PrecisionConfig(dtype=self.dtype)
        return replace(self, precision=own)

    def load_distill_target(self, device: torch.device) -> DistillTarget | None:
        """:attr:`distill_target` with the teacher's output projection on ``device``."""
        chunk = chunk_tokens(self.train.logprob_chunk_tokens, device.type)
        return (
            None
            if self.distill_target is None
            else self.distill_target.load(device, chunk_tokens=chunk)
        )

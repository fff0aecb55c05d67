"""How gradients become steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.base import Node


class TorchEngine(Node):
    """Plain PyTorch in this process, on CPU or one GPU."""

    kind: Literal["torch"] = "torch"
    device: str = "auto"
    """``auto`` (CUDA if there is one, else CPU), or a torch device such as ``cpu`` or
    ``cuda:1``."""
    sharding: Literal["none", "full"] = "none"
    """What several ranks do with the model. none: each holds all of it (replicas). full: each holds
    its part of the weights, gradients and optimizer state (FSDP2), and a layer is gathered when it
    is computed. One rank alone has nothing to shard."""
    reshard_after_forward: bool = True
    """sharding=full: free each layer's gathered weights after its forward pass and gather them
    again for backward. False: keep them in between, which saves a third of the traffic and costs
    the memory of the whole model in the compute format."""
    reduce_gradients: Literal["every_pass", "once"] = "every_pass"
    """sharding=full: when gradients are summed over ranks. every_pass: after each micro-batch;
    between passes a rank holds its part of the sums. once: after the last micro-batch of a batch;
    least traffic, and until then each rank holds an fp32 gradient of the whole model."""
    cpu_offload: bool = False
    """sharding=full: keep sharded weights, gradients and optimizer state in CPU memory, and step
    there."""

    def rules(self) -> Iterator[str]:
        if self.sharding == "none":
            for name in ("reshard_after_forward", "reduce_gradients", "cpu_offload"):
                if self.model_dump()[name] != type(self).model_fields[name].default:
                    yield f"{name} acts on a sharded model only; remove it, or use sharding=full"


class TrainConfig(Node):
    """Batches, optimizer and schedule."""

    engine: TorchEngine = TorchEngine()
    """Which engine trains."""
    train_batch_size: int | None = Field(None, ge=1)
    """B: samples per optimizer step, over all micro-batches and ranks. (Give any two of B, b and
    accumulation.)"""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """b: samples per forward/backward pass on one rank."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """Backward passes per optimizer step = B / (b x ranks)."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Build micro-batches up to this many tokens instead of b samples (dynamic batching). None: by
    b."""
    layout: Literal["shared_prefix", "packed", "padded"] = "shared_prefix"
    """How rows stand in a micro-batch. shared_prefix: packed, and a group's prompt is computed
    once. packed: rows one after another, no padding. padded: a rectangle. The numbers are the
    same."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "constant"
    """Shape after warm-up."""
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of all optimizer steps over which the rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final rate / peak rate (cosine_with_min_lr)."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay, on matrices only (not on norms and biases)."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1, beta2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip the global gradient norm to this. None: no clipping."""
    max_consecutive_skips: int = Field(10, ge=1)
    """Stop the run, after saving, when this many optimizer steps in a row were skipped because the
    loss or the gradient was not finite. (Overflows that a dynamic loss scale may still cure are
    not counted: its floor stops the run.)"""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: about a third more compute, much less memory."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay. None: none."""
    logprob_chunk_tokens: int = Field(512, ge=1)
    """Log-probs are computed this many tokens at a time; [chunk, vocab] fp32 logits are the
    peak."""

    def rules(self) -> Iterator[str]:
        if self.max_tokens_per_micro_batch and (
            self.micro_train_batch_size or self.gradient_accumulation_steps
        ):
            yield (
                "max_tokens_per_micro_batch builds micro-batches by tokens, so "
                "micro_train_batch_size and "
                "gradient_accumulation_steps cannot be set as well"
            )


class RLTrainConfig(TrainConfig):
    """Batches, optimizer and schedule of an RL update."""

    epochs_per_rollout: int = Field(1, ge=1)
    """Passes over the rollout buffer."""


class CheckpointConfig(Node):
    """What is kept, and when. Saving is on by default."""

    every_n_steps: int = Field(50, ge=0)
    """Save every this many steps. 0: only at the end and on interruption."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    best_metric: str | None = None
    """Also keep the checkpoint that is best by this metric, e.g. ``eval/pass@1``. None: the job's
    default."""
    best_mode: Literal["max", "min"] | None = None
    """Whether more or less of ``best_metric`` is better. None: less for losses, more for all
    else."""


class ObserveConfig(Node):
    """What a run writes about itself (metrics.jsonl always)."""

    tensorboard: bool = False
    """Also write TensorBoard event files under ``tensorboard/``."""
    samples_per_step: int = Field(64, ge=0)
    """Samples kept per step in ``samples/``. 0: none."""
    log_every_n_steps: int = Field(1, ge=1)
    """Print progress every this many steps (metrics.jsonl has every step)."""

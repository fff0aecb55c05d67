"""Config of 8-bit AdamW, and the parameters that have 8-bit moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from burnish.config.train_engines import TorchEngine, TrainEngineFacts
from burnish.optimizers.config import AdamOptimizer, WeightShape

SMALLEST = 4096
"""Entries of the smallest matrix with 8-bit moments (the default of bitsandbytes)."""
BLOCK = 256
"""Consecutive entries with one scale (bitsandbytes)."""


class _Adam8bit(AdamOptimizer):
    """A kind with 8-bit moments, of which blocks of several weights share one scale."""

    state_format: ClassVar[str] = "adamw_8bit"
    blocks_in_shards: ClassVar[bool]
    """True if rows of a shard contain complete blocks."""

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        if isinstance(engine, TorchEngine) and engine.tensor_parallel_size > 1:
            with_what = f"tensor_parallel_size={engine.tensor_parallel_size}"
        elif isinstance(engine, TorchEngine) and (
            engine.sharding == "none" or self.blocks_in_shards
        ):
            return None
        elif isinstance(engine, TorchEngine):
            with_what = "sharding=full"
        else:
            with_what = "kind=deepspeed"
        return (
            f"train.optimizer.kind={self.kind} with train.engine.{with_what}: one number of its "
            "state describes several weights, which shards divide in other places, so results "
            "and checkpoints would depend on the number of ranks; use the torch engine with "
            f"sharding={'full' if self.blocks_in_shards else 'none'} and tensor_parallel_size=1, "
            "or optimizer kind adamw or muon, whose state is sharded"
        )

    def weight_bytes(self, weight: WeightShape) -> float:
        """Two moments of 8 bits and their scales, or two fp32 moments."""
        if weight.is_table or not has_8bit_moments(weight.shape):
            return 8.0 * weight.numel
        return 2.0 * weight.numel + 8.0 * math.ceil(weight.numel / BLOCK)


class AdamW8bit(_Adam8bit):
    """AdamW of bitsandbytes (arXiv 2110.02861; extra ``quant``): 8-bit moments with one scale per
    256 entries. Embeddings, vectors and matrices of fewer than 4096 entries keep fp32 moments."""

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    blocks_in_shards: ClassVar[bool] = True

    def sharding_problem(self, weight: WeightShape, ranks: int) -> str | None:
        """Return the error for a parameter whose blocks cannot be divided over ``ranks``."""
        if weight.is_table or not has_8bit_moments(weight.shape):
            return None
        return undivided_blocks(weight.name, weight.shape, ranks)


class PagedAdamW8bit(_Adam8bit):
    """adamw_8bit with moments that CUDA pages to host memory when GPU memory is full. Not run:
    needs a GPU."""

    kind: Literal["paged_adamw_8bit"] = "paged_adamw_8bit"
    blocks_in_shards: ClassVar[bool] = False

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        if isinstance(engine, TorchEngine) and engine.device == "cpu":
            return (
                "train.optimizer.kind=paged_adamw_8bit with train.engine.device=cpu: pages move "
                "between GPU and host memory, so it needs CUDA; use adamw_8bit"
            )
        return super().engine_problem(engine)


def has_8bit_moments(shape: Sequence[int]) -> bool:
    """Return whether a parameter that is no embedding table has 8-bit moments."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST


def undivided_blocks(name: str, shape: Sequence[int], ranks: int) -> str | None:
    """Return the error if the rows of FSDP2 over ``ranks`` divide a parameter inside a block of
    256 entries, which have one scale, or leave a rank without entries; else None."""
    rows, row = shape[0], math.prod(shape[1:])
    each = -(-rows // ranks)
    if ranks == 1 or (each * row % BLOCK == 0 and each * (ranks - 1) < rows):
        return None
    return (
        f"train.optimizer.kind=adamw_8bit with train.engine.sharding=full: the rows of {name} "
        f"{list(shape)} cannot be divided over {ranks} ranks in multiples of {BLOCK} entries, "
        "which have one scale; use another number of ranks, or train.optimizer.kind=adamw"
    )

"""Config of optimizers: one class per kind.

Settings that several kinds read (``weight_decay``, ``adam_betas``, ``adam_eps``) are keys of
``train``. A class here has only the settings of its own kind, and the facts about it that rules,
plans and engines need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node
from burnish.config.train_engines import TorchEngine, TrainEngineFacts


class OptimizerFacts(ABC):
    """Facts about an optimizer that follow from its settings. The defaults are those of AdamW."""

    @property
    def uses_adam_settings(self) -> bool:
        """Return whether ``train.adam_betas`` and ``train.adam_eps`` have an effect."""
        return True

    @property
    @abstractmethod
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints. Optimizers of one format can continue
        each other's runs."""

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        """Return why a train engine cannot run the optimizer, or None if it can."""
        return None


class AdamW(Node, OptimizerFacts):
    """AdamW (arXiv 1711.05101) with fp32 moments: 8 bytes per trained weight."""

    kind: Literal["adamw"] = "adamw"

    @property
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints."""
        return "adamw"


class Muon(Node, OptimizerFacts):
    """Muon (Jordan et al. 2024; arXiv 2502.16982): momentum, orthogonalized by Newton-Schulz
    iterations, for the matrices of the layers. AdamW trains the rest: embeddings, output
    projection, value head, norms, biases."""

    kind: Literal["muon"] = "muon"
    matrix_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the matrices. None: that of the role, which AdamW uses."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Format of the Newton-Schulz iterations. fp32 is slower, and equal on any number of ranks up
    to fp32 rounding."""
    lr_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix. match_rms_adamw: 0.2 x sqrt(max(rows, columns)), for
    learning rates of AdamW. original: sqrt(max(1, rows / columns)), for rates of about 0.02."""
    adamw_params: tuple[str, ...] = ()
    """Parts of parameter names, such as ``c_attn``, that AdamW trains too."""

    @property
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints."""
        return "muon"


class _SharedScales(OptimizerFacts):
    """State in which one number describes a block of several weights."""

    kind: str
    _blocks_in_shards: ClassVar[bool] = False
    """True if the weights of one number are consecutive entries, which rows of a shard contain."""

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        """Return why a train engine cannot run the optimizer, or None if it can."""
        if isinstance(engine, TorchEngine) and engine.tensor_parallel_size > 1:
            with_what = f"tensor_parallel_size={engine.tensor_parallel_size}"
        elif isinstance(engine, TorchEngine) and (
            engine.sharding == "none" or self._blocks_in_shards
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
            f"sharding={'full' if self._blocks_in_shards else 'none'} and tensor_parallel_size=1, "
            "or optimizer kind adamw or muon, whose state is sharded"
        )


class AdamW8bit(_SharedScales, Node):
    """AdamW of bitsandbytes (arXiv 2110.02861; extra ``quant``): 8-bit moments with one scale per
    256 entries. Embeddings, vectors and matrices of fewer than 4096 entries keep fp32 moments."""

    _blocks_in_shards: ClassVar[bool] = True

    kind: Literal["adamw_8bit"] = "adamw_8bit"

    @property
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints."""
        return "adamw_8bit"


class PagedAdamW8bit(_SharedScales, Node):
    """adamw_8bit with moments that CUDA pages to host memory when GPU memory is full. Not run:
    needs a GPU."""

    kind: Literal["paged_adamw_8bit"] = "paged_adamw_8bit"

    @property
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints."""
        return "adamw_8bit"

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        """Return why a train engine cannot run the optimizer, or None if it can."""
        if isinstance(engine, TorchEngine) and engine.device == "cpu":
            return (
                "train.optimizer.kind=paged_adamw_8bit with train.engine.device=cpu: pages move "
                "between GPU and host memory, so it needs CUDA; use adamw_8bit"
            )
        return super().engine_problem(engine)


class Adafactor(Node, OptimizerFacts):
    """Adafactor (arXiv 1804.04235) as in transformers: row and column means of the squared
    gradient, without momentum; about 4 bytes per row and column of a matrix."""

    kind: Literal["adafactor"] = "adafactor"
    decay_rate: float = Field(-0.8, lt=0)
    """Exponent of the step in the decay of the squared gradient's averages: 1 - step ^
    decay_rate."""
    clip_threshold: float = Field(1.0, gt=0)
    """Largest root mean square of the update of a parameter, before the learning rate."""
    grad_eps: float = Field(1e-30, gt=0)
    """Constant added to squared gradients."""
    scale_parameter: bool = False
    """Multiply the learning rate by the root mean square of each parameter (at least 1e-3)."""

    @property
    def state_format(self) -> str:
        """Name of the format of the state in checkpoints."""
        return "adafactor"

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        """Return why a train engine cannot run the optimizer, or None if it can."""
        if isinstance(engine, TorchEngine):
            return None
        return (
            "train.optimizer.kind=adafactor with train.engine.kind=deepspeed: ZeRO steps flat "
            "shards, in which a matrix is divided at any entry, so a rank has no rows and columns "
            "whose means it could take; use train.engine.kind=torch (sharding=full shards "
            "Adafactor exactly), or optimizer kind adamw"
        )

    @property
    def uses_adam_settings(self) -> bool:
        """Return whether ``train.adam_betas`` and ``train.adam_eps`` have an effect."""
        return False


def _adamw_unless_named(value: Any) -> Any:
    """Expand ``optimizer: muon`` to ``{kind: muon}``; use AdamW if no kind is given."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "adamw", **value} if isinstance(value, dict) else value


# The registry of optimizers: one line each.
OptimizerConfig = Annotated[
    Annotated[AdamW | Muon | AdamW8bit | PagedAdamW8bit | Adafactor, Field(discriminator="kind")],
    BeforeValidator(_adamw_unless_named),
]

Scheduler = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "polynomial", "wsd"]


class ScheduleConfig(Node):
    """Learning-rate schedule of one role, over all of its optimizer steps."""

    lr_scheduler: Scheduler = "constant"
    """Schedule of the learning rate after warm-up. polynomial and wsd end at ``min_lr_ratio``."""
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of all optimizer steps with linear warm-up from 0."""
    lr_warmup_steps: int | None = Field(None, ge=0)
    """Optimizer steps with linear warm-up from 0, in place of lr_warmup_ratio."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate / peak learning rate (cosine_with_min_lr, polynomial, wsd)."""
    lr_power: float = Field(1.0, gt=0)
    """Exponent of the polynomial schedule. 1: linear."""
    lr_decay_ratio: float = Field(0.1, gt=0, le=1)
    """Fraction of all optimizer steps in the final decay of wsd (warm-up, stable, decay)."""
    lr_decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Decay of wsd. sqrt: 1 - sqrt(progress) (arXiv 2405.18392)."""

    def rules(self) -> Iterator[str]:
        if self.lr_warmup_steps is not None and self.lr_warmup_ratio:
            yield (
                f"lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_ratio="
                f"{self.lr_warmup_ratio:g} both set the length of the warm-up; remove one"
            )
        for name, schedulers in _SCHEDULERS_OF.items():
            if self.lr_scheduler not in schedulers and self.is_own(name):
                yield (
                    f"{name} has no effect with lr_scheduler={self.lr_scheduler}; remove it, or "
                    f"use lr_scheduler={' or '.join(schedulers)}"
                )
        if self.lr_scheduler == "wsd" and self.lr_warmup_ratio + self.lr_decay_ratio > 1:
            yield (
                f"lr_warmup_ratio={self.lr_warmup_ratio:g} and lr_decay_ratio="
                f"{self.lr_decay_ratio:g} are more than all steps; lower one"
            )


_SCHEDULERS_OF = {
    "min_lr_ratio": ("cosine_with_min_lr", "polynomial", "wsd"),
    "lr_power": ("polynomial",),
    "lr_decay_ratio": ("wsd",),
    "lr_decay_shape": ("wsd",),
}
"""Keys of one schedule or several, which have no effect with the others."""

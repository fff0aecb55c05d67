"""Options of each train engine, and the facts about it that checks, plans and runtimes need.

To add an engine, write a class here with its options and facts, and add it to
:data:`TrainEngineConfig`. Implement the engine itself (``train/engine.py`` lists the hooks) and its
memory profile (``plan/engine_profile.py`` lists the hooks), each in a file of its own. Add one line
in ``tests/contract/pools.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node, named_kind
from burnish.config.model import PrecisionConfig


class TrainEngineFacts(ABC):
    """Facts about a train engine that follow from its options. The defaults are those of
    replicas."""

    own_updates: ClassVar[tuple[str, ...] | None] = None
    """Kinds of optimizers whose updates the engine's own code makes, so that it runs no others.
    None: it runs the rules of every kind (``optimizers/rule.py``)."""

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute the same rows together."""
        return 1

    @property
    def shards_weights(self) -> bool:
        """Return whether each of several ranks holds a part of every weight."""
        return False

    @property
    def shares_weights(self) -> bool:
        """Return whether another engine in the same process can run the model unchanged."""
        return True

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether master weights and moments are in host memory."""
        return False

    @property
    def keeps_weights_on_host(self) -> str | None:
        """Setting that keeps the weights in host memory during the entire run, or None."""
        return None

    @property
    def parallel_setting(self) -> str:
        """Setting that makes ranks compute the same rows, as written in a recipe."""
        return "train.engine.kind"

    @property
    def waits_by(self) -> str | None:
        """Setting that makes ranks wait for each other in every pass, or None if they do not. If
        they do not, a pass can be repeated, and it returns the outputs of routers."""
        return None

    @property
    def saves_own_shards(self) -> bool:
        """Return whether each rank writes its own part of a checkpoint, from a copy."""
        return False

    @property
    def saves_first(self) -> str:
        """Engine, and the reason why it saves before the next step if ranks do not write their own
        parts."""
        return (
            "train.engine.sharding=none: rank 0 writes the weights and state that every replica "
            "has, not a copy of them"
        )

    @property
    def lora_problem(self) -> str | None:
        """Reason why the engine supports only plain adapters on inner layers, with the way out.
        None if it supports all settings of ``model.lora``."""
        return None

    @property
    def compile_problem(self) -> str | None:
        """Reason why layers cannot be compiled (``train.compile``). None if they can."""
        return None

    @property
    def selective_problem(self) -> str | None:
        """Reason why layers cannot keep some of their results for backward
        (``train.gradient_checkpointing: selective``). None if they can."""
        return None

    @abstractmethod
    def implementation(self, *, grouped: bool) -> str:
        """Return ``module:class`` of the engine. ``grouped``: its ranks have a process group."""

    @abstractmethod
    def memory_profile(self, *, ranks: int) -> str:
        """Return ``module:class`` of the engine's memory profile, for the planner. ``ranks``: ranks
        with different rows."""

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        """Yield an error for each number format that the engine does not support."""
        yield from ()


class TorchEngine(Node, TrainEngineFacts):
    """Plain PyTorch, on CPU or one GPU per rank: in the job's process, or on Ray in each rank's
    worker."""

    kind: Literal["torch"] = "torch"
    device: str = "auto"
    """``auto`` (CUDA if available, else CPU), or a torch device such as ``cpu`` or ``cuda:1``."""
    sharding: Literal["none", "full"] = "none"
    """none: replicas. full: each rank holds a shard of the weights, gradients and optimizer state
    (FSDP2); layers are gathered for computation. A single rank is never sharded."""
    reshard_after_forward: bool = True
    """sharding=full: free a layer's gathered weights after forward and gather them again for
    backward. False: keep them (a third less traffic, but memory for the entire model in the compute
    format)."""
    reduce_gradients: Literal["every_pass", "once"] = "every_pass"
    """sharding=full: sum gradients over ranks after each micro-batch (every_pass; a rank then holds
    its shard), or after a batch's last one (once; least traffic, but each rank holds an fp32
    gradient of the entire model)."""
    cpu_offload: bool = False
    """sharding=full: keep weights, gradients and optimizer state in CPU memory, and step there."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Consecutive ranks that compute the same rows, each a contiguous part of the tokens; attention
    exchanges tokens for heads (Ulysses). Must divide ranks and attention heads. 1: off."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Consecutive ranks that compute the same rows, each with part of every layer's heads and inner
    width. Must divide ranks, attention heads and key/value heads. 1: off."""

    @property
    def ranks_per_row(self) -> int:
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def shards_weights(self) -> bool:
        return self.sharding == "full"

    @property
    def shares_weights(self) -> bool:
        return self.tensor_parallel_size == 1  # a single process has one rank: never sharded

    @property
    def offloads_optimizer(self) -> bool:
        return self.cpu_offload

    @property
    def lora_problem(self) -> str | None:
        if self.tensor_parallel_size == 1:
            return None
        return (
            f"train.engine.tensor_parallel_size={self.tensor_parallel_size}: 4-bit blocks, norms "
            "of weights and saved modules are not split over the ranks of a layer; use "
            "tensor_parallel_size=1 with train.engine.sharding=full"
        )

    @property
    def compile_problem(self) -> str | None:
        if self.tensor_parallel_size == 1:
            return None
        return (
            f"train.engine.tensor_parallel_size={self.tensor_parallel_size}: ranks add their parts "
            "of a layer inside it, in code that is not compiled"
        )

    @property
    def keeps_weights_on_host(self) -> str | None:
        return "train.engine.cpu_offload=true" if self.cpu_offload else None

    @property
    def waits_by(self) -> str | None:
        if self.sharding == "full":
            return "train.engine.sharding=full"
        return self.parallel_setting if self.ranks_per_row > 1 else None

    @property
    def saves_own_shards(self) -> bool:
        return self.sharding == "full"

    def implementation(self, *, grouped: bool) -> str:
        if self.sharding == "full" and grouped:
            return "burnish.train.fsdp.engine:ShardedTrainEngine"
        return "burnish.train.torch.engine:TorchTrainEngine"

    def memory_profile(self, *, ranks: int) -> str:
        sharded = self.sharding == "full" and ranks > 1
        return "burnish.plan.torch_profile:" + ("ShardedProfile" if sharded else "ReplicaProfile")

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        if self.sharding == "full" and precision.grad_accum_dtype != "fp32":
            yield (
                f"precision.grad_accum_dtype={precision.grad_accum_dtype} with "
                "train.engine.sharding=full: sharded gradients are accumulated in fp32 (each "
                "rank has only its shard); use fp32"
            )

    @property
    def parallel_setting(self) -> str:
        tensor = self.tensor_parallel_size > 1
        name = "tensor_parallel_size" if tensor else "sequence_parallel_size"
        return f"train.engine.{name}={self.ranks_per_row}"

    @property
    def parallel_problem(self) -> str | None:
        """Reason why ranks cannot compute rows together with these settings, or None if they
        can."""
        if self.sequence_parallel_size == 1 or self.tensor_parallel_size == 1:
            return None
        return (
            f"sequence_parallel_size={self.sequence_parallel_size} with "
            f"tensor_parallel_size={self.tensor_parallel_size}: both split the heads over the "
            "ranks that compute a row, and their combination is not implemented; use one of the "
            "two (sequence_parallel_size with sharding=full for long rows, tensor_parallel_size "
            "for wide layers)"
        )

    def rules(self) -> Iterator[str]:
        if self.parallel_problem is not None:
            yield self.parallel_problem
        if self.sharding == "none":
            for name in ("reshard_after_forward", "reduce_gradients", "cpu_offload"):
                if self.model_dump()[name] != type(self).model_fields[name].default:
                    yield (
                        f"{name} applies only to a sharded model; remove it, or use sharding=full"
                    )


class DeepSpeedEngine(Node, TrainEngineFacts):
    """DeepSpeed ZeRO over data-parallel ranks: sharded state, gradients and weights (extra
    ``deepspeed``)."""

    kind: Literal["deepspeed"] = "deepspeed"
    device: Literal["auto"] = "auto"
    """DeepSpeed selects it; the environment variable ``DS_ACCELERATOR`` (cpu, cuda) overrides
    it."""
    zero_stage: int = Field(2, ge=0, le=3)
    """Sharded state. 0: none. 1: master weights and moments. 2: also gradients. 3: also weights."""
    adam_offload: bool = False
    """Keep master weights and moments in host memory and step there (stages 1 to 3)."""
    param_offload: bool = False
    """Keep this rank's shard of the weights in host memory (stage 3)."""
    zero_init: bool = False
    """Shard weights while reading files; no rank ever holds the entire model (stage 3; models with
    a ``path``)."""
    zero_hpz_partition_size: int = Field(1, ge=1)
    """ZeRO++: second shard of the weights in groups of this many ranks (a node's GPUs), so backward
    gathers within the node (stage 3). 1: none."""
    param_persistence_threshold: int = Field(100_000, ge=0)
    """Stage 3: weights with fewer entries than this are not sharded."""
    reduce_bucket_size: int = Field(50_000_000, ge=1)
    """Gradient entries per communication; buffers of this size are allocated."""

    own_updates: ClassVar[tuple[str, ...] | None] = ("adamw", "muon")

    @property
    def tensor_parallel_size(self) -> int:
        """Return 1: layers are not split over ranks."""
        return 1

    @property
    def sequence_parallel_size(self) -> int:
        """Return 1: rows are not split over ranks."""
        return 1

    @property
    def shards_weights(self) -> bool:
        return self.zero_stage == 3

    @property
    def shares_weights(self) -> bool:
        return self.zero_stage < 3  # stage 3 shards the weights even on one rank

    @property
    def offloads_optimizer(self) -> bool:
        return self.adam_offload

    @property
    def lora_problem(self) -> str | None:
        return (
            f"train.engine.kind=deepspeed (zero_stage={self.zero_stage}): ZeRO flattens and casts "
            "all parameters of a layer, also 4-bit codes, and stage 3 splits them, so only plain "
            "adapters on inner layers are exact; use train.engine.kind=torch, which shards with "
            "train.engine.sharding=full"
        )

    @property
    def compile_problem(self) -> str | None:
        return (
            "train.engine.kind=deepspeed: ZeRO gathers weights by hooks inside of layers, which "
            "compiled layers do not call"
        )

    @property
    def selective_problem(self) -> str | None:
        if self.zero_stage < 3:
            return None
        return (
            "train.engine.zero_stage=3: DeepSpeed gathers weights inside of layers, elsewhere "
            "in backward than in forward"
        )

    @property
    def keeps_weights_on_host(self) -> str | None:
        return "train.engine.param_offload=true" if self.param_offload else None

    @property
    def waits_by(self) -> str | None:
        return "train.engine.kind=deepspeed"

    @property
    def saves_first(self) -> str:
        return (
            "train.engine.kind=deepspeed: the ranks gather every tensor for rank 0, which writes, "
            "and these collectives cannot overlap with those of training"
        )

    def implementation(self, *, grouped: bool) -> str:
        return "burnish.train.deepspeed.engine:DeepSpeedTrainEngine"

    def memory_profile(self, *, ranks: int) -> str:
        return "burnish.plan.deepspeed_profile:DeepSpeedProfile"

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        if self.zero_stage == 0 and precision.dtype == "fp16":
            yield (
                "train.engine.zero_stage=0 with precision.dtype=fp16: DeepSpeed then ignores "
                "hysteresis and the minimum of the loss scale, and does not multiply the loss by "
                "it; use zero_stage=1 (the same memory on one rank), or dtype=bf16"
            )
        elif self.zero_stage == 0 and precision.dtype != precision.grad_accum_dtype:
            yield (
                f"train.engine.zero_stage=0 with precision.dtype={precision.dtype}: DeepSpeed "
                f"then accumulates gradients only in {precision.dtype}; use zero_stage=1 (the "
                f"same memory on one rank), or precision.grad_accum_dtype={precision.dtype}"
            )
        if precision.dtype == "fp16" and precision.fp16.min_loss_scale % 1:
            yield (
                f"precision.fp16.min_loss_scale={precision.fp16.min_loss_scale:g}: DeepSpeed "
                "accepts only whole numbers; use 1 or more"
            )

    def rules(self) -> Iterator[str]:
        if self.adam_offload and self.zero_stage == 0:
            yield (
                "adam_offload offloads shards of the optimizer, but zero_stage=0 has none; "
                "use zero_stage 1 to 3"
            )
        for name in ("param_offload", "zero_init"):
            if self.model_dump()[name] and self.zero_stage != 3:
                yield (
                    f"{name} applies to shards of the weights, but zero_stage={self.zero_stage} "
                    "replicates them; use zero_stage=3"
                )
        if self.zero_hpz_partition_size > 1 and self.zero_stage != 3:
            yield (
                f"zero_hpz_partition_size={self.zero_hpz_partition_size} adds a second shard of "
                f"the weights, but zero_stage={self.zero_stage} replicates them; use zero_stage=3"
            )


# The registry of train engines: one line each.
TrainEngineConfig = Annotated[
    Annotated[TorchEngine | DeepSpeedEngine, Field(discriminator="kind")],
    named_kind("torch"),
]

"""The options of each train engine, and the facts about it that checks, plans and runtimes need.

To add an engine: a class here with its options and facts, its name in :data:`TrainEngineConfig`,
the engine itself (``train/engine.py`` lists the hooks), its memory profile
(``plan/model_state.py``), and one line in ``tests/contract/pools.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node
from burnish.config.model import PrecisionConfig


class TrainEngineFacts(ABC):
    """Facts about a train engine that follow from its options. The defaults are those of
    replicas."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same rows together."""
        return 1

    @property
    def shards_weights(self) -> bool:
        """Return whether each of several ranks holds a part of every weight."""
        return False

    @property
    def shares_weights(self) -> bool:
        """Return whether another engine in the same process can run the model as it is."""
        return True

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether masters and moments are in host memory."""
        return False

    @property
    def parallel_setting(self) -> str:
        """The setting by which ranks compute the same rows, as it is written."""
        return "train.engine.kind"

    @property
    def waits_by(self) -> str | None:
        """The setting by which ranks wait for each other in every pass; None: they do not. If they
        do not, a pass can be repeated, and it returns the outputs of routers."""
        return None

    @property
    def saves_own_shards(self) -> bool:
        """Return whether each rank writes its own part of a checkpoint."""
        return False

    @abstractmethod
    def implementation(self, *, grouped: bool) -> str:
        """``module:class`` of the engine. ``grouped``: its ranks have a process group."""

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        """One sentence for each number format that the engine cannot keep to."""
        yield from ()


class TorchEngine(Node, TrainEngineFacts):
    """Plain PyTorch, on CPU or one GPU per rank: in the process of the job, or on Ray in each
    rank's worker."""

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
    sequence_parallel_size: int = Field(1, ge=1)
    """This many consecutive ranks compute the same rows, each a stretch of their tokens; around
    attention tokens are exchanged for heads (Ulysses). It must divide the ranks and the model's
    attention heads. 1: a rank computes whole rows."""

    tensor_parallel_size: int = Field(1, ge=1)
    """This many consecutive ranks compute the same rows, each with its part of every layer's heads
    and inner width. It must divide the ranks and the model's attention and key/value heads. 1: a
    layer is whole."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that compute the same rows together."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def shards_weights(self) -> bool:
        """Return whether each of several ranks holds a part of every weight."""
        return self.sharding == "full"

    @property
    def shares_weights(self) -> bool:
        """Return whether another engine in the same process can run the model as it is. (One
        process has one rank, whose model is not in shards.)"""
        return self.tensor_parallel_size == 1

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether masters and moments are in host memory."""
        return self.cpu_offload

    @property
    def waits_by(self) -> str | None:
        """The setting by which ranks wait for each other in every pass; None: they do not."""
        if self.sharding == "full":
            return "train.engine.sharding=full"
        return self.parallel_setting if self.ranks_per_row > 1 else None

    @property
    def saves_own_shards(self) -> bool:
        """Return whether each rank writes its own part of a checkpoint."""
        return self.sharding == "full"

    def implementation(self, *, grouped: bool) -> str:
        """``module:class`` of the engine. ``grouped``: its ranks have a process group."""
        if self.sharding == "full" and grouped:
            return "burnish.train.fsdp:ShardedTrainEngine"
        return "burnish.train.torch:TorchTrainEngine"

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        """One sentence for each number format that the engine cannot keep to."""
        if self.sharding == "full" and precision.grad_accum_dtype != "fp32":
            yield (
                f"precision.grad_accum_dtype={precision.grad_accum_dtype} with "
                "train.engine.sharding=full: sharded gradients add up in fp32 (each rank holds its "
                "part of them only); use fp32"
            )

    @property
    def parallel_setting(self) -> str:
        """The setting by which ranks compute the same rows, as it is written."""
        tensor = self.tensor_parallel_size > 1
        name = "tensor_parallel_size" if tensor else "sequence_parallel_size"
        return f"train.engine.{name}={self.ranks_per_row}"

    @property
    def parallel_problem(self) -> str | None:
        """Why ranks cannot compute rows together in this way; None: they can."""
        if self.sequence_parallel_size == 1 or self.tensor_parallel_size == 1:
            return None
        return (
            f"sequence_parallel_size={self.sequence_parallel_size} with tensor_parallel_size="
            f"{self.tensor_parallel_size}: both share the heads among the ranks that compute a "
            "row, and sharing them twice is not there; use one of the two (sequence_parallel_"
            "size with sharding=full for long rows, tensor_parallel_size for wide layers)"
        )

    def rules(self) -> Iterator[str]:
        if self.parallel_problem is not None:
            yield self.parallel_problem
        if self.sharding == "none":
            for name in ("reshard_after_forward", "reduce_gradients", "cpu_offload"):
                if self.model_dump()[name] != type(self).model_fields[name].default:
                    yield f"{name} acts on a sharded model only; remove it, or use sharding=full"


class DeepSpeedEngine(Node, TrainEngineFacts):
    """DeepSpeed's ZeRO over data-parallel ranks: state, gradients and weights in shards (extra
    ``deepspeed``)."""

    kind: Literal["deepspeed"] = "deepspeed"
    device: Literal["auto"] = "auto"
    """DeepSpeed finds its accelerator itself; the environment variable ``DS_ACCELERATOR`` (cpu,
    cuda) overrules it."""
    zero_stage: int = Field(2, ge=0, le=3)
    """What is cut into shards. 0: nothing. 1: masters and moments. 2: gradients too. 3: weights
    too."""
    adam_offload: bool = False
    """Keep masters and moments in host memory and step there (stages 1 to 3)."""
    param_offload: bool = False
    """Keep this rank's shard of the weights in host memory (stage 3)."""
    zero_init: bool = False
    """Cut weights into shards while they are read from files, so that no rank ever holds the whole
    model (stage 3; models with a ``path``)."""
    zero_hpz_partition_size: int = Field(1, ge=1)
    """ZeRO++: keep a second shard of the weights within groups of this many ranks (the GPUs of a
    node), so that backward gathers inside the node (stage 3). 1: none."""
    param_persistence_threshold: int = Field(100_000, ge=0)
    """Stage 3: weights of fewer entries than this stay whole on every rank."""
    reduce_bucket_size: int = Field(50_000_000, ge=1)
    """Gradient entries that are sent at one time; buffers of this size are held."""

    @property
    def tensor_parallel_size(self) -> int:
        """A layer is whole."""
        return 1

    @property
    def sequence_parallel_size(self) -> int:
        """A rank computes whole rows."""
        return 1

    @property
    def shards_weights(self) -> bool:
        """Return whether each rank holds a part of every weight."""
        return self.zero_stage == 3

    @property
    def shares_weights(self) -> bool:
        """Return whether another engine in the same process can run the model as it is. (Stage 3
        has its weights in shards even on one rank.)"""
        return self.zero_stage < 3

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether masters and moments are in host memory."""
        return self.adam_offload

    @property
    def waits_by(self) -> str | None:
        """The setting by which ranks wait for each other in every pass."""
        return "train.engine.kind=deepspeed"

    def implementation(self, *, grouped: bool) -> str:
        """``module:class`` of the engine."""
        return "burnish.train.deepspeed:DeepSpeedTrainEngine"

    def precision_rules(self, precision: PrecisionConfig) -> Iterator[str]:
        """One sentence for each number format that the engine cannot keep to."""
        if self.zero_stage == 0 and precision.dtype == "fp16":
            yield (
                "train.engine.zero_stage=0 with precision.dtype=fp16: there DeepSpeed ignores "
                "hysteresis and the floor of the loss scale, and does not multiply the loss by it; "
                "use zero_stage=1 (the same memory on one rank), or dtype=bf16"
            )
        elif self.zero_stage == 0 and precision.dtype != precision.grad_accum_dtype:
            yield (
                f"train.engine.zero_stage=0 with precision.dtype={precision.dtype}: there "
                f"DeepSpeed adds gradients up in {precision.dtype} only; use zero_stage=1 (the "
                "same memory on one rank), or "
                f"precision.grad_accum_dtype={precision.dtype}"
            )
        if precision.dtype == "fp16" and precision.min_loss_scale % 1:
            yield (
                f"precision.min_loss_scale={precision.min_loss_scale:g}: DeepSpeed takes whole "
                "numbers only; use 1 or more"
            )

    def rules(self) -> Iterator[str]:
        if self.adam_offload and self.zero_stage == 0:
            yield (
                "adam_offload moves shards of the optimizer, and zero_stage=0 has none; use 1 to 3"
            )
        for name in ("param_offload", "zero_init"):
            if self.model_dump()[name] and self.zero_stage != 3:
                yield (
                    f"{name} is about shards of the weights, and zero_stage={self.zero_stage} "
                    "keeps them whole; use zero_stage=3"
                )
        if self.zero_hpz_partition_size > 1 and self.zero_stage != 3:
            yield (
                f"zero_hpz_partition_size={self.zero_hpz_partition_size} keeps a second shard of "
                f"the weights, and zero_stage={self.zero_stage} keeps them whole; use zero_stage=3"
            )


def _torch_unless_named(value: Any) -> Any:
    """``engine: deepspeed`` is short for its defaults; without a kind it is the torch engine."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "torch", **value} if isinstance(value, dict) else value


# The registry of train engines: one line each.
TrainEngineConfig = Annotated[
    Annotated[TorchEngine | DeepSpeedEngine, Field(discriminator="kind")],
    BeforeValidator(_torch_unless_named),
]

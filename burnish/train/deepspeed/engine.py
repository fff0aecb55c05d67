"""DeepSpeed train engine: ZeRO stages 0 to 3. The only module that imports deepspeed.

DeepSpeed implements sharding, gathering, reduction over ranks, the loss scale, clipping and
offload. The template (``engine.py``) implements micro-batches, the learning rate, step counts and
checkpoints. A run therefore gives the same numbers as with other engines, and its checkpoints can
be loaded by another engine.

Reading order: ``_prepare``, ``zero.ZeroOptimizer``. docs/engines.md maps recipe keys to
DeepSpeed's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor

from burnish.checkpoint.save import FinishedSave, PendingSave
from burnish.config.model import Dtype
from burnish.config.train_engines import DeepSpeedEngine
from burnish.distributed.process_group import RankGroup
from burnish.errors import BurnishError
from burnish.models.buffers import persistent_buffers
from burnish.models.checks import check_compute_dtype, check_head
from burnish.models.islands import require_one_dtype, with_islands
from burnish.models.load import DTYPES, describe
from burnish.models.lora_layers import merged_weights
from burnish.train.base import Loss, Outputs
from burnish.train.deepspeed.zero import (
    WEIGHT_BUCKET_BYTES,
    ZeroAdamW,
    ZeroOptimizer,
    buckets,
    buffers_of,
    ds_config,
    forget_ended_groups,
    is_partitioned,
    shards_of,
    zero_section,
)
from burnish.train.diagnose import BadTensor
from burnish.train.engine import BaseTrainEngine, Describe
from burnish.train.forward import BatchForward, zero_of
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

OLDEST = Version("0.19.8")


class DeepSpeedError(BurnishError, RuntimeError):
    """DeepSpeed is missing, has an unsupported version, or does not support the requested
    setting."""


class DeepSpeedTrainEngine(BaseTrainEngine):
    """A train engine for one model in one role, with its state in ZeRO shards over ``ranks``.

    Gradients use the global denominators. DeepSpeed averages over ranks, so :class:`ZeroOptimizer`
    first multiplies the loss by the number of ranks.
    """

    optimizer: ZeroOptimizer | None
    engine: Any = None
    """DeepSpeed's engine; None if the engine is frozen and not sharded (stages 0 to 2)."""
    waits_in_backward = True

    @classmethod
    def loads_on_host(cls, spec: EngineSpec) -> bool:
        """Return True: the full fp32 weights could exceed a GPU that fits the shards."""
        return True

    @classmethod
    @contextmanager
    def loading(cls, spec: EngineSpec, dtype: Dtype, ranks: RankGroup) -> Iterator[None]:
        """Shard weights while transformers reads them, if ``zero_init`` is set."""
        options = cast(DeepSpeedEngine, spec.role.train.engine)
        if not options.zero_init:
            yield
            return
        library = _deepspeed()
        _join(library, ranks)
        on_gpu = torch.device(_accelerator(library).current_device_name()).type != "cpu"
        from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero_section(options, on_gpu=on_gpu),
            **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        }
        keep = HfDeepSpeedConfig(config)  # transformers keeps a weak reference
        try:
            yield
        finally:
            del keep
            unset_hf_deepspeed_config()

    @property
    def options(self) -> DeepSpeedEngine:
        """``train.engine`` of the recipe."""
        return cast(DeepSpeedEngine, self.spec.role.train.engine)

    # ---- setup -----------------------------------------------------------------------------

    def _start_backend(self, device: torch.device | None) -> torch.device:
        """Initialize DeepSpeed and return the device that it selects. Raises DeepSpeedError if the
        precision settings are not supported."""
        for problem in self.options.precision_rules(self.spec.role.precision):
            raise DeepSpeedError(problem)
        self._library = _deepspeed()
        _join(self._library, self.ranks)
        self.waits_in_forward = self.options.zero_stage == 3
        return torch.device(_accelerator(self._library).current_device_name())

    def _prepare(self) -> ZeroOptimizer | None:
        """Cast the model, initialize DeepSpeed with it, and copy the unrounded weights to its
        masters."""
        module = BatchForward(self.model, self.forward)
        masters, spec = self._cast(), self.spec
        adamw = ZeroAdamW(self.model, spec) if spec.role.trainable else None
        if spec.role.trainable or self.options.zero_stage == 3:
            with _on_this_machine(self._library):
                config = ds_config(spec, on_gpu=self.device.type != "cpu")
                self.engine, *_ = self._library.initialize(
                    model=module, optimizer=adamw, config=config
                )
        else:
            module.to(self.device)
        self._module = module
        self._run: Callable[..., tuple[Tensor, ...]] = self.engine or module
        if adamw is None:
            return None
        return ZeroOptimizer(
            self.model, self.engine, adamw, spec=spec, ranks=self.ranks, masters=masters
        )

    def _cast(self) -> dict[str, Tensor]:
        """Move weights to the device in the compute dtype; return the trained ones in fp32 if that
        dtype differs.

        Returned weights are full, or this rank's shard if the model was loaded in shards.
        """
        dtype, masters = DTYPES[self.spec.role.precision.dtype], {}
        require_one_dtype(self.model, dtype, "train.engine.kind=deepspeed")
        for name, parameter in self.model.named_parameters():
            held = [parameter, *shards_of(parameter)]
            if parameter.requires_grad and dtype != torch.float32:
                masters[name] = held[-1].detach().float()
            if is_partitioned(parameter):  # DeepSpeed places its shards
                for tensor in held:
                    tensor.data = tensor.data.to(dtype)
            else:
                parameter.data = parameter.data.to(self.device, dtype)
        return masters

    def _check_model(self) -> None:
        """Run the checks that loading could not, because the weights were in shards."""
        check_compute_dtype(
            self.body, describe(self.spec.role.model), backward=self.spec.role.trainable
        )
        if self.options.zero_stage == 3 and not self.scalar:
            check_head(self.model, describe(self.spec.role.model))

    # ---- computing -------------------------------------------------------------------------

    def _outputs(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        outputs = self._run(batch, with_entropy=with_entropy)
        if not self.forward.routes:
            return self.forward.named(outputs)
        *rest, logits, chosen = outputs  # the last fields of the outputs
        named = self.forward.named(tuple(rest))
        return replace(named, router_logits=logits, chosen_experts=chosen)

    def _states(self, batch: Batch) -> Tensor:
        return self._run(batch, states=True)[0]

    def _micro_loss(self, batch: Batch, rows: list[int], loss: Loss) -> tuple[Tensor, Stats]:
        """Compute the loss; make it depend on every output if ranks need equal traces (stage 3) or
        it has no gradient."""

        def with_all_outputs(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
            scalar, stats = loss(outputs, batch)
            alike = self.options.zero_stage < 3 and scalar.requires_grad
            return (scalar if alike else scalar + zero_of(outputs)), stats

        return super()._micro_loss(batch, rows, with_all_outputs)

    def _find_bad(self, compute: Callable[[], Tensor], *, together: bool) -> BadTensor | None:
        """Repeat a pass outside DeepSpeed's own forward, which requires DeepSpeed's own
        backward."""
        self._run = self._module
        try:
            return super()._find_bad(compute, together=together)
        finally:
            self._run = self.engine

    # ---- weights and state -----------------------------------------------------------------

    def _held_tensors(self) -> Iterable[Tensor]:
        """Return weights, their shards, and all buffers of DeepSpeed's optimizer, which include
        gradients. (DeepSpeed's own ``offload_states`` requires its fused Adam at stage 3 and an
        optimizer at every stage.)"""
        tensors = [*super()._held_tensors()]
        tensors += [shard for p in self.model.parameters() for shard in shards_of(p)]
        return tensors if self.engine is None else [*tensors, *buffers_of(self.engine.optimizer)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, full tensor) in the compute dtype, LoRA merged. All ranks take
        part.

        Stage 3 gathers one bucket of weights at a time. A tensor is valid until the next one is
        requested.
        """
        self.reload()
        if self.options.zero_stage < 3:
            yield from with_islands(merged_weights(self.model), self._fp32_in_sampler())
            return
        for bucket in buckets(self.model, WEIGHT_BUCKET_BYTES):
            with self._library.zero.GatheredParameters(list(bucket.values())):
                merged = merged_weights(self.model, only=bucket.keys())
                yield from with_islands(merged, self._fp32_in_sampler())
        yield from persistent_buffers(self.model)

    def _write(self, folder: Path, describe: Describe, *, copy: bool) -> PendingSave:
        """Write synchronously; rank 0 writes for all ranks."""
        assert self.optimizer is not None
        self.optimizer.state.save(folder, partial(describe, folder))
        return FinishedSave()


# ---- the library ---------------------------------------------------------------------------


def _deepspeed() -> Any:
    """Return the package. Raises DeepSpeedError if it is missing or has an unsupported version."""
    try:
        import deepspeed
    except ImportError as error:
        raise DeepSpeedError(
            f"train.engine.kind=deepspeed needs the package deepspeed, and importing it failed "
            f"({error}); install it with: pip install 'burnish[deepspeed]', or use "
            "train.engine.kind=torch"
        ) from None
    check_version(deepspeed.__version__)
    import deepspeed.accelerator
    import deepspeed.comm.torch

    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _accelerator(library: Any) -> Any:
    return library.accelerator.get_accelerator()


def check_version(version: str) -> None:
    """Raise DeepSpeedError for a DeepSpeed version with wrong results or excessive memory use."""
    installed = Version(version)
    if Version("0.16.0") <= installed < Version("0.16.8"):
        raise DeepSpeedError(
            f"DeepSpeed {version} does not release gathered weights under ZeRO-3 with gradient "
            "checkpointing (0.16.0 to 0.16.7: pull request 6726, reverted by 7258), so memory "
            f"grows with the depth of the model; install {OLDEST} or newer, or use "
            "train.engine.kind=torch"
        )
    if installed < OLDEST:
        raise DeepSpeedError(
            f"DeepSpeed {version} does not check gradients in fp32 and bf16 at stage 3, so one "
            f"step with a non-finite gradient destroys the weights; install {OLDEST} or newer, or "
            "use train.engine.kind=torch"
        )


def _join(library: Any, ranks: RankGroup) -> None:
    """Initialize DeepSpeed's communication on the existing process group.

    Creates a group of one process if none exists and there is one rank. Raises DeepSpeedError if
    the group and ``ranks`` differ in size.
    """
    accelerator = _accelerator(library)
    if not torch.distributed.is_initialized() and ranks.size == 1:
        backend = accelerator.communication_backend_name()
        torch.distributed.init_process_group(
            "gloo" if accelerator.device_name() == "cpu" else backend,
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    if world != ranks.size:
        raise DeepSpeedError(
            f"this engine has {ranks.size} ranks but torch.distributed has {world}: DeepSpeed "
            "uses the entire process group; start as many processes as the engine has ranks"
        )
    forget_ended_groups(library)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it; launchers set it
    with _on_this_machine(library):
        library.init_distributed(verbose=False)


@contextmanager
def _on_this_machine(library: Any) -> Iterator[None]:
    """Return a context manager that disables two of DeepSpeed's actions on a CPU.

    First, DeepSpeed builds a C++ extension for shared memory at startup, which takes about 40 s and
    needs a compiler. Training does not need it. Second, DeepSpeed rejects fp16 if oneDNN has no
    fp16 products. Burnish computes them through fp32 (``models/half_linear.py``).
    """
    accelerator = _accelerator(library)
    module: Any = sys.modules["deepspeed.comm.torch"]
    if accelerator.device_name() != "cpu" or "build_shm_op" not in vars(module):
        yield
        return
    build, supported = module.build_shm_op, accelerator.is_fp16_supported
    module.build_shm_op, accelerator.is_fp16_supported = lambda: None, lambda: True
    try:
        yield
    finally:
        module.build_shm_op, accelerator.is_fp16_supported = build, supported

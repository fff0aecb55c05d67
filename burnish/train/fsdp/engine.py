"""Torch train engine with its model sharded over ranks (FSDP2,
``torch.distributed.fsdp.fully_shard``).

Every rank holds its rows of each weight, gradient and moment. A layer's weights are gathered when
the layer is computed. All other behavior is inherited from :class:`TorchTrainEngine`. Reading
order: ``ShardedTrainEngine._prepare`` -> ``_outputs`` -> ``_backward_passes`` ->
``sharded_state.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks, new_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import RankGroup
from burnish.models.buffers import persistent_buffers
from burnish.models.checks import check_head, raise_if_lacking, raise_overflow
from burnish.models.empty import fill_rows
from burnish.models.islands import require_one_dtype, with_islands
from burnish.models.load import DTYPES, describe
from burnish.models.lora_layers import adapted_layers, merged_weights
from burnish.models.nf4 import packed_names, quantized_layers
from burnish.models.tensor_files import Rows
from burnish.models.units import gathered_modules
from burnish.train.base import Outputs
from burnish.train.batching import Share
from burnish.train.diagnose import BadTensor, first_bad_tensor
from burnish.train.engine import Describe
from burnish.train.forward import NO_ROWS
from burnish.train.fsdp.sharded_state import BackgroundSave, ShardedOptimizer, local, own_rows
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

log = logging.getLogger("burnish")

T = TypeVar("T")


class _Within(nn.Module):
    """Module that runs any function as its own forward pass.

    FSDP2 gathers a module's weights in its forward. The log-prob head, which reads the output
    projection's weight (tied or not), and the value head are computed here in addition to the body.
    Inside this forward the weights that belong to no layer are gathered, and their gradients are
    stored where FSDP2 expects them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class ShardedTrainEngine(TorchTrainEngine):
    """A train engine for one model in one role, sharded over ``ranks``. It needs a process group;
    one rank is enough.

    The model may have its weights, the same on all ranks, or be empty (``empty=True`` at load). If
    it is empty, each rank reads its own rows.
    """

    waits_in_forward = waits_in_backward = True
    optimizer_class = ShardedOptimizer

    @classmethod
    def loads_on_host(cls, spec: EngineSpec) -> bool:
        """Return whether the engine offloads to the CPU; its fp32 weights may be larger than a
        GPU."""
        return cast(TorchEngine, spec.role.train.engine).cpu_offload

    @classmethod
    def reads_own_shards(cls, ranks: RankGroup) -> bool:
        """Return whether there are several ranks; each then reads its own rows."""
        return ranks.size > 1

    # ---- sharding --------------------------------------------------------------------------

    def _place(self) -> None:
        dtype = DTYPES[self.spec.role.precision.dtype]
        require_one_dtype(self.model, dtype, "train.engine.sharding=full")
        self._pending: BackgroundSave | None = None
        self._save_group: ProcessGroup | None = None
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # the masters
                parameter.data = parameter.data.float()
        for layer in quantized_layers(self.model).values():
            layer.store_as(DTYPES[self.spec.role.precision.dtype])
        empty = {n for n, p in self.model.named_parameters() if p.is_meta}
        self._was_empty = bool(empty)
        self.root = _Within(self.model)
        self.units = self._shard()
        self._names = _names_of_units(self.model, self.units)
        if empty:
            self._fill(empty)

    def _shard(self) -> list[FSDPModule]:
        """Shard the model; return the modules that are gathered as one unit, the root last.

        Each decoder layer is a unit. The embedding is a unit if no other module reads its weight.
        The root contains the rest: final norm, output projection or value head, and tied
        embeddings. It stays gathered from forward to backward, which needs it first.
        """
        engine = self.options
        group = self.ranks.group if self.tp_plan is None else self.data_parallel.group
        assert group is not None, "a sharded model needs a process group"
        dtype = DTYPES[self.spec.role.precision.dtype]
        on_gpu = self.device.type != "cpu"
        shard = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(group, self.device.type),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # they already have the compute dtype
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=on_gpu)
            if engine.cpu_offload
            else OffloadPolicy(),
        )
        tied = _is_tied(self.model, self.body.get_input_embeddings())
        gathered = gathered_modules(self.body, tied=tied)
        if not any(part.kind == "layer" for part in gathered):
            log.warning(
                "%s declares no layers that can be gathered separately, so every rank gathers the "
                "full model in each pass",
                type(self.body).__name__,
            )
        units = []
        for part in gathered:
            units.append(shard(part.module, reshard_after_forward=engine.reshard_after_forward))
            plain = "" not in adapted_layers(part.module)
            if part.kind == "embedding" and plain:  # its gradient does not depend on it
                units[-1].set_unshard_in_backward(False)
        units.append(shard(self.root))
        for unit in units:  # losses divide by global counts: gradients are summed, not averaged
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return units

    def _fill(self, empty: set[str]) -> None:
        """Allocate memory for this rank's rows of the parameters named in ``empty``, and read those
        rows."""
        home = torch.device("cpu") if self.options.cpu_offload else self.device

        def with_memory(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor

        self.root._apply(with_memory)
        fill_rows(
            {
                name: (local(parameter), self._own_rows(name, parameter))
                for name, parameter in self.model.named_parameters()
                if name in empty
            },
            self.spec.role.model,
            keep=self._own_columns,
        )

    def _own_part(self, name: str, parameter: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        rows = full[slice(*self._own_rows(name, parameter))]
        return local(parameter), self._own_columns(name, rows)

    def _own_rows(self, name: str, parameter: Tensor) -> Rows:
        """Return the rows of a parameter that this rank holds."""
        rows = own_rows(parameter)
        return rows if self.tp_plan is None else self.tp_plan.rows(name, rows)

    def _own_columns(self, name: str, rows: Tensor) -> Tensor:
        """Return this rank's part of complete rows of a parameter."""
        return rows if self.tp_plan is None else self.tp_plan.own_part(name, rows)

    def _check_model(self) -> None:
        """Check the model with a pass over its shards. All ranks raise one rank's error."""
        name, dtype = describe(self.spec.role.model), DTYPES[self.spec.role.precision.dtype]
        codes = packed_names(self.model)
        named = self.model.named_parameters()
        parts = ((n, local(p).to(dtype)) for n, p in named if n not in codes)
        self._check_weights(parts, name)
        if self._was_empty and not self.scalar:
            with torch.no_grad():
                self.root(partial(check_head, self.model, name))
            self._end_passes()
        if dtype == torch.float32:
            return
        try:  # a pass over one row
            with torch.set_grad_enabled(self.spec.role.trainable):
                out = self._outputs(NO_ROWS.to(self.device), with_entropy=False)
                total = torch.stack([t.sum() for t in out.tensors() if t is not None]).sum()
                if self.spec.role.trainable:
                    total.backward()
        except (NotImplementedError, RuntimeError) as error:
            raise_if_lacking(error, self.body, name)
            raise
        if not bool(total.isfinite()):
            raise_overflow(dtype, name)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._end_passes()

    def _end_passes(self) -> None:
        """Free weights that remain gathered after a pass without backward."""
        for unit in self.units:
            unit.reshard()
        # Otherwise the list of modules run in such passes grows until the next backward.
        reset = getattr(self.root, "reset_iter_state", None)  # house: ok torch's, by its version
        if reset is not None:
            reset()
            return
        state: Any = cast(FSDPModule, self.root)._get_fsdp_state()  # before torch 2.13
        for group in state._comm_ctx.post_forward_order:
            group._post_forward_indices.clear()
        state._comm_ctx.post_forward_order.clear()

    # ---- computing -------------------------------------------------------------------------

    def _backward_passes(self, share: Share) -> Iterator[list[int]]:
        passes = list(super()._backward_passes(share))
        once = self.options.reduce_gradients == "once"
        for i, rows in enumerate(passes):
            cast(FSDPModule, self.root).set_requires_gradient_sync(not once or i + 1 == len(passes))
            yield rows

    def _outputs(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        """Compute outputs inside the root's forward, so that the weights outside layers are
        gathered."""

        def compute() -> tuple[Tensor | None, ...]:  # FSDP2 finds tensors in tuples
            return self.forward(batch, with_entropy=with_entropy).tensors()

        outputs = self.root(compute)
        return Outputs(*outputs)

    def _states(self, batch: Batch) -> Tensor:
        states: Tensor = self.root(partial(self.forward.states, batch))
        return states

    def _find_bad(self, compute: Callable[[], Tensor], *, together: bool) -> BadTensor | None:
        """Repeat a pass to completion on all ranks. A bad row of one rank is reported by all ranks
        that gather it."""
        assert self.optimizer is not None
        cast(FSDPModule, self.root).set_requires_gradient_sync(True)
        bad = first_bad_tensor(self.model, compute, units=cast(list[nn.Module], self.units))
        self.optimizer.zero_grad()
        return bad

    # ---- state -----------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, full tensor) in the compute dtype, LoRA merged, on every rank.

        Every rank must consume all tensors, in step with the other ranks. A layer is gathered when
        its first weight is requested and freed after its last. The tensors are copies that the
        caller owns.
        """
        self.reload()
        for unit in self.units:
            unit.unshard()
            try:
                merged = merged_weights(self.model, self._names[unit])
                for name, tensor in with_islands(merged, self._fp32_in_sampler()):
                    full = tensor
                    if self.tp_plan is not None:
                        full = self.tp_plan.unshard(name, tensor)
                    yield name, full.clone() if full is tensor else full
            finally:
                unit.reshard()
        yield from persistent_buffers(self.model)

    def _write(self, folder: Path, describe: Describe, *, copy: bool) -> BackgroundSave:
        """Write this rank's rows (``master-00001-of-00002.safetensors`` ...); rank 0 also writes
        the other files.

        ``copy``: the state is copied to CPU memory first and written while training continues. A
        previous save is awaited before this one starts, so at most one is running.
        """
        assert isinstance(self.optimizer, ShardedOptimizer)
        if self._save_group is None:
            # the same ranks with the same timeout, for saves only: a background thread uses it
            # while training communicates on the original group
            group = self.ranks.group
            assert group is not None
            self._save_group = new_group(
                get_process_group_ranks(group),
                backend="gloo",
                timeout=group._get_backend(torch.device(self.device.type)).options._timeout,
                use_local_synchronization=True,
            )
        if self._pending is not None:
            self._pending.join()
        folder.mkdir(parents=True, exist_ok=True)
        tensor_shards, finish = self.optimizer.tensor_shards(copy=copy), partial(describe, folder)
        self._pending = BackgroundSave(folder, tensor_shards, self._save_group, finish=finish)
        return self._pending


def _is_tied(model: nn.Module, embedding: nn.Module) -> bool:
    """Return whether another module of the model reads the embedding's weight."""
    inside = set(embedding.modules())
    return any(
        parameter is weight
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
        for weight in embedding.parameters()
    )


def _names_of_units(model: nn.Module, units: list[FSDPModule]) -> dict[FSDPModule, set[str]]:
    """Return the names of the parameters that each unit gathers."""
    left = {name for name, _ in model.named_parameters()}
    modules = {cast(FSDPModule, module): name for name, module in model.named_modules()}
    names: dict[FSDPModule, set[str]] = {}
    for unit in units:
        prefix = f"{modules[unit]}." if unit in modules else ""  # the root has the rest
        names[unit] = {name for name in left if name.startswith(prefix)}
        left -= names[unit]
    return names

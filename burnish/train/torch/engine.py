"""Torch train engine with one device per rank: plain PyTorch, and the reference for every other
engine.

Every rank holds all weights or, with ``tensor_parallel_size``, its part of each layer. Gradients
are summed over ranks once, in the step. Reading order: ``engine.py`` -> ``forward.py`` ->
``batching.py`` -> ``models/logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from burnish.checkpoint.save import FinishedSave, PendingSave
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import RankGroup
from burnish.distributed.tensor_parallel import TensorParallelPlan, apply_tensor_parallel
from burnish.models.checks import check_compute_dtype, check_weights
from burnish.models.islands import cast_parameters, with_islands
from burnish.models.load import DTYPES, ModelError, describe
from burnish.models.lora_layers import merged_weights
from burnish.models.nf4 import quantized_layers
from burnish.models.tensor_files import TensorShards, save_tensors, write_shards
from burnish.train.batching import MicroBatchBackoff
from burnish.train.engine import BaseTrainEngine, Describe
from burnish.train.forward import Forward
from burnish.train.optim import Optimizer
from burnish.train.state import write_together
from burnish.train.torch.sequence_parallel import make_forward, parallel_groups


class TorchTrainEngine(BaseTrainEngine):
    """A train engine for one model in one role on one device, with replicated weights.

    A group of ranks that compute the same rows (``sequence_parallel_size``,
    ``tensor_parallel_size``) counts as one rank when rows are split. Tensor-parallel groups also
    shard the weights.
    """

    optimizer: Optimizer | None
    optimizer_class = Optimizer

    @property
    def options(self) -> TorchEngine:
        """``train.engine`` of the recipe."""
        return cast(TorchEngine, self.spec.role.train.engine)

    # ---- setup -----------------------------------------------------------------------------

    def _groups(self) -> tuple[RankGroup, RankGroup]:
        return parallel_groups(self.options, self.ranks)

    def _make_forward(self) -> Forward:
        spec = self.spec
        return make_forward(
            self.model,
            spec.role.engine_role,
            spec.role.train,
            temperature=spec.temperature,
            model_parallel=self.model_parallel,
        )

    def _prepare(self) -> Optimizer | None:
        self.tp_plan: TensorParallelPlan | None = None
        if self.options.tensor_parallel_size > 1:
            self.tp_plan = apply_tensor_parallel(
                self.model, self.body, self.model_parallel, self.data_parallel
            )
        dtype = DTYPES[self.spec.role.precision.dtype]
        cast_parameters(self.model, dtype, only_frozen=True)  # the optimizer casts the others
        for layer in quantized_layers(self.model).values():
            layer.compute_dtype = dtype
        self._place()
        if not self.spec.role.trainable:
            return None
        spec = self.spec
        optimizer = self.optimizer_class(
            self.model,
            spec.role.train,
            lr=spec.role.lr or spec.role.train.lr,
            total_steps=spec.total_steps,
            precision=spec.role.precision,
            tp_plan=self.tp_plan,
            device=self.device,
        )
        if self.spec.role.train.on_oom == "retry_smaller":
            self.smaller = MicroBatchBackoff(self.forward.layout, forget=optimizer.zero_grad)
        return optimizer

    def _place(self) -> None:
        """Shard the weights, in engines that do so."""

    def _check_model(self) -> None:
        name = describe(self.spec.role.model)
        self._check_weights(self.model.named_parameters(), name)
        check_compute_dtype(self.body, name, backward=self.spec.role.trainable)

    def _check_weights(self, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Raise ModelError on all ranks if any rank has a weight that is not finite."""
        problem: str | None = None
        try:
            check_weights(weights, name)
        except ModelError as error:
            problem = str(error)
        problems = [text for text in self.ranks.gather(problem) if text is not None]
        if problems:
            raise ModelError(problems[0])

    # ---- weights and state -----------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, full tensor) in the compute dtype, LoRA merged, on every rank.
        The ranks of a tensor-parallel group must consume all tensors, in step."""
        self.reload()
        for name, tensor in with_islands(merged_weights(self.model), self._fp32_in_sampler()):
            yield name, tensor if self.tp_plan is None else self.tp_plan.unshard(name, tensor)

    def _own_part(self, name: str, parameter: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        if self.tp_plan is None:
            return parameter, full
        rows = full[slice(*self.tp_plan.rows(name, (0, parameter.shape[0])))]
        return parameter, self.tp_plan.own_part(name, rows)

    def _write(self, folder: Path, describe: Describe, *, copy: bool) -> PendingSave:
        """Write synchronously. Replicas are equal, so rank 0 writes. In a tensor-parallel group
        every rank writes its part."""
        assert self.optimizer is not None
        write = partial(self._write_whole, folder, self.optimizer, describe)
        if self.tp_plan is not None:
            tensor_shards, part = (
                self.optimizer.tensor_shards(copy=False),
                (self.model_parallel.rank, self.model_parallel.size),
            )
            parts = partial(self._write_parts, folder, tensor_shards, part)
            write_together(self.ranks, parts if self.data_parallel.rank == 0 else None)
            write = partial(describe, folder)
        write_together(self.ranks, write if self.ranks.rank == 0 else None)
        return FinishedSave()

    def _write_parts(
        self, folder: Path, tensor_shards: TensorShards, part: tuple[int, int]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(folder, tensor_shards, part)

    def _write_whole(self, folder: Path, optimizer: Optimizer, describe: Describe) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, tensors in optimizer.tensors().items():
            save_tensors(tensors, folder / f"{kind}.safetensors")
        describe(folder)

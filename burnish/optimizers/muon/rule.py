"""Muon over full or sharded matrices in decoder layers, and AdamW as the rule of the rest.

The momentum is a sum per entry, so it is sharded like the weight. The Newton-Schulz iterations need
the full matrix. Under FSDP2 and ZeRO the matrices are dealt to the ranks: each rank gathers its
matrix, computes the update, and scatters it. Under tensor parallelism the ranks of a group gather
the matrix and compute the same update. Expert tensors, which FSDP2 shards by expert, and matrices
that are on one rank (most in stages 1 and 2 of ZeRO) need no communication.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import DTYPES
from burnish.models.units import layers_of
from burnish.optimizers.adamw.rule import adamw_rules
from burnish.optimizers.config import WeightShape
from burnish.optimizers.muon.config import Muon
from burnish.optimizers.rule import (
    OptimizerError,
    RuleInputs,
    ShardedRule,
    UpdateRule,
    embedding_names,
)

_FUSED = re.compile(r"qkv|c_attn|query_key_value|W_pack|in_proj", re.IGNORECASE)
"""Names of projections that hold several matrices, in an order that differs between families."""


def make_rules(config: Muon, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule of the matrices and AdamW's rule of the rest. Raises OptimizerError if the
    model has no matrices, or if one cannot be split over tensor-parallel ranks."""
    trained, tp_plan = inputs.trained, inputs.tp_plan
    halves_of = hidden_matrices(inputs.model, {t.name: t.shape for t in trained}, config)
    matrices = [t for t in trained if t.name in halves_of]
    if tp_plan is not None and (
        several := [t.name for t in matrices if halves_of[t.name] or len(t.shape) > 2]
    ):
        raise OptimizerError(
            f"train.optimizer.kind=muon with train.engine.tensor_parallel_size="
            f"{tp_plan.model_parallel.size}: {several[0]} holds several matrices, whose split over "
            "ranks is not supported; use sharding=full without tensor parallelism, or add it to "
            "train.optimizer.adamw_params"
        )
    tp_dims = {t.name: None if tp_plan is None else tp_plan.dim(t.name) for t in matrices}
    group = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    muon = MuonOptimizer(
        [Matrix(t.master, t.shape, halves_of[t.name], tp_dims[t.name]) for t in matrices],
        config,
        weight_decay=inputs.train.weight_decay,
        device=inputs.device,
        **group,
    )
    lr_ratio = (config.matrix_lr or inputs.lr) / inputs.lr
    rule = UpdateRule(muon, {"momentum": "momentum"}, lr_ratio=lr_ratio)
    rest = [t for t in trained if t.name not in halves_of]
    return [rule, *adamw_rules(config, rest, inputs)]


def hidden_matrices(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Muon
) -> dict[str, bool]:
    """Return the parameters that Muon trains -> whether their rows are two matrices.

    These are the weight matrices and stacks of expert matrices in the decoder layers (of adapters:
    A and B, each a matrix). Raises OptimizerError if there are none, and for a parameter with
    several matrices in an unknown order.
    """
    body = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    inside = {id(p) for _, layer in layers_of(body) for p in layer.parameters()} if body else set()
    parameters = dict(model.named_parameters())
    tables = embedding_names(model)
    hidden_size = None if body is None else body.config.get_text_config().hidden_size
    halves_of: dict[str, bool] = {}
    for name, shape in shapes.items():
        if config.trains(WeightShape(name, shape, name in tables, id(parameters[name]) in inside)):
            halves_of[name] = _is_two_matrices(name, shape, hidden_size)
    if not halves_of:
        raise OptimizerError(
            f"train.optimizer.kind=muon: {type(model).__name__} has no matrix in decoder layers "
            "that is trained with Muon; use train.optimizer.kind=adamw"
        )
    return halves_of


def _is_two_matrices(name: str, shape: tuple[int, ...], hidden_size: int | None) -> bool:
    """Return whether a parameter is the gate and up projection in one. Raises OptimizerError for
    other parameters that hold several matrices."""
    if "lora_" in name:
        return False
    if "gate_up_proj" in name:
        if shape[-1] == hidden_size and shape[-2] != hidden_size:
            return True
    elif not _FUSED.search(name):
        return False
    part = name.removesuffix(".weight").rpartition(".")[2]
    raise OptimizerError(
        f"train.optimizer.kind=muon: {name} {list(shape)} holds several matrices in one tensor, "
        "in an order that differs between model families, and Muon must orthogonalize each of "
        f"them alone; train it with AdamW (train.optimizer.adamw_params=[{part}]), or use "
        "train.optimizer.kind=adamw"
    )


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of a X + b (X X^T) X + c (X X^T)^2 X (Jordan et al. 2024)."""


def orthogonalize(matrices: Tensor, *, steps: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an approximation of U V^T for each matrix U S V^T, by Newton-Schulz iterations.

    ``matrices``: [..., m, n]. The singular values of the result are between about 0.7 and 1.2,
    except those that are almost 0 in the input. Result: the same shape, in fp32.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape).to(torch.float32)


def lr_scale(rows: int, columns: int, kind: Literal["match_rms_adamw", "original"]) -> float:
    """Return the factor on the learning rate of a [rows, columns] matrix.

    ``match_rms_adamw``: updates have the root mean square that is typical of AdamW, 0.2
    (arXiv 2502.16982, eq. 4). ``original``: Jordan et al. 2024.
    """
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class Matrix:
    """One parameter that Muon trains: a matrix, two matrices in one, or a stack of either."""

    master: Tensor
    """This rank's part of the fp32 weight."""
    shape: tuple[int, ...]
    """Shape of the full parameter: [m, n], or [experts, m, n]."""
    halves: bool = False
    """True if the rows are two matrices (gate and up projection)."""
    tp_dim: int | None = None
    """Dimension along which tensor parallelism splits the parameter."""
    counts: tuple[int, ...] = ()
    """Entries of the flattened parameter that each rank has, one after another (ZeRO; ``master`` is
    then flat). Empty: ranks share the rows (FSDP2)."""

    @property
    def stacked(self) -> bool:
        """Return whether the first dimension counts matrices; FSDP2 never divides those."""
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        """Number of rows of one matrix."""
        return self.shape[-2] // (2 if self.halves else 1)

    @property
    def on_one_rank(self) -> bool:
        """Return whether no matrix is divided between ranks."""
        return sum(map(bool, self.counts)) == 1 if self.counts else self.stacked


class MuonOptimizer(ShardedRule):
    """Muon over matrices that may be sharded. Implements torch's interface for its ``state``."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        settings: Muon,
        *,
        weight_decay: float,
        device: torch.device,
        tensor_parallel: RankGroup = SINGLE,
    ) -> None:
        """``device``: where updates are computed; weights may be in host memory."""
        super().__init__([m.master for m in matrices], {"lr": 0.0})
        self.matrices, self.settings, self.weight_decay = tuple(matrices), settings, weight_decay
        self.device, self.tensor_parallel = device, tensor_parallel

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. All ranks of :attr:`shards` take part."""
        self.update(self.matrices)

    @torch.no_grad()
    def update(self, matrices: Sequence[Matrix]) -> None:
        """Update some of the matrices, the same on all ranks of :attr:`shards`."""
        have = self.shards.any_across([m.master.grad is not None for m in matrices])
        stepped = [m for m, there in zip(matrices, have, strict=True) if there]
        alone = [m for m in stepped if m.on_one_rank or self.shards.size == 1]
        dealt = [m for m in stepped if not (m.on_one_rank or self.shards.size == 1)]
        for matrix in alone:
            local = self._momentum(matrix)
            if local.numel():
                local = local.reshape(-1, *_row(matrix))
                self._apply(matrix, self._update_of_local(matrix, local))
        for begin in range(0, len(dealt), self.shards.size):
            self._step_dealt(dealt[begin : begin + self.shards.size])

    def _momentum(self, matrix: Matrix) -> Tensor:
        """Add the gradient to the momentum; return this rank's part of the matrix to
        orthogonalize."""
        master, beta = matrix.master, self.settings.momentum
        grad = torch.zeros_like(master) if master.grad is None else master.grad
        state = self.state[master]
        if not state:
            state["momentum"] = torch.zeros_like(master)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(grad, 1.0 - beta)
        update = grad.lerp(momentum, beta) if self.settings.nesterov else momentum
        return update.to(self.device)

    def _update_of_local(self, matrix: Matrix, local: Tensor) -> Tensor:
        """Return the update of all rows of ``local`` [rows, columns], which tensor parallelism may
        still have split."""
        dim, group = matrix.tp_dim, self.tensor_parallel
        if dim is None or group.size == 1:
            return self._orthogonal(matrix, local)
        full = self._orthogonal(matrix, torch.cat(group.gather_tensor(local), dim))
        return full.chunk(group.size, dim)[group.rank]

    def _orthogonal(self, matrix: Matrix, full: Tensor) -> Tensor:
        parts = full.chunk(2, dim=-2) if matrix.halves else (full,)
        steps, dtype = self.settings.ns_steps, DTYPES[self.settings.ns_dtype]
        orthogonal = [orthogonalize(part, steps=steps, dtype=dtype) for part in parts]
        return torch.cat(orthogonal, dim=-2) if matrix.halves else orthogonal[0]

    def _step_dealt(self, matrices: Sequence[Matrix]) -> None:
        """Step at most one matrix per rank of :attr:`shards`; rank r computes matrix r."""
        group, mine = self.shards, None
        for owner, matrix in enumerate(matrices):
            flat = self._momentum(matrix).reshape(-1)
            gathered = _gather_to(owner, flat, _counts(matrix, self), group)
            if gathered is not None:
                mine = matrix, gathered.view(-1, *_row(matrix))
        update = None if mine is None else self._update_of_local(*mine)
        for owner, matrix in enumerate(matrices):
            full = update if owner == group.rank else None
            counts = _counts(matrix, self)
            out = torch.empty(max(counts), device=self.device)
            self._apply(matrix, _scatter_from(owner, full, counts, out, group))

    def _apply(self, matrix: Matrix, update: Tensor) -> None:
        lr, master = float(self.param_groups[0]["lr"]), matrix.master
        scale = lr_scale(matrix.rows, matrix.shape[-1], self.settings.lr_scale)
        master.mul_(1.0 - lr * self.weight_decay)
        master.add_(update.to(master.device).reshape(master.shape), alpha=-lr * scale)


def _row(matrix: Matrix) -> tuple[int, ...]:
    """Return the shape of a row of this rank's part."""
    return matrix.shape[1:] if matrix.counts else tuple(matrix.master.shape[1:])


def _counts(matrix: Matrix, muon: MuonOptimizer) -> Sequence[int]:
    """Return the number of entries on each rank: as given, or those of ceil(rows / ranks) rows, of
    which the last ranks have fewer."""
    if matrix.counts:
        return matrix.counts
    rows = matrix.shape[0] // (muon.tensor_parallel.size if matrix.tp_dim == 0 else 1)
    each, row = -(-rows // muon.shards.size), math.prod(_row(matrix))
    return [max(0, min(each, rows - rank * each)) * row for rank in range(muon.shards.size)]


def _gather_to(owner: int, shard: Tensor, counts: Sequence[int], group: RankGroup) -> Tensor | None:
    """Return the entries of all ranks on rank ``owner``; None on the others."""
    from torch.distributed import gather

    padded = shard.new_zeros(max(counts))
    padded[: len(shard)] = shard
    parts = [torch.empty_like(padded) for _ in range(group.size)] if owner == group.rank else None
    gather(padded, parts, group=group.group, group_dst=owner)
    if parts is None:
        return None
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _scatter_from(
    owner: int, full: Tensor | None, counts: Sequence[int], out: Tensor, group: RankGroup
) -> Tensor:
    """Return this rank's entries of ``full``, which rank ``owner`` has, in ``out``."""
    from torch.distributed import scatter

    parts: list[Tensor] | None = None
    if full is not None:
        parts = [torch.zeros_like(out) for _ in counts]
        for part, part_of_rank in zip(parts, full.reshape(-1).split(list(counts)), strict=True):
            part[: len(part_of_rank)] = part_of_rank
    scatter(out, parts, group=group.group, group_src=owner)
    return out[: counts[group.rank]]

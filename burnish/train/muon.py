"""Muon over full or sharded matrices.

The momentum is a sum per entry, so it is sharded like the weight. The Newton-Schulz iterations need
the full matrix. Under FSDP2 the matrices are dealt to the ranks: each rank gathers its matrix,
computes the update, and scatters it. Under tensor parallelism the ranks of a group gather the
matrix and compute the same update. Expert tensors, which FSDP2 shards by expert, need no
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.train.process_group import SINGLE, RankGroup

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

    @property
    def stacked(self) -> bool:
        """Return whether the first dimension counts matrices; FSDP2 never divides those."""
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        """Number of rows of one matrix."""
        return self.shape[-2] // (2 if self.halves else 1)


@dataclass(frozen=True)
class MuonSettings:
    """Settings of the update."""

    momentum: float
    nesterov: bool
    steps: int
    dtype: torch.dtype
    scale: Literal["match_rms_adamw", "original"]
    weight_decay: float


class Muon(torch.optim.Optimizer):
    """Muon over matrices that may be sharded. Implements torch's interface for its ``state``."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        settings: MuonSettings,
        *,
        device: torch.device,
        tensor_parallel: RankGroup = SINGLE,
    ) -> None:
        """``device``: where updates are computed; weights may be in host memory."""
        super().__init__([m.master for m in matrices], {"lr": 0.0})
        self.matrices, self.settings, self.device = tuple(matrices), settings, device
        self.tensor_parallel = tensor_parallel
        self.shards: RankGroup = SINGLE
        """Ranks over which rows of the weights are sharded. Set before each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. All ranks of :attr:`shards` take part."""
        have = self.shards.any_across([m.master.grad is not None for m in self.matrices])
        stepped = [m for m, there in zip(self.matrices, have, strict=True) if there]
        alone = [m for m in stepped if m.stacked or self.shards.size == 1]
        dealt = [m for m in stepped if not (m.stacked or self.shards.size == 1)]
        for matrix in alone:
            local = self._momentum(matrix)
            if local.numel():
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
        found = grad.lerp(momentum, beta) if self.settings.nesterov else momentum
        return found.to(self.device)

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
        made = [
            orthogonalize(p, steps=self.settings.steps, dtype=self.settings.dtype) for p in parts
        ]
        return torch.cat(made, dim=-2) if matrix.halves else made[0]

    def _step_dealt(self, matrices: Sequence[Matrix]) -> None:
        """Step at most one matrix per rank of :attr:`shards`; rank r computes matrix r."""
        group, mine = self.shards, None
        for owner, matrix in enumerate(matrices):
            parts = _gather_to(owner, self._momentum(matrix), _even_rows(matrix, self), group)
            if parts is not None:
                mine = matrix, torch.cat(parts)[: _local_rows(matrix, self)]
        update = None if mine is None else self._update_of_local(*mine)
        for owner, matrix in enumerate(matrices):
            own = _scatter_from(
                owner,
                update if owner == group.rank else None,
                torch.empty(_even_rows(matrix, self), *matrix.master.shape[1:], device=self.device),
                group,
            )
            self._apply(matrix, own[: len(matrix.master)])

    def _apply(self, matrix: Matrix, update: Tensor) -> None:
        lr, master = float(self.param_groups[0]["lr"]), matrix.master
        scale = lr_scale(matrix.rows, matrix.shape[-1], self.settings.scale)
        master.mul_(1.0 - lr * self.settings.weight_decay)
        master.add_(update.to(master.device), alpha=-lr * scale)


def _local_rows(matrix: Matrix, muon: Muon) -> int:
    """Return the number of rows of a tensor-parallel part, over all shards."""
    return matrix.shape[0] // (muon.tensor_parallel.size if matrix.tp_dim == 0 else 1)


def _even_rows(matrix: Matrix, muon: Muon) -> int:
    """Return the number of rows of the largest shard, that of the first rank: ceil(rows / n)."""
    return -(-_local_rows(matrix, muon) // muon.shards.size)


def _gather_to(owner: int, own: Tensor, rows: int, group: RankGroup) -> list[Tensor] | None:
    """Return every rank's part, padded to ``rows`` rows, on rank ``owner``; None on the others."""
    from torch.distributed import gather

    padded = own.new_zeros(rows, *own.shape[1:])
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in range(group.size)] if owner == group.rank else None
    gather(padded, found, group=group.group, group_dst=owner)
    return found


def _scatter_from(owner: int, full: Tensor | None, out: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's rows of ``full``, which rank ``owner`` has, in ``out``."""
    from torch.distributed import scatter

    parts: list[Tensor] | None = None
    if full is not None:
        padded = out.new_zeros(group.size * len(out), *out.shape[1:])
        padded[: len(full)] = full
        parts = list(padded.chunk(group.size))
    scatter(out, parts, group=group.group, group_src=owner)
    return out

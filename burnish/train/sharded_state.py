"""State of a sharded model's ranks: each keeps and saves its own rows of the weights, gradients and
moments.

FSDP2 cuts every parameter along its first dimension: rank r of n has rows ``[r * c, (r + 1) * c)``
with c = ceil(rows / n), and the last ranks may have fewer or none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object
from torch.distributed.tensor import DTensor

from burnish.models.tensor_files import Rows, TensorShards, write_shards
from burnish.train.optim import Optimizer
from burnish.train.process_group import SINGLE, RankGroup


def own_rows(parameter: Tensor) -> Rows:
    """[begin, end) of the rows of a sharded parameter that this rank holds."""
    sharded = cast(DTensor, parameter)
    mesh, rows = sharded.device_mesh, sharded.shape[0]
    each, rank = -(-rows // mesh.size()), mesh.get_local_rank()
    begin, end = min(rank * each, rows), min((rank + 1) * each, rows)
    assert end - begin == local(sharded).shape[0], "FSDP2 cuts parameters in another way"
    return begin, end


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded parameter or gradient; the same memory."""
    return cast(DTensor, tensor).to_local()


class ShardedOptimizer(Optimizer):
    """The same optimizer over this rank's rows, which are its fp32 masters.

    FSDP2 gathers the weights rounded to the compute format and sums gradients over ranks in fp32,
    so there is no second copy of the weights and nothing is left to sum in a step but the norm.
    """

    def _take_masters(self, dtype: torch.dtype) -> list[Tensor]:
        self.half = False  # half-precision weights are there in a gathered layer only
        self.rows = {n: own_rows(p) for n, p in zip(self.names, self.params, strict=True)}
        if self.tp_plan is not None:
            self.rows = {name: self.tp_plan.rows(name, rows) for name, rows in self.rows.items()}
        return [local(parameter).detach() for parameter in self.params]

    @torch.no_grad()
    def gradients(self, ranks: RankGroup = SINGLE) -> list[Tensor]:
        """This rank's rows of the fp32 gradient, which are summed over ranks already."""
        for master, parameter in zip(self.masters, self.params, strict=True):
            master.grad = None if parameter.grad is None else local(parameter.grad)
        if self.tp_plan is not None:
            self.tp_plan.sum_partial(self._named_gradients())
        return [m.grad for m in self.masters if m.grad is not None]

    def _norm(self, grads: Sequence[Tensor], ranks: RankGroup) -> Tensor:
        if self.tp_plan is not None:
            return self.tp_plan.norm(self._named_gradients(), ranks)
        own = super()._norm(grads, ranks)
        square = own.double().square()  # in fp64: a finite norm does not overflow
        ranks.all_reduce_([square])
        return square.sqrt().to(own)


class BackgroundSave:
    """A checkpoint that is being written while training goes on.

    Each rank's thread writes its own files; then the ranks tell each other how it went, over a
    process group of their own, and rank 0 calls ``finish``, which makes the checkpoint whole.
    """

    def __init__(
        self,
        folder: Path,
        tensor_shards: TensorShards,
        group: ProcessGroup,
        *,
        finish: Callable[[], Any],
    ) -> None:
        self._folder, self._tensor_shards, self._group = folder, tensor_shards, group
        self._finish = finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="burnish-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether this rank's part is over, for good or ill."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Until it is over, for good or ill."""
        self._thread.join()

    def wait(self) -> None:
        """Until the checkpoint is whole. Raises OSError, on all ranks, if one could not
        write."""
        self.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._together(self._write)
            self._together(self._finish if self._group.rank() == 0 else lambda: None)
        except BaseException as error:  # told by wait(), in the thread that asks
            self._error = error
        finally:
            self._tensor_shards = {}

    def _together(self, work: Callable[[], Any]) -> None:
        """Do this rank's work and wait for the others'. Raises OSError if one failed."""
        problem: str | None = None
        try:
            work()
        except Exception as error:  # the other ranks wait for an answer
            problem = f"rank {self._group.rank()}: {type(error).__name__}: {error}"
        problems: list[str | None] = [None] * self._group.size()
        all_gather_object(problems, problem, group=self._group)
        bad = [text for text in problems if text is not None]
        if bad:
            raise OSError(f"{self._folder} could not be written: {'; '.join(bad)}")

    def _write(self) -> None:
        write_shards(self._folder, self._tensor_shards, (self._group.rank(), self._group.size()))

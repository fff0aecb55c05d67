"""State of a sharded model on one rank: it holds and saves its own rows of weights, gradients and
moments.

FSDP2 shards every parameter along its first dimension: rank r of n has rows ``[r * c, (r + 1) *
c)`` with c = ceil(rows / n). The last ranks may have fewer rows or none.
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

from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.tensor_files import Rows, TensorShards, write_shards
from burnish.train.optim import Optimizer


def own_rows(parameter: Tensor) -> Rows:
    """Return [begin, end) of the rows of a sharded parameter that this rank holds."""
    sharded = cast(DTensor, parameter)
    mesh, rows = sharded.device_mesh, sharded.shape[0]
    each, rank = -(-rows // mesh.size()), mesh.get_local_rank()
    begin, end = min(rank * each, rows), min((rank + 1) * each, rows)
    assert end - begin == local(sharded).shape[0], "FSDP2 shards parameters in another way"
    return begin, end


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter or gradient; they share its memory."""
    return cast(DTensor, tensor).to_local()


class ShardedOptimizer(Optimizer):
    """Optimizer over this rank's rows, which are its fp32 masters.

    FSDP2 gathers the weights rounded to the compute dtype and sums gradients over ranks in fp32.
    There is therefore no second copy of the weights, and a step only sums the norm over ranks.
    """

    def _take_masters(self, dtype: torch.dtype) -> list[Tensor]:
        self.half = False  # half-precision weights exist in gathered layers only
        self.rows = {n: own_rows(p) for n, p in zip(self.names, self.params, strict=True)}
        self.shard_ranks = cast(DTensor, self.params[0]).device_mesh.size()
        if self.tp_plan is not None:
            self.rows = {name: self.tp_plan.rows(name, rows) for name, rows in self.rows.items()}
        return [local(parameter).detach() for parameter in self.params]

    @torch.no_grad()
    def gradients(self, ranks: RankGroup = SINGLE) -> list[Tensor]:
        """Return this rank's rows of the fp32 gradient, which FSDP2 has already summed over
        ranks."""
        for master, parameter in zip(self.masters, self.params, strict=True):
            master.grad = None if parameter.grad is None else local(parameter.grad)
        if self.tp_plan is not None:
            self.tp_plan.sum_partial(self._named_gradients())
        return [m.grad for m in self.masters if m.grad is not None]

    def _shard_group(self, ranks: RankGroup) -> RankGroup:
        return ranks if self.tp_plan is None else self.tp_plan.data_parallel

    def _norm(self, grads: Sequence[Tensor], ranks: RankGroup) -> Tensor:
        if self.tp_plan is not None:
            return self.tp_plan.norm(self._named_gradients(), ranks)
        norm = super()._norm(grads, ranks)
        square = norm.double().square()  # in fp64: a finite norm does not overflow
        ranks.all_reduce_([square])
        return square.sqrt().to(norm)


class BackgroundSave:
    """Checkpoint that is written in the background while training continues.

    Each rank's thread writes its own files. The ranks then exchange errors over a separate process
    group. Rank 0 calls ``finish``, which completes the checkpoint.
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
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until this rank's thread has ended, successfully or not."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises OSError on all ranks if one could not
        write."""
        self.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            part = self._group.rank(), self._group.size()
            self._together(lambda: write_shards(self._folder, self._tensor_shards, part))
            self._together(self._finish if self._group.rank() == 0 else lambda: None)
        except BaseException as error:  # raised by wait(), in the calling thread
            self._error = error
        finally:
            self._tensor_shards = {}

    def _together(self, work: Callable[[], Any]) -> None:
        """Run this rank's work and wait for that of the other ranks. Raises OSError if one
        failed."""
        problem: str | None = None
        try:
            work()
        except Exception as error:  # the other ranks wait for the result
            problem = f"rank {self._group.rank()}: {type(error).__name__}: {error}"
        problems: list[str | None] = [None] * self._group.size()
        all_gather_object(problems, problem, group=self._group)
        bad = [text for text in problems if text is not None]
        if bad:
            raise OSError(f"{self._folder} could not be written: {'; '.join(bad)}")

"""Shards of each parameter in a tensor-parallel group, and their use in gradients, norms,
checkpoints and weight transfer.

Three kinds of parameters exist. Sharded ones are split over the ranks of a group. Replicated ones
have the same gradient on every rank of a group. Replicated ones with a partial gradient (norms of
single heads, one half of an adapter) need a sum of the gradient over the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.distributed.process_group import RankGroup
from burnish.models.buffers import plain_name
from burnish.models.load import ModelError
from burnish.models.tensor_files import Rows, TensorShard
from burnish.models.tensor_parallel import ShardSpec, join_parts, part_of, shard_layers


class TensorParallelPlan:
    """Shards of a model's parameters in a tensor-parallel group."""

    def __init__(
        self, specs: Mapping[str, ShardSpec], model_parallel: RankGroup, data_parallel: RankGroup
    ) -> None:
        self.model_parallel, self.data_parallel = model_parallel, data_parallel
        self._specs = dict(specs)
        self._exported = {plain_name(n): spec for n, spec in specs.items()}

    def dim(self, name: str) -> int | None:
        """Return the dimension along which a parameter is sharded; None: it is replicated."""
        return self._specs[name].dim if name in self._specs else None

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the unsharded shape. ``own``: the shape of the local part, which may additionally
        be sharded in another way."""
        return self._specs[name].shape if name in self._specs else tuple(own)

    def rows(self, name: str, own: Rows) -> Rows:
        """Return the rows of the unsharded parameter. ``own``: rows within this rank's
        tensor-parallel part."""
        if self.dim(name) != 0:
            return own
        begin = self.model_parallel.rank * (self._specs[name].shape[0] // self.model_parallel.size)
        return own[0] + begin, own[1] + begin

    def columns(self, name: str) -> Rows | None:
        """Return [begin, end) of the columns (the last dimension) that this rank holds; None:
        all."""
        dim = self.dim(name)
        if not dim or dim != len(self._specs[name].shape) - 1:
            return None
        each = self._specs[name].shape[dim] // self.model_parallel.size
        return self.model_parallel.rank * each, (self.model_parallel.rank + 1) * each

    def own_part(self, name: str, rows: Tensor, dims: Sequence[int] | None = None) -> Tensor:
        """Return this rank's part of complete ``rows`` of a tensor.

        ``dims``: dimensions of parameter ``name`` that those of the tensor follow; None: all.
        """
        at = self._position(name, dims)
        if not at:
            return rows
        rank, size = self.model_parallel.rank, self.model_parallel.size
        return part_of(rows, at, blocks=self._specs[name].blocks, rank=rank, size=size)

    def _position(self, name: str, dims: Sequence[int] | None) -> int | None:
        """Return the dimension of a tensor along which the group splits it; None: it does not."""
        dim = self.dim(name)
        return dim if dim is None or dims is None else {d: i for i, d in enumerate(dims)}.get(dim)

    def sum_partial(self, grads: Mapping[str, Tensor]) -> None:
        """Sum over the group the gradients of replicated parameters for which each rank has a
        partial gradient."""
        self.model_parallel.all_reduce_(
            [g for n, g in grads.items() if n in self._specs and self.dim(n) is None]
        )

    def norm(self, grads: Mapping[str, Tensor], ranks: RankGroup) -> Tensor:
        """Return the L2 norm of the full gradient. ``ranks``: the ranks over which it is sharded.
        Gradients replicated in a tensor-parallel group count once."""
        kinds: list[list[Tensor]] = [[], []]
        for name, grad in grads.items():
            kinds[self.dim(name) is None].append(grad)
        sharded, replicated = (
            torch.nn.utils.get_total_norm(kind).double().square() for kind in kinds
        )
        square = sharded.to(replicated.device) + replicated / self.model_parallel.size
        ranks.all_reduce_([square])
        return square.sqrt().float()

    def unshard(self, name: str, tensor: Tensor) -> Tensor:
        """Return an exported weight (adapters merged), unsharded from every rank's part. All ranks
        of the group take part."""
        spec = self._exported.get(name)
        if spec is None or spec.dim is None:
            return tensor
        return join_parts(self.model_parallel.gather_tensor(tensor), spec.dim, spec.blocks)

    def tensor_shard(
        self,
        name: str,
        tensor: Tensor,
        *,
        rows: Rows,
        shape: tuple[int, ...],
        dims: Sequence[int] | None = None,
    ) -> TensorShard:
        """Return this rank's shard of a tensor that is sharded like parameter ``name``.

        The group writes each row once and complete. ``rows``: the local rows of the unsharded
        tensor; ``shape``: its shape. ``dims``: as in :meth:`own_part`. All ranks of the group take
        part.
        """
        rank, size = self.model_parallel.rank, self.model_parallel.size
        at = self._position(name, dims)
        if at == 0:
            return TensorShard(tensor, rows[0], shape)
        if at is None:
            return TensorShard(tensor if rank == 0 else tensor[:0], rows[0], shape)
        parts = self.model_parallel.gather_tensor(tensor)
        joined = join_parts(parts, at, self._specs[name].blocks)
        each = -(-len(joined) // size)
        own = joined[rank * each : (rank + 1) * each]
        return TensorShard(own, rows[0] + min(rank * each, len(joined)), shape)


def apply_tensor_parallel(
    model: nn.Module, body: PreTrainedModel, model_parallel: RankGroup, data_parallel: RankGroup
) -> TensorParallelPlan:
    """Shard ``model`` over the group. All ranks start with the same weights, or with an empty
    model.

    Raises ModelError if the model cannot be sharded. Also raises ModelError if the outputs change,
    because transformers' plan then does not fit the model.
    """
    assert model_parallel.group is not None
    model.eval()  # dropout would make the two passes differ
    empty = any(p.is_meta for p in model.parameters())
    before = None if empty else _trial_hidden_states(body)
    specs = shard_layers(body, model_parallel.group)
    if before is not None:
        after = _trial_hidden_states(body)
        # As in check_head: far above rounding in any dtype, far below a wrong layer.
        room = 0.02 * float(before.abs().max())
        if model_parallel.any(not torch.allclose(after, before, rtol=0.02, atol=room)):
            raise ModelError(
                f"train.engine.tensor_parallel_size={model_parallel.size}: the outputs of "
                f"{type(body).__name__} change when it is sharded by transformers' plan; use 1"
            )
    prefix = next(name for name, module in model.named_modules() if module is body)
    named = {f"{prefix}.{name}" if prefix else name: spec for name, spec in specs.items()}
    return TensorParallelPlan(named, model_parallel, data_parallel)


@torch.no_grad()
def _trial_hidden_states(body: PreTrainedModel) -> Tensor:
    """Return the hidden states of four tokens."""
    ids = torch.arange(1, 5, device=body.device)[None]
    return body(input_ids=ids, use_cache=False).last_hidden_state.float()  # type: ignore[no-any-return]

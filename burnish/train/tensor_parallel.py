"""Parts of each parameter on the ranks of a tensor-parallel group, and their gathering: gradients,
norms, checkpoints, weights for a rollout engine.

Three kinds of parameters: cut ones, of which each rank of a team has a part; whole ones, with the
same gradient on every rank of a team; and whole ones with a partial gradient (norms of single
heads, one half of an adapter), which is summed over the team.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.buffers import plain_name
from burnish.models.load import ModelError
from burnish.models.tensor_files import Rows, TensorShard
from burnish.models.tensor_parallel import ShardSpec, shard_layers
from burnish.train.process_group import RankGroup


class TensorParallelPlan:
    """The parameters of a model that a team of ranks computes together."""

    def __init__(
        self, specs: Mapping[str, ShardSpec], model_parallel: RankGroup, data_parallel: RankGroup
    ) -> None:
        self.model_parallel, self.data_parallel = model_parallel, data_parallel
        self._specs = dict(specs)
        self._exported = {plain_name(n): spec for n, spec in specs.items()}

    def dim(self, name: str) -> int | None:
        """The dimension along which a parameter is cut; None: it is whole on every rank."""
        return self._specs[name].dim if name in self._specs else None

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the unsharded shape. ``own``: the shape of the local part, which may be sharded in
        another way too."""
        return self._specs[name].shape if name in self._specs else tuple(own)

    def rows(self, name: str, own: Rows) -> Rows:
        """Rows of the whole parameter. ``own``: of this team rank's part."""
        if self.dim(name) != 0:
            return own
        begin = self.model_parallel.rank * (self._specs[name].shape[0] // self.model_parallel.size)
        return own[0] + begin, own[1] + begin

    def columns(self, name: str) -> Rows | None:
        """[begin, end) of the columns that this rank has; None: all."""
        if self.dim(name) != 1:
            return None
        each = self._specs[name].shape[1] // self.model_parallel.size
        return self.model_parallel.rank * each, (self.model_parallel.rank + 1) * each

    def sum_partial(self, grads: Mapping[str, Tensor]) -> None:
        """Sum over the team the gradients of whole parameters of which each rank has a part of
        the gradient."""
        self.model_parallel.all_reduce_(
            [g for n, g in grads.items() if n in self._specs and self.dim(n) is None]
        )

    def norm(self, grads: Mapping[str, Tensor], ranks: RankGroup) -> Tensor:
        """L2 norm of the whole gradient. ``ranks``: those over which parts of it lie; what is whole
        in a team counts once."""
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
        """The whole of an exported weight (adapters merged), from every rank's part. All ranks of
        the team take part."""
        spec = self._exported.get(name)
        if spec is None or spec.dim is None:
            return tensor
        return torch.cat(self.model_parallel.gather_tensor(tensor), spec.dim)

    def tensor_shard(
        self, name: str, tensor: Tensor, *, rows: Rows, shape: tuple[int, ...]
    ) -> TensorShard:
        """Return this rank's shard of a tensor that is sharded as parameter ``name`` is, so that
        the group writes each row once and complete. ``rows``: the local rows of the unsharded
        parameter; ``shape``: its shape. All ranks of the group take part."""
        rank, size = self.model_parallel.rank, self.model_parallel.size
        if self.dim(name) == 0:
            return TensorShard(tensor, rows[0], shape)
        if self.dim(name) is None:
            return TensorShard(tensor if rank == 0 else tensor[:0], rows[0], shape)
        joined = torch.cat(self.model_parallel.gather_tensor(tensor), 1)
        each = -(-len(joined) // size)
        own = joined[rank * each : (rank + 1) * each]
        return TensorShard(own, rows[0] + min(rank * each, len(joined)), shape)


def apply_tensor_parallel(
    model: nn.Module, body: PreTrainedModel, model_parallel: RankGroup, data_parallel: RankGroup
) -> TensorParallelPlan:
    """Cut ``model`` over the team, whose ranks come with the same weights, or with none yet.

    Raises ModelError if that cannot be done, or if the model computes something else
    afterwards: then its plan does not fit it.
    """
    assert model_parallel.group is not None
    model.eval()  # dropout would make the two passes differ
    empty = any(p.is_meta for p in model.parameters())
    before = None if empty else _trial_hidden_states(body)
    specs = shard_layers(body, model_parallel.group)
    if before is not None:
        after = _trial_hidden_states(body)
        # As in check_head: far above rounding in any format, far below a wrong layer.
        room = 0.02 * float(before.abs().max())
        if model_parallel.any(not torch.allclose(after, before, rtol=0.02, atol=room)):
            raise ModelError(
                f"train.engine.tensor_parallel_size={model_parallel.size}: {type(body).__name__} "
                f"computes "
                "something else when it is cut by transformers' plan; use 1"
            )
    prefix = next(name for name, module in model.named_modules() if module is body)
    named = {f"{prefix}.{name}" if prefix else name: spec for name, spec in specs.items()}
    return TensorParallelPlan(named, model_parallel, data_parallel)


@torch.no_grad()
def _trial_hidden_states(body: PreTrainedModel) -> Tensor:
    """Hidden states of four tokens."""
    ids = torch.arange(1, 5, device=body.device)[None]
    return body(input_ids=ids, use_cache=False).last_hidden_state.float()  # type: ignore[no-any-return]

"""What the ranks of a tensor-parallel team have of each parameter, and how it becomes whole again:
gradients, norms, checkpoints, weights for a rollout engine.

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
from burnish.models.tensor_files import Piece, Rows
from burnish.models.tensor_parallel import Cut, cut_layers
from burnish.train.ranks import Ranks


class Cuts:
    """The parameters of a model that a team of ranks computes together."""

    def __init__(self, cuts: Mapping[str, Cut], team: Ranks, peers: Ranks) -> None:
        self.team, self.peers = team, peers
        self._cuts = dict(cuts)
        self._exported = {plain_name(n): cut for n, cut in cuts.items()}

    def dim(self, name: str) -> int | None:
        """The dimension along which a parameter is cut; None: it is whole on every rank."""
        return self._cuts[name].dim if name in self._cuts else None

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Of the whole parameter. ``own``: of what is here, which may be sharded otherwise too."""
        return self._cuts[name].shape if name in self._cuts else tuple(own)

    def rows(self, name: str, own: Rows) -> Rows:
        """Rows of the whole parameter. ``own``: of this team rank's part."""
        if self.dim(name) != 0:
            return own
        begin = self.team.rank * (self._cuts[name].shape[0] // self.team.size)
        return own[0] + begin, own[1] + begin

    def columns(self, name: str) -> Rows | None:
        """[begin, end) of the columns that this rank has; None: all."""
        if self.dim(name) != 1:
            return None
        each = self._cuts[name].shape[1] // self.team.size
        return self.team.rank * each, (self.team.rank + 1) * each

    def sum_partial(self, grads: Mapping[str, Tensor]) -> None:
        """Sum over the team the gradients of whole parameters of which each rank has a part of
        the gradient."""
        self.team.sum_([g for n, g in grads.items() if n in self._cuts and self.dim(n) is None])

    def norm(self, grads: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
        """L2 norm of the whole gradient. ``ranks``: those over which parts of it lie; what is whole
        in a team counts once."""
        kinds: list[list[Tensor]] = [[], []]
        for name, grad in grads.items():
            kinds[self.dim(name) is None].append(grad)
        cut, whole = (torch.nn.utils.get_total_norm(kind).double().square() for kind in kinds)
        square = cut.to(whole.device) + whole / self.team.size
        ranks.sum_([square])
        return square.sqrt().float()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of an exported weight (adapters merged), from every rank's part. All ranks of
        the team take part."""
        cut = self._exported.get(name)
        if cut is None or cut.dim is None:
            return tensor
        return torch.cat(self.team.gather_tensor(tensor), cut.dim)

    def piece(self, name: str, tensor: Tensor, *, rows: Rows, shape: tuple[int, ...]) -> Piece:
        """What this rank writes of a tensor that is cut as parameter ``name`` is, so that the team
        writes each row once and whole. ``rows``: of the whole parameter, that are here; ``shape``:
        of the whole. All ranks of the team take part."""
        rank, size = self.team.rank, self.team.size
        if self.dim(name) == 0:
            return Piece(tensor, rows[0], shape)
        if self.dim(name) is None:
            return Piece(tensor if rank == 0 else tensor[:0], rows[0], shape)
        joined = torch.cat(self.team.gather_tensor(tensor), 1)
        each = -(-len(joined) // size)
        own = joined[rank * each : (rank + 1) * each]
        return Piece(own, rows[0] + min(rank * each, len(joined)), shape)


def cut_model(model: nn.Module, body: PreTrainedModel, team: Ranks, peers: Ranks) -> Cuts:
    """Cut ``model`` over the team, whose ranks come with the same weights, or with none yet.

    Raises ModelError where that cannot be done, or where the model computes something else
    afterwards: then its plan does not fit it.
    """
    assert team.group is not None
    model.eval()  # dropout would make the two passes differ
    empty = any(p.is_meta for p in model.parameters())
    before = None if empty else _try(body)
    cuts = cut_layers(body, team.group)
    if before is not None:
        after = _try(body)
        # As in check_head: far above rounding in any format, far below a wrong layer.
        room = 0.02 * float(before.abs().max())
        if team.any(not torch.allclose(after, before, rtol=0.02, atol=room)):
            raise ModelError(
                f"train.engine.tensor_parallel_size={team.size}: {type(body).__name__} computes "
                "something else when it is cut by transformers' plan; use 1"
            )
    prefix = next(name for name, module in model.named_modules() if module is body)
    named = {f"{prefix}.{name}" if prefix else name: cut for name, cut in cuts.items()}
    return Cuts(named, team, peers)


@torch.no_grad()
def _try(body: PreTrainedModel) -> Tensor:
    """Hidden states of four tokens."""
    ids = torch.arange(1, 5, device=body.device)[None]
    return body(input_ids=ids, use_cache=False).last_hidden_state.float()  # type: ignore[no-any-return]

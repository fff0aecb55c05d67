"""Sequence parallelism: a micro-batch's tokens sharded over ranks
(``train.engine.sequence_parallel_size``).

All ranks of a sequence-parallel group have the same rows. The arranged tokens form one row, padded
to a multiple of the group size, and each rank computes one contiguous shard of it. Log-probs and
values are computed on the rank that has their hidden state, then summed. Every rank therefore has
all of them and computes the same loss. A rank's gradient is that of its shard. Gradients are summed
over all ranks of all groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import RankGroup
from burnish.models.attention import SequenceParallelPlan, plan_segments
from burnish.models.load import ModelError, require_packing
from burnish.models.routing import Routing
from burnish.models.segments import Segment
from burnish.models.support import runs_own_code
from burnish.models.ulysses import sum_over
from burnish.tensors import upload
from burnish.train.base import Role
from burnish.train.batching import Arranged
from burnish.train.forward import Forward
from burnish.types import Batch

ATTENDING = {"full_attention", "sliding_attention"}
"""Layer types that mix tokens by attention, which ranks exchange."""
BY_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest computed row, of which each rank has only a part."""


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of an arranged micro-batch: C tokens of one row."""

    input_ids: Tensor  # [1, C]; the last ranks' may be padding
    position_ids: Tensor  # [1, C]
    plan: SequenceParallelPlan
    begin: int
    """Position of the first token in the full row."""


def local_shard(arranged: Arranged, model_parallel: RankGroup) -> LocalShard:
    """Return the shard of the arranged tokens for rank ``model_parallel.rank``."""
    assert model_parallel.group is not None
    tokens, positions = arranged.input_ids.flatten(), arranged.position_ids.flatten()
    plan = arranged.plan
    if plan is None:  # a rectangle: rows of equal length, one after another
        rows, width = arranged.input_ids.shape
        plan = plan_segments([Segment(r * width, width) for r in range(rows)], positions)
    count = tokens.numel()
    length = -(-count // model_parallel.size)
    begin = model_parallel.rank * length
    padded = [F.pad(x, (0, model_parallel.size * length - count)) for x in (tokens, positions)]
    ids, at = (x[None, begin : begin + length] for x in padded)
    return LocalShard(ids, at, SequenceParallelPlan(plan, count, model_parallel.group), begin)


def parallel_groups(engine: TorchEngine, ranks: RankGroup) -> tuple[RankGroup, RankGroup]:
    """Return (ranks that compute the same rows as this one, ranks that compute other rows with the
    same part of them).

    Raises ValueError if the number of ranks is not a multiple of the group size, or if both tensor
    and sequence parallelism are set.
    """
    if engine.parallel_problem is not None:
        raise ValueError(f"train.engine: {engine.parallel_problem}")
    size = engine.ranks_per_row
    if ranks.size % size:
        raise ValueError(
            f"{engine.parallel_setting}: {size} ranks compute the same rows, so the number of "
            f"ranks ({ranks.size}) must be a multiple of {size}"
        )
    return ranks.subgroups(size)


def make_forward(
    model: nn.Module,
    role: Role,
    train: TrainConfig,
    *,
    temperature: float,
    model_parallel: RankGroup,
) -> Forward:
    """Return the forward pass over micro-batches. ``model_parallel``: the ranks that have the same
    rows."""
    if cast(TorchEngine, train.engine).sequence_parallel_size == 1:
        return Forward(model, role, train, temperature=temperature)
    return SequenceParallelForward(
        model, role, train, temperature=temperature, model_parallel=model_parallel
    )


class SequenceParallelForward(Forward):
    """Forward pass of a micro-batch computed jointly by a group of ranks. All of them call it at
    the same time with the same rows and get the same outputs."""

    def __init__(
        self,
        model: nn.Module,
        role: Role,
        train: TrainConfig,
        *,
        temperature: float,
        model_parallel: RankGroup,
    ) -> None:
        super().__init__(model, role, train, temperature=temperature)
        self.model_parallel = model_parallel
        self._checked = False
        setting = f"train.engine.sequence_parallel_size={model_parallel.size}"
        require_packing(self.body.config, setting, trust=runs_own_code(self.body))
        check_sequence_parallel(self.body.config, model_parallel.size)

    def _compute(
        self, batch: Batch, arranged: Arranged, *, with_entropy: bool | None
    ) -> tuple[Tensor, ...]:
        shard = local_shard(arranged, self.model_parallel)
        hidden = self._hidden(shard.input_ids, shard.position_ids, shard.plan)
        return self._outputs_of(batch, arranged, shard, hidden, with_entropy=with_entropy)

    def _compute_routed(
        self, batch: Batch, arranged: Arranged, *, with_entropy: bool
    ) -> tuple[tuple[Tensor, ...], Routing]:
        """Return the outputs and the routing of all tokens. Each rank's gradient is that of the
        tokens of its shard."""
        shard, group = local_shard(arranged, self.model_parallel), self.model_parallel.group
        assert group is not None
        hidden, routes = self._hidden_routed(shard.input_ids, shard.position_ids, shard.plan)
        outputs = self._outputs_of(batch, arranged, shard, hidden, with_entropy=with_entropy)
        index = arranged.flat_index - shard.begin
        local_reads = ((index >= 0) & (index < len(hidden))).nonzero()[:, 0]
        source, target = (
            upload(index[local_reads], hidden.device),
            upload(local_reads, hidden.device),
        )

        def all_tokens(values: Tensor) -> Tensor:  # [L, C, ...] -> [L, M, ...]
            zeros = values.new_zeros(values.shape[0], len(index), values.shape[2])
            return sum_over(group, zeros.index_copy(1, target, values[:, source]))

        return outputs, Routing(all_tokens(routes.logits), all_tokens(routes.chosen))

    def _outputs_of(
        self,
        batch: Batch,
        arranged: Arranged,
        shard: LocalShard,
        hidden: Tensor,
        *,
        with_entropy: bool | None,
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs on all ranks from the ``hidden`` [C, H] states of this
        one."""
        self._check_asked(shard.plan)
        read, target = self._reads(batch)
        index = arranged.flat_index[read] - shard.begin
        local_reads = ((index >= 0) & (index < len(hidden))).nonzero()[:, 0]
        group, device = self.model_parallel.group, hidden.device
        assert group is not None
        at_reads, targets = (
            hidden[upload(index[local_reads], device)],
            upload(target[local_reads], device),
        )
        answers = self._ask(batch, at_reads, targets, with_entropy=with_entropy)
        return tuple(sum_over(group, values) for values in answers)

    def _check_asked(self, plan: SequenceParallelPlan) -> None:
        """Raise ModelError, on the first pass, unless every layer's attention exchanged its
        tokens."""
        asked, layers = len(plan.layers), int(_text(self.body.config).num_hidden_layers)
        if not self._checked and asked != layers:
            raise ModelError(
                f"{type(self.body).__name__} has {layers} layers, but only {asked} of them use an "
                "attention that supports sequence parallelism; use "
                "train.engine.sequence_parallel_size=1"
            )
        self._checked = True


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Raise ModelError if ``size`` ranks cannot share the attention of a model with this
    HuggingFace ``config``."""
    text = _text(config)
    values = text.to_dict()
    heads, name = int(text.num_attention_heads), text.model_type
    setting = f"train.engine.sequence_parallel_size={size}"
    if heads % size:
        works = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ModelError(
            f"{setting} does not divide the {heads} attention heads (num_attention_heads) of this "
            f"{name} model, which are shared among its ranks; use one of {', '.join(works)}"
        )
    odd = sorted(set(values.get("layer_types") or ()) - ATTENDING)
    if odd:
        raise ModelError(
            f"{setting}: this {name} model has layers of type {', '.join(odd)}, which mix tokens "
            "without attention, so tokens of different ranks would not be mixed; use 1 (for long "
            "rows with train.gradient_checkpointing=true)"
        )
    rope = str(values.get("rope_parameters") or values.get("rope_scaling") or "")
    kinds = [kind for kind in sorted(BY_LENGTH) if f"'{kind}'" in rope]
    if kinds:
        raise ModelError(
            f"{setting}: the rotary embedding of this {name} model ({kinds[0]}) depends on the "
            "length of the longest row, but each rank has only a shard of it; use 1 (for long "
            "rows with train.gradient_checkpointing=true)"
        )


def _text(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model of a composite model."""
    return config.get_text_config()

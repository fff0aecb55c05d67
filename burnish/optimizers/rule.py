"""Update rules: each steps some of the fp32 masters of a model.

Checks, clipping, loss scaling, moving average and checkpoints are the same for all rules
(``train/optim.py``). The rules of a kind of optimizer are in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.base import module_of
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.distributed.tensor_parallel import TensorParallelPlan
from burnish.errors import BurnishError
from burnish.models.tensor_files import Rows


class OptimizerError(BurnishError, ValueError):
    """An optimizer that cannot train a model, or whose library is missing."""


@dataclass(frozen=True)
class Trained:
    """One trained parameter of a rank."""

    name: str
    parameter: Tensor
    """The parameter of the model, for its number of dimensions."""
    master: Tensor
    """This rank's part of its fp32 weight."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    shard_ranks: int = 1
    """Ranks over which the rows are sharded (FSDP2)."""


@dataclass(frozen=True)
class StateShard:
    """A rank's part of a state tensor that has another shape than its parameter."""

    shape: tuple[int, ...]
    """Shape of the full state tensor."""
    rows: Rows
    """[begin, end) of this rank's part, along the first dimension."""
    dims: tuple[int, ...] = (0,)
    """Dimensions of the parameter that those of the state follow. Ranks that split others have the
    same part."""


class ShardedRule(torch.optim.Optimizer):
    """An optimizer whose ranks take part in each step of a sharded parameter."""

    shards: RankGroup = SINGLE
    """Ranks over which the rows of the weights are sharded. Set before each step."""


StateLayout = Callable[[tuple[int, ...], Rows, Rows], StateShard]
"""(shape of the full parameter, this rank's rows, this rank's columns) -> the part of the state"""


class UpdateRule:
    """A torch optimizer over some masters, with its state as tensors."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: Mapping[str, str],
        *,
        lr_ratio: float = 1.0,
        extra: Callable[[], dict[str, Any]] = dict,
        layouts: Mapping[str, StateLayout] | None = None,
    ) -> None:
        """``kinds``: name in a checkpoint -> key of the optimizer's state. ``lr_ratio``: learning
        rate relative to that of the role. ``extra``: entries of every state that are the same
        for all parameters and not saved. ``layouts``: kinds that have another shape than their
        parameter."""
        self.optimizer, self.kinds, self.lr_ratio = optimizer, dict(kinds), lr_ratio
        self._extra = extra
        self.layouts: dict[str, StateLayout] = dict(layouts or {})

    @property
    def masters(self) -> list[Tensor]:
        """The weights that the rule steps."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, lr: float, shards: RankGroup) -> None:
        """Make one update with learning rate ``lr`` of the role. ``shards``: ranks over which the
        rows of the weights are sharded."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.lr_ratio
        if isinstance(self.optimizer, ShardedRule):
            self.optimizer.shards = shards
        self.optimizer.step()

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the saved state of one master; empty before its first update."""
        held = self.optimizer.state.get(master, {})
        return {
            kind: torch.as_tensor(
                held[key], dtype=None if isinstance(held[key], Tensor) else torch.float32
            )
            for kind, key in self.kinds.items()
            if key in held
        }

    def restore(self, master: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Set the state of one master to what :meth:`state` returned."""
        state: dict[str, Any] = {}
        for kind, tensor in tensors.items():
            counts = kind == "step" and not isinstance(self.optimizer, torch.optim.AdamW)
            value = tensor.to(master.device, copy=True)
            state[self.kinds[kind]] = int(tensor) if counts else value
        self.optimizer.state[master] = {**state, **self._extra()}


@dataclass(frozen=True)
class RuleInputs:
    """Arguments of ``make_rules``: a model, its trained parameters and settings."""

    model: nn.Module
    trained: Sequence[Trained]
    train: TrainConfig
    """Settings that several kinds of optimizers read."""
    lr: float
    """Peak learning rate of the role."""
    device: torch.device
    """Compute device of the engine."""
    tp_plan: TensorParallelPlan | None = None


def make_rules(inputs: RuleInputs) -> list[UpdateRule]:
    """Return the update rules of the recipe's optimizer; together they step every parameter once.

    Calls ``make_rules`` in the file ``rule.py`` of the optimizer's folder. Raises OptimizerError if
    the optimizer cannot train the model, or its library is missing.
    """
    config = inputs.train.optimizer
    rules: list[UpdateRule] = module_of(config, "rule").make_rules(config, inputs)
    return rules


def decay_groups(trained: Sequence[Trained], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups with weight decay (matrices) and without (norms and biases)."""
    decay = [t.master for t in trained if t.parameter.ndim >= 2]
    plain = [t.master for t in trained if t.parameter.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def embedding_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of embedding tables."""
    return {
        f"{name}.{own_name}" if name else own_name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for own_name, _ in module.named_parameters(recurse=False)
    }

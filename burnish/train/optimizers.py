"""The optimizers of ``train.optimizer``: a config and a model's trained parameters in, update rules
out.

An :class:`UpdateRule` steps some of the fp32 masters. Checks, clipping, loss scaling, moving
average and checkpoints are the same for all rules (``optim.py``)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.optimizer import Adafactor as AdafactorConfig
from burnish.config.optimizer import AdamW
from burnish.config.optimizer import Muon as MuonConfig
from burnish.config.train import TrainConfig
from burnish.errors import BurnishError
from burnish.models.load import DTYPES
from burnish.models.tensor_files import Rows
from burnish.models.units import layers_of
from burnish.train.adafactor import Adafactor, AdafactorSettings, Weight
from burnish.train.muon import Matrix, Muon, MuonSettings
from burnish.train.process_group import RankGroup
from burnish.train.tensor_parallel import TensorParallelPlan

SMALLEST_8BIT = 4096
"""Entries of the smallest matrix with 8-bit moments (the default of bitsandbytes)."""
BLOCK_8BIT = 256
"""Consecutive entries with one scale (bitsandbytes)."""
_FUSED = re.compile(r"qkv|c_attn|query_key_value|W_pack|in_proj", re.IGNORECASE)
"""Names of projections that hold several matrices, in an order that differs between families."""


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
        if isinstance(self.optimizer, Muon | Adafactor):
            self.optimizer.shards = shards
        self.optimizer.step()

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the saved state of one master; empty before its first update."""
        held = self.optimizer.state.get(master, {})
        return {
            kind: torch.as_tensor(held[key], dtype=None if _is_tensor(held[key]) else torch.float32)
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


ADAM_STATE = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step"}


def make_rules(
    model: nn.Module,
    trained: Sequence[Trained],
    config: TrainConfig,
    *,
    lr: float,
    device: torch.device,
    tp_plan: TensorParallelPlan | None,
) -> list[UpdateRule]:
    """Return the update rules of ``config.optimizer``; together they step every parameter once.

    ``lr``: peak learning rate of the role. ``device``: compute device of the engine. Raises
    OptimizerError if the optimizer cannot train the model, or its library is missing.
    """
    own = config.optimizer
    if isinstance(own, AdamW):
        return _adamw(trained, config, lr)
    if isinstance(own, MuonConfig):
        return _muon(model, trained, config, lr=lr, device=device, tp_plan=tp_plan)
    if isinstance(own, AdafactorConfig):
        return [_adafactor(trained, config, own, tp_plan)]
    return _adamw_8bit(model, trained, config, lr, paged=own.kind == "paged_adamw_8bit")


def _groups(trained: Sequence[Trained], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups with weight decay (matrices) and without (norms and biases)."""
    decay = [t.master for t in trained if t.parameter.ndim >= 2]
    plain = [t.master for t in trained if t.parameter.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def _adamw(trained: Sequence[Trained], config: TrainConfig, lr: float) -> list[UpdateRule]:
    if not trained:
        return []
    adamw = torch.optim.AdamW(
        _groups(trained, config.weight_decay),
        lr=lr,
        betas=config.adam_betas,
        eps=config.adam_eps,
        fused=True,
    )
    return [UpdateRule(adamw, ADAM_STATE)]


def embedding_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of embedding tables."""
    return {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for own, _ in module.named_parameters(recurse=False)
    }


# ---- Muon ----------------------------------------------------------------------------------


def _muon(
    model: nn.Module,
    trained: Sequence[Trained],
    config: TrainConfig,
    *,
    lr: float,
    device: torch.device,
    tp_plan: TensorParallelPlan | None,
) -> list[UpdateRule]:
    own = config.optimizer
    assert isinstance(own, MuonConfig)
    hidden = hidden_matrices(model, {t.name: t.shape for t in trained}, own.adamw_params)
    if tp_plan is not None and (
        odd := [n for n in hidden if hidden[n] or len(_shape(trained, n)) > 2]
    ):
        raise OptimizerError(
            f"train.optimizer.kind=muon with train.engine.tensor_parallel_size="
            f"{tp_plan.model_parallel.size}: {odd[0]} holds several matrices, whose split over "
            "ranks is not supported; use sharding=full without tensor parallelism, or add it to "
            "train.optimizer.adamw_params"
        )
    matrices = [
        Matrix(t.master, t.shape, hidden[t.name], None if tp_plan is None else tp_plan.dim(t.name))
        for t in trained
        if t.name in hidden
    ]
    groups = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    settings = muon_settings(own, weight_decay=config.weight_decay)
    muon = Muon(matrices, settings, device=device, **groups)
    rule = UpdateRule(muon, {"momentum": "momentum"}, lr_ratio=(own.matrix_lr or lr) / lr)
    return [rule, *_adamw([t for t in trained if t.name not in hidden], config, lr)]


def muon_settings(own: MuonConfig, *, weight_decay: float) -> MuonSettings:
    """Return the settings of the update."""
    return MuonSettings(
        momentum=own.momentum,
        nesterov=own.nesterov,
        steps=own.ns_steps,
        dtype=DTYPES[own.ns_dtype],
        scale=own.lr_scale,
        weight_decay=weight_decay,
    )


def _shape(trained: Sequence[Trained], name: str) -> tuple[int, ...]:
    return next(t.shape for t in trained if t.name == name)


def hidden_matrices(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], adamw_params: Sequence[str] = ()
) -> dict[str, bool]:
    """Return the parameters that Muon trains -> whether their rows are two matrices.

    These are the weight matrices and stacks of expert matrices in the decoder layers (of adapters:
    A and B, each a matrix). ``adamw_params``: parts of the names of exceptions. Raises
    OptimizerError if there are none, and for a parameter with several matrices in an unknown order.
    """
    body = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    inside = {id(p) for _, layer in layers_of(body) for p in layer.parameters()} if body else set()
    named = dict(model.named_parameters())
    tables = embedding_names(model)
    hidden_size = None if body is None else body.config.get_text_config().hidden_size
    found: dict[str, bool] = {}
    for name, shape in shapes.items():
        matrix = name not in tables and is_muon_matrix(name, shape, adamw_params)
        if id(named[name]) in inside and matrix:
            found[name] = _is_two_matrices(name, shape, hidden_size)
    if not found:
        raise OptimizerError(
            f"train.optimizer.kind=muon: {type(model).__name__} has no matrix in decoder layers "
            "that is trained with Muon; use train.optimizer.kind=adamw"
        )
    return found


def is_muon_matrix(name: str, shape: Sequence[int], adamw_params: Sequence[str]) -> bool:
    """Return whether Muon trains a parameter of a decoder layer that is no embedding table: a
    matrix, or a stack of the matrices of experts, whose name has no part in ``adamw_params``."""
    experts = len(shape) == 3 and "experts" in name
    matrix = len(shape) == 2 and name.endswith("weight")
    return (matrix or experts) and not any(part in name for part in adamw_params)


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


# ---- Adafactor -----------------------------------------------------------------------------


def _adafactor(
    trained: Sequence[Trained],
    config: TrainConfig,
    own: AdafactorConfig,
    tp_plan: TensorParallelPlan | None,
) -> UpdateRule:
    weights = [
        Weight(
            t.master,
            t.shape,
            weight_decay=config.weight_decay if t.parameter.ndim >= 2 else 0.0,
            tp_dim=None if tp_plan is None else tp_plan.dim(t.name),
        )
        for t in trained
    ]
    settings = AdafactorSettings(
        decay_rate=own.decay_rate,
        clip_threshold=own.clip_threshold,
        grad_eps=own.grad_eps,
        scale_parameter=own.scale_parameter,
    )
    group = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    kinds = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "step")
    return UpdateRule(
        Adafactor(weights, settings, **group),
        {kind: kind for kind in kinds},
        layouts={"exp_avg_sq_row": _of_rows, "exp_avg_sq_col": _of_columns},
    )


def _of_rows(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per row."""
    return StateShard(shape[:-1], rows, dims=tuple(range(len(shape) - 1)))


def _of_columns(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per column, of each matrix of a stack."""
    stack = range(len(shape) - 2)
    dims = (*stack, len(shape) - 1)
    return StateShard(tuple(shape[d] for d in dims), rows if stack else columns, dims)


# ---- 8-bit AdamW ---------------------------------------------------------------------------


def _adamw_8bit(
    model: nn.Module, trained: Sequence[Trained], config: TrainConfig, lr: float, *, paged: bool
) -> list[UpdateRule]:
    if paged and trained[0].master.device.type == "cpu":
        raise OptimizerError(
            "train.optimizer.kind=paged_adamw_8bit on a CPU: pages move between GPU and host "
            "memory, so it needs CUDA; use adamw_8bit"
        )
    try:
        from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit
    except ImportError as error:
        raise OptimizerError(
            "train.optimizer.kind=adamw_8bit needs the package bitsandbytes, and importing it "
            f"failed ({error}); install it with: pip install 'burnish[quant]'"
        ) from None
    tables = embedding_names(model)
    has_8_bits = {t.name: has_8bit_moments(t.shape) and t.name not in tables for t in trained}
    small = [t for t in trained if not has_8_bits[t.name]]
    large = [t for t in trained if has_8_bits[t.name]]
    if not large:
        return _adamw(small, config, lr)
    for t in large:
        if not divides_blocks(t.shape, t.shard_ranks):
            raise OptimizerError(undivided_blocks(t.name, t.shape, t.shard_ranks))
    kind = PagedAdamW8bit if paged else AdamW8bit
    optimizer = kind(
        _groups(large, config.weight_decay),
        lr=lr,
        betas=config.adam_betas,
        eps=config.adam_eps,
        min_8bit_size=1,  # a rank's rows may have fewer entries than SMALLEST_8BIT
    )
    device = large[0].master.device

    def maps() -> dict[str, Any]:
        optimizer.fill_qmap()
        names = {"qmap1": "dynamic", "qmap2": "udynamic"}
        return {key: optimizer.name2qmap[name].to(device) for key, name in names.items()}

    kinds = {"exp_avg_8bit": "state1", "exp_avg_sq_8bit": "state2", "step": "step"}
    kinds |= {"exp_avg_absmax": "absmax1", "exp_avg_sq_absmax": "absmax2"}
    scales = {"exp_avg_absmax": _of_blocks, "exp_avg_sq_absmax": _of_blocks}
    return [UpdateRule(optimizer, kinds, extra=maps, layouts=scales), *_adamw(small, config, lr)]


def _of_blocks(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per block of 256 entries."""
    row = math.prod(shape[1:])
    count, begin, end = (-(-row * r // BLOCK_8BIT) for r in (shape[0], *rows))
    return StateShard((count,), (begin, end))


def has_8bit_moments(shape: Sequence[int]) -> bool:
    """Return whether ``adamw_8bit`` trains a parameter that is no embedding with 8-bit moments."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST_8BIT


def divides_blocks(shape: Sequence[int], ranks: int) -> bool:
    """Return whether the rows of FSDP2 over ``ranks`` divide a parameter between blocks of 256
    entries, which have one scale, with entries for every rank."""
    rows, row = shape[0], math.prod(shape[1:])
    each = -(-rows // ranks)
    return ranks == 1 or (each * row % BLOCK_8BIT == 0 and each * (ranks - 1) < rows)


def undivided_blocks(name: str, shape: Sequence[int], ranks: int) -> str:
    """Return the error for a parameter that :func:`divides_blocks` rejects."""
    return (
        f"train.optimizer.kind=adamw_8bit with train.engine.sharding=full: the rows of {name} "
        f"{list(shape)} cannot be divided over {ranks} ranks in multiples of {BLOCK_8BIT} entries, "
        "which have one scale; use another number of ranks, or train.optimizer.kind=adamw"
    )

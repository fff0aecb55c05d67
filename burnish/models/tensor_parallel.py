"""Tensor parallelism: shard a model's layers over ranks. Every rank has some of the heads and some
of the inner width of each layer, and all tokens.

transformers' plan of the model (``base_model_tp_plan``) determines how weights are sharded. The
first projections of attention and MLP are sharded by outputs (``colwise``), the last ones by inputs
(``rowwise``). The input of the first is replicated, so its gradient is summed over ranks. The
output of the last is a partial sum, so it is summed over ranks. Everything else (embeddings, norms,
the head) is replicated: every rank computes it redundantly. Source: Megatron-LM, arXiv:1909.08053.

Every rank has a part of the inner width of every expert of a mixture. The router is replicated: all
ranks choose the same experts. The weights of the chosen experts scale partial outputs, so their
gradient is summed over ranks, and that of the router is then complete on every rank.

Weights are plain tensors, local to each rank. ``distributed/tensor_parallel.py`` tracks which
shards of the full parameters they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.distributed import ProcessGroup, all_reduce
from transformers import PretrainedConfig, PreTrainedModel

from burnish.models.load import ModelError, require_packing
from burnish.models.support import runs_own_code

COLWISE, ROWWISE, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Supported styles of a module. PARTIAL: weights are replicated, each rank applies them to its own
heads, and their gradient is a partial sum."""
EXPERTS = "moe_tp_experts"
"""Style of a module with the stacked matrices of all experts of a layer."""
EXPERT_WEIGHTS = {"gate_up_proj": "packed_colwise", "down_proj": ROWWISE}
"""Parameters of such a module, and their styles. packed_colwise: the gate and the up projection,
each of which is split by outputs."""


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded over ranks."""

    dim: int | None
    """Dimension along which it is split evenly. None: it is replicated, and each rank's gradient is
    a partial sum."""
    shape: tuple[int, ...]
    """Shape of the unsharded parameter."""
    blocks: int = 1
    """Equal blocks along ``dim``, each of which is split evenly (gate and up projection: 2)."""


def part_of(full: Tensor, dim: int, *, blocks: int, rank: int, size: int) -> Tensor:
    """Return the part of rank ``rank`` of ``size`` along ``dim``: its share of each block.

    >>> part_of(torch.arange(8), 0, blocks=2, rank=1, size=2)
    tensor([2, 3, 6, 7])
    """
    return torch.cat([block.chunk(size, dim)[rank] for block in full.chunk(blocks, dim)], dim)


def join_parts(parts: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """Return the tensor whose parts :func:`part_of` returned, in the order of the ranks."""
    split = [part.chunk(blocks, dim) for part in parts]
    return torch.cat([chunks[block] for block in range(blocks) for chunks in split], dim)


def shard_layers(body: PreTrainedModel, group: ProcessGroup) -> dict[str, ShardSpec]:
    """Shard the layers of ``body`` over ``group``, in place, and add the hooks that sum over ranks.

    Returns the sharding of each parameter, by its name in ``body``. All ranks of ``group`` must
    call it, with the same weights. Raises ModelError if the model has no plan, or cannot be split
    over this number of ranks.
    """
    size = group.size()
    setting = f"train.engine.tensor_parallel_size={size}"
    require_packing(body.config, setting, trust=runs_own_code(body))
    styles = layer_styles(body)
    check_head_counts(body.config, size)
    specs: dict[str, ShardSpec] = {}
    for name, style in styles.items():
        for leaf, parameter in body.get_submodule(name).named_parameters():
            (dim, blocks), full = _split(style, leaf, name), f"{name}.{leaf}"
            specs[full] = ShardSpec(dim, tuple(parameter.shape), blocks)
            if dim is None:
                continue
            width = parameter.shape[dim] // blocks
            if width % size:
                raise ModelError(
                    f"train.engine.tensor_parallel_size={size} does not divide dimension {dim} of "
                    f"{full} {list(parameter.shape)}; use a divisor of {width}"
                )
            parameter.data = part_of(
                parameter.data, dim, blocks=blocks, rank=group.rank(), size=size
            )
        if style in (ROWWISE, EXPERTS):
            body.get_submodule(name).register_forward_hook(partial(_sum_output, group))
        if style == EXPERTS:
            body.get_submodule(name).register_forward_pre_hook(
                partial(_share_inputs, group), with_kwargs=True
            )
    for parent in _parents(styles):
        body.get_submodule(parent).register_forward_pre_hook(
            partial(_share_input, group), with_kwargs=True
        )
    return specs


def shard_dims(body: PreTrainedModel) -> dict[str, int | None]:
    """Return the sharded dimension of each parameter of ``body`` that its plan covers.

    None: the parameter is replicated. Raises ModelError like :func:`layer_styles`.
    """
    return {
        f"{name}.{leaf}": _split(style, leaf, name)[0]
        for name, style in layer_styles(body).items()
        for leaf, _ in body.get_submodule(name).named_parameters()
    }


def layer_styles(body: PreTrainedModel) -> dict[str, str]:
    """Return the sharding style of each module, by its name in ``body``.

    Modules outside of the layers are replicated, even if the plan contains them. Raises ModelError
    if there is no plan, or if it is incomplete.
    """
    text = body.config.get_text_config()
    plan = {k: v for k, v in (text.base_model_tp_plan or {}).items() if ".*." in k}
    kind = f"this {text.model_type} model ({type(body).__name__})"
    if COLWISE not in plan.values():
        raise ModelError(
            f"train.engine.tensor_parallel_size: transformers has no tensor-parallel plan for "
            f"{kind}; use 1, and sharding=full or sequence_parallel_size"
        )
    inside = _inside_experts(plan)
    supported = (COLWISE, ROWWISE, PARTIAL, EXPERTS)
    odd = {k: v for k, v in plan.items() if v not in supported and k not in inside}
    if odd:
        name, style = next(iter(odd.items()))
        raise ModelError(
            f"train.engine.tensor_parallel_size: the plan of {kind} shards {name} in an "
            f"unsupported way ({style}); use 1, and sharding=full or sequence_parallel_size"
        )
    styles = {}
    for name, _ in body.named_modules():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if key in plan:
            styles[name] = plan[key]
    for parent in _parents(styles):
        for leaf, _ in body.get_submodule(parent).named_parameters():
            if not any(f"{parent}.{leaf}".startswith(f"{name}.") for name in styles):
                raise ModelError(
                    f"train.engine.tensor_parallel_size: the plan of {kind} does not cover "
                    f"{parent}.{leaf}; use 1, and sharding=full"
                )
    return styles


def _inside_experts(plan: Mapping[str, str]) -> set[str]:
    """Return the keys of ``plan`` that name parameters of experts which can be split."""
    inside: set[str] = set()
    for key in (k for k, v in plan.items() if v == EXPERTS):
        expert_plan = {k: v for k, v in plan.items() if k.startswith(f"{key}.")}
        if {k.removeprefix(f"{key}."): v for k, v in expert_plan.items()} == EXPERT_WEIGHTS:
            inside |= expert_plan.keys()
    return inside


_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_head_counts(config: PretrainedConfig, size: int) -> None:
    """Raise ModelError if ``size`` does not divide the numbers of heads in this HuggingFace
    ``config``."""
    text = config.get_text_config()
    fields = text.to_dict()
    counts = {name: fields.get(name) for name in (text.attribute_map.get(n, n) for n in _HEADS)}
    if not isinstance(next(iter(counts.values())), int):
        raise ModelError(
            f"train.engine.tensor_parallel_size={size}: this {text.model_type} model has no number "
            "of attention heads that ranks could share; use 1, and sharding=full"
        )
    heads = {name: count for name, count in counts.items() if count is not None}
    for name, count in heads.items():
        if count % size:
            works = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise ModelError(
                f"train.engine.tensor_parallel_size={size} does not divide the {count} heads "
                f"({name}) of this {text.model_type} model, which are shared among its ranks (none "
                f"is replicated); use one of {', '.join(works)}, with sharding=full over more ranks"
            )


def _parents(styles: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that contain column-wise projections: their inputs need a summed
    gradient."""
    yield from dict.fromkeys(n.rpartition(".")[0] for n, s in styles.items() if s == COLWISE)


def _split(style: str, leaf: str, module: str) -> tuple[int | None, int]:
    """Return the dimension along which a module's parameter is sharded (None: it is replicated),
    and the number of blocks along it.

    ``leaf`` is its name in the module. Adapters are siblings of ``base_layer``.
    """
    dims: dict[str, dict[str, int | None]] = {
        COLWISE: {"weight": 0, "bias": 0, "lora_A": None, "lora_B": 0},
        ROWWISE: {"weight": 1, "lora_A": 1, "lora_B": None},
        EXPERTS: {"gate_up_proj": 1, "down_proj": 2},
    }
    if style == PARTIAL:
        return None, 1
    part = re.sub(r"^(lora_[AB])\.\w+\.weight$", r"\1", leaf.removeprefix("base_layer."))
    if part in dims[style]:
        return dims[style][part], 2 if part == "gate_up_proj" else 1
    raise ModelError(
        f"train.engine.tensor_parallel_size: {module}.{leaf} cannot be sharded, although its layer "
        "is sharded by inputs or outputs; use 1, and sharding=full"
    )


def _share_input(group: ProcessGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _Share.apply(kwargs["hidden_states"], group)}
    return (_Share.apply(args[0], group), *args[1:]), kwargs


def _share_inputs(group: ProcessGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Sum the gradients of all inputs of experts: the hidden states, and the weights of the chosen
    experts."""

    def share(value: Any) -> Any:
        shared = isinstance(value, Tensor) and value.is_floating_point()
        return _Share.apply(value, group) if shared else value

    return tuple(map(share, args)), {name: share(value) for name, value in kwargs.items()}


def _sum_output(group: ProcessGroup, module: nn.Module, args: Any, output: Tensor) -> Any:
    return _Sum.apply(output, group)


class _Share(autograd.Function):
    """Identity in forward; sums the gradient over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(autograd.Function):
    """Sum over ranks in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    all_reduce(total, group=group)
    return total

"""A model's layers cut over ranks (Megatron tensor parallelism): every rank has some of the heads
and some of the inner width of each layer, and all of the tokens.

Which weights are cut, and how, is transformers' plan of the model (``base_model_tp_plan``): the
first projections of attention and MLP by their outputs (``colwise``), the last by their inputs
(``rowwise``). What goes into the first is whole on every rank, so its gradient is summed over
ranks; what comes out of the last is a part of a sum, and summed. All else (embeddings, norms, the
head) is whole on every rank, and computed by all alike. Source: Megatron-LM, arXiv:1909.08053.

Weights are plain tensors, each rank's own; ``train/tensor_parallel.py`` knows what they are part
of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, autograd, nn
from torch.distributed import ProcessGroup, all_reduce
from transformers import PreTrainedModel

from burnish.models.load import ModelError, require_packing
from burnish.models.support import runs_own_code

COLWISE, ROWWISE, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""What can be done to a module. PARTIAL: its weights are whole on every rank, which computes its
own heads with them."""


@dataclass(frozen=True)
class ShardSpec:
    """A rank's part of a parameter."""

    dim: int | None
    """The dimension along which ranks have equal parts; None: all have all of it, and the gradient
    is a part of a sum."""
    shape: tuple[int, ...]
    """Of the whole parameter."""


def shard_layers(body: PreTrainedModel, group: ProcessGroup) -> dict[str, ShardSpec]:
    """Keep this rank's part of every layer of ``body``, and let its layers compute with the
    others'. Returns what was done, by the parameter's name in ``body``.

    All ranks of ``group`` call it, with the same weights. Raises ModelError if the model has no
    plan, or cannot be cut into as many parts.
    """
    size = group.size()
    setting = f"train.engine.tensor_parallel_size={size}"
    require_packing(body.config, setting, trust=runs_own_code(body))
    styles = layer_styles(body)
    check_head_counts(body.config, size)
    specs: dict[str, ShardSpec] = {}
    for name, style in styles.items():
        for leaf, parameter in body.get_submodule(name).named_parameters():
            dim, full = _dim(style, leaf, name), f"{name}.{leaf}"
            specs[full] = ShardSpec(dim, tuple(parameter.shape))
            if dim is None:
                continue
            if parameter.shape[dim] % size:
                raise ModelError(
                    f"train.engine.tensor_parallel_size={size} does not divide dimension {dim} of "
                    f"{full} {list(parameter.shape)}; use a divisor of {parameter.shape[dim]}"
                )
            parameter.data = parameter.data.chunk(size, dim)[group.rank()].clone()
        if style == ROWWISE:
            body.get_submodule(name).register_forward_hook(partial(_sum_output, group))
    for parent in _parents(styles):
        body.get_submodule(parent).register_forward_pre_hook(
            partial(_share_input, group), with_kwargs=True
        )
    return specs


def shard_dims(body: PreTrainedModel) -> dict[str, int | None]:
    """Along which dimension each parameter of ``body`` that belongs to a layer's plan is cut; None:
    it is whole on every rank. Raises ModelError as :func:`layer_styles`."""
    return {
        f"{name}.{leaf}": _dim(style, leaf, name)
        for name, style in layer_styles(body).items()
        for leaf, _ in body.get_submodule(name).named_parameters()
    }


def layer_styles(body: PreTrainedModel) -> dict[str, str]:
    """Return the sharding style of each module, by its name in ``body``. Raises ModelError if there
    is no plan, or an incomplete one. (Modules outside of the layers are replicated, whatever the
    plan says.)"""
    text = body.config.get_text_config()
    plan = {k: v for k, v in (text.base_model_tp_plan or {}).items() if ".*." in k}
    kind = f"this {text.model_type} model ({type(body).__name__})"
    if COLWISE not in plan.values():
        raise ModelError(
            f"train.engine.tensor_parallel_size: transformers has no tensor-parallel plan for "
            f"{kind}; use 1, and sharding=full or sequence_parallel_size"
        )
    odd = {k: v for k, v in plan.items() if v not in (COLWISE, ROWWISE, PARTIAL)}
    if odd:
        name, style = next(iter(odd.items()))
        raise ModelError(
            f"train.engine.tensor_parallel_size: the plan of {kind} cuts {name} in a way that is "
            f"not there ({style}); use 1, and sharding=full or sequence_parallel_size"
        )
    found = {}
    for name, _ in body.named_modules():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if key in plan:
            found[name] = plan[key]
    for parent in _parents(found):
        for leaf, _ in body.get_submodule(parent).named_parameters():
            if not any(f"{parent}.{leaf}".startswith(f"{name}.") for name in found):
                raise ModelError(
                    f"train.engine.tensor_parallel_size: the plan of {kind} does not say what to "
                    f"do with {parent}.{leaf}; use 1"
                )
    return found


_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_head_counts(config: Any, size: int) -> None:
    """Raise ModelError where ``size`` ranks cannot share the heads of a model of this HuggingFace
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
                f"({name}) of this {text.model_type} model, which are shared among its ranks; use "
                f"one of {', '.join(works)}"
            )


def _parents(styles: Mapping[str, str]) -> Iterator[str]:
    """The modules whose inputs go to projections that are cut by their outputs."""
    yield from dict.fromkeys(n.rpartition(".")[0] for n, s in styles.items() if s == COLWISE)


def _dim(style: str, leaf: str, module: str) -> int | None:
    """Along which dimension a parameter of a module is cut. ``leaf``: its name there; adapters
    stand beside the ``base_layer``."""
    if style == PARTIAL:
        return None
    part = leaf.removeprefix("base_layer.")
    if part == "weight":
        return 0 if style == COLWISE else 1
    if part == "bias" and style == COLWISE:
        return 0
    if re.fullmatch(r"lora_A\.\w+\.weight", part):
        return None if style == COLWISE else 1
    if re.fullmatch(r"lora_B\.\w+\.weight", part):
        return 0 if style == COLWISE else None
    raise ModelError(
        f"train.engine.tensor_parallel_size: {module}.{leaf} is part of a layer that is cut by its "
        "inputs or outputs, and cannot be; use 1"
    )


def _share_input(group: ProcessGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": _Share.apply(kwargs["hidden_states"], group)}
    return (_Share.apply(args[0], group), *args[1:]), kwargs


def _sum_output(group: ProcessGroup, module: nn.Module, args: Any, output: Tensor) -> Any:
    return _Sum.apply(output, group)


class _Share(autograd.Function):
    """The same tensor for every rank's part of the computation."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(autograd.Function):
    """The sum of every rank's part, from which all compute on alike."""

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

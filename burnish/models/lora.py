"""LoRA adapters: inject them with peft, disable them for the reference, merge them for export."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.model import LoraConfig
from burnish.models.buffers import persistent_buffers, plain_name

log = logging.getLogger("burnish")

ADAPTER = "default"


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """Return the peft config of our config; it is also written with an exported adapter."""
    targets = config.target_modules
    return PeftLoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def inject_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Inject adapters into ``model``, in place. Afterwards only adapters require gradients.

    Raises ValueError if the targets match no layer, match the embedding or the output projection,
    or match layers that adapters cannot wrap.
    """
    generator = torch.get_rng_state()
    inject_adapter_in_model(peft_config(config), model, adapter_name=ADAPTER)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(isinstance(end, LoraLayer) for end in ends):
        raise ValueError(
            "the embedding and the output projection cannot have adapters (log-probs are computed "
            "from the projection's weight alone); name inner layers, or use all-linear"
        )
    _fill_empty_adapters(model, generator)
    _check_shared_weights(model)
    _check_special_layers(model)
    _warn_of_bare_experts(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _check_shared_weights(model: nn.Module) -> None:
    """Raise ValueError if several adapted layers share a weight (Zamba repeats an attention block).

    Each layer would have its own adapter, and they could not be merged into one weight.
    """
    names: dict[int, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer, ParamWrapper):
            continue
        first = names.setdefault(id(layer.get_base_layer().weight), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} share one weight, and their adapters could not be merged into "
                "it; name layers that are not repeated, or train all weights"
            )


@torch.no_grad()
def _check_special_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if adapters break subclasses of ``nn.Linear`` with their own forward.

    Examples are the grouped projections of DeepSeek-V4 and routers that return several tensors.
    Computes two tokens if there are such layers and the model is neither sharded nor on the meta
    device.
    """
    adapted = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    special = {n: m.get_base_layer() for n, m in adapted.items() if _is_special(m)}
    if not special or any(p.is_meta or not p.numel() for p in model.parameters()):
        return
    try:
        model(input_ids=torch.tensor([[1, 2]], device=model.device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        name, layer = next(iter(special.items()))
        left_out = {n.rpartition(".")[2] for n in special}
        others = sorted({n.rpartition(".")[2] for n in adapted} - left_out)
        raise ValueError(
            f"{name} is a {type(layer).__name__}, whose forward an adapter does not support "
            f"({str(error).splitlines()[0]}); name other layers, such as [{', '.join(others)}]"
        ) from error


def _is_special(layer: LoraLayer) -> bool:
    base = layer.get_base_layer()
    return isinstance(base, nn.Linear) and type(base).forward is not nn.Linear.forward


def _fill_empty_adapters(model: nn.Module, generator: Tensor) -> None:
    """Initialize adapters that are on the meta device, on the CPU.

    peft moves adapters to the device of their layer; on the meta device they lose their values.
    They are drawn again from the random state ``generator``, with the same result.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    empty = [layer for layer in layers if layer.lora_A[ADAPTER].weight.is_meta]
    if empty:
        torch.set_rng_state(generator)
    for layer in empty:
        for part in (layer.lora_A, layer.lora_B):
            linear = cast(nn.Linear, part.to_empty(device="cpu")[ADAPTER])
            linear.reset_parameters()  # a new layer also draws its weights from the generator
        layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of ``model`` inside the ``with`` block."""
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    trainable = [p for p in model.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trainable:  # peft's switch also touches requires_grad
            parameter.requires_grad_(True)


def merged_weights(
    model: nn.Module, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HuggingFace name, tensor) for every parameter, then for every persistent buffer.

    Adapters are merged into their base weights in fp32. ``only`` restricts the parameters to these
    names in ``model`` (base weights; adapters follow theirs) and skips buffers. None: all.
    """
    adapters = _adapters_by_parameter(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name or (only is not None and name not in only):
            continue
        plain = plain_name(name)
        if plain not in adapters:
            yield plain, parameter.detach()
            continue
        with torch.no_grad():
            merged = parameter.float()
            for layer in adapters[plain]:
                merged = merged + layer.get_delta_weight(ADAPTER).float()  # type: ignore[attr-defined]
            yield plain, merged.to(parameter.dtype)
    if only is None:
        yield from persistent_buffers(model)


def _adapters_by_parameter(model: nn.Module) -> dict[str, list[LoraLayer]]:
    """Return the adapters of each adapted parameter, by the parameter's plain name.

    A wrapper around a module adapts the module's ``weight``. A :class:`ParamWrapper` adapts the
    parameter that it names; several of these may be nested around one module.
    """
    found: dict[str, list[LoraLayer]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            found.setdefault(f"{plain_name(name)}.{leaf}", []).append(layer)
    return found


_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}
"""Names of an expert's projections, in checkpoints of common mixtures and in transformers."""


def _warn_of_bare_experts(model: nn.Module, config: LoraConfig) -> None:
    """Log a warning if ``config`` seems to target fused experts but they have no adapters.

    peft only supports the expert weights of some families.
    """
    targets = config.target_modules
    if isinstance(targets, str):
        asked = targets == "all-linear"
    else:
        asked = bool(_MLP_NAMES & {target.rpartition(".")[2] for target in targets})
    if not asked:
        return
    adapters = _adapters_by_parameter(model)
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    bare = [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
        and len(_shape(parameter)) == 3
        and id(parameter) not in convolutions
        and plain_name(name) not in adapters
    ]
    if bare:
        log.warning(
            "model.lora.target_modules=%r gives no adapters to %d fused expert weights of this %s "
            "model (e.g. %s): they stay as in the base model",
            *(targets, len(bare), type(model).__name__, bare[0]),
        )


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full parameter, even if DeepSpeed shards it."""
    return tuple(vars(parameter).get("ds_shape", parameter.shape))

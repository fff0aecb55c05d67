"""LoRA adapters: injected through peft, switched off for the reference, merged on the way out."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.model import LoraConfig

ADAPTER = "default"


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """The peft form of our config, as it is written beside an exported adapter."""
    targets = config.target_modules
    return PeftLoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def inject_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters into ``model`` in place; only they require gradients afterwards.

    Raises ValueError where the targets match no layer, or the embedding or the output projection.
    """
    generator = torch.get_rng_state()
    inject_adapter_in_model(peft_config(config), model, adapter_name=ADAPTER)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(isinstance(end, LoraLayer) for end in ends):
        raise ValueError(
            "the embedding and the output projection cannot have adapters (log-probs are computed "
            "from the "
            "projection's weight alone); name inner layers, or use all-linear"
        )
    _fill_empty_adapters(model, generator)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _fill_empty_adapters(model: nn.Module, generator: Tensor) -> None:
    """peft moves adapters to where their layer is: to the meta device too, without their values.
    These are drawn again, as they were from ``generator``, the state of then."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    empty = [layer for layer in layers if layer.lora_A[ADAPTER].weight.is_meta]
    if empty:
        torch.set_rng_state(generator)
    for layer in empty:
        for part in (layer.lora_A, layer.lora_B):
            linear = cast(nn.Linear, part.to_empty(device="cpu")[ADAPTER])
            linear.reset_parameters()  # as a new layer does, which draws
        layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its base weights alone."""
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
    """(HuggingFace name, tensor) of every parameter, adapters added to their base weights in
    fp32. ``only``: these parameters, by their names in ``model`` (a layer's base weight and
    adapters go together); None: all."""
    deltas = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    for name, parameter in model.named_parameters():
        if ".lora_" in name or (only is not None and name not in only):
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner:
            yield name, parameter.detach()
        elif leaf == "weight":
            with torch.no_grad():
                delta = deltas[owner].get_delta_weight(ADAPTER).float()  # type: ignore[attr-defined]
                yield f"{owner}.weight", (parameter.float() + delta).to(parameter.dtype)
        else:
            yield f"{owner}.{leaf}", parameter.detach()

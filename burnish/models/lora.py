"""LoRA adapters: inject them with peft, disable them for the reference, merge them for export.

peft is imported where a model has or gets adapters, because its import (and that of bitsandbytes,
which it imports if installed) takes as long as that of torch.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from burnish.config.model import ADAPTER_CONFIG, END_NAMES, LoraConfig
from burnish.models.buffers import persistent_buffers, plain_name
from burnish.models.nf4 import Nf4Layer, packed_names, quantized_layers

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

log = logging.getLogger("burnish")

ADAPTER = "default"


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """Return the peft config of our config; it is also written with an exported adapter."""
    from peft import LoraConfig as PeftLoraConfig

    targets = config.target_modules
    return PeftLoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )


def inject_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Inject adapters into ``model``, in place. Afterwards only adapters and saved modules require
    gradients. With ``config.path`` they start with the weights of that folder.

    Raises ValueError if the targets match no layer, match tied embeddings, or match layers that
    adapters cannot wrap, and if the adapter of ``config.path`` belongs to another base.
    """
    from peft import inject_adapter_in_model

    _check_targets(model, config)
    generator = torch.get_rng_state()
    tied = _is_tied(model)
    inject_adapter_in_model(peft_config(config), model, adapter_name=ADAPTER)
    _check_ends(model, tied=tied)
    _check_saved(model, config)
    _fill_empty_adapters(model, generator)
    _check_shared_weights(model)
    _check_special_layers(model)
    _warn_of_bare_experts(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if config.path is not None:
        load_adapter(model, Path(config.path))


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter or to the copy of a saved module."""
    return ".lora_" in name or _SAVED in name


def has_adapters(module: nn.Module) -> bool:
    """Return whether ``module`` is, or contains, an adapted layer or a saved module."""
    return any(is_adapter(f".{name}") for name, _ in module.named_parameters())


def adapted_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """Return the adapted layers in ``module`` (itself included, as ``""``), by name."""
    if not has_adapters(module):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}


def saved_modules(module: nn.Module) -> dict[str, ModulesToSaveWrapper]:
    """Return the modules in ``module`` that peft trains and saves in full, by name."""
    if not has_adapters(module):
        return {}
    from peft.utils.other import ModulesToSaveWrapper

    return {name: m for name, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)}


_SAVED = f".modules_to_save.{ADAPTER}."
_ORIGINAL = ".original_module."


def effective_weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return (weight [O, I], bias [O] or None) that ``layer`` computes with now, differentiable
    with respect to its adapter or its saved copy.

    Adapters that are disabled do not count. The delta of an adapter [O, I] is materialized.
    """
    if (wrapper := saved_modules(layer).get("")) is not None:
        saved = wrapper.modules_to_save[ADAPTER]
        return effective_weight(wrapper.original_module if wrapper.disable_adapters else saved)
    if (adapted := adapted_layers(layer).get("")) is not None:
        weight, bias = effective_weight(adapted.get_base_layer())
        if adapted.disable_adapters:
            return weight, bias
        delta: Tensor = cast(Any, adapted).get_delta_weight(ADAPTER)
        return weight + delta.to(weight.dtype), bias
    return cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Copy the weights of peft's adapter in ``folder`` into the adapters of ``model``.

    Raises ValueError if names or shapes differ: the adapter belongs to another base model.
    """
    file = folder / ADAPTER_FILE
    if not (folder / ADAPTER_CONFIG).is_file() or not file.is_file():
        raise ValueError(
            f"model.lora.path={folder} is not an adapter folder: it needs {ADAPTER_CONFIG} and "
            f"{ADAPTER_FILE} (adapter_model.bin can run code when read; convert it to safetensors "
            "with peft's save_pretrained)"
        )
    own = adapter_tensors(model)
    given = {name.removeprefix(_PEFT_PREFIX): t for name, t in load_file(file).items()}
    if odd := sorted(own.keys() ^ given.keys()):
        where = "only the adapter has" if odd[0] in given else "only this model has"
        raise ValueError(
            f"the adapter {folder} does not fit this base model: {len(odd)} names differ, e.g. "
            f"{where} {odd[0]}; set model.path to the base of the adapter"
            + (f" ({base})" if (base := adapter_base(folder)) else "")
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise ValueError(
                f"the adapter {folder} belongs to another base model: {name} has shape "
                f"{list(given[name].shape)} in the adapter and {list(tensor.shape)} in this "
                "model; set model.path to the base of the adapter"
                + (f" ({base})" if (base := adapter_base(folder)) else "")
            )
        if not bool(given[name].isfinite().all()):
            raise ValueError(f"the adapter {folder} has a weight that is not finite: {name}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])


ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters and saved modules of ``model``, by their name in peft's
    format without its prefix. They share the model's memory."""
    from peft.utils import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return found


def adapter_base(folder: Path) -> str | None:
    """Return the base model that an adapter folder names, or None."""
    found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return found.get("base_model_name_or_path") or None


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _check_ends(model: PreTrainedModel, *, tied: bool) -> None:
    """Raise ValueError if the embedding or the output projection has an adapter or is saved, and
    the two are tied."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if tied and any(has_adapters(end) for end in ends):
        raise ValueError(
            "the embedding and the output projection of this model are tied: one weight, which an "
            "adapter or a saved copy of one of them would split into two, so the merged model "
            "could not be loaded; name inner layers, use all-linear, or train all weights"
        )


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a name of ``target_modules`` matches no module. peft only checks that one
    matches. Heads are not part of scalar models, a saved adapter has its own names, and peft
    translates the names of experts, which are stacked in parameters."""
    names, wanted = [name for name, _ in model.named_modules()], config.target_modules
    stacked = any(parameter.ndim > 2 for parameter in model.parameters())
    if config.path is not None or wanted == "all-linear" or stacked:
        return
    if isinstance(wanted, str):
        missing = [] if any(re.fullmatch(wanted, name) for name in names) else [wanted]
    else:
        inner = (target for target in wanted if target not in END_NAMES)
        missing = [t for t in inner if not any(f".{n}".endswith(f".{t}") for n in names)]
    if missing:
        linear = {n.rpartition(".")[2] for n, m in model.named_modules() if _is_linear(m)}
        raise ValueError(
            f"{missing[0]!r} matches no module of this model; use all-linear, or names of its "
            f"linear layers: {', '.join(sorted(linear))}"
        )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _check_saved(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a name of ``modules_to_save`` matches no module, or one that cannot be
    saved."""
    saved = saved_modules(model)
    for wanted in config.modules_to_save:
        if not any(n == wanted or n.endswith(f".{wanted}") for n in saved):
            raise ValueError(
                f"model.lora.modules_to_save has {wanted!r}, which names no module of this model; "
                "use names such as embed_tokens, lm_head or norm"
            )
    for name, module in saved.items():
        if adapted_layers(module) or packed_names(module):
            raise ValueError(
                f"model.lora.modules_to_save: {name} contains layers with adapters or 4-bit "
                "weights; save modules outside of model.lora.target_modules, such as lm_head"
            )


def _check_shared_weights(model: nn.Module) -> None:
    """Raise ValueError if several adapted layers share a weight (Zamba repeats an attention block).

    Each layer would have its own adapter, and they could not be merged into one weight.
    """
    from peft.tuners.lora.layer import ParamWrapper

    names: dict[int, str] = {}
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ParamWrapper):
            continue
        first = names.setdefault(_weight_id(layer.get_base_layer()), name)
        if first != name:
            raise ValueError(
                f"{first} and {name} share one weight, and their adapters could not be merged into "
                "it; name layers that are not repeated, or train all weights"
            )


def _weight_id(layer: nn.Module) -> int:
    return id(layer.packed if isinstance(layer, Nf4Layer) else layer.weight)


@torch.no_grad()
def _check_special_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if adapters break subclasses of ``nn.Linear`` with their own forward.

    Examples are the grouped projections of DeepSeek-V4 and routers that return several tensors.
    Computes two tokens if there are such layers and the model is neither sharded nor on the meta
    device.
    """
    adapted = adapted_layers(model)
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
    quantized = isinstance(base, Nf4Layer)
    return (
        isinstance(base, nn.Linear)
        and not quantized
        and type(base).forward is not nn.Linear.forward
    )


def _fill_empty_adapters(model: nn.Module, generator: Tensor) -> None:
    """Initialize adapters that are on the meta device, on the CPU.

    peft moves adapters to the device of their layer; on the meta device they lose their values.
    They are drawn again from the random state ``generator``, with the same result.
    """
    layers = [layer for layer in adapted_layers(model).values() if ADAPTER in layer.lora_A]
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
    layers: list[Any] = [*adapted_layers(model).values(), *saved_modules(model).values()]
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

    Adapters are merged into their base weights in fp32; 4-bit weights are dequantized first. Saved
    modules replace their originals. ``only`` restricts the parameters to these names in ``model``
    (base weights; adapters follow theirs) and skips buffers. None: all.
    """
    adapters, quantized = _adapters_by_parameter(model), quantized_layers(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name or _ORIGINAL in name or (only is not None and name not in only):
            continue
        owner, _, leaf = name.rpartition(".")
        base: Tensor = parameter.detach()
        if leaf == "packed" and owner in quantized:
            name, base = f"{owner}.weight", quantized[owner].weight
        plain = plain_name(name.replace(_SAVED, "."))
        if plain not in adapters:
            yield plain, base
            continue
        with torch.no_grad():
            merged = base.float()
            for layer in adapters[plain]:
                merged = _merged(layer, merged)
            yield plain, merged.to(base.dtype)
    if only is None:
        yield from persistent_buffers(model)


def _merged(layer: Any, base: Tensor) -> Tensor:
    """Return the fp32 weight ``base`` with the adapter of ``layer``.

    DoRA scales every output's weights to a trained norm: magnitude x (W + D) / |W + D|.
    """
    merged = base + layer.get_delta_weight(ADAPTER).float()
    if ADAPTER not in (layer.lora_magnitude_vector or ()):
        return merged
    inputs = 0 if layer.fan_in_fan_out else 1
    factor = layer.lora_magnitude_vector[ADAPTER].weight.float() / merged.norm(dim=inputs)
    return merged * factor.unsqueeze(inputs)


def _adapters_by_parameter(model: nn.Module) -> dict[str, list[LoraLayer]]:
    """Return the adapters of each adapted parameter, by the parameter's plain name.

    A wrapper around a module adapts the module's ``weight``. A :class:`ParamWrapper` adapts the
    parameter that it names; several of these may be nested around one module.
    """
    found: dict[str, list[LoraLayer]] = {}
    if not (layers := adapted_layers(model)):
        return found
    from peft.tuners.lora.layer import ParamWrapper

    for name, layer in layers.items():
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
        if not is_adapter(name)
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

"""LoRA adapters: inject them with peft, check that they fit, read and write them in peft's format.

peft is imported where a model has or gets adapters, because its import (and that of bitsandbytes,
which it imports if installed) takes as long as that of torch.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from burnish.config.adapters import ADAPTER_CONFIG, saved_exclusion
from burnish.config.model import HEAD_NAMES, LoraConfig
from burnish.models.auto_class import other_parts
from burnish.models.buffers import plain_name
from burnish.models.lora_layers import (
    ADAPTER,
    adapted_layers,
    adapters_by_parameter,
    has_adapters,
    is_adapter,
    saved_modules,
)
from burnish.models.nf4 import Nf4Layer, packed_names

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig

log = logging.getLogger("burnish")


def peft_config(config: LoraConfig, model: nn.Module) -> PeftLoraConfig:
    """Return the peft config of our config; it is also written with an exported adapter. In a
    composite model, only the language model gets adapters, unless those of ``config.path`` are
    elsewhere too. Raises ValueError if these were made for another composite model."""
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
        exclude_modules=_excluded(config, model),
        task_type="CAUSAL_LM",
    )


def _excluded(config: LoraConfig, model: nn.Module) -> str | None:
    """Return the names of modules without adapters as a regular expression. None: all may have
    one."""
    parts = other_parts(model)
    adapted = adapted_layers(model)
    if parts is not None and adapted:
        outside = any(re.fullmatch(parts, plain_name(name)) for name in adapted)
        return None if outside else parts
    if config.path is None:
        return parts
    saved = saved_exclusion(Path(config.path))
    if saved not in (None, parts):
        base = adapter_base(Path(config.path))
        raise ValueError(
            f"model.lora.path: the adapter {config.path} has exclude_modules={saved!r}, which is "
            f"not that of this model ({parts!r}); set model.path to the base of the adapter"
            + (f" ({base})" if base else "")
        )
    return saved


def inject_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Inject adapters into ``model``, in place. Afterwards only adapters and saved modules require
    gradients. With ``config.path`` they start with the weights of that folder.

    Raises ValueError as :func:`add_adapters`, if adapters break a layer's own forward, and if the
    adapter of ``config.path`` belongs to another base. The message starts with the setting.
    """
    generator = torch.get_rng_state()
    add_adapters(model, config)
    _fill_empty_adapters(model, generator)
    _check_special_layers(model, config)
    _warn_of_bare_experts(model, config)
    if config.path is not None:
        load_adapter(model, Path(config.path))


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add the adapters and saved copies of ``config`` to ``model``, in place. Afterwards only their
    parameters require gradients.

    Reads no weights and works on the meta device, so that a memory plan counts the parameters that
    a run trains. Raises ValueError if a target matches no layer, and if targets match tied
    embeddings or layers that adapters cannot wrap. The message starts with the setting.
    """
    from peft import inject_adapter_in_model

    _check_targets(model, config)
    _check_saved_weights(model, config)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    settings = peft_config(config, model)
    try:
        inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ValueError(f"{_targets(config)}: {error}") from error
    except TypeError as error:  # a saved module that also has an adapter
        raise ValueError(
            f"{_SAVE}={list(config.modules_to_save)}: {error}; save modules outside of "
            "model.lora.target_modules, such as lm_head"
        ) from error
    _check_ends(model, config, tied=tied)
    _check_expert_targets(model, config)
    _check_saved(model, config)
    _check_shared_weights(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


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
    adapters = adapter_tensors(model)
    tensors = {name.removeprefix(_PEFT_PREFIX): t for name, t in load_file(file).items()}
    tensors = _without_base_weights(tensors, model, folder)
    if odd := sorted(adapters.keys() ^ tensors.keys()):
        where = "only the adapter has" if odd[0] in tensors else "only this model has"
        raise ValueError(
            f"model.lora.path: the adapter {folder} does not fit this base model: {len(odd)} names "
            f"differ, e.g. {where} {odd[0]}; set model.path to the base of the adapter"
            + (f" ({base})" if (base := adapter_base(folder)) else "")
        )
    for name, tensor in adapters.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"model.lora.path: the adapter {folder} belongs to another base model: {name} has "
                f"shape {list(tensors[name].shape)} in the adapter and {list(tensor.shape)} in "
                "this model; set model.path to the base of the adapter"
                + (f" ({base})" if (base := adapter_base(folder)) else "")
            )
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(
                f"model.lora.path: the adapter {folder} has a weight that is not finite: {name}"
            )
    with torch.no_grad():
        for name, tensor in adapters.items():
            tensor.copy_(tensors[name])


def _without_base_weights(
    adapter: Mapping[str, Tensor], model: nn.Module, folder: Path
) -> dict[str, Tensor]:
    """Return an adapter without copies of weights of the base. peft saves those of an embedding or
    head that has an adapter.

    Raises ValueError if one of them is not equal to the weight of ``model``.
    """
    base = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    for name in base.keys() & adapter.keys():
        weight = base[name]
        if weight.is_meta or not torch.equal(adapter[name].to(weight), weight):
            raise ValueError(
                f"model.lora.path: the adapter {folder} has a {name} of its own, which is not that "
                "of this model, but an adapter cannot replace weights of its base; merge it into "
                "its base with peft (merge_and_unload, save_pretrained), and set model.path to the "
                "result"
            )
    return {name: tensor for name, tensor in adapter.items() if name not in base}


ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters and saved modules of ``model``, by their name in peft's
    format without its prefix. They share the model's memory."""
    from peft.utils import get_peft_model_state_dict

    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return tensors


def adapter_base(folder: Path) -> tuple[str | None, str | None]:
    """Return (the base model that an adapter folder names, its hub revision); None where it names
    none."""
    adapter_config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    names = ("base_model_name_or_path", "revision")
    base, revision = (adapter_config.get(name) or None for name in names)
    return base, revision


def adapted_ends(model: PreTrainedModel) -> list[str]:
    """Return the names of the embedding and of the output projection if they have adapters."""
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    return [plain_name(name) for name, layer in adapted_layers(model).items() if id(layer) in ends]


def _check_ends(model: PreTrainedModel, config: LoraConfig, *, tied: bool) -> None:
    """Raise ValueError if the embedding or the output projection has an adapter or is saved, and
    the two are tied, and if it has an adapter with DoRA's magnitude."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = adapted_ends(model)
    if tied and any(has_adapters(end) for end in ends):
        setting = _targets(config) if names else f"{_SAVE}={list(config.modules_to_save)}"
        raise ValueError(
            f"{setting}: the embedding and the output projection of this model are tied: one "
            "weight, which an adapter or a saved copy of one of them would split into two, so the "
            "merged model could not be loaded; name inner layers, use all-linear, or train all "
            "weights"
        )
    if config.use_dora and names:
        raise ValueError(
            f"model.lora.use_dora=true: {_targets(config)} gives an adapter to {names[0]}, and the "
            "magnitude of an embedding or head is not supported; name only inner layers, save "
            f"{names[0].rpartition('.')[2]} with {_SAVE}, or use use_dora=false"
        )


_SAVE = "model.lora.modules_to_save"


def _targets(config: LoraConfig) -> str:
    """Return the setting of the targets, as written in a recipe."""
    targets = config.target_modules
    return f"model.lora.target_modules={targets if isinstance(targets, str) else list(targets)}"


def _check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ValueError if a name of ``target_modules`` matches no module. peft only checks that one
    matches. Models without a head may be given its name. Names of experts, which are stacked in
    parameters, are checked later."""
    names, targets = [name for name, _ in model.named_modules()], config.target_modules
    if config.path is not None or targets == "all-linear":
        return
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        missing = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in names)]
    if model.get_output_embeddings() is None:
        missing = [name for name in missing if name not in HEAD_NAMES]
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        missing = [name for name in missing if name.rpartition(".")[2] not in _MLP_NAMES]
    if missing:
        modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)]
        linear = {n.rpartition(".")[2] for n, _ in modules}
        raise ValueError(
            f"{_targets(config)}: {missing[0]!r} matches no module of this model; use all-linear, "
            f"or names of its linear layers: {', '.join(sorted(linear))}"
        )


def _check_expert_targets(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a target names projections of stacked experts, and neither these nor a
    layer of that name have an adapter. peft translates the names of some families."""
    from peft.tuners.lora.layer import ParamWrapper

    adapted = adapted_layers(model)
    if (
        config.path is not None
        or isinstance(config.target_modules, str)
        or any(isinstance(layer, ParamWrapper) for layer in adapted.values())
    ):
        return
    names = [f".{plain_name(name)}" for name in adapted]
    for target in config.target_modules:
        is_expert = target.rpartition(".")[2] in _MLP_NAMES
        if is_expert and not any(name.endswith(f".{target}") for name in names):
            raise ValueError(
                f"{_targets(config)}: {target!r} matches no module of this model, and its fused "
                "expert weights get no adapters; remove it, or use all-linear"
            )


def _check_saved_weights(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a module to save has 4-bit weights, which peft cannot copy and train."""
    for name, module in model.named_modules():
        if name.endswith(config.modules_to_save or ("\0",)) and packed_names(module):
            raise ValueError(_saved_text(name))


def _saved_text(name: str) -> str:
    return (
        f"{_SAVE}: {name} contains layers with adapters or 4-bit weights; save modules outside of "
        "model.lora.target_modules, such as lm_head"
    )


def _check_saved(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if a name of ``modules_to_save`` matches no module, or one that cannot be
    saved."""
    saved = saved_modules(model)
    for module_name in config.modules_to_save:
        if not any(n == module_name or n.endswith(f".{module_name}") for n in saved):
            raise ValueError(
                f"{_SAVE} has {module_name!r}, which names no module of this model; "
                "use names such as embed_tokens, lm_head or norm"
            )
    for name, module in saved.items():
        if adapted_layers(module):
            raise ValueError(_saved_text(name))


def _check_shared_weights(model: nn.Module, config: LoraConfig) -> None:
    """Raise ValueError if several adapted layers share a weight (Zamba repeats an attention block).

    Each layer would have its own adapter, and they could not be merged into one weight.
    """
    from peft.tuners.lora.layer import ParamWrapper

    names: dict[int, str] = {}
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ParamWrapper):
            continue
        base = layer.get_base_layer()
        weight = base.packed if isinstance(base, Nf4Layer) else base.weight
        first = names.setdefault(id(weight), name)
        if first != name:
            raise ValueError(
                f"{_targets(config)}: {first} and {name} share one weight, and their adapters "
                "could not be merged into it; name layers that are not repeated, or train all "
                "weights"
            )


@torch.no_grad()
def _check_special_layers(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ValueError if adapters break subclasses of ``nn.Linear`` and ``nn.Embedding`` with
    their own forward.

    Examples are the grouped projections of DeepSeek-V4, routers that return several tensors, and
    the learned positions of OPT, which are computed from the mask.
    Computes two tokens if there are such layers and the model is neither sharded nor on the meta
    device.
    """
    adapted = adapted_layers(model)
    special = {}
    for name, layer in adapted.items():
        base = layer.get_base_layer()
        is_plain = type(base).forward in (nn.Linear.forward, nn.Embedding.forward)
        is_layer = isinstance(base, nn.Linear | nn.Embedding) and not isinstance(base, Nf4Layer)
        if is_layer and not is_plain:
            special[name] = base
    if not special or any(p.is_meta or not p.numel() for p in model.parameters()):
        return
    try:
        model(input_ids=torch.tensor([[1, 2]], device=model.device), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        name, base = next(iter(special.items()))
        left_out = {n.rpartition(".")[2] for n in special}
        others = sorted({n.rpartition(".")[2] for n in adapted} - left_out)
        raise ValueError(
            f"{_targets(config)}: {name} is a {type(base).__name__}, whose forward an adapter "
            f"does not support ({str(error).splitlines()[0]}); name other layers, such as "
            f"[{', '.join(others)}]"
        ) from error


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
    adapters = adapters_by_parameter(model)
    others = re.compile(other_parts(model) or "(?!)")
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    bare = [
        plain_name(name)
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
        and len(vars(parameter).get("ds_shape", parameter.shape)) == 3  # of DeepSpeed's shards
        and id(parameter) not in convolutions
        and plain_name(name) not in adapters
        and others.fullmatch(plain_name(name)) is None
    ]
    if bare:
        log.warning(
            "model.lora.target_modules=%r gives no adapters to %d fused expert weights of this %s "
            "model (e.g. %s): they stay as in the base model",
            *(targets, len(bare), type(model).__name__, bare[0]),
        )

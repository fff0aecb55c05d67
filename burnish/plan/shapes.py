"""Shape of a model from its config alone: the size of every parameter, counted on the meta device.

A config comes from the recipe (``scratch``), a folder's config.json, or the hub's cache on this
machine. If a hub model is not cached, the small table ``models.yaml`` is used. Nothing is
downloaded and no weight is read.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    PretrainedConfig,
)

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.paths import folder_problem
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.auto_class import language_model_class
from burnish.models.load import describe
from burnish.models.nf4 import layers_to_quantize
from burnish.models.scalar_model import head_width
from burnish.models.scratch import scratch_tokenizer
from burnish.models.units import gathered_modules
from burnish.models.untrusted import UNREADABLE, check_kinds, refuse_kernels

_ENDINGS = re.compile(r"-(instruct|it|chat|base|hf|v0\.3|sft|dpo|\d{4})$")


class PlanError(BurnishError, ValueError):
    """A plan that cannot be made. The message names the missing information and how to supply
    it."""


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that are gathered together: a decoder layer, the embedding, or the rest."""

    name: str
    kind: str
    """``layer``, ``embedding`` or ``rest`` (final norm, output projection or value head; also the
    embedding if it is tied)."""
    numels: tuple[int, ...]
    """Number of entries of each parameter."""
    lora: int = 0
    """Number of adapter entries in this unit."""
    quantized: tuple[int, ...] = ()
    """Number of entries of each 4-bit weight, which are also in ``numels``."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of each parameter, in the order of ``numels``; empty if unknown."""
    names: tuple[str, ...] = ()
    """Name of each parameter in the model, in the order of ``numels``; empty if unknown."""

    @property
    def numel(self) -> int:
        """Number of entries of all base parameters."""
        return sum(self.numels)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. ``scalar``: the model has ``outputs`` (critic, reward) instead of the
    vocabulary."""

    name: str
    source: str
    """Description of the config's origin."""
    config: PretrainedConfig
    units: tuple[FsdpUnit, ...]
    scalar: bool
    tied: bool
    outputs: int = 1
    double_quantization: bool = False
    """True if the scales of 4-bit weights are quantized too."""

    @property
    def parameters(self) -> int:
        """Number of entries of all parameters without adapters; tied parameters count once."""
        return sum(unit.numel for unit in self.units)

    @property
    def adapters(self) -> int:
        """Number of entries of all LoRA adapters."""
        return sum(unit.lora for unit in self.units)

    @property
    def quantized(self) -> tuple[int, ...]:
        """Number of entries of each 4-bit weight."""
        return tuple(n for unit in self.units for n in unit.quantized)

    @property
    def layers(self) -> tuple[FsdpUnit, ...]:
        """The decoder layers."""
        return tuple(unit for unit in self.units if unit.kind == "layer")

    @property
    def text(self) -> Any:
        """Config of the language model itself."""
        return self.config.get_text_config()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        text = self.text.to_dict()
        given = text.get("head_dim")
        return int(given or text["hidden_size"] // text["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        text = self.text.to_dict()
        return int(text.get("num_key_value_heads") or text["num_attention_heads"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens; None: no limit."""
        text, count = self.text.to_dict(), len(self.layers)
        window = text.get("sliding_window")
        kinds = text.get("layer_types")
        if kinds:
            return tuple(window if "sliding" in kind else None for kind in kinds[:count])
        return (window,) * count


def shape_of(model: ModelConfig, *, scalar: bool = False, outputs: int = 1) -> ModelShape:
    """Return the shape of a recipe's model. ``outputs``: of a scalar model. Raises PlanError if its
    config is not available."""
    return _shape(model.model_dump_json(), scalar, outputs)


@functools.lru_cache(maxsize=64)
def _shape(model_json: str, scalar: bool, outputs: int) -> ModelShape:
    model = ModelConfig.model_validate_json(model_json)
    config, source = find_config(model)
    own = describe(model)
    if model.attn_implementation == "eager":
        config.burnish_attention = "eager"
    return shape_from_config(config, own, source, scalar=scalar, outputs=outputs, lora=model.lora)


def shape_from_config(  # house: ok the model, its origin and its head
    config: PretrainedConfig,
    name: str,
    source: str,
    *,
    scalar: bool = False,
    outputs: int = 1,
    lora: LoraConfig | None = None,
) -> ModelShape:
    """Return the shape of the model that ``config`` describes. Raises PlanError if transformers
    cannot build it."""
    try:
        with torch.device("meta"):
            network: Any = language_model_class(config).from_config(config)
    except (ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise PlanError(
            f"{name}: transformers cannot build a language model from its config ({source}): "
            f"{error}"
        ) from error
    return ModelShape(
        name=name,
        source=source,
        config=config,
        units=tuple(_units(network, outputs=outputs if scalar else None, lora=lora)),
        scalar=scalar,
        outputs=outputs,
        tied=_is_tied(network),
        double_quantization=lora is not None and lora.double_quantization,
    )


def _units(network: Any, *, outputs: int | None, lora: LoraConfig | None) -> list[FsdpUnit]:
    """Return the units that are gathered together, ending with the rest (the root's parameters).
    ``outputs``: of a scalar model; None: a language model."""
    scalar = outputs is not None
    body = network.get_decoder()
    owner = body if scalar else network
    left = {id(p): p for p in owner.parameters()}
    called = {id(p): name for name, p in owner.named_parameters()}
    units: list[FsdpUnit] = []
    packed: set[int] = set()
    if lora is not None and lora.quantization is not None:
        packed = {id(layer.weight) for layer in layers_to_quantize(network)}

    def take(module: nn.Module, name: str, kind: str) -> None:
        own = [left.pop(id(p)) for p in module.parameters() if id(p) in left]
        adapters = _adapter_entries(module, lora) if lora is not None and kind == "layer" else 0
        nf4 = tuple(p.numel() for p in own if id(p) in packed)
        shapes = tuple(tuple(p.shape) for p in own)
        sizes = tuple(p.numel() for p in own)
        names = tuple(called[id(p)] for p in own)
        units.append(FsdpUnit(name, kind, sizes, adapters, nf4, shapes, names))

    for unit in gathered_modules(body, tied=not scalar and _is_tied(network)):
        take(unit.module, unit.name, unit.kind)
    rest = [tuple(p.shape) for p in left.values()]
    if scalar:
        rest.append((outputs or 1, head_width(network)))
    units.append(FsdpUnit("rest", "rest", tuple(map(math.prod, rest)), shapes=tuple(rest)))
    return units


def _is_tied(network: Any) -> bool:
    head = network.get_output_embeddings()
    tied: bool = head is not None and head.weight is network.get_input_embeddings().weight
    setting = network.config.to_dict().get("tie_word_embeddings", False)
    text = network.config.get_text_config().to_dict()  # (some composite types have it only there)
    return tied or bool(text.get("tie_word_embeddings", setting))


def _adapter_entries(block: nn.Module, lora: LoraConfig) -> int:
    """Return r x (inputs + outputs), with DoRA also the outputs, summed over the linear layers of a
    block that get an adapter."""
    linears = [(n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear)]
    return sum(
        lora.lora_rank * (m.in_features + m.out_features) + lora.use_dora * m.out_features
        for n, m in linears
        if _is_target(n, lora.target_modules)
    )


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):  # a regular expression on full names, as in peft
        return re.fullmatch(targets, f"model.layers.0.{name}") is not None
    return any(name == t or name.endswith(f".{t}") for t in targets)


# ---- origin of a config ---------------------------------------------------------------------


def find_config(model: ModelConfig) -> tuple[PretrainedConfig, str]:
    """Return the HuggingFace config of a model and its origin. Raises PlanError, or
    ModelError for a folder that is not safe to read."""
    if model.scratch is not None:
        return _scratch_config(model.scratch), "model.scratch"
    path = str(model.path)
    options: dict[str, Any] = {"gguf_file": model.gguf_file} if model.gguf_file else {}
    if Path(path).is_dir():
        check_kinds(Path(path))
    try:
        found = AutoConfig.from_pretrained(
            path,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            **options,
        )
    except UNREADABLE as error:
        return _from_table(path, error)
    if not model.trust_remote_code:
        refuse_kernels(found, path)
    is_folder = Path(path).is_dir()
    return (
        found,
        f"{path}/config.json" if is_folder else f"config of {path} in the HuggingFace cache",
    )


def _scratch_config(scratch: ScratchConfig) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=len(scratch_tokenizer(scratch.alphabet)),
        hidden_size=scratch.hidden_size,
        intermediate_size=4 * scratch.hidden_size,
        num_hidden_layers=scratch.num_layers,
        num_attention_heads=scratch.num_heads,
        num_key_value_heads=scratch.num_kv_heads,
        max_position_embeddings=scratch.max_position_embeddings,
        tie_word_embeddings=scratch.tie_word_embeddings,
    )


def _from_table(path: str, error: Exception) -> tuple[PretrainedConfig, str]:
    known = known_models()
    entry = None if Path(path).exists() else known.get(_plain_name(path))
    if entry is None and (problem := folder_problem(path)):
        raise PlanError(f"model.path: {problem}")
    if entry is None:
        names = ", ".join(sorted({e["name"] for e in known.values() if "source" in e}))
        reason = library_text(error)
        raise PlanError(
            f"the sizes of the model {path} are not known: no config.json could be read ({reason}),"
            f" and it is not in the table of known models ({names}); put its config.json into a "
            "folder and set model.path to that folder"
        ) from error
    fields = copy.deepcopy(entry["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    source = entry.get("recipe") or f"huggingface.co/{entry['source']}"
    return config, f"built-in table, from {source}"


@functools.lru_cache(maxsize=1)
def known_models() -> dict[str, dict[str, Any]]:
    """Return the table of well-known models by plain name, including other names of the same
    shape."""
    text = (importlib.resources.files("burnish.plan") / "models.yaml").read_text("utf-8")
    table: dict[str, dict[str, Any]] = {}
    for name, entry in yaml.safe_load(text).items():
        for key in (name, *entry.get("also", ())):
            table[key] = {"name": name, **entry}
    return table


def _plain_name(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2].lower()
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    return name


def matrix_flops(shape: ModelShape) -> float:
    """Return the FLOPs of all matrices in one token's forward pass, counting multiplications and
    additions. The input embedding is a lookup and not counted. Of a mixture of experts, only the
    experts used by a token count."""
    text = shape.text.to_dict()
    total = sum(u.numel for u in shape.units)
    embedding = int(text["vocab_size"]) * int(text["hidden_size"])
    active = total - (0 if shape.tied and not shape.scalar else embedding)
    experts, used = (
        text.get("num_local_experts") or text.get("num_experts") or 0,
        text.get("num_experts_per_tok") or 0,
    )
    if experts and used:
        width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
        one = 3 * int(text["hidden_size"]) * width
        active -= len(shape.layers) * one * (experts - used)
    return 2.0 * max(active, 0)


def rounded_up(count: int, parts: int) -> int:
    """Return the size of one of ``parts`` equal parts, with the last one padded."""
    return math.ceil(count / parts)

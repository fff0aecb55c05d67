"""Shape of a model from its config alone: the size of every parameter, counted on the meta device.

A config comes from the recipe (``scratch``), a folder's config.json, or the hub's cache on this
machine. If a hub model is not cached, the small table ``models.yaml`` is used. Nothing is
downloaded. No weight is read, but for tied ends if a folder has both (``models/tied_ends.py``).
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import (
    AutoConfig,
    PretrainedConfig,
)

from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.paths import folder_problem
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.auto_class import language_model_class
from burnish.models.buffers import plain_name
from burnish.models.empty import weight_files
from burnish.models.load import describe
from burnish.models.lora import add_adapters
from burnish.models.lora_layers import is_adapter
from burnish.models.nf4 import layers_to_quantize
from burnish.models.paths import ModelError
from burnish.models.scalar_model import head_width
from burnish.models.scratch import scratch_config
from burnish.models.tied_ends import untie_as_stored
from burnish.models.units import gathered_modules
from burnish.models.untrusted import UNREADABLE, check_kinds, refuse_kernels
from burnish.models.value_head import has_score
from burnish.optimizers.rule import embedding_names

_ENDINGS = re.compile(r"-(instruct|it|chat|base|hf|v0\.3|sft|dpo|\d{4})$")


class PlanError(BurnishError, ValueError):
    """A plan that cannot be made. The message names the missing information and how to supply
    it."""


class AdapterError(PlanError):
    """Adapters of a recipe that do not fit its model."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    name: str
    """Name in the model without adapters; of adapters, also their own part."""
    shape: tuple[int, ...]
    trained: bool = True
    quantized: bool = False
    """True if it is kept in 4 bits."""
    is_table: bool = False
    """True for an embedding table."""

    @functools.cached_property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that are gathered together: a decoder layer, the embedding, or the rest."""

    name: str
    kind: str
    """``layer``, ``embedding`` or ``rest`` (final norm, output projection or value head; also the
    embedding if it is tied)."""
    base: tuple[Weight, ...]
    """Parameters of the model without adapters."""
    adapters: tuple[Weight, ...] = ()
    """Parameters of adapters and of the copies of saved modules."""

    @functools.cached_property
    def numel(self) -> int:
        """Number of entries of all base parameters."""
        return sum(weight.numel for weight in self.base)

    @functools.cached_property
    def trained(self) -> tuple[Weight, ...]:
        """The trained parameters."""
        return tuple(weight for weight in (*self.base, *self.adapters) if weight.trained)

    @functools.cached_property
    def num_trained(self) -> int:
        """Number of entries of the trained parameters."""
        return sum(weight.numel for weight in self.trained)

    @functools.cached_property
    def num_gathered(self) -> int:
        """Number of entries of all parameters."""
        return self.numel + sum(weight.numel for weight in self.adapters)


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
        """Number of entries of all LoRA adapters and of the copies of saved modules."""
        return sum(weight.numel for unit in self.units for weight in unit.adapters)

    @functools.cached_property
    def trained(self) -> int:
        """Number of entries that a run trains: those of adapters, saved modules and the head of a
        scalar model, or of all parameters."""
        return sum(unit.num_trained for unit in self.units)

    @property
    def quantized(self) -> tuple[int, ...]:
        """Number of entries of each 4-bit weight."""
        return tuple(w.numel for unit in self.units for w in unit.base if w.quantized)

    @property
    def layers(self) -> tuple[FsdpUnit, ...]:
        """The decoder layers."""
        return tuple(unit for unit in self.units if unit.kind == "layer")

    @property
    def text(self) -> Any:
        """Config of the language model itself."""
        return self.config.get_text_config()

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the language model's config, also under the names that transformers maps to the
        family's own (``hidden_size`` for ``n_embd``)."""
        text = self.text
        named: dict[str, Any] = text.to_dict()
        common = text.attribute_map.items()
        return {**{name: named[field] for name, field in common if field in named}, **named}

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; that of the embedding if the config does not name it."""
        return self._largest("hidden_size") or self._embedding[1]

    @property
    def vocab_size(self) -> int:
        """Number of tokens; that of the embedding if the config does not name it."""
        return self._largest("vocab_size") or self._embedding[0]

    @property
    def _embedding(self) -> tuple[int, ...]:
        tables = (w for unit in self.units for w in unit.base if w.is_table)
        return max(tables, key=lambda table: table.numel, default=Weight("", (0, 0))).shape

    @property
    def inner_size(self) -> int:
        """Width of the MLP; the largest, if layers differ."""
        return self._largest("intermediate_size") or 4 * self.hidden_size

    @property
    def heads(self) -> int:
        """Number of attention heads; 0 for models without attention."""
        return self._largest("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Width of one attention head; 0 for models without attention."""
        if not self.heads:
            return 0
        return self._largest("head_dim") or self.hidden_size // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads; 0 for models without attention."""
        return self._largest("num_key_value_heads") or self.heads

    def _largest(self, name: str) -> int:
        """Return a field of the config, or its largest entry if layers differ; 0 without it."""
        value = self.fields.get(name) or 0
        return int(max(value) if isinstance(value, list | tuple) else value)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens; None: no limit."""
        count = len(self.layers)
        window = self.fields.get("sliding_window")
        kinds = self.fields.get("layer_types")
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
    name = describe(model)
    if model.attn_implementation == "eager":
        config.burnish_attention = "eager"
    return shape_from_config(config, name, source, scalar=scalar, outputs=outputs, lora=model.lora)


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
        tied = _is_tied(network)
        gathered_modules(network.get_decoder(), tied=tied)
    except UNREADABLE as error:
        raise PlanError(
            f"{name}: transformers cannot build a language model from its config ({source}): "
            f"{library_text(error)}"
        ) from error
    packed, quantization = set[int](), None if lora is None else lora.quantization
    if quantization is not None:
        packed = {id(layer.weight) for layer in layers_to_quantize(network)}
    if lora is not None:
        is_classifier = scalar and has_score(config)  # its body gets them, without a head around it
        try:
            with torch.device("meta"):
                add_adapters(network.get_decoder() if is_classifier else network, lora)
        except ValueError as error:
            raise AdapterError(f"{name}: {error}") from error
    units = _units(
        network, outputs if scalar else None, adapted=lora is not None, packed=packed, tied=tied
    )
    return ModelShape(
        name=name,
        source=source,
        config=config,
        units=tuple(units),
        scalar=scalar,
        outputs=outputs,
        tied=tied,
        double_quantization=quantization is not None and quantization.double,
    )


def _units(
    network: Any, outputs: int | None, *, adapted: bool, packed: set[int], tied: bool
) -> list[FsdpUnit]:
    """Return the units that are gathered together, ending with the rest (the root's parameters).

    ``outputs``: of a scalar model; None: a language model. ``adapted``: adapters are trained, and
    the head of a scalar model; otherwise all parameters are. ``packed``: ids of the parameters in
    4 bits."""
    scalar = outputs is not None
    body = network.get_decoder()
    owner = body if scalar else network
    left = dict(owner.named_parameters())
    tables = embedding_names(owner)
    names = {id(parameter): name for name, parameter in left.items()}

    def take(parameters: Iterable[nn.Parameter], name: str, kind: str) -> FsdpUnit:
        base: list[Weight] = []
        adapters: list[Weight] = []
        for own_name in [names[id(p)] for p in parameters if names.get(id(p)) in left]:
            parameter = left.pop(own_name)
            weight = Weight(
                plain_name(own_name),
                tuple(parameter.shape),
                trained=parameter.requires_grad or not adapted,
                quantized=id(parameter) in packed,
                is_table=own_name in tables,
            )
            (adapters if is_adapter(own_name) else base).append(weight)
        return FsdpUnit(name, kind, tuple(base), tuple(adapters))

    units = [
        take(unit.module.parameters(), unit.name, unit.kind)
        for unit in gathered_modules(body, tied=not scalar and tied)
    ]
    rest = take(list(left.values()), "rest", "rest")
    if outputs is not None:
        head = Weight("score.weight", (outputs, head_width(network)))
        rest = replace(rest, base=(*rest.base, head))
    return [*units, rest]


def _is_tied(network: Any) -> bool:
    head = network.get_output_embeddings()
    tied: bool = head is not None and head.weight is network.get_input_embeddings().weight
    setting = network.config.to_dict().get("tie_word_embeddings", False)
    text = network.config.get_text_config().to_dict()  # (some composite types have it only there)
    return tied or bool(text.get("tie_word_embeddings", setting))


# ---- origin of a config ---------------------------------------------------------------------


def find_config(model: ModelConfig) -> tuple[PretrainedConfig, str]:
    """Return the HuggingFace config of a model and its origin. Raises PlanError, or
    ModelError for a folder that is not safe to read."""
    if (scratch := model.scratch) is not None:
        return scratch_config(scratch), "model.scratch"
    path = str(model.path)
    options: dict[str, Any] = {"gguf_file": model.gguf_file} if model.gguf_file else {}
    if Path(path).is_dir():
        check_kinds(Path(path))
    try:
        config = AutoConfig.from_pretrained(
            path,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            **options,
        )
    except UNREADABLE as error:
        return _from_table(path, error)
    if not model.trust_remote_code:
        refuse_kernels(config, path)
    is_folder = Path(path).is_dir()
    if is_folder:
        _untie(config, model)
    return (
        config,
        f"{path}/config.json" if is_folder else f"config of {path} in the HuggingFace cache",
    )


def _untie(config: PretrainedConfig, model: ModelConfig) -> None:
    try:
        files = weight_files(model)
    except ModelError:  # a plan needs no weights: the config decides
        return
    if files is not None:
        auto_class, name = language_model_class(config), str(model.path)
        untie_as_stored(config, auto_class, files, files.read, name=name)


def _from_table(path: str, error: Exception) -> tuple[PretrainedConfig, str]:
    known, name = known_models(), path.rstrip("/").rpartition("/")[2].lower()
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    entry = None if Path(path).exists() else known.get(name)
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


def matrix_flops(shape: ModelShape) -> float:
    """Return the FLOPs of all matrices in one token's forward pass, counting multiplications and
    additions. The input embedding is a lookup and not counted. Of a mixture of experts, only the
    experts used by a token count."""
    fields = shape.fields
    active = shape.parameters
    if not shape.tied or shape.scalar:
        active -= shape.vocab_size * shape.hidden_size
    experts, used = (
        fields.get("num_local_experts") or fields.get("num_experts") or 0,
        fields.get("num_experts_per_tok") or 0,
    )
    if experts and used:
        width = int(fields.get("moe_intermediate_size") or fields["intermediate_size"])
        expert_size = 3 * shape.hidden_size * width
        active -= len(shape.layers) * expert_size * (experts - used)
    return 2.0 * max(active, 0)


def rounded_up(count: int, parts: int) -> int:
    """Return the size of one of ``parts`` equal parts, with the last one padded."""
    return math.ceil(count / parts)

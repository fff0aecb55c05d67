"""Selection of the engine of a recipe's ``train.engine``, and of the way its model is loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.checkpointing import check_selective
from burnish.models.compiled_layers import check_compile
from burnish.models.deterministic import check_deterministic
from burnish.models.end_tokens import add_end_tokens
from burnish.models.load import hf_config, load_causal_lm
from burnish.models.lora import adapted_ends
from burnish.models.paths import ModelError
from burnish.models.support import model_support, runs_own_code
from burnish.models.value_head import NewHead, load_scalar_model
from burnish.train.engine import BaseTrainEngine
from burnish.train.spec import EngineSpec


def engine_class(spec: EngineSpec, ranks: RankGroup = SINGLE) -> type[BaseTrainEngine]:
    """Return the class that ``spec.role.train.engine`` names. Only its module is imported."""
    path = spec.role.train.engine.implementation(grouped=ranks.group is not None)
    engine: type[BaseTrainEngine] = resolve_name(path)
    return engine


def load_engine(
    spec: EngineSpec,
    *,
    scalar: bool,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: RankGroup = SINGLE,
    device: torch.device,
    random: PretrainedConfig | None = None,
) -> BaseTrainEngine:
    """Load the model of a role and return its engine on ``device``.

    ``scalar``: the model has a scalar head. A trainable language model gets a new one, drawn with
    ``seed``; a critic's is zero, because the policy would otherwise first learn from noisy values.
    ``random``: the config of the model, which then gets random weights.
    """
    role = spec.role
    if role.train.attention == "flash":  # an error before the model is loaded
        config = random or hf_config(role.model)
        packs = config is None or model_support(config, trust=runs_own_code(config)).packed
        spec.choose_attention(config, device, role.train.layout if packs else "padded")
    if role.train.compile == "layers":
        config = random or hf_config(role.model)
        check_compile(config, device, role.precision.dtype)
    if role.train.deterministic:
        check_deterministic(random or hf_config(role.model), device, role.precision.dtype)
    if role.trainable and role.train.gradient_checkpointing == "selective":
        check_selective(random or hf_config(role.model))
    # Trained weights become the unrounded masters.
    dtype: Dtype = "fp32" if role.trainable and role.model.lora is None else role.dtype
    home = load_device(spec, device, ranks)
    with loading(spec, dtype, ranks):
        empty = random is None and reads_own_shards(spec, ranks)
        model: Any
        if scalar:
            new_head: NewHead = "zero" if role.kind == "critic" else "random"
            model = load_scalar_model(
                role.model,
                dtype=dtype,
                device=home,
                seed=seed,
                new_head=new_head if role.trainable else None,
                empty=empty,
                random=random,
                num_outputs=role.outputs,
                output_names=role.output_names,
                output_weights=spec.output_weights,
            )
        else:
            model = load_causal_lm(role.model, dtype=dtype, device=home, empty=empty, random=random)
    if not scalar and tokenizer is not None:
        add_end_tokens(model, tokenizer)
    return make_engine(model, spec, tokenizer=tokenizer, ranks=ranks, device=device)


def make_engine(
    model: nn.Module,
    spec: EngineSpec,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: RankGroup = SINGLE,
    device: torch.device | None = None,
) -> BaseTrainEngine:
    """Return the engine that ``spec.role.train.engine`` names, over ``model``. ``device``: compute
    device; None: the device of the model. DeepSpeed selects its own. Raises ModelError if embedding
    or head have an adapter that the engine does not support."""
    problem, lora = spec.role.train.engine.lora_problem, spec.role.model.lora
    if problem is not None and lora is not None:
        # embedding or head, also if a pattern of target_modules matches them
        whole = model.model if spec.role.engine_role in ("critic", "reward") else model
        if names := adapted_ends(cast(PreTrainedModel, whole)):
            raise ModelError(
                f"model.lora.target_modules={lora.target_modules!r} gives an adapter to "
                f"{names[0]}, with {problem}; or name only inner layers"
            )
    kind = engine_class(spec, ranks)
    return kind(model, spec, tokenizer=tokenizer, ranks=ranks, device=device)


def load_device(spec: EngineSpec, device: torch.device, ranks: RankGroup = SINGLE) -> torch.device:
    """Return the device on which the model of an engine on ``device`` is loaded.

    DeepSpeed and offloaded FSDP2 start from fp32 weights. They may exceed a GPU that fits the
    shards or the half-precision weights, so they stay in host memory.
    """
    on_host = spec.role.trainable and engine_class(spec, ranks).loads_on_host(spec)
    return torch.device("cpu") if on_host else device


def loading(
    spec: EngineSpec, dtype: Dtype, ranks: RankGroup = SINGLE
) -> AbstractContextManager[None]:
    """Return a context manager within which the model of an engine is loaded in ``dtype``. An
    engine may shard the model during the load."""
    return engine_class(spec, ranks).loading(spec, dtype, ranks)


def reads_own_shards(spec: EngineSpec, ranks: RankGroup = SINGLE) -> bool:
    """Return whether each rank reads its own rows of the weights into a model created without
    weights."""
    if spec.role.model.lora is not None and spec.role.model.lora.needs_whole_weights:
        return False
    return engine_class(spec, ranks).reads_own_shards(ranks)

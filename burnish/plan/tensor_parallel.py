"""Tensor-parallel part of a model on one rank, described as a model with a smaller config.

A layer with a share of the heads and of the inner width is equal to a layer of a smaller config.
The part is therefore counted and traced like any other model. Its parameter count is compared with
the sharding of ``models/tensor_parallel.py``; if they differ, the model has no such config.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from burnish.config.model import LoraConfig
from burnish.models.auto_class import language_model_class
from burnish.models.load import ModelError
from burnish.models.tensor_parallel import check_head_counts, shard_dims
from burnish.plan.shapes import ModelShape, PlanError, shape_from_config

SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Config fields that are divided by the number of ranks."""
EXPERT_WIDTH = "moe_intermediate_size"
"""The same, in the configs of mixtures that have it (others have experts of intermediate_size)."""


def rank_shape(shape: ModelShape, parts: int, lora: LoraConfig | None) -> ModelShape | None:
    """Return the shape of the model on each of ``parts`` ranks; None if no config describes it.
    Raises PlanError if the model cannot be sharded among ``parts`` ranks."""
    if parts == 1:
        return shape
    config = copy.deepcopy(shape.config)
    text = config.get_text_config()
    try:
        check_head_counts(config, parts)
        expected = _entries(shape, parts)
    except ModelError as error:
        raise PlanError(str(error)) from error
    text.head_dim = shape.head_dim  # otherwise derived from the smaller number of heads
    values = text.to_dict()
    for name in (*SHARED, *([EXPERT_WIDTH] if EXPERT_WIDTH in values else [])):
        value = values.get(name)
        if value is None or value % parts:
            return None
        setattr(text, name, value // parts)
    part = shape_from_config(
        config, shape.name, shape.source, scalar=shape.scalar, outputs=shape.outputs, lora=lora
    )
    return part if part.parameters == expected else None


def _entries(shape: ModelShape, parts: int) -> int:
    """Return the number of entries on one rank, from the sharding plan of the model's layers."""
    with torch.device("meta"):
        network = language_model_class(shape.config).from_config(shape.config)
        body: Any = network.get_decoder()
    dims = shard_dims(body)
    sizes = {name: parameter.numel() for name, parameter in body.named_parameters()}
    less = sum(sizes[name] - sizes[name] // parts for name, dim in dims.items() if dim is not None)
    return shape.parameters - less

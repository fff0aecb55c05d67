"""Check from the model configs that a job's models can be sharded as its recipe requests, before
anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.config.job import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.parallelism import ParallelDegree, ParallelKind, parallel_degrees
from burnish.models.load import ModelError, describe, hf_config, require_packing
from burnish.models.tensor_parallel import check_head_counts
from burnish.plan.shapes import PlanError, find_config
from burnish.rollout.vllm.model import check_parallel_size
from burnish.train.torch.sequence_parallel import check_sequence_parallel

_CHECKS: Mapping[ParallelKind, Callable[[Any, int], None]] = {
    "rollout": check_parallel_size,
    "tensor": check_head_counts,
    "sequence": check_sequence_parallel,
}

_SETTINGS: Mapping[ParallelKind, str] = {
    "tensor": "train.engine.tensor_parallel_size",
    "sequence": "train.engine.sequence_parallel_size",
}


def check_head_divisibility(config: JobConfig, *, download: bool) -> None:
    """Raise ModelError if a model's heads cannot be divided among vLLM's processes, or among
    tensor- or sequence-parallel ranks. A model whose config cannot be read alone is left to the
    engine that loads it.

    ``download``: allow downloading a config from the hub.
    """
    for degree in parallel_degrees(config.roles()):
        family_config = config_of(degree.model, download=download)
        if family_config is None:
            continue
        try:
            if degree.kind != "rollout":
                _require_packing(family_config, degree)
            _CHECKS[degree.kind](family_config.get_text_config(), degree.size)
        except ModelError as error:
            raise ModelError(f"{describe(degree.model)}: {error}") from None


def _require_packing(family_config: Any, degree: ParallelDegree) -> None:
    setting = f"{_SETTINGS[degree.kind]}={degree.size}"
    require_packing(family_config, setting, trust=degree.model.trust_remote_code)


def config_of(model: ModelConfig, *, download: bool) -> Any:
    """Return the HuggingFace config of a model; None if it cannot be read alone. ``download``:
    allow downloading it from the hub."""
    try:
        return find_config(model)[0]
    except PlanError:
        return hf_config(model) if download else None

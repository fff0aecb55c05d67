"""Whether the models of a job can be shared out as its recipe says: from their configs, before
anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.config.jobs import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.splits import Split, SplitKind, splits_of
from burnish.memory.shapes import PlanError, find_config
from burnish.models.load import ModelError, describe, hf_config, require_packing
from burnish.models.tensor_parallel import check_sizes
from burnish.rollout.vllm_model import check_split
from burnish.train.spread import check_heads

_CHECKS: Mapping[SplitKind, Callable[[Any, int], None]] = {
    "rollout": check_split,
    "tensor": check_sizes,
    "sequence": check_heads,
}

_SETTINGS: Mapping[SplitKind, str] = {
    "tensor": "train.engine.tensor_parallel_size",
    "sequence": "train.engine.sequence_parallel_size",
}


def check_splits(config: JobConfig, *, download: bool) -> None:
    """Raise ModelError where vLLM's processes, or a team of ranks, cannot share a model's heads. A
    model whose config cannot be read alone is left to the engine that loads it.

    ``download``: a config that is not on this machine may be asked of the hub.
    """
    for split in splits_of(config):
        found = config_of(split.model, download=download)
        if found is None:
            continue
        try:
            if split.kind != "rollout":
                _require_packing(found, split)
            _CHECKS[split.kind](found.get_text_config(), split.size)
        except ModelError as error:
            raise ModelError(f"{describe(split.model)}: {error}") from None


def _require_packing(found: Any, split: Split) -> None:
    setting = f"{_SETTINGS[split.kind]}={split.size}"
    require_packing(found, setting, trust=split.model.trust_remote_code)


def config_of(model: ModelConfig, *, download: bool) -> Any:
    """The HuggingFace config of a model; None if it cannot be read alone. ``download``: as for
    :func:`check_splits`."""
    try:
        return find_config(model)[0]
    except PlanError:
        return hf_config(model) if download else None

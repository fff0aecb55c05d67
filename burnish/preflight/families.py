"""Check from the model configs alone how the models of a job run, and that they can be sharded as
the recipe requests, before anything is loaded.

If a cached result exists, it is read without importing torch (``models/family.py``), so that a dry
run stays fast. Functions that need torch import it themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from burnish.config.job import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.roles import Role, RolloutRole
from burnish.models.family import DecodingSupport, ModelSupport, keep, key_of, recall
from burnish.rollout.local.config import LocalEngine
from burnish.small_files import read_small

ParallelKind = Literal["rollout", "tensor", "sequence"]


@dataclass(frozen=True)
class ParallelDegree:
    """A model, and the number of processes over which its heads are split."""

    model: ModelConfig
    kind: ParallelKind
    """rollout: vLLM's processes. tensor, sequence: a group of the torch engine's ranks."""
    size: int


def check_families(config: JobConfig, *, download: bool) -> list[str]:
    """Return one sentence about how each model of the job runs, for models whose config can be
    read.

    ``download``: allow downloading a config from the hub. Raises ModelError if a model cannot be
    trained, or if the local engine cannot sample from it.
    """
    sentences = []
    for model in models_of(config.roles()):
        if model.scratch is not None:  # a Llama, covered by the tests
            continue
        sampled = model == config.model and bool(config.nodes_of(LocalEngine))
        family = find_support(model, sampled=sampled, download=download)
        if family is None:
            continue
        support, decoding = family
        name = model.path or "model"
        if support.refusal or (decoding is not None and decoding.decoding is None):
            from burnish.models.load import ModelError

            if support.refusal:
                raise ModelError(support.refusal_of(name))
            assert decoding is not None
            raise ModelError(f"{name}: {decoding.sentence()}; use rollout.engine.kind=vllm")
        sentences.append(f"{name}: {support.sentence()}")
        if decoding is not None and decoding.decoding != "batched":
            sentences.append(f"{name}: {decoding.sentence()}; rollout.engine.kind=vllm is faster")
    return sentences


def find_support(
    model: ModelConfig, *, sampled: bool, download: bool
) -> tuple[ModelSupport, DecodingSupport | None] | None:
    """Return how a model runs and, if ``sampled``, how the local engine samples from it. Return
    None if its config cannot be read without its weights, or not at all (loading the model reports
    the reason)."""
    file = Path(model.path or "") / "config.json"
    content: list[bytes] = []  # stays empty for GGUF files and models with custom code
    if file.is_file() and not (model.trust_remote_code or model.gguf_file):
        content = [hashlib.sha256(read_small(file)).digest()]
    keys = [key_of(kind, "config", content) for kind in (ModelSupport, DecodingSupport)]
    support = recall(ModelSupport, keys[0]) if content else None
    decoding = recall(DecodingSupport, keys[1]) if content and sampled else None
    if support is None or (sampled and decoding is None and not support.refusal):
        from burnish.models.support import model_support
        from burnish.rollout.local.engine import decoding_support

        family_config = config_of(model, download=download)
        if family_config is None:
            return None
        support = model_support(family_config, trust=model.trust_remote_code)
        decoding = None
        if sampled and not support.refusal:
            decoding = decoding_support(family_config, trust=model.trust_remote_code)
        for key, result in zip(keys, (support, decoding), strict=True):
            if content and result is not None and not result.refusal:
                keep(key, result)
    return support, decoding


def models_of(roles: Sequence[Role]) -> list[ModelConfig]:
    """Return all models of a job, each once."""
    return list(dict.fromkeys(role.model for role in roles))


def parallel_degrees(roles: Sequence[Role]) -> list[ParallelDegree]:
    """Return every model whose heads are split over several processes, once; empty for most
    jobs."""
    degrees = []
    for role in roles:
        if isinstance(role, RolloutRole):
            degrees.append(ParallelDegree(role.model, "rollout", role.tensor_parallel))
        else:
            degrees.append(ParallelDegree(role.model, "tensor", role.tensor_parallel))
            degrees.append(ParallelDegree(role.model, "sequence", role.sequence_parallel))
    return list(dict.fromkeys(degree for degree in degrees if degree.size > 1))


def check_head_divisibility(config: JobConfig, *, download: bool) -> None:
    """Raise ModelError if a model's heads cannot be divided among vLLM's processes, or among
    tensor- or sequence-parallel ranks. A model whose config cannot be read alone is left to the
    engine that loads it.

    ``download``: allow downloading a config from the hub.
    """
    degrees = parallel_degrees(config.roles())
    if not degrees:
        return
    from burnish.models.load import ModelError, describe, require_packing
    from burnish.models.tensor_parallel import check_head_counts
    from burnish.rollout.vllm.model import check_parallel_size
    from burnish.train.torch.sequence_parallel import check_sequence_parallel

    checks: Mapping[ParallelKind, Callable[[Any, int], None]] = {
        "rollout": check_parallel_size,
        "tensor": check_head_counts,
        "sequence": check_sequence_parallel,
    }
    for degree in degrees:
        family_config = config_of(degree.model, download=download)
        if family_config is None:
            continue
        try:
            if degree.kind != "rollout":
                setting = f"train.engine.{degree.kind}_parallel_size={degree.size}"
                require_packing(family_config, setting, trust=degree.model.trust_remote_code)
            checks[degree.kind](family_config.get_text_config(), degree.size)
        except ModelError as error:
            raise ModelError(f"{describe(degree.model)}: {error}") from None


def config_of(model: ModelConfig, *, download: bool) -> Any:
    """Return the HuggingFace config of a model; None if it cannot be read alone. ``download``:
    allow downloading it from the hub."""
    from burnish.models.load import hf_config
    from burnish.plan.shapes import PlanError, find_config

    try:
        return find_config(model)[0]
    except PlanError:
        return hf_config(model) if download else None

"""Check from the model configs alone how the models of a job run, before anything is loaded.

If a cached result exists, it is read without importing torch (``models/family.py``), so that a dry
run stays fast.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from burnish.config.job import JobConfig
from burnish.config.model import ModelConfig
from burnish.config.parallelism import models_of
from burnish.models.family import DecodingSupport, ModelSupport, keep, key_of, recall
from burnish.rollout.local.config import LocalEngine
from burnish.small_files import read_small


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
    content = _content(model)
    keys = [key_of(kind, "config", content) for kind in (ModelSupport, DecodingSupport)]
    support = recall(ModelSupport, keys[0]) if content else None
    decoding = recall(DecodingSupport, keys[1]) if content and sampled else None
    if support is None or (sampled and decoding is None and not support.refusal):
        from burnish.models.support import model_support
        from burnish.preflight.ranks import config_of
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


def _content(model: ModelConfig) -> list[bytes]:
    """Return a digest of the model's config file. The result is empty if there is none, for GGUF
    files, and for models with custom code."""
    file = Path(model.path or "") / "config.json"
    if model.trust_remote_code or model.gguf_file or not file.is_file():
        return []
    return [hashlib.sha256(read_small(file)).digest()]

"""Gradient checkpointing (``train.gradient_checkpointing``), and the check of its selective form on
a small random copy of a model, before weights are loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from burnish.config.train import Checkpointing
from burnish.models.attention import ATTENTION_NAME, NO_MASK, plan_segments
from burnish.models.dropout import start_training
from burnish.models.family_check import failure_text
from burnish.models.kept_results import LayerPass, layer_passes
from burnish.models.paths import ModelError
from burnish.models.segments import Segment
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border, cached_result, model_support, runs_own_code


def enable_checkpointing(body: PreTrainedModel, mode: Checkpointing) -> None:
    """Recompute activations in backward, all or a selection. Raises ModelError if the model does
    not support it.

    transformers renamed the method in 5.2x.
    """
    renamed = getattr(body, "activation_checkpointing_enable", None)  # house: ok two versions
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = layer_passes
    try:
        (renamed or body.gradient_checkpointing_enable)(options)
    except ValueError as error:
        raise ModelError(
            f"train.gradient_checkpointing={str(mode).lower()}: {error} Use "
            "train.gradient_checkpointing=false"
        ) from error


@dataclass(frozen=True)
class SelectiveSupport:
    """Result of selective checkpointing on a small random copy of a model."""

    model_type: str
    refusal: str = ""
    """Why the layers of this model cannot keep some of their results; empty if they can."""


def check_selective(config: PretrainedConfig | None) -> None:
    """Raise ModelError if the layers of a model (None: unknown) cannot keep some of their results
    for backward."""
    if config is None:
        return
    trust = runs_own_code(config)
    packed = model_support(config, trust=trust).packed
    tiny = below_rope_border(shrink(config))

    def run() -> SelectiveSupport:
        with torch.enable_grad():
            return _try_to_keep(tiny, packed=packed, trust=trust)

    if problem := cached_result(SelectiveSupport, tiny, run, trust=trust).refusal:
        raise ModelError(
            f"train.gradient_checkpointing=selective: {problem}; use "
            "train.gradient_checkpointing=true or false"
        )


MOST_ERROR = 1e-5
"""Largest difference of a gradient in the trial, of the largest gradient. Recomputation is exact
but for families that compute some derivatives otherwise in training mode."""


def _try_to_keep(tiny: PretrainedConfig, *, packed: bool, trust: bool) -> SelectiveSupport:
    refused = functools.partial(SelectiveSupport, tiny.model_type)
    model = build(tiny, trust=trust)
    if packed:
        model.set_attn_implementation(ATTENTION_NAME)
    body: Any = model.get_decoder()
    plain, begun = _gradients(body, packed=packed), LayerPass.begun
    try:
        enable_checkpointing(body, "selective")
        start_training(model, dropout=False)
        kept = _gradients(body, packed=packed)
    except ModelError:
        return refused("this model has no layers that can be recomputed")
    except Exception as error:  # whatever a model raises
        return refused(f"its layers cannot keep some of their results ({failure_text(error)})")
    if LayerPass.begun == begun:
        return refused("this model recomputes nothing although it says that it can")
    differences = [float((x - y).abs().max()) for x, y in zip(plain, kept, strict=True)]
    wrong_by = max(differences) / max(float(x.abs().max()) for x in plain)
    if not wrong_by <= MOST_ERROR:
        return refused(
            "its layers change results that are kept, so gradients would be wrong "
            f"(by {wrong_by:.1e} of the largest)"
        )
    return SelectiveSupport(tiny.model_type)


def _gradients(body: Any, *, packed: bool) -> list[Tensor]:
    """Return the gradients of a pass over two rows of 8 tokens."""
    ids = torch.arange(16) % body.get_input_embeddings().num_embeddings
    inputs: dict[str, Any] = {"input_ids": ids.view(2, 8)}
    if packed:
        positions = torch.arange(8).repeat(2)
        inputs = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": NO_MASK,
            "plan": plan_segments([Segment(0, 8), Segment(8, 8)], positions),
        }
    body.zero_grad()
    body(use_cache=False, **inputs).last_hidden_state.square().mean().backward()
    return [p.grad.clone() for p in body.parameters() if p.grad is not None]

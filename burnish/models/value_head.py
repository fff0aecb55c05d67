"""Scalar models: a language model's body with one linear output, for critics and reward models.

Parameter names match HuggingFace's ``*ForSequenceClassification`` with one label, so exports load
there unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from burnish.config.model import Dtype, ModelConfig
from burnish.models.load import (
    DTYPES,
    ModelError,
    check_support,
    choose_attention,
    describe,
    from_pretrained,
    hf_config,
    load_causal_lm,
    place,
    without_weights,
)
from burnish.models.lora import inject_lora

NewHead = Literal["random", "zero"]


class ScalarModel(nn.Module):
    """A body and a linear output: ``score(body(tokens))``, one number per token."""

    def __init__(self, body: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.model = body
        self.score = score
        self.config = body.config


def load_scalar_model(
    config: ModelConfig,
    *,
    dtype: Dtype = "fp32",
    device: torch.device | str = "cpu",
    seed: int = 0,
    new_head: NewHead | None = None,
    empty: bool = False,
) -> ScalarModel:
    """Load a scalar model from a sequence classifier with one output, or from a causal LM with
    ``new_head``.

    A ``random`` head is drawn from N(0, 1/(H+1)) with ``seed`` (like reward models in arXiv
    2009.01325); a ``zero`` head starts at 0. New adapters also depend only on ``seed``. ``empty``
    leaves the other weights on the meta device, as in :func:`load_causal_lm`. Raises ModelError if
    the model has no head and ``new_head`` is None (scores would be noise), or if it has more than
    one output.
    """
    check_support(config)
    if _is_classifier(config):
        auto_class = AutoModelForSequenceClassification
        model: Any = without_weights(auto_class, config, dtype) if empty else None
        if model is None:
            model = from_pretrained(auto_class, config, DTYPES[dtype])
            model = place(model, dtype=dtype, device=device, lora=config.lora)
        if model.config.num_labels != 1:
            raise ModelError(
                f"{describe(config)} has {model.config.num_labels} outputs, and a reward model "
                "has 1; use a classifier trained with num_labels=1"
            )
        choose_attention(model, describe(config))
        if config.lora is not None:
            if config.lora.path is not None:
                raise ModelError(
                    f"model.lora.path={config.lora.path} with the classifier {describe(config)}: "
                    "adapters of language models do not fit it; merge the adapter into its base "
                    "first, or remove model.lora.path"
                )
            with _drawn_from(seed):
                inject_lora(model.base_model, config.lora)
        return ScalarModel(model.base_model, model.score)
    if new_head is None:
        if config.path is not None and config.gguf_file is None and hf_config(config) is None:
            load_causal_lm(config)  # raises with the reason why its config cannot be read
        raise ModelError(
            f"{describe(config)} is a language model without a reward head, so its scores would "
            "be noise; train one first (burnish rm), or use a sequence classifier with one output"
        )
    with _drawn_from(seed):
        body = load_causal_lm(config, dtype=dtype, device=device, empty=empty).get_decoder()
    width = body.config.hidden_size
    score = nn.Linear(width, 1, bias=False)
    std = (width + 1) ** -0.5 if new_head == "random" else 0.0
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(score.weight, std=std, generator=generator)
    return ScalarModel(body, score.to(device=device, dtype=DTYPES[dtype]))


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's generator inside the ``with`` block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _is_classifier(config: ModelConfig) -> bool:
    found = hf_config(config)
    names = (found.architectures or []) if found is not None else []
    return any(name.endswith("ForSequenceClassification") for name in names)

"""Scalar models: a language model's body with one linear output, for critics and reward models.
Regression and classification reward models are trained with several outputs.

Parameter names match HuggingFace's ``*ForSequenceClassification``, so exports load there unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from burnish.config.model import Dtype, ModelConfig
from burnish.models.attn_implementation import use_attention
from burnish.models.empty import read_tensor
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
    """A body and a linear output: ``score(body(tokens))``, one number per token and output."""

    def __init__(self, body: PreTrainedModel, score: nn.Linear) -> None:
        super().__init__()
        self.model = body
        self.score = score
        self.config = body.config


def load_scalar_model(  # house: ok properties of the model and of its head
    config: ModelConfig,
    *,
    dtype: Dtype = "fp32",
    device: torch.device | str = "cpu",
    seed: int = 0,
    new_head: NewHead | None = None,
    empty: bool = False,
    num_outputs: int = 1,
    output_weights: Mapping[str, float] | None = None,
) -> ScalarModel:
    """Load a scalar model from a sequence classifier, or from a causal LM with ``new_head``.

    If ``new_head`` is set, the model is trained and has ``num_outputs`` outputs. Otherwise it has
    one: if the classifier has several, their sum weighted by ``output_weights`` (by name; None:
    ``reward_weights`` of its config).

    A ``random`` head is drawn from N(0, 1/(H+1)) with ``seed`` (like reward models in arXiv
    2009.01325); a ``zero`` head starts at 0. New adapters also depend only on ``seed``. ``empty``
    leaves the other weights on the meta device, as in :func:`load_causal_lm`. Raises ModelError if
    the model has no head and ``new_head`` is None (scores would be noise), or if the number of
    outputs does not fit.
    """
    check_support(config)
    if _is_classifier(config):
        auto_class = AutoModelForSequenceClassification
        model: Any = without_weights(auto_class, config, dtype) if empty else None
        if model is None:
            model = from_pretrained(auto_class, config, DTYPES[dtype])
            model = place(model, dtype=dtype, device=device, lora=config.lora)
        if new_head is not None and model.config.num_labels != num_outputs:
            raise ModelError(
                f"{describe(config)} has {model.config.num_labels} outputs, but this recipe trains "
                f"{num_outputs}; use a classifier with num_labels={num_outputs}, or a language "
                "model, which gets a new head"
            )
        weights = None
        if new_head is None:
            weights = weights_of_outputs(config, model.config, output_weights)
        choose_attention(model, describe(config))
        use_attention(model, config.attn_implementation, describe(config))
        if config.lora is not None:
            if config.lora.path is not None:
                raise ModelError(
                    f"model.lora.path={config.lora.path} with the classifier {describe(config)}: "
                    "adapters of language models do not fit it; merge the adapter into its base "
                    "first, or remove model.lora.path"
                )
            with _drawn_from(seed):
                inject_lora(model.base_model, config.lora)
        score = model.score
        if weights is not None:
            score = _weighted(score, weights, config)
        return ScalarModel(model.base_model, score)
    if new_head is None:
        if config.path is not None and config.gguf_file is None and hf_config(config) is None:
            load_causal_lm(config)  # raises with the reason why its config cannot be read
        raise ModelError(
            f"{describe(config)} is a language model without a reward head, so its scores would "
            "be noise; train one first (burnish rm), or use a sequence classifier"
        )
    with _drawn_from(seed):
        body = load_causal_lm(config, dtype=dtype, device=device, empty=empty).get_decoder()
    width = body.config.hidden_size
    score = nn.Linear(width, num_outputs, bias=False)
    std = (width + 1) ** -0.5 if new_head == "random" else 0.0
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(score.weight, std=std, generator=generator)
    return ScalarModel(body, score.to(device=device, dtype=DTYPES[dtype]))


def weights_of_outputs(
    config: ModelConfig, found: PretrainedConfig, given: Mapping[str, float] | None
) -> list[float] | None:
    """Return the weight of each output of the classifier in the reward. None: it has one output,
    which is the reward. Raises ModelError if the weights are missing or do not fit the names."""
    chosen = given if given is not None else found.to_dict().get("reward_weights")
    num = int(found.num_labels or 1)
    if chosen is None and num == 1:
        return None
    labels: Mapping[Any, str] = found.id2label or {}
    names = [str(labels.get(i, labels.get(str(i), f"LABEL_{i}"))) for i in range(num)]
    if chosen is None:
        raise ModelError(
            f"{describe(config)} has {num} outputs ({', '.join(names)}), and a reward is one "
            f"number; set the reward's output_weights, e.g. {{{names[-1]}: 1}} (or reward_weights "
            "in its config.json), by which the outputs are summed"
        )
    unknown = [name for name in chosen if name not in names]
    if unknown or not any(chosen.values()):
        raise ModelError(
            f"{'output_weights' if given is not None else 'reward_weights'}={dict(chosen)} of "
            f"{describe(config)}: "
            + (f"there is no output {unknown[0]!r}" if unknown else "all weights are 0")
            + f"; the outputs are {', '.join(names)}"
        )
    found_weights = [float(chosen.get(name, 0.0)) for name in names]
    return None if found_weights == [1.0] else found_weights


def _weighted(score: nn.Linear, weights: Sequence[float], config: ModelConfig) -> nn.Linear:
    """Return a head whose one output is the weighted sum of the outputs of ``score``. Computed in
    fp32, then rounded to the dtype of the head."""
    own = {n: p for n, p in score.named_parameters()}
    full = {n: read_tensor(config, f"score.{n}") if p.is_meta else p for n, p in own.items()}
    dtype = score.weight.dtype
    summed = nn.Linear(score.in_features, 1, bias=score.bias is not None)
    with torch.no_grad():
        for name, parameter in summed.named_parameters():
            source = full[name].detach().float()
            parameter.copy_(torch.tensor(weights, device=source.device) @ source)
    home = "cpu" if score.weight.is_meta else score.weight.device
    return summed.to(device=home, dtype=dtype)


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

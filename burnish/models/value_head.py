"""Scalar models: a language model's body with one linear output, for critics and reward models.
Regression and classification reward models are trained with several outputs.

``scalar_model.py`` has the forms of folders that contain one, and ``scalar_support.py`` decides
between them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from burnish.config.model import Dtype, ModelConfig
from burnish.models.attn_implementation import use_attention
from burnish.models.empty import read_tensor, weight_files
from burnish.models.load import (
    DTYPES,
    ModelError,
    check_support,
    choose_attention,
    describe,
    from_pretrained,
    hf_config,
    inject_adapters,
    load_causal_lm,
    place,
    without_weights,
)
from burnish.models.lora_layers import has_adapters
from burnish.models.paths import check_path
from burnish.models.scalar_model import (
    ScalarModel,
    head_width,
    is_own,
    load_own,
    names_of_outputs,
    path_of,
)
from burnish.models.scalar_support import require_scalar
from burnish.models.untrusted import UNREADABLE, unloadable
from burnish.oom import is_out_of_memory

log = logging.getLogger("burnish")

NewHead = Literal["random", "zero"]


def load_scalar_model(  # house: ok properties of the model and of its head
    config: ModelConfig,
    *,
    dtype: Dtype = "fp32",
    device: torch.device | str = "cpu",
    seed: int = 0,
    new_head: NewHead | None = None,
    empty: bool = False,
    random: PretrainedConfig | None = None,
    num_outputs: int = 1,
    output_names: Sequence[str] = (),
    output_weights: Mapping[str, float] | None = None,
) -> ScalarModel:
    """Load a scalar model from a sequence classifier, or from a causal LM with ``new_head``.

    If ``new_head`` is set, the model is trained and has ``num_outputs`` outputs, which are put in
    the order of ``output_names`` (empty: they have no names). Otherwise it has one: if the
    classifier has several, their sum weighted by ``output_weights`` (by name; None:
    ``reward_weights`` of its config).

    A ``random`` head is drawn from N(0, 1/(H+1)) with ``seed`` (like reward models in arXiv
    2009.01325); a ``zero`` head starts at 0. New adapters also depend only on ``seed``. ``empty``
    leaves the other weights on the meta device, and ``random`` draws them, as in
    :func:`load_causal_lm`. Raises ModelError if the model has no head and ``new_head`` is None
    (scores would be noise), or if the outputs do not fit.
    """
    if random is None:
        check_support(config)
    pretrained_config = random or hf_config(config)
    if random is None and pretrained_config is not None and has_score(pretrained_config):
        check_outputs(config, pretrained_config, num_outputs if new_head is not None else None)
        order = (
            None if new_head is None else _order_of_outputs(config, pretrained_config, output_names)
        )
        model = _from_folder(config, pretrained_config, dtype=dtype, device=device, empty=empty)
        if config.lora is not None:
            _add_adapters(model, config, seed=seed)
        if order is not None:
            model.score = _mixed(model.score, lambda full: full[order], config)
        if new_head is None:
            weights = weights_of_outputs(config, pretrained_config, output_weights)
            if weights is not None:
                mix = torch.tensor(weights)
                model.score = _mixed(
                    model.score, lambda full: (mix.to(full.device) @ full)[None], config
                )
        return model
    if random is None and new_head is None:
        if config.path is not None and config.gguf_file is None and pretrained_config is None:
            load_causal_lm(config)  # raises with the reason why its config cannot be read
        architectures = pretrained_config and pretrained_config.architectures
        kind = (architectures or ["a language model"])[0]
        raise ModelError(
            f"{describe(config)} ({kind}) is without a reward head that scores a row, so its "
            "scores would be noise; train one first (burnish rm), or use a sequence classifier"
        )
    if pretrained_config is not None:
        require_scalar(pretrained_config, describe(config), trust=config.trust_remote_code)
        if random is None:
            _check_no_head(config, pretrained_config)
    network = _language_model(
        config, dtype=dtype, device=device, empty=empty, random=random, seed=seed
    )
    if pretrained_config is None:  # a GGUF file, or a model made from scratch
        require_scalar(network.config, describe(config))
    body = network.get_decoder()
    if has_adapters(network) and not has_adapters(body):
        raise ModelError(
            f"{describe(config)}: model.lora gives adapters to the output projection alone, which "
            "a head replaces; name inner layers in model.lora.target_modules, or use all-linear "
            "(for a critic: in critic.model.lora)"
        )
    width = head_width(network)
    score = nn.Linear(width, num_outputs, bias=False)
    std = (width + 1) ** -0.5 if new_head == "random" else 0.0
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(score.weight, std=std, generator=generator)
    score = score.to(device=device, dtype=DTYPES[dtype])
    return ScalarModel(body, score, network.config)


def _language_model(
    config: ModelConfig,
    *,
    dtype: Dtype,
    device: torch.device | str,
    empty: bool,
    random: PretrainedConfig | None,
    seed: int,
) -> Any:
    """Return the language model whose body a new scalar model gets. It is only ``empty`` if the
    files have its weights under the names of :class:`ScalarModel`."""
    if empty:
        with _drawn_from(seed):
            network = load_causal_lm(config, dtype=dtype, device=device, empty=True)
        if dict(network.named_modules()).get("model") is network.get_decoder():
            return network
    with _drawn_from(seed):
        return load_causal_lm(config, dtype=dtype, device=device, random=random)


def _from_folder(
    config: ModelConfig,
    pretrained_config: PretrainedConfig,
    *,
    dtype: Dtype,
    device: torch.device | str,
    empty: bool,
) -> ScalarModel:
    """Return the scalar model of a folder that has a head, of either form."""
    name = describe(config)
    if is_own(pretrained_config):
        check_path(config, warn=True)
        try:
            model = load_own(config, pretrained_config, name)
        except UNREADABLE as error:
            if isinstance(error, ModelError) or is_out_of_memory(error):
                raise
            raise unloadable("model", name, error) from error
    else:
        model = _from_classifier(config, pretrained_config, dtype=dtype, empty=empty)
    if not any(parameter.is_meta for parameter in model.parameters()):
        place(model.model, dtype=dtype, device=device, lora=config.lora)
        model.score.to(device=device, dtype=DTYPES[dtype])
    choose_attention(model.model, name, model.config)
    use_attention(model.model, config.attn_implementation, name)
    return model


def _from_classifier(
    config: ModelConfig, pretrained_config: PretrainedConfig, *, dtype: Dtype, empty: bool
) -> ScalarModel:
    """Return body and head of transformers' classifier. Raises ModelError if it has another head,
    or computes more than a linear output of its body."""
    name, auto_class = describe(config), AutoModelForSequenceClassification
    support = require_scalar(pretrained_config, name, trust=config.trust_remote_code)
    model: Any = None
    if empty and support.body_path == "model":  # the files have the names of ScalarModel
        model = without_weights(auto_class, config, dtype)
    if model is None:
        model = from_pretrained(auto_class, config, DTYPES[dtype])
    path = path_of(support.body_class, model)
    if path is None or support.form != "classifier" or not isinstance(model.score, nn.Linear):
        raise ModelError(
            f"{name} is a {type(model).__name__}, whose scores are not a linear output of its "
            f"{support.body_class} ({support.reason or 'it has another head'}); use a language "
            "model of the family, which gets a new head"
        )
    return ScalarModel(model.get_submodule(path), model.score, model.config)


def _add_adapters(model: ScalarModel, config: ModelConfig, *, seed: int) -> None:
    assert config.lora is not None
    if config.lora.path is not None:
        raise ModelError(
            f"model.lora.path={config.lora.path} with the classifier {describe(config)}: adapters "
            "of language models do not fit it; merge the adapter into its base first, or remove "
            "model.lora.path"
        )
    with _drawn_from(seed):
        inject_adapters(model.model, config)


def has_score(config: PretrainedConfig) -> bool:
    """Return whether a folder with this config has a head: a reward model or critic exported by
    Burnish, or transformers' sequence classifier."""
    names = config.architectures or []
    return is_own(config) or any(name.endswith("ForSequenceClassification") for name in names)


def _check_no_head(config: ModelConfig, pretrained_config: PretrainedConfig) -> None:
    """Raise ModelError if the files have a head of another form, which a new one would replace
    (OpenRLHF's reward models, TRL's value heads, token classifiers)."""
    names = weight_files(config) or ()
    head = next((name for name in sorted(names) if _HEAD.match(name)), None)
    if head is None:
        return
    kind = (pretrained_config.architectures or ["unknown"])[0]
    raise ModelError(
        f"{describe(config)} has a trained head ({head}) that Burnish does not read, because its "
        f"config.json has architectures: [{kind}]; a new one would replace it. If it is one linear "
        "layer on the last token (OpenRLHF's RewardModel), name its tensor score.weight, and set "
        "architectures to the sequence classifier of the family (such as "
        "[LlamaForSequenceClassification]) and num_labels to 1. For a new head, remove the old "
        "one: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


_HEAD = re.compile(
    r"(score|classifier|qa_outputs|(regression|reward|value)\w*|(v|rm|classification)_head)\."
)
"""Beginning of the names of a head's tensors, outside of the body."""


def check_outputs(
    config: ModelConfig, pretrained_config: PretrainedConfig, num_outputs: int | None
) -> None:
    """Raise ModelError if the model has another number of outputs than ``num_outputs`` (None:
    any)."""
    if num_outputs is not None and pretrained_config.num_labels != num_outputs:
        raise ModelError(
            f"{describe(config)} has {pretrained_config.num_labels} outputs, but this recipe "
            f"trains {num_outputs}; use a classifier with num_labels={num_outputs}, or a language "
            "model, which gets a new head"
        )


def _order_of_outputs(
    config: ModelConfig, pretrained_config: PretrainedConfig, output_names: Sequence[str]
) -> list[int] | None:
    """Return the classifier's outputs in the order of ``output_names``; None: as they are.

    One output, and outputs without names, are taken as they are. Raises ModelError if the outputs
    have other names: they would be trained on as outputs that they are not.
    """
    names = names_of_outputs(pretrained_config)
    if len(names) == 1 or not output_names or list(output_names) == names:
        return None
    if sorted(output_names) == sorted(names):
        log.info(
            "the outputs of %s (%s) are put in the order of the recipe: %s",
            *(describe(config), ", ".join(names), ", ".join(output_names)),
        )
        return [names.index(name) for name in output_names]
    if names == [f"LABEL_{index}" for index in range(len(names))]:
        log.warning(
            "the outputs of %s have no names (id2label in its config.json); they are taken as %s, "
            "in this order",
            *(describe(config), ", ".join(output_names)),
        )
        return None
    raise ModelError(
        f"the outputs of {describe(config)} are {', '.join(names)}, but this recipe trains "
        f"{', '.join(output_names)}; use these names in the recipe and its rows, write the "
        "recipe's names into id2label of its config.json if they mean the same, or use a language "
        "model, which gets a new head"
    )


def weights_of_outputs(
    config: ModelConfig,
    pretrained_config: PretrainedConfig,
    output_weights: Mapping[str, float] | None,
) -> list[float] | None:
    """Return the weight of each output of the classifier in the reward. None: it has one output,
    which is the reward. Raises ModelError if the weights are missing or do not fit the names."""
    chosen = (
        output_weights
        if output_weights is not None
        else pretrained_config.to_dict().get("reward_weights")
    )
    num = int(pretrained_config.num_labels or 1)
    if chosen is None and num == 1:
        return None
    names = names_of_outputs(pretrained_config)
    if chosen is None:
        raise ModelError(
            f"{describe(config)} has {num} outputs ({', '.join(names)}), and a reward is one "
            f"number; set the reward's output_weights, e.g. {{{names[-1]}: 1}} (or reward_weights "
            "in its config.json), by which the outputs are summed"
        )
    unknown = [name for name in chosen if name not in names]
    if unknown or not any(chosen.values()):
        key = "output_weights" if output_weights is not None else "reward_weights"
        raise ModelError(
            f"{key}={dict(chosen)} of {describe(config)}: "
            + (f"there is no output {unknown[0]!r}" if unknown else "all weights are 0")
            + f"; the outputs are {', '.join(names)}"
        )
    weights = [float(chosen.get(name, 0.0)) for name in names]
    return None if weights == [1.0] else weights


def _mixed(score: nn.Linear, mix: Callable[[Tensor], Tensor], config: ModelConfig) -> nn.Linear:
    """Return a head whose outputs are those of ``score`` after ``mix``, which maps the fp32 rows
    of a parameter to the new ones. The result is rounded to the dtype of the head."""
    parameters = {n: p for n, p in score.named_parameters()}
    full = {n: read_tensor(config, f"score.{n}") if p.is_meta else p for n, p in parameters.items()}
    rows = {name: mix(tensor.detach().float()) for name, tensor in full.items()}
    home = "cpu" if score.weight.is_meta else score.weight.device
    new = nn.Linear(score.in_features, len(rows["weight"]), bias=score.bias is not None)
    new = new.to(device=home, dtype=score.weight.dtype)
    new.load_state_dict(rows)
    return new


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's generator inside the ``with`` block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield

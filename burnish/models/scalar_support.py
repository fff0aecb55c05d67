"""Determine how a reward model or critic of a family is exported.

A scalar model is a language model's body with a new head. transformers has a sequence classifier
for some families, under various names and sometimes with another computation. A small random copy
of the model is therefore written in that form, loaded again, and compared with the scores that
training would compute. If they differ, Burnish's own form is tried in the same way. A model that
fits neither is refused before it is trained.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from burnish.config.model import ModelConfig
from burnish.models.buffers import persistent_buffers
from burnish.models.family_check import failure_text
from burnish.models.paths import ModelError
from burnish.models.scalar_model import ScalarModel, head_width, load_own, path_of, save_own
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border, cached_result

Form = Literal["classifier", "own"]
TOLERANCE = 1e-5
"""Largest difference of fp32 scores, as a fraction of the largest score and at least 1: the same
operations in another order."""
_OUTPUTS = 2


@dataclass(frozen=True)
class ScalarSupport:
    """The form in which scalar models of a family are exported, and the evidence for it."""

    model_type: str
    form: Form = "own"
    body_class: str = ""
    """Name of the body's class."""
    body_path: str = ""
    """Name of the body in transformers' classifier. Empty for the form ``own``."""
    difference: float = 0.0
    """Largest difference of scores after export and loading, fp32."""
    reason: str = ""
    """Why transformers' classifier is not used; empty if it is."""
    refusal: str = ""
    """Why such a model cannot be trained; empty if it can."""


def scalar_support(config: PretrainedConfig, *, trust: bool = False) -> ScalarSupport:
    """Return how scalar models of the language model with this ``config`` are exported.

    The first call for a family takes about a second; later calls read the result from memory or
    from the cache folder. ``trust``: as in :func:`burnish.models.support.model_support`.
    """
    try:
        tiny = below_rope_border(shrink(config))
    except Exception as error:  # a config that cannot be shrunk: reported as a refusal
        reason = f"no small copy of the model can be made to check it ({failure_text(error)})"
        return ScalarSupport(config.model_type, refusal=reason)
    tiny.num_labels = _OUTPUTS
    return cached_result(ScalarSupport, tiny, lambda: _check(tiny, trust=trust), trust=trust)


def require_scalar(config: PretrainedConfig, name: str, *, trust: bool = False) -> ScalarSupport:
    """Return :func:`scalar_support`. Raises ModelError if the model ``name`` cannot be exported."""
    support = scalar_support(config, trust=trust)
    if support.refusal:
        raise ModelError(
            f"a reward model or critic made from {name} could not be used after training: "
            f"{support.refusal}; use another model (docs/models.md lists those that work)"
        )
    return support


def _check(tiny: PretrainedConfig, *, trust: bool) -> ScalarSupport:
    try:
        network: Any = build(tiny, trust=trust)
        body = network.get_decoder()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)  # (torch.manual_seed would also seed GPUs)
            score = nn.Linear(head_width(network), _OUTPUTS, bias=False)
        model = ScalarModel(body, score, network.config)
        scores = _scores(model)
    except Exception as error:  # whatever the model raises: it cannot compute scores
        refusal = f"a small copy of it computes no scores ({failure_text(error)})"
        return ScalarSupport(tiny.model_type, refusal=refusal)
    name = type(body).__name__
    forms: list[tuple[Form, Callable[..., tuple[str, Tensor]]]] = [
        ("classifier", _as_classifier),
        ("own", _as_own),
    ]
    reasons = []
    for form, exported in forms:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path, again = exported(model, Path(folder), trust=trust)
            difference = float((again - scores).abs().max() / scores.abs().max().clamp(min=1.0))
            if not difference <= TOLERANCE:
                raise ValueError(f"its scores differ by {difference:.1e}")
        except Exception as error:  # whatever the form does not support: the next one is tried
            reasons.append(str(error) if isinstance(error, ModelError) else failure_text(error))
            continue
        return ScalarSupport(tiny.model_type, form, name, path, difference, "; ".join(reasons))
    return ScalarSupport(tiny.model_type, refusal=f"its export does not load ({reasons[-1]})")


_PAD = 0
"""A pad token, as exports have; in none of the rows."""
_ROWS = [[5, 9, 7, 6, 11, 8, 5, 10, 13], [12, 6], [7]]


@torch.no_grad()
def _scores(model: ScalarModel) -> Tensor:
    """Return [rows, outputs] scores of the last token of each row, computed alone."""
    states = [model.model(input_ids=torch.tensor([r]), use_cache=False) for r in _ROWS]
    last = torch.stack([out.last_hidden_state[0, -1] for out in states])
    scores: Tensor = model.score(last.float())
    if not bool(scores.isfinite().all()):
        raise ValueError("its scores are not finite")
    return scores


def _as_classifier(model: ScalarModel, folder: Path, *, trust: bool) -> tuple[str, Tensor]:
    """Return the body's name in transformers' classifier, and the scores of an export in that
    form."""
    auto: Any = AutoModelForSequenceClassification
    if type(model.config) not in auto._model_mapping:
        raise ModelError(f"transformers has no sequence classifier of {model.config.model_type}")
    config = type(model.config).from_dict({**model.config.to_dict(), "num_labels": _OUTPUTS})
    config.pad_token_id = _PAD
    shell = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    path = path_of(type(model.model).__name__, shell)
    if path is None:
        raise ValueError(f"{type(shell).__name__} has no {type(model.model).__name__}")
    shell.load_state_dict(classifier_weights(dict(_state(model)), path, shell), strict=False)
    shell.save_pretrained(folder)
    again, info = auto.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True
    )
    if info["missing_keys"]:
        raise ValueError(f"the files of {type(shell).__name__} lack {info['missing_keys']}")
    with torch.no_grad():
        rows = [again.eval()(input_ids=torch.tensor([r]), use_cache=False) for r in _ROWS]
    return path, torch.cat([out.logits for out in rows]).float()


def _as_own(model: ScalarModel, folder: Path, *, trust: bool) -> tuple[str, Tensor]:
    config = type(model.config).from_dict({**model.config.to_dict(), "num_labels": _OUTPUTS})
    save_own(dict(_state(model)), config, folder)
    where = ModelConfig(path=str(folder), trust_remote_code=trust)
    again = load_own(where, config, config.model_type)
    return "", _scores(again.eval())


def _state(model: ScalarModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(persistent_buffers(model))}


def classifier_weights(
    weights: dict[str, Tensor], body_path: str, shell: nn.Module
) -> dict[str, Tensor]:
    """Return the weights of a :class:`ScalarModel` under their names in a classifier. Raises
    ValueError if the classifier has other parameters."""
    named = {
        f"{body_path}.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in weights.items()
    }
    tied = set(shell.all_tied_weights_keys or ())  # type: ignore[union-attr, arg-type]
    misfits = sorted(named.keys() ^ set(shell.state_dict()) - tied)
    if misfits:
        raise ValueError(f"{type(shell).__name__} has other parameters, e.g. {misfits[0]}")
    return named

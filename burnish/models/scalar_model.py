"""Scalar models, and the two forms of folders that contain one.

``classifier``: transformers' ``*ForSequenceClassification``, with any name of its body
(``transformer.h.0...``). ``own``: for families without such a class, or whose class computes
something else. Such a folder contains

* ``config.json``: the config of the language model that the body is from, with
  ``architectures: ["BurnishScoreModel"]``, the number of outputs (``num_labels``, ``id2label``) and
  the statistics and weights of the outputs that a classifier's config has.
* ``*.safetensors``: the body's parameters and persistent buffers as ``model.<name>``, and
  ``score.weight`` [outputs, width], where ``<name>`` is the name in the module that
  ``AutoModelForCausalLM.from_config(config).get_decoder()`` returns.

``models/scalar_support.py`` decides which form a family gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.config.model import ModelConfig
from burnish.models.auto_class import has_language_model, language_model_class
from burnish.models.buffers import persistent_buffers
from burnish.models.empty import weight_files
from burnish.models.paths import ModelError
from burnish.models.support import plain_torch

OWN_CLASS = "BurnishScoreModel"
"""Architecture in the config of a folder of the form ``own``."""
SCORES_AT = "scores_at"
"""Field of a config: ``end_token`` if the model was trained to score the end token of the last
answer, as all exports of Burnish were. Other code passes the entire rendering of a conversation to
a classifier, which scores its last token."""
_OLDER_MARKS = (
    "process_reward", "step_separator", "process_reward_stats",
    "reward_mean", "reward_std", "reward_weights",
)  # fmt: skip
"""Fields that Burnish alone writes, also in exports that are older than ``SCORES_AT``. Statistics
of scores were measured at the end token, too."""
_HEAD_FIELDS = (*_OLDER_MARKS, SCORES_AT)
"""Fields of Burnish in a config that describe a head. Those of transformers are ``problem_type``
and the names of the outputs."""


class ScalarModel(nn.Module):
    """A body and a linear output: ``score(body(tokens))``, one number per token and output."""

    def __init__(
        self, body: PreTrainedModel, score: nn.Linear, config: PretrainedConfig | None = None
    ) -> None:
        """``config``: config of the language model that the body is from."""
        super().__init__()
        self.model = body
        self.score = score
        alone = config is None or has_language_model(body.config)
        self.config: PretrainedConfig = body.config if alone or config is None else config
        """Config from which transformers builds a language model with this body: that of the body
        if transformers maps it, else that of the composite model."""


def head_width(network: Any) -> int:
    """Return the width of the hidden states that the body of a language model returns: the input
    of its output projection.

    ``hidden_size`` differs if the body ends in a projection (OPT-350m: 1024, projected to 512).
    """
    head = network.get_output_embeddings()
    if isinstance(head, nn.Linear):
        return head.in_features
    return int(network.get_decoder().config.get_text_config().hidden_size)


def path_of(body_class: str, owner: nn.Module) -> str | None:
    """Return the name in ``owner`` of its only module of the class named ``body_class``; None if it
    has none or several."""
    names = [name for name, m in owner.named_modules() if type(m).__name__ == body_class]
    return names[0] if len(names) == 1 else None


def reset_head(config: PretrainedConfig, outputs: int) -> None:
    """Make ``config`` that of a head with ``outputs`` outputs of which nothing else is known:
    remove the fields that describe the head of the model that training started from."""
    for name in _HEAD_FIELDS:
        vars(config).pop(name, None)
    config.problem_type = None
    config.id2label = {index: f"LABEL_{index}" for index in range(outputs)}
    config.label2id = {name: index for index, name in config.id2label.items()}


def names_of_outputs(config: PretrainedConfig) -> list[str]:
    """Return the names of the outputs in order; transformers' ``LABEL_0`` ... if they have none."""
    labels: Mapping[Any, str] = config.id2label or {}
    count = int(config.num_labels or 1)
    return [str(labels.get(i, labels.get(str(i), f"LABEL_{i}"))) for i in range(count)]


def is_own(config: PretrainedConfig) -> bool:
    """Return whether ``config`` is that of a folder of the form ``own``."""
    return (config.architectures or []) == [OWN_CLASS]


def scores_last_token(metadata: Mapping[str, Any]) -> bool:
    """Return whether a model with these fields in its config scores the last token of a rendered
    conversation, and not the end token of its last answer. Both are the same with templates that
    write nothing behind it."""
    if (place := metadata.get(SCORES_AT)) is not None:
        return place != "end_token"
    is_exported = any(metadata.get(field) is not None for field in _OLDER_MARKS)
    return not is_exported and metadata.get("architectures") != [OWN_CLASS]


def empty_scalar(config: PretrainedConfig, outputs: int, *, bias: bool, trust: bool) -> ScalarModel:
    """Return the scalar model of a language model's config with its parameters on the meta device.
    Buffers are computed."""
    with plain_torch(), init_empty_weights(include_buffers=False):
        network = language_model_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust
        )
        score = nn.Linear(head_width(network), outputs, bias=bias)
    network.tie_weights()  # moving parameters to the meta device untied them
    return ScalarModel(network.get_decoder(), score, config)


def save_own(
    weights: Mapping[str, Tensor], config: PretrainedConfig, folder: Path, *, shard: str = "5GB"
) -> None:
    """Write parameters and persistent buffers of a scalar model, and its config with all fields but
    the architecture, to ``folder``."""
    config.architectures = [OWN_CLASS]
    config.save_pretrained(folder)
    save_torch_state_dict(dict(weights), folder, max_shard_size=shard, metadata={"format": "pt"})


def load_own(config: ModelConfig, pretrained_config: PretrainedConfig, name: str) -> ScalarModel:
    """Return the scalar model of a folder of the form ``own`` in the dtype of its files, on the
    CPU. ``pretrained_config``: that of the folder. ``name``: for messages.

    Raises ModelError if the files do not fit the config.
    """
    files = weight_files(config)
    if files is None:
        raise ModelError(f"{name} has no safetensors files, or some are missing; export it again")
    model = empty_scalar(
        pretrained_config,
        int(pretrained_config.num_labels or 1),
        bias="score.bias" in files,
        trust=config.trust_remote_code,
    )
    try:
        check_names(model, files)
        tensors = {tensor_name: files.read(tensor_name) for tensor_name in files}
        model.load_state_dict(tensors, strict=False, assign=True)
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"{name}: its safetensors files and its config do not fit ({error}); export it again"
        ) from error
    return model


def check_names(model: ScalarModel, names: Iterable[str]) -> None:
    """Raise ValueError unless ``names`` are those of the parameters and persistent buffers."""
    expected = {name for name, _ in model.named_parameters()}
    expected |= {name for name, _ in persistent_buffers(model)}
    if misfits := sorted(expected ^ set(names)):
        raise ValueError(f"{misfits[0]} is only in one of them")

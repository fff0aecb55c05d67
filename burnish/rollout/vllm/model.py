"""Config of a model for vLLM, and checks for models that vLLM cannot run. Nothing here imports
vllm."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from burnish.models.load import ModelError
from burnish.models.support import row_limit


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without weights (on the meta device), with the names and shapes that a
    trainer sends, and a config that names its class.

    Raises ModelError for a composite model, of which vLLM would start all parts.
    """
    config = copy.deepcopy(model.config)
    if config.get_text_config() is not config:
        raise ModelError(
            f"vLLM runs all parts of this composite model ({config.model_type}), but the trainer "
            "has only its language model; use rollout.engine.kind=local"
        )
    with torch.device("meta"):
        bare: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(bare).__name__]
    bare.config = config
    return bare


def check_parallel_size(config: PretrainedConfig, parallel: int) -> None:
    """Raise ModelError if ``parallel`` does not divide the numbers of heads."""
    for name, heads in (
        ("attention", config.num_attention_heads),
        ("key/value", _kv_heads(config)),
    ):
        if heads % parallel:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ModelError(
                f"rollout.engine.tensor_parallel_size={parallel} does not divide the model's "
                f"{heads} {name} heads; use one of {fits}"
            )


def check_head_dim(config: PretrainedConfig, known: Sequence[int]) -> None:
    """Raise ModelError if vLLM's attention on CPU does not support the model's head size. vLLM
    would start, and fail at the first token.

    Latent attention is refused too: on CPU, vLLM 0.32 gave log-probs that were up to 3.9 nats away
    from those of transformers, for a small DeepSeek-V3 with the same weights.
    """
    if config.to_dict().get("kv_lora_rank"):
        raise ModelError(
            f"vLLM on CPU does not compute the latent attention of this {config.model_type} model "
            "as transformers does; use rollout.engine.kind=local, or vLLM on a GPU"
        )
    size = _head_dim(config)
    if size not in known:
        raise ModelError(
            f"vLLM on CPU has no attention for heads of {size} (hidden_size / num_heads), only for "
            f"{list(known)}; use rollout.engine.kind=local, or a model with such heads"
        )


def longest_row(config: PretrainedConfig, max_len: int | None) -> int:
    """Return the maximum tokens of a row: the smaller of ``max_len`` and the model's limit. Raises
    ModelError if both are unknown."""
    limits = [limit for limit in (max_len, row_limit(config)) if limit is not None]
    if not limits:
        raise ModelError(
            f"the config of this {config.model_type} model has no max_position_embeddings, so the "
            "maximum row length is unknown; set rollout.engine.max_model_len"
        )
    return min(limits)


def cache_bytes(config: PretrainedConfig, length: int, *, dtype: torch.dtype, block: int) -> int:
    """Return the bytes of one sequence of ``length`` tokens in the key/value cache: full blocks and
    a spare one."""
    blocks = -(-length // block) + 1
    per_token = 2 * config.num_hidden_layers * _kv_heads(config) * _head_dim(config)
    return int(blocks * block * per_token * dtype.itemsize)


def _kv_heads(config: PretrainedConfig) -> int:
    """Return the number of key/value heads: that of heads if the config has none (GPT-2, GPT-NeoX,
    OPT)."""
    return int(config.to_dict().get("num_key_value_heads") or config.num_attention_heads)


def _head_dim(config: PretrainedConfig) -> int:
    head_dim = config.to_dict().get("head_dim")
    return int(head_dim or config.hidden_size // config.num_attention_heads)

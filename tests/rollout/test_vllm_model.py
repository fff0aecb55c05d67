"""Values read from a model's config for vLLM. (No vLLM is needed.)"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from burnish.models.load import ModelError
from burnish.rollout.vllm.model import cache_bytes, check_parallel_size, longest_row

FAMILIES = {"gpt2": (12, 64), "gpt_neox": (64, 96), "opt": (12, 64)}
"""Heads, and width of one, of models whose configs have no num_key_value_heads."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_without_a_number_of_key_value_heads_has_as_many_as_heads(kind: str) -> None:
    """Two blocks of 32 for 40 tokens and a spare one, key and value of every head, 4 bytes."""
    heads, width = FAMILIES[kind]
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    expected = 3 * 32 * 2 * 2 * heads * width * 4
    assert cache_bytes(config, 40, dtype=torch.float32, block=32) == expected
    check_parallel_size(config, 4)
    with pytest.raises(ModelError, match=f"size=5 does not divide the model's {heads} attention"):
        check_parallel_size(config, 5)


def test_key_value_heads_count_if_there_are_fewer() -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8)
    check_parallel_size(config, 8)
    with pytest.raises(ModelError, match="size=16 does not divide the model's 8 key/value heads"):
        check_parallel_size(config, 16)


def test_a_row_is_limited_by_the_setting_and_the_models_positions() -> None:
    """BLOOM's config names no number of positions."""
    gpt2, bloom = AutoConfig.for_model("gpt2"), AutoConfig.for_model("bloom")
    assert longest_row(gpt2, None) == longest_row(gpt2, 4096) == 1024
    assert longest_row(gpt2, 100) == longest_row(bloom, 100) == 100
    with pytest.raises(ModelError, match=r"set rollout\.engine\.max_model_len"):
        longest_row(bloom, None)

"""Shrunk configs: small, of the same behavior, with every layer type; and the models built of
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from burnish.models.shrink import SPECIAL, VOCAB, build, shrink
from burnish.models.support import model_support
from burnish.rollout.local.engine import decoding_support


def config(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type].from_dict({"model_type": model_type, **fields})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def test_a_large_model_keeps_its_behavior_and_loses_its_size() -> None:
    """Llama 3.1 70B: 64 heads of 8 key/value heads stay grouped, 131072 / 8192 = 16 stays 16."""
    large = config(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        attention_dropout=0.1,
    )
    before = large.to_dict()
    small = shrink(large)
    assert large.to_dict() == before
    assert (small.num_hidden_layers, small.vocab_size) == (2, VOCAB)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert small.max_position_embeddings == 16 * 8
    assert small.rope_parameters == {**LLAMA3, "original_max_position_embeddings": 8}
    assert small.bos_token_id == SPECIAL
    assert small.eos_token_id == [SPECIAL + 1, SPECIAL + 2, SPECIAL + 3]
    assert small.attention_dropout == 0.1


@pytest.mark.parametrize(
    ("heads", "kv", "small"),
    [(32, 32, (4, 4)), (32, 8, (4, 2)), (2, 2, (2, 2)), (2, 1, (2, 1))],
)
def test_heads_share_keys_as_before(heads: int, kv: int, small: tuple[int, int]) -> None:
    """Few heads stay few: there are never more key/value heads than heads."""
    found = shrink(config("llama", num_attention_heads=heads, num_key_value_heads=kv))
    assert (found.num_attention_heads, found.num_key_value_heads) == small


def test_one_layer_of_each_type_is_kept_in_order() -> None:
    """Qwen3-Next has (linear, linear, linear, full) * 12: one linear, then one full layer."""
    small = shrink(config("qwen3_next"))
    assert small.layer_types == ["linear_attention", "full_attention"]


def test_layers_of_a_period_keep_their_pattern() -> None:
    """Jamba: attention in layers i % 8 == 4, experts in layers i % 2 == 1. Three types: (mamba,
    dense), (mamba, experts), (attention, dense), so attention is i % 3 == 2 of three."""
    small = shrink(config("jamba", num_hidden_layers=32))
    assert small.num_hidden_layers == 3
    assert (small.attn_layer_period, small.attn_layer_offset) == (3, 2)
    assert (small.expert_layer_period, small.expert_layer_offset) == (2, 1)


def test_layers_that_share_keys_keep_a_layer_to_share_with() -> None:
    small = shrink(
        config(
            "gemma3n_text",
            num_hidden_layers=35,
            num_kv_shared_layers=15,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        )
    )
    kinds, shared = small.layer_types, small.num_kv_shared_layers
    assert set(kinds[-shared:]) == set(kinds[:-shared]) == {"sliding_attention", "full_attention"}


def test_a_window_longer_than_all_rows_stays_longer() -> None:
    assert shrink(config("phi3", sliding_window=262144)).sliding_window == 64
    assert shrink(config("mistral", sliding_window=4096)).sliding_window == 4


FAMILIES = {
    "llama": config("llama"),
    "gemma2": config("gemma2"),
    "granite": config("granite", logits_scaling=8.0, attention_multiplier=0.0078125),
    "deepseek_v3": config("deepseek_v3"),
    "qwen3_5": config("qwen3_5"),
    "mamba2": config("mamba2"),
    "nemotron_h": config("nemotron_h"),
    "falcon": config("falcon"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_depend_on_earlier_tokens_and_on_the_seed_alone(name: str) -> None:
    """A change of token 3 of 8 moves the log-probs of later tokens by more than 0.1 nats, not those
    of earlier ones; the same seed gives the same model and leaves the global state as it was."""
    small = shrink(FAMILIES[name])
    state = torch.get_rng_state()
    model, again = build(small, seed=3), build(small, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    other = ids.clone()
    other[0, 3] = 20
    with torch.no_grad():
        first, second = (model(input_ids=x).logits.log_softmax(-1) for x in (ids, other))
        assert torch.equal(first, again(input_ids=ids).logits.log_softmax(-1))
    change = (first - second).abs()[0].amax(-1)
    assert change[:3].max() < 1e-5  # (of mixtures: other rows in the products of an expert)
    assert change[4:].max() > 0.1
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("rope", [YARN, LLAMA3], ids=["yarn", "llama3"])
@pytest.mark.parametrize(
    ("longest", "original"),
    [(32768, 32768), (40960, 32768), (65536, 32768), (4096, 8192), (16384, 8192), (131072, 8192)],
)
def test_scaled_models_with_a_small_maximum_are_sampled(
    model_type: str, rope: dict[str, object], longest: int, original: int
) -> None:
    """The copy has room for the rows of the experiments, at the ratio of the config."""
    scaling = {**rope, "original_max_position_embeddings": original, "rope_theta": 1e6}
    large = config(model_type, max_position_embeddings=longest, rope_parameters=scaling)
    small = shrink(large)
    found = small.rope_parameters["original_max_position_embeddings"]
    assert small.max_position_embeddings >= 32
    assert small.max_position_embeddings / found == pytest.approx(longest / original, rel=0.05)
    assert longest < 4 * original or found == 8
    assert model_support(large, use_disk=False).packed
    assert decoding_support(large, use_disk=False).decoding == "batched"

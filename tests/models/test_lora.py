"""Adapters: placement, effect and merging. (With an optimizer: tests/train.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.load import ModelError, load_causal_lm
from burnish.models.lora import adapters_off, merged_weights
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model

TOKENS = torch.tensor([[7, 8, 9, 10, 11]])


def adapted(**lora: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LoraConfig(**{"lora_rank": 4, **lora})
    return load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32), lora=config))


def disturb(model: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_new_adapters_keep_the_outputs_and_are_the_only_trained_weights() -> None:
    model, base = adapted(), load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
    assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7 and all(".lora_" in n for n in trained)


def test_target_modules_choose_where_adapters_go() -> None:
    names = [
        n for n, p in adapted(target_modules=("q_proj",)).named_parameters() if p.requires_grad
    ]
    assert len(names) == 2 * 2 and all("q_proj" in n for n in names)


def test_the_output_head_gets_no_adapter() -> None:
    torch.manual_seed(0)
    scratch = ScratchConfig(hidden_size=32, tie_word_embeddings=False)
    model = load_causal_lm(ModelConfig(scratch=scratch, lora=LoraConfig()))
    assert not any("lm_head" in n for n, p in model.named_parameters() if p.requires_grad)


def small(model_type: str, folder: Path) -> ModelConfig:
    """A small random model of a family, in a folder."""
    build(shrink(CONFIG_MAPPING[model_type]())).save_pretrained(folder)
    return ModelConfig(path=str(folder), lora=LoraConfig(lora_rank=4))


def test_linear_layers_with_another_forward_are_refused_with_alternatives(
    tmp_path: Path,
) -> None:
    """DeepSeek-V4 projects groups of heads by blocks of one matrix; peft would multiply the full
    matrix."""
    config = small("deepseek_v4", tmp_path)
    with pytest.raises(ModelError, match=r"o_a_proj is a DeepseekV4GroupedLinear.*o_b_proj"):
        load_causal_lm(config)
    lora = LoraConfig(lora_rank=4, target_modules=("o_b_proj", "kv_proj"))
    load_causal_lm(config.model_copy(update={"lora": lora}))(TOKENS, use_cache=False)


def test_layers_that_share_a_weight_are_refused(tmp_path: Path) -> None:
    """Zamba's attention block is repeated: two layers, one weight. Two adapters would be trained,
    and a merged weight could hold one of them only."""
    with pytest.raises(ModelError, match=r"layers.1\..* and model.layers.2\..* share one weight"):
        load_causal_lm(small("zamba", tmp_path))


def test_convolutions_are_not_reported_as_experts_without_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_causal_lm(small("qwen3_5", tmp_path))
    assert "fused expert" not in caplog.text


def test_a_parameter_that_transformers_freezes_needs_adapters(tmp_path: Path) -> None:
    """The initial state of HRM's fast cycle is never trained, so no checkpoint would hold it."""
    config = small("hrm_text", tmp_path)
    load_causal_lm(config)
    with pytest.raises(ModelError, match=r"never trained \(model.z_L_init\).*model.lora"):
        load_causal_lm(config.model_copy(update={"lora": None}))


def test_adapters_of_a_model_that_is_read_in_shards_have_the_same_initial_values(
    tmp_path: Path,
) -> None:
    """Its layers are on the meta device when they get their adapters."""
    base = ModelConfig(scratch=ScratchConfig(hidden_size=32))
    load_causal_lm(base).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), lora=LoraConfig(lora_rank=4))
    found = []
    for empty in (False, True):
        torch.manual_seed(5)
        model = load_causal_lm(config, empty=empty)
        weights = dict(model.named_parameters())
        assert weights["model.norm.weight"].is_meta == empty
        found.append({n: p for n, p in weights.items() if ".lora_" in n})
    assert len(found[0]) == 2 * 2 * 7
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name


def test_adapters_of_a_critic_depend_only_on_its_seed() -> None:
    config = ModelConfig(scratch=ScratchConfig(hidden_size=32), lora=LoraConfig(lora_rank=4))
    found = []
    for before, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(before)
        model = load_scalar_model(config, seed=seed, new_head="random")
        found.append(next(p for n, p in model.named_parameters() if ".lora_A" in n))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_adapters_off_is_the_base_model_and_on_again_afterwards() -> None:
    model, base = adapted(), load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
    disturb(model)
    tuned = model(TOKENS).logits
    assert (tuned - base(TOKENS).logits).abs().max() > 0.01
    with adapters_off(model):
        assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
    assert torch.equal(model(TOKENS).logits, tuned)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())


@pytest.mark.parametrize("alpha", [4, 32])
def test_merged_weights_are_base_plus_scaled_product(alpha: int) -> None:
    """W + (alpha / rank) B A, by hand for every adapted matrix."""
    model = adapted(lora_alpha=alpha)
    disturb(model)
    own = dict(model.named_parameters())
    merged = dict(merged_weights(model))
    base = dict(
        load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32))).named_parameters()
    )
    assert merged.keys() == base.keys()
    changed = 0
    for name, weight in merged.items():
        stem = name.removesuffix(".weight")
        expected = base[name]
        if f"{stem}.lora_A.default.weight" in own:
            a, b = own[f"{stem}.lora_A.default.weight"], own[f"{stem}.lora_B.default.weight"]
            expected = expected + alpha / 4 * b @ a
            changed += 1
        # one product of rank 4 and one sum in fp32, of numbers below 10
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)
    assert changed == 14
    assert torch.equal(
        own["model.layers.0.mlp.up_proj.base_layer.weight"],
        base["model.layers.0.mlp.up_proj.weight"],
    )

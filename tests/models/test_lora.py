"""Adapters: placement, effect and merging. (With an optimizer: tests/train.)"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.models.load import ModelError, load_causal_lm
from burnish.models.lora_layers import adapters_off, effective_weight, merged_weights
from burnish.models.nf4 import quantize
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


@pytest.mark.parametrize("form", [{"target_modules": ".*lm_head"},
                                  {"target_modules": ("lm_head",)}], ids=str)  # fmt: skip
def test_adapters_that_a_head_replaces_are_no_adapters_of_a_scalar_model(form: Any) -> None:
    scratch = ScratchConfig(hidden_size=32, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"output projection alone"):
        load_scalar_model(ModelConfig(scratch=scratch, lora=LoraConfig(**form)), new_head="random")
    more = LoraConfig(target_modules=("lm_head", "q_proj"))
    model = load_scalar_model(ModelConfig(scratch=scratch, lora=more), new_head="random")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("q_proj" in name or name == "score.weight" for name in trained)


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


FORMS: list[dict[str, Any]] = [
    {"quantization": "nf4"},
    {"quantization": {"double": False}, "use_rslora": True},
    {"use_dora": True},
    {"use_dora": True, "quantization": "nf4"},
    {"modules_to_save": ("embed_tokens", "lm_head"), "quantization": "nf4"},
    {"target_modules": ("lm_head", "embed_tokens", "o_proj")},
]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Small models: untied, GPT-2's transposed layers, tied and scaled, and fused experts."""
    names = ("llama", "gpt2", "gemma3_text", "qwen3", "qwen3_moe")
    return {name: small(name, tmp_path_factory.mktemp(name)) for name in names}


CASES = [
    *(("llama", form) for form in FORMS),
    *((name, form) for name in ("gpt2", "gemma3_text", "qwen3") for form in FORMS[:4:3]),
    ("qwen3_moe", FORMS[0]),
]


@pytest.mark.parametrize(("family", "form"), CASES, ids=str)
def test_merged_weights_compute_what_the_adapted_model_computes(
    families: dict[str, ModelConfig], family: str, form: dict[str, Any]
) -> None:
    """A plain model with the merged weights has the same logits; with adapters disabled, the
    adapted model is the base, whose linear weights are those that NF4 can represent."""
    config = families[family]
    lora = LoraConfig(lora_rank=4, **form)
    model = load_causal_lm(config.model_copy(update={"lora": lora}))
    base = load_causal_lm(config.model_copy(update={"lora": None}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(1)
                )
    out = model(TOKENS, use_cache=False).logits
    with adapters_off(model):
        off = model(TOKENS, use_cache=False).logits
    merged = dict(merged_weights(model))
    assert {n for n, _ in base.named_parameters()} <= merged.keys()
    assert not any("lora" in name or "packed" in name for name in merged)
    weight, _ = effective_weight(model.get_output_embeddings())
    assert (out - off).abs().max() > 0.05, "the adapters have an effect"
    if "quantization" not in form:
        assert torch.equal(off, base(TOKENS, use_cache=False).logits)
    base.load_state_dict(merged, strict=False)
    # fp32 sums of 4 layers' products, of size 10, in another order
    torch.testing.assert_close(base(TOKENS, use_cache=False).logits, out, atol=5e-5, rtol=0)
    torch.testing.assert_close(base.get_output_embeddings().weight, weight, atol=1e-6, rtol=0)


def test_nf4_weights_are_the_nearest_of_16_levels_per_block() -> None:
    """A block of 64 has one scale, its largest number, so the error is at most half of the widest
    gap between levels (0.152 x the scale), and 1 and 0 are exact."""
    layer = torch.nn.Linear(64, 2, bias=False)
    torch.manual_seed(0)
    weight = torch.rand(2, 64) * 2 - 1
    weight[:, 0], weight[:, 1] = torch.tensor([1.0, 0.5]), 0.0
    weight[1, 2:] *= 0.5
    layer.weight.data = weight.clone()
    holder: Any = torch.nn.Sequential(layer)
    holder.get_output_embeddings = lambda: None
    quantize(holder, double=False, device="cpu")
    found = layer.weight
    assert torch.equal(found[:, :2], weight[:, :2])
    assert (found - weight).abs().amax(1).div(torch.tensor([1.0, 0.5])).max() < 0.153
    assert all(len(row.unique()) <= 16 for row in found)
    assert layer.packed.nbytes == 64 and layer.scales.nbytes == 8  # 0.5 B per entry, 4 per block


def test_adapters_start_from_a_folder_and_refuse_another_base(
    families: dict[str, ModelConfig], tmp_path: Path
) -> None:
    """peft's own package writes the adapter; the model computes the same with it."""
    config = families["llama"].model_copy(update={"lora": None})
    torch.manual_seed(3)
    theirs = get_peft_model(
        load_causal_lm(config),
        PeftConfig(
            r=3,
            lora_alpha=5,
            target_modules=["q_proj", "up_proj"],
            modules_to_save=["lm_head"],
            use_rslora=True,
            use_dora=True,
        ),
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path)
    lora = LoraConfig(path=str(tmp_path))
    assert (lora.lora_rank, lora.use_dora, lora.modules_to_save) == (3, True, ("lm_head",))
    model = load_causal_lm(config.model_copy(update={"lora": lora}))
    expected = theirs(TOKENS, use_cache=False).logits
    assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
    with pytest.raises(ValueError, match="lora_rank=4"):
        LoraConfig(path=str(tmp_path), lora_rank=4)
    other = ModelConfig(scratch=ScratchConfig(hidden_size=16, tie_word_embeddings=False), lora=lora)
    with pytest.raises(ModelError, match="belongs"):
        load_causal_lm(other)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written, "bias": "all"}))
    with pytest.raises(ValueError, match="bias='all'"):
        LoraConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match="adapter folder"):
        load_causal_lm(config.model_copy(update={"lora": LoraConfig(path=str(tmp_path / "none"))}))


@pytest.mark.parametrize("form", [{"modules_to_save": ("lm_head",)}, FORMS[-1]], ids=str)
def test_ends_that_are_tied_have_no_adapters(form: dict[str, Any]) -> None:
    config = ModelConfig(scratch=ScratchConfig(hidden_size=32), lora=LoraConfig(**form))
    with pytest.raises(ModelError, match=r"are tied: one weight.*use all-linear"):
        load_causal_lm(config)


@pytest.mark.parametrize(
    ("method", "way_out"), [("gptq", "the tool that quantized it"), ("fp8", "dequantize=True")]
)
def test_quantized_checkpoints_are_refused_before_their_weights_are_read(
    families: dict[str, ModelConfig], tmp_path: Path, method: str, way_out: str
) -> None:
    config = json.loads((Path(str(families["llama"].path)) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{method}.*{way_out}.*quantization=nf4"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    "lora",
    [
        {"modules_to_save": ("mlp",), "target_modules": ("q_proj",), "quantization": "nf4"},
        {"modules_to_save": ("proj",), "target_modules": ("down_proj",)},
    ],
    ids=str,
)
def test_saved_modules_with_adapters_or_4_bit_weights_are_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"modules_to_save.*outside of.*such as lm_head"):
        adapted(**lora)


def test_a_missing_bitsandbytes_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"pip install 'burnish\[quant\]'"):
        adapted(quantization="nf4")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"use_dora": True, "target_modules": ("lm_head",)}, "use_dora with target_modules"),
        ({"modules_to_save": ("norm",), "target_modules": ("norm",)}, "remove it from one"),
    ],
)
def test_settings_of_adapters_that_exclude_each_other(lora: dict[str, Any], message: str) -> None:
    assert any(message in rule for rule in LoraConfig(**lora).broken_rules())

"""Adapters against peft's own package: every setting gives peft's numbers, or is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING

from burnish.config.adapters import adapter_problem
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.models.dropout import start_training
from burnish.models.load import ModelError, load_causal_lm
from burnish.models.lora_layers import merged_weights
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model
from burnish.train.engines import make_engine
from burnish.train.forward import Forward
from burnish.train.spec import EngineSpec
from burnish.types import rows_to_batch

TOKENS = torch.tensor([[7, 8, 9, 10, 11, 7, 20, 31]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Untied, tied, transposed, scaled, and a head and embedding with other names."""
    found = {}
    for name in ("llama", "gpt2", "qwen3", "gemma3_text", "gpt_neox", "qwen3_moe", "rwkv"):
        folder = tmp_path_factory.mktemp(name)
        build(shrink(CONFIG_MAPPING[name]())).save_pretrained(folder)
        found[name] = ModelConfig(path=str(folder))
    return found


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


INNER = {"llama": "q_proj", "gpt2": "c_attn", "gpt_neox": "query_key_value", "qwen3_moe": "q_proj"}
SETTINGS: list[dict[str, Any]] = [
    {"r": 1},
    {"r": 5, "lora_alpha": 3},
    {"lora_alpha": 2.5},
    {"use_rslora": True},
    {"use_dora": True},
    {"lora_dropout": 0.3},
    {"target_modules": "all-linear"},
    {"target_modules": r".*layers\.0.*_proj"},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["query_key_value", "embed_out", "embed_in"]},
    {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    {"target_modules": r".*(q_proj|embed_tokens|lm_head)", "use_dora": True},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "norm"]},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"rank_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"q_proj": 2}},
    {"layers_to_transform": [0]},
    {"exclude_modules": ["k_proj"]},
    {"trainable_token_indices": [3, 4]},
    {"target_parameters": ["mlp.experts.gate_up_proj"]},
    {"alora_invocation_tokens": [7]},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal", "r": 4},
    {"init_lora_weights": False},
    {"ensure_weight_tying": True},
]
REFUSED = (
    *("bias", "lora_bias", "rank_pattern", "alpha_pattern", "layers_to_transform"),
    *("exclude_modules", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "ensure_weight_tying"),
)
"""Settings that no model of Burnish has."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_of_peft_has_pefts_numbers_or_is_refused(
    bases: dict[str, ModelConfig], tmp_path: Path, family: str, setting: dict[str, Any]
) -> None:
    """Logits of the adapter's folder, and of the model with merged weights."""
    inner = INNER.get(family, "q_proj")
    options = {"r": 3, "target_modules": [inner, "k_proj"], **setting}
    if family in ("gpt2", "gpt_neox") and options["target_modules"] == [inner, "k_proj"]:
        options["target_modules"] = [inner]
    torch.manual_seed(3)
    try:
        theirs = get_peft_model(load_causal_lm(bases[family]), PeftConfig(**options))
        theirs(input_ids=TOKENS, use_cache=False)
    except (ValueError, TypeError, RuntimeError) as error:
        pytest.skip(f"peft itself refuses it: {error}")
    theirs.eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    expected = theirs(input_ids=TOKENS, use_cache=False).logits
    try:
        config = bases[family].model_copy(update={"lora": LoraConfig(path=str(tmp_path))})
        model = load_causal_lm(config)
    except ValueError as error:
        changed = str(setting.get("init_lora_weights", "")).startswith(("pissa", "olora"))
        ends = {"embed_tokens", "lm_head", "embed_in", "embed_out"}
        on_ends = bool(ends & {*theirs.peft_config["default"].target_modules})
        on_ends |= bool(ends & {*(setting.get("modules_to_save") or ())})
        on_ends |= "embed" in str(options["target_modules"])
        on_ends &= family != "llama" or "use_dora" in setting  # (its ends are not tied)
        assert changed or on_ends or set(setting) & set(REFUSED), error
        assert "model.lora" in str(error) or "path" in str(error)
        return
    assert not set(setting) & set(REFUSED)
    # fp32, the same products; of stacked or merged weights in another order
    torch.testing.assert_close(
        model(TOKENS, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5
    )
    merged = load_causal_lm(bases[family])
    merged.load_state_dict(dict(merged_weights(model)), strict=False)
    torch.testing.assert_close(
        merged(TOKENS, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"init_lora_weights": "pissa_niter_16"}, "PiSSA"),
        ({"init_lora_weights": "olora"}, "OLoRA"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"use_qalora": True}, "use_qalora"),
        ({"new_in_2031": {"a": 1}, "peft_version": "9.1"}, "new_in_2031.*9.1"),
        ({"new_in_2031": 0.5}, "new_in_2031"),
        ({"new_in_2031": "x"}, "new_in_2031"),
        ({"new_in_2031": 1}, "new_in_2031"),
        ({"init_lora_weights": 1}, "init_lora_weights=1"),
    ],
)
def test_settings_that_change_the_function_are_refused_by_name(
    settings: dict[str, Any], problem: str
) -> None:
    found = adapter_problem({"r": 4, **settings})
    assert found is not None
    for part in problem.split(".*"):
        assert part in found


def test_defaults_of_the_installed_peft_and_unused_settings_are_accepted() -> None:
    plain = json.loads(json.dumps(PeftConfig(task_type="CAUSAL_LM").to_dict(), default=list))
    assert adapter_problem({**plain, "peft_type": "LORA"}) is None
    assert adapter_problem({"new_in_2031": None, "use_other": False, "new_config": {}}) is None
    assert peft.__version__ and adapter_problem({"megatron_core": "other"}) is None


def test_a_file_that_is_no_mapping_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a peft config"):
        LoraConfig(path=str(tmp_path))


HEAD_PATTERNS = [(".*(q_proj|head)", "llama"), ("head|.*attention.key", "rwkv")]


@pytest.mark.parametrize(("pattern", "family"), HEAD_PATTERNS)
def test_magnitudes_of_a_head_that_a_pattern_matches_are_refused(
    bases: dict[str, ModelConfig], pattern: str, family: str
) -> None:
    lora = LoraConfig(use_dora=True, target_modules=pattern)
    with pytest.raises(ModelError, match=r"use_dora.*adapter to (lm_)?head,.*modules_to_save"):
        load_causal_lm(bases[family].model_copy(update={"lora": lora}))
    assert not list(lora.broken_rules())


def test_a_pattern_that_excludes_the_head_may_name_it(bases: dict[str, ModelConfig]) -> None:
    lora = LoraConfig(use_dora=True, target_modules=r"(?!lm_head).*q_proj")
    assert not list(lora.broken_rules())
    load_causal_lm(bases["llama"].model_copy(update={"lora": lora}))


def test_an_adapter_with_an_embedding_of_its_own_is_refused_with_a_way_out(
    bases: dict[str, ModelConfig], tmp_path: Path
) -> None:
    """peft saves the weights of an embedding that has an adapter: copies of the base's."""
    theirs = get_peft_model(
        load_causal_lm(bases["llama"]), PeftConfig(target_modules=["q_proj", "embed_tokens"])
    )
    with torch.no_grad():
        dict(theirs.named_parameters())[
            "base_model.model.model.embed_tokens.base_layer.weight"
        ].add_(1)
    theirs.save_pretrained(tmp_path / "adapter")
    lora = LoraConfig(path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"embed_tokens\.base_layer\.weight of its own.*merge"):
        load_causal_lm(bases["llama"].model_copy(update={"lora": lora}))
    expected = theirs.merge_and_unload()
    expected.save_pretrained(tmp_path / "merged")
    model = load_causal_lm(ModelConfig(path=str(tmp_path / "merged")))
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def test_weights_that_are_read_in_parts_are_read_in_full_for_adapters_of_ends(
    bases: dict[str, ModelConfig],
) -> None:
    """A pattern cannot say before; the initial values are those of a full load."""
    for family, pattern in (("llama", ".*(q_proj|embed_tokens)"), ("rwkv", "head|.*key")):
        lora = LoraConfig(target_modules=pattern)
        config = bases[family].model_copy(update={"lora": lora})
        torch.manual_seed(5)
        full = dict(load_causal_lm(config).named_parameters())
        torch.manual_seed(5)
        model = load_causal_lm(config, empty=True)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, full[name]), name


@pytest.mark.parametrize("engine", [{"kind": "deepspeed"}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize(("pattern", "family"), HEAD_PATTERNS)
def test_engines_for_inner_layers_refuse_a_head_that_a_pattern_matches(
    bases: dict[str, ModelConfig], engine: dict[str, Any], pattern: str, family: str
) -> None:
    model = bases[family].model_copy(update={"lora": LoraConfig(target_modules=pattern)})
    chosen = DeepSpeedEngine(**engine) if "kind" in engine else TorchEngine(**engine)
    spec = EngineSpec(TrainRole.alone("policy", TrainConfig(engine=chosen), model))
    with pytest.raises(ModelError, match=r"target_modules=.* gives an adapter to (lm_)?head"):
        make_engine(load_causal_lm(model), spec)


@pytest.mark.parametrize("names", [("q_proj", "wte"), ("q_proj", "lm_heads"), ("q_proj", "w1")])
def test_every_listed_target_matches_a_module(
    bases: dict[str, ModelConfig], names: tuple[str, ...]
) -> None:
    for family in ("llama", "qwen3_moe"):
        config = bases[family].model_copy(update={"lora": LoraConfig(target_modules=names)})
        if family == "qwen3_moe" and names[1] == "w1":
            continue  # one of the names of experts that peft translates
        with pytest.raises(ModelError, match=f"target_modules.*'{names[1]}' matches no module"):
            load_causal_lm(config)


def test_the_refusal_of_tied_ends_names_the_setting_that_asks_for_them(
    bases: dict[str, ModelConfig],
) -> None:
    for lora, key in (
        (LoraConfig(modules_to_save=("lm_head",)), "modules_to_save"),
        (LoraConfig(target_modules=("c_attn", "wte")), "target_modules"),
    ):
        with pytest.raises(ModelError, match=rf"model\.lora\.{key}=.*are tied") as caught:
            load_causal_lm(bases["gpt2"].model_copy(update={"lora": lora}))
        other = {"modules_to_save", "target_modules"} - {key}
        assert other.pop() not in str(caught.value)


def test_classifiers_name_the_setting_too(tmp_path: Path) -> None:
    config = shrink(CONFIG_MAPPING["llama"]())
    from transformers import LlamaForSequenceClassification

    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    lora = LoraConfig(target_modules=("q_proj", "wte"))
    with pytest.raises(ModelError, match=r"target_modules.*'wte' matches no module"):
        load_scalar_model(ModelConfig(path=str(tmp_path), lora=lora), new_head="random")


BATCH = rows_to_batch([[7, 8, 9, 10, 11]], [[False, True, True, True, True]], prompt_lens=[1])


@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_dropout_acts_on_the_adapter_of_the_output_head(
    bases: dict[str, ModelConfig], probability: float
) -> None:
    """log softmax of W h + s B A drop(h), with the mask of the same seed; W h in evaluation mode
    has the adapter without dropout."""
    lora = LoraConfig(target_modules=("lm_head",), lora_dropout=probability, lora_alpha=8)
    config = bases["llama"].model_copy(update={"lora": lora})
    model: Any = load_causal_lm(config)
    randomize(model)
    forward = Forward(model, "policy", TrainConfig(), temperature=1.0)
    head = model.lm_head
    hidden = model.model(BATCH.tokens[None], use_cache=False).last_hidden_state[0, :-1]
    start_training(model, dropout=False)
    torch.manual_seed(5)
    found = forward(BATCH, with_entropy=False).logprobs
    torch.manual_seed(5)
    dropped = nn.functional.dropout(hidden, probability)
    a, b = head.lora_A["default"].weight, head.lora_B["default"].weight
    logits = hidden @ head.base_layer.weight.T + 8 / 16 * dropped @ a.T @ b.T
    wanted = logits.log_softmax(-1).gather(1, BATCH.tokens[1:, None])[:, 0]
    assert found is not None
    torch.testing.assert_close(found[1:], wanted, atol=1e-5, rtol=1e-5)  # fp32 sums
    found.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in (a, b))
    model.eval()
    still = forward(BATCH, with_entropy=False).logprobs
    assert still is not None
    assert math.isclose(float((still - found).abs().max()) > 1e-3, probability > 0)

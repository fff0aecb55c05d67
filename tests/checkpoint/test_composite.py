"""Text-only training of models that read images too: checkpoints, exports and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.auto_class import language_model_class
from burnish.models.composite import PROCESSOR_FILES
from burnish.models.load import ModelError, load_causal_lm
from burnish.models.lora_layers import adapted_layers
from burnish.models.shrink import build, shrink
from burnish.train.base import Loss
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
GLM = {**MROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
KOSMOS = {"layers": 2, "embed_dim": 64, "ffn_dim": 64, "attention_heads": 4}
"""Names of sizes that ``shrink`` does not know: the model of its trial has those of the config."""
TYPES: dict[str, dict[str, Any]] = {
    "gemma3": {},  # transformers also maps it as a causal language model
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},  # its language model has no class
    "qwen3_vl_moe": {},
    "glm4v": {"text_config": {"rope_parameters": GLM}},
    "mistral3": {},
    "llava": {},
    "internvl": {},
    "smolvlm": {},
    "qwen2_audio": {},
    "minicpmv4_6": {},  # linear attention: padded rows
}


def base_of(kind: str, folder: Path) -> tuple[Any, ModelConfig]:
    base = build(shrink(CONFIG_MAPPING[kind](**TYPES[kind])))
    base.save_pretrained(folder)
    for name in PROCESSOR_FILES:
        (folder / name).write_text(f'{{"name": "{name}"}}')
    return base, ModelConfig(path=str(folder))


def logits_of(model: Any) -> Tensor:
    ids = torch.tensor([[5, 9, 7, 6, 11, 8]])
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def trained(
    config: ModelConfig, batch: Batch, loss: Loss, folder: Path
) -> tuple[TorchTrainEngine, Path]:
    spec = EngineSpec(TrainRole.alone("policy", TrainConfig(lr=0.01), config, dropout=False))
    engine = TorchTrainEngine(load_causal_lm(config), spec)
    engine.forward_backward(batch, loss)
    engine.optim_step()
    store = CheckpointStore(folder / "checkpoints", keep_last=1, best_mode="max")
    saved = store.save(1, lambda part: engine.save(part / "policy"))
    return engine, export(saved, folder / "out")


@pytest.mark.parametrize("kind", TYPES)
def test_a_composite_model_is_trained_on_text_and_exported_with_all_its_parts(
    kind: str, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """Class, config, files, keys and processor are those of the checkpoint. The decoder and the
    output projection are trained; all other tensors are unchanged, bit for bit."""
    base, config = base_of(kind, tmp_path / "base")
    engine, out = trained(config, ragged_batch, nll, tmp_path)
    auto = language_model_class(AutoConfig.from_pretrained(out))
    plain = auto.from_pretrained(out, dtype=torch.float32)
    assert type(plain) is type(base)
    exported, own = plain.state_dict(), engine.model.state_dict()
    assert exported.keys() == own.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in own.items())
    model = engine.model
    parts = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    language = {id(parameter) for parameter in parts}
    for name, parameter in model.named_parameters():
        unchanged = torch.equal(exported[name], base.state_dict()[name])
        assert unchanged or id(parameter) in language, name
        assert not (unchanged and "embed_tokens" in name and id(parameter) in language)
    files = [load_file(Path(str(path)) / "model.safetensors") for path in (config.path, out)]
    assert files[0].keys() == files[1].keys()
    for name in PROCESSOR_FILES:
        assert (out / name).read_text() == f'{{"name": "{name}"}}'
    assert torch.allclose(logits_of(plain), logits_of(engine.model), atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_only_the_language_model_of_a_composite_model_gets_adapters(
    kind: str, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """The tower of LLaVA has a ``q_proj`` too, and its adapters would get no gradient."""
    base, config = base_of(kind, tmp_path / "base")
    for targets in ("all-linear", ("q_proj", "up_proj")):
        lora = LoraConfig(lora_rank=2, target_modules=targets)
        adapted = config.model_copy(update={"lora": lora})
        folder = tmp_path / str(len(targets))
        engine, out = trained(adapted, ragged_batch, nll, folder)
        names = adapted_layers(engine.model)
        assert names and all("language_model" in name for name in names)
        changed = [bool(p.any()) for n, p in engine.model.named_parameters() if ".lora_B" in n]
        assert changed and all(changed)
        plain = type(base).from_pretrained(out, dtype=torch.float32)
        for name, tensor in plain.state_dict().items():
            if "language_model" not in name and "lm_head" not in name:
                assert torch.equal(tensor, base.state_dict()[name]), name


def test_an_exported_adapter_of_a_composite_model_is_trained_again(
    ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """It names the parts without adapters. Those of another base are refused."""
    _, config = base_of("gemma3", tmp_path / "base")
    adapted = config.model_copy(update={"lora": LoraConfig(lora_rank=2)})
    engine, _ = trained(adapted, ragged_batch, nll, tmp_path)
    saved = next((tmp_path / "checkpoints").glob("step*"))
    adapter = export(saved, tmp_path / "adapter", lora="adapter")
    again = config.model_copy(update={"lora": LoraConfig(path=str(adapter))})
    model = load_causal_lm(again)
    assert torch.equal(logits_of(model), logits_of(engine.model))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["exclude_modules"] = settings["exclude_modules"].replace("language", "other")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="exclude_modules"):
        load_causal_lm(config.model_copy(update={"lora": LoraConfig(path=str(adapter))}))


@pytest.mark.parametrize(
    ("kind", "separate"), [("aya_vision", True), ("blip-2", True), ("kosmos-2", False)]
)
def test_a_composite_model_that_cannot_be_used_is_refused_with_advice_that_works(
    kind: str, separate: bool, tmp_path: Path
) -> None:
    """Its language model is only suggested if transformers can load it alone."""
    config = CONFIG_MAPPING[kind](**({"text_config": KOSMOS} if kind == "kosmos-2" else {}))
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="composite model") as caught:
        load_causal_lm(ModelConfig(path=str(tmp_path)))
    assert ("in a separate folder" in str(caught.value)) is separate
    if separate:
        build(shrink(config.get_text_config())).save_pretrained(tmp_path / "text")
        load_causal_lm(ModelConfig(path=str(tmp_path / "text")))

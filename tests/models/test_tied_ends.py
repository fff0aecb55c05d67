"""A folder whose config ties both ends of the model, with two different ends in its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    modeling_utils,
)

import burnish
from burnish.config.load import load_config
from burnish.config.model import ModelConfig
from burnish.models.load import load_causal_lm
from burnish.plan.shapes import shape_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
FAMILIES = (LlamaConfig, Gemma3TextConfig)


def save(config: PretrainedConfig, folder: Path, *, equal: bool) -> dict[str, Tensor]:
    """Save a random model with both ends in its files, and return its weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights[EMBEDDING]
    weights[HEAD] = embedding.clone() if equal else torch.randn_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ends_are_trained_and_exported(
    family: type[PretrainedConfig], tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The learning rate is too small to change a weight by more than 1e-6."""
    folder = tmp_path / "model"
    weights = save(family(vocab_size=len(tiny_tokenizer), **SIZES), folder, equal=False)
    tiny_tokenizer.save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+2", "response": "3"}) + "\n")
    recipe = {
        "job": "sft",
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(folder)},
        "data": {"sources": [str(tmp_path / "rows.jsonl")]},
        "train": {"train_batch_size": 1, "lr": 1e-9},
        "max_steps": 1,
    }
    out = burnish.export(burnish.run(load_config(recipe)).run_dir, tmp_path / "out")
    exported = load_file(out / "model.safetensors")
    for name in (HEAD, EMBEDDING):
        torch.testing.assert_close(exported[name], weights[name], atol=1e-6, rtol=0)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("equal", [False, True])
def test_shards_and_plan_have_the_ends_of_the_files(
    equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save(LlamaConfig(vocab_size=32, **SIZES), tmp_path, equal=equal)
    weights["mtp.embed_tokens.weight"] = torch.randn_like(
        weights[HEAD]
    )  # of a part that is not read
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(path=str(tmp_path))
    # While DeepSpeed shards weights, transformers compares tensors without elements.
    monkeypatch.setattr(modeling_utils, "_tied_params_are_equal", lambda *_: True)
    for empty in (False, True):
        model = load_causal_lm(config, empty=empty)
        assert (HEAD in dict(model.named_parameters())) is not equal, empty
        assert model.config.tie_word_embeddings is equal
    assert shape_of(config).tied is equal

"""Parameters that a model family computes itself are neither trained nor decayed, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.models.load import load_tokenizer

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "marian": (
        {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
        | {"is_decoder": True, "is_encoder_decoder": False, "decoder_start_token_id": 0}
        | {"pad_token_id": 0},
        "embed_positions",
    ),
    "ernie4_5_moe": (
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "moe_k": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_num_experts": 4}
        | {"moe_intermediate_size": 8, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
        "e_score_correction_bias",
    ),
}
"""Family -> its config, and a part of the names of parameters that transformers does not train."""


@pytest.mark.parametrize("more", [{}, {"optimizer": {"kind": "adafactor"}}, {"ema_decay": 0.5}])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_parameters_of_the_gradient_change(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    options, name = FAMILIES[family]
    tokenizer = load_tokenizer(ModelConfig.model_validate({"scratch": {"alphabet": "0123+="}}))
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32}
    config = AutoConfig.for_model(family, **sizes, **options)
    model = AutoModelForCausalLM.from_config(config)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all(name in one for one in frozen)
    with torch.no_grad():
        for parameter in frozen:
            model.get_parameter(parameter).uniform_(-0.1, 0.1)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "1+1=", "response": "2301"}) + "\n") * 4)
    tree = {"job": "sft", "run_dir": str(tmp_path / "run"), "max_steps": 2}
    tree |= {"model": {"path": str(tmp_path / "model")}, "data": {"sources": [str(rows)]}}
    tree |= {"train": {"train_batch_size": 2, "lr": 0.01, "weight_decay": 0.1} | more}
    tree["data"] |= {"max_len": 16}  # type: ignore[operator]
    out = burnish.export(burnish.run(load_config(tree)).run_dir, tmp_path / "out")
    trained = AutoModelForCausalLM.from_pretrained(out).state_dict()
    before = model.state_dict()
    same = {n for n, p in model.named_parameters() if torch.equal(trained[n], before[n])}
    assert frozen <= same
    assert len(same) < len(before) / 2

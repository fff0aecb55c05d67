"""``model.attn_implementation``: equal log-probs with every attention, its plan, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from burnish.config import ConfigError, load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import ModelError, check_support, load_causal_lm
from burnish.plan.activations import key_of
from burnish.plan.role_base import with_layout
from burnish.plan.shapes import shape_of
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import rows_to_batch

RL: dict[str, Any] = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"]},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 8},
    "train": {"train_batch_size": 16},
}


def model(attention: str) -> ModelConfig:
    return ModelConfig(scratch=ScratchConfig(), attn_implementation=attention)


def test_every_attention_gives_the_same_logprobs_on_ragged_rows() -> None:
    rows = [[5, 3, 9, 4], [7, 8], [2, 6, 11, 13, 1, 3]]
    masks = [[i > 0 for i in range(len(row))] for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[1, 1, 1])
    found = {}
    for attention in ("auto", "sdpa", "eager"):
        config = model(attention)
        spec = EngineSpec(TrainRole.alone("policy", TrainConfig(train_batch_size=1), config))
        engine = TorchTrainEngine(load_causal_lm(config), spec)
        found[attention] = engine.logprobs(batch)
        layouts = {"auto": "shared_prefix"}
        assert engine.forward.layout == layouts.get(attention, "padded")
    for attention in ("sdpa", "eager"):  # 1e-5: fp32 log-probs of up to 10 in another order
        torch.testing.assert_close(found[attention], found["auto"], atol=1e-5, rtol=0)


def test_the_plan_pads_rows_and_tells_eager_attention_from_the_others() -> None:
    shapes = {name: shape_of(model(name)) for name in ("auto", "sdpa", "eager")}
    train = TrainConfig(train_batch_size=1)
    assert with_layout(train, shapes["auto"], model("auto")).layout == "shared_prefix"
    assert with_layout(train, shapes["sdpa"], model("sdpa")).layout == "padded"
    keys = {name: key_of(shape) for name, shape in shapes.items()}
    assert keys["eager"] != keys["sdpa"] == keys["auto"]


def test_an_attention_that_is_not_there_is_refused_before_the_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"flash-attn|CUDA"):
        check_support(model("flash_attention_2"))
    tiny = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=32)
    GPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), attn_implementation="sdpa")
    check_support(config)
    GPT2LMHeadModel._supports_sdpa, kept = False, GPT2LMHeadModel._supports_sdpa
    try:
        with pytest.raises(ModelError, match="GPT2LMHeadModel"):
            check_support(config)
    finally:
        GPT2LMHeadModel._supports_sdpa = kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.attn_implementation=eager"], "rollout.engine.own_weights=true"),
        (
            ["model.attn_implementation=flash_attention_2", "rollout.engine.own_weights=true"],
            "FlashAttention",
        ),
        (
            [
                "model.attn_implementation=sdpa",
                "rollout.engine.own_weights=true",
                "train.layout=packed",
            ],
            "train.layout=packed; remove train.layout",
        ),
    ],
)
def test_settings_that_contradict_it_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RL, overrides)

"""Whole jobs on models that cannot pack rows, and on models that scale and cap their logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import burnish
from burnish.checkpoint.export import export
from burnish.config import JobConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import load_tokenizer
from burnish.models.shrink import build, shrink
from burnish.observe.metrics import read_metrics

GAE = (
    "algorithm.advantage=gae",
    "algorithm.kl={init_kl_coef: 0.01, placement: loss, estimator: k3}",
)


def save_family(folder: Path, model_type: str) -> str:
    """A tiny random model of a family, with a tokenizer of digits."""
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=")))
    fields = shrink(AutoConfig.for_model(model_type)).to_dict()
    fields |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    fields |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config: PretrainedConfig = AutoConfig.for_model(**fields)
    model = build(config)
    model.save_pretrained(folder / model_type)
    tokenizer.save_pretrained(folder / model_type)
    return str(folder / model_type)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "stablelm", "gemma2"])
def test_ppo_trains_on_what_it_sampled_and_exports_what_it_trained(
    model_type: str,
    rl: Callable[..., JobConfig],
    tmp_path: Path,
) -> None:
    """Sampler and trainer take different ways through the model (row by row with a cache, padded or
    packed) and agree within fp32 rounding. KL 0 before the first update: the reference too."""
    path = save_family(tmp_path, model_type)
    config = rl(f"model={{path: {path}}}", "train.lr=1e-4", "rollout.temperature=4", *GAE)
    burnish.run(config, rewards=lambda response: sum(map(ord, response)) % 7 / 7)
    rows = list(read_metrics(tmp_path / "run"))
    assert len(rows) == 2
    assert all(row["train/mismatch_max"] < 1e-4 for row in rows), rows
    assert rows[0]["train/kl"] < 1e-6 and rows[1]["train/grad_norm"] > 0
    out = export(tmp_path / "run", tmp_path / "out")
    trained = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert (trained(ids).logits - start(ids).logits).abs().max() > 1e-5

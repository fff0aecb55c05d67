"""Checkpoints and exports of a model that reads images too, trained on text."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burnish.checkpoint.export import export
from burnish.checkpoint.save import CheckpointStore
from burnish.config.model import ModelConfig
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.models.shrink import build, shrink
from burnish.train.base import Loss
from burnish.train.spec import EngineSpec
from burnish.train.torch import TorchTrainEngine
from burnish.types import Batch


def test_a_composite_model_is_exported_with_all_its_parts(
    ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """Gemma 3 has a vision tower, a projector and a language model. The checkpoint keeps the config
    of all of them, and the export every key."""
    base = build(shrink(CONFIG_MAPPING["gemma3"]()))
    base.save_pretrained(tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"))
    engine = TorchTrainEngine(
        load_causal_lm(config), EngineSpec("policy", TrainConfig(lr=0.01), config)
    )
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, best_mode="max")
    store.save(1, lambda folder: engine.save(folder / "policy"))
    out = export(store.folder / "step_000001", tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(plain) is type(base)
    exported, trained = plain.state_dict(), engine.model.state_dict()
    assert exported.keys() == trained.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in trained.items())
    moved = [name for name, t in base.state_dict().items() if not torch.equal(t, exported[name])]
    assert any("vision_tower" in name for name in exported)
    assert moved and not any("vision_tower" in name for name in moved)

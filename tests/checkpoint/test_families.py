"""Models that are more than Llama: what trains is what is exported, handed over and resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from burnish.checkpoint.export import export
from burnish.checkpoint.manifest import write_manifest
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.rollout import LocalEngine
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.rollout.local import LocalRolloutEngine
from burnish.sync.inproc import InprocSync
from burnish.train.base import Loss
from burnish.train.torch import TorchTrainEngine
from burnish.types import Batch

MakeEngine = Callable[..., TorchTrainEngine]
TOKENIZER = load_tokenizer(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
TOKENS = torch.tensor([[7, 8, 9, 10, 11, 12, 30, 31]])
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # distributions far from uniform
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4),
}


def folder_of(config: PreTrainedConfig, folder: Path) -> ModelConfig:
    """The random model of ``config`` in a folder, as a run would start from."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelConfig(path=str(folder))


def checkpoint(folder: Path, engine: TorchTrainEngine) -> Path:
    folder.mkdir()
    engine.save(folder / engine.role)
    write_manifest(folder, step=1, extra={"metric": None})
    return folder


def logprobs(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """[1, T, V], by plain attention."""
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits.float().log_softmax(-1)
    return found


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in MIXTURES),
        ("qwen3_moe", ("down_proj",)),
        ("mixtral", ("w2",)),
        ("olmoe", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_adapters_of_experts_are_in_exports_and_hand_overs(  # house: ok fixtures and parameters
    family: str,
    targets: Any,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    tmp_path: Path,
) -> None:
    base = folder_of(MIXTURES[family], tmp_path / "base")
    torch.manual_seed(1)
    lora = LoraConfig(lora_rank=4, target_modules=targets)
    config = base.model_copy(update={"lora": lora})
    engine = make_engine(config=config, lr=0.02)
    before = logprobs(engine.model)
    for _ in range(2):
        engine.forward_backward(ragged_batch, nll)
        engine.optim_step()
    expected = logprobs(engine.model)
    assert float((expected - before).abs().max()) > 0.1, "the adapters learned nothing"

    merged = AutoModelForCausalLM.from_pretrained(
        export(checkpoint(tmp_path / "c", engine), tmp_path / "out"), dtype="auto"
    )
    # fp32: a product with the sum of base and adapter instead of the sum of two products
    torch.testing.assert_close(logprobs(merged), expected, atol=2e-6, rtol=0)

    rollout = LocalRolloutEngine(load_causal_lm(base), TOKENIZER, LocalEngine())
    InprocSync(engine, rollout)
    torch.testing.assert_close(logprobs(rollout.model), expected, atol=2e-6, rtol=0)

    adapter = export(tmp_path / "c", tmp_path / "adapter", lora="adapter")
    plain = AutoModelForCausalLM.from_pretrained(base.path, dtype="auto")
    again = PeftModel.from_pretrained(plain, adapter)
    torch.testing.assert_close(logprobs(again.base_model.model), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("targets", "says"),
    [("all-linear", True), (("q_proj", "up_proj"), True), (("q_proj", "v_proj"), False)],
)
def test_experts_without_adapters_are_mentioned_if_they_were_asked_for(
    targets: Any, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """peft does not know the fused experts of Qwen2-MoE."""
    base = folder_of(MIXTURES["qwen2_moe"], tmp_path / "base")
    lora = LoraConfig(lora_rank=4, target_modules=targets)
    with caplog.at_level(logging.WARNING, "burnish"):
        load_causal_lm(base.model_copy(update={"lora": lora}))
    text = "gives no adapters to 4 fused expert weights"
    assert (text in caplog.text) is says

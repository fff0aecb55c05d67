"""Training passes without a model's own dropout: GPT-2, OPT, Llama, Falcon, mixtures with jitter,
with adapters and with recomputed layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import burnish
from burnish.config import load_config
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.dropout import noise_of, start_training
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE = {"num_local_experts": 4, "intermediate_size": 32, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NOISY: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **ENDS),
    "opt": lambda: transformers.OPTConfig(
        **SIZES, ffn_dim=32, word_embed_proj_dim=32, layerdrop=0.3, attention_dropout=0.1, **ENDS
    ),
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=64, attention_dropout=0.1, **ENDS
    ),
    "neox": lambda: transformers.GPTNeoXConfig(
        **SIZES, intermediate_size=64, attention_dropout=0.1, hidden_dropout=0.1, **ENDS
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, **MIXTURE, router_jitter_noise=0.1, attention_dropout=0.1, **ENDS
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SIZES, **MIXTURE, input_jitter_noise=0.1, hidden_dropout=0.1, **ENDS
    ),
}


def made(name: str, folder: Path) -> ModelConfig:
    """A random model of the family in a folder."""
    torch.manual_seed(1)
    config = NOISY[name]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return ModelConfig(path=str(folder / name))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (9, 7, 12, 8)]
    masks = [[i >= 4 for i in range(len(row))] for row in rows]
    return rows_to_batch(rows, masks, prompt_lens=[4] * 4)


def first_update(model: ModelConfig, **options: Any) -> tuple[Tensor, TorchTrainEngine]:
    """Ratios of the policy in the first training pass to the policy before it, at its tokens."""
    recompute = options.pop("gradient_checkpointing", False)
    train = TrainConfig(layout="padded", gradient_checkpointing=recompute)
    spec = EngineSpec(TrainRole.alone("policy", train, model, **options), micro_batch_size=2)
    engine = TorchTrainEngine(load_causal_lm(model), spec)
    ratios: list[Tensor] = []
    rows = batch()
    old = engine.logprobs(rows).split([16, 20])  # of the two micro-batches

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        ratio = (outputs.logprobs - old[len(ratios)]).exp()
        ratios.append(ratio.detach()[micro.action_mask])
        return -outputs.logprobs.sum() / micro.num_tokens, Stats()

    engine.forward_backward(rows, loss)
    return torch.cat(ratios), engine


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("name", NOISY)
def test_ratios_are_exactly_one_at_the_first_update(
    name: str, recompute: bool, tmp_path: Path
) -> None:
    model = made(name, tmp_path)
    ratios, engine = first_update(model, dropout=False, gradient_checkpointing=recompute)
    assert bool((ratios == 1.0).all()), ratios
    gradient = [p.grad for p in engine.model.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in gradient) > 0
    kept = transformers.AutoConfig.from_pretrained(model.path).to_dict()
    assert noise_of(engine.model.config) == noise_of(NOISY[name]()), "exports keep the config"
    assert kept["model_type"] == engine.model.config.model_type
    with_noise, _ = first_update(model, dropout=True, gradient_checkpointing=recompute)
    assert not bool((with_noise == 1.0).all()), "as configured, the passes differ"


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_layers_are_recomputed_without_dropout_too(recompute: bool, tmp_path: Path) -> None:
    """Two layers, two micro-batches: 4 calls, or 8 with those of the backward pass."""
    spec = EngineSpec(
        TrainRole.alone(
            "policy",
            TrainConfig(gradient_checkpointing=recompute),
            made("gpt2", tmp_path),
            dropout=False,
        ),
        micro_batch_size=2,
    )
    engine = TorchTrainEngine(load_causal_lm(spec.role.model), spec)
    calls: list[int] = []
    for block in engine.model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() / micro.num_tokens, Stats()

    engine.forward_backward(batch(), loss)
    assert len(calls) == (8 if recompute else 4)


def test_adapters_keep_their_own_dropout(tmp_path: Path) -> None:
    """``lora_dropout`` is the recipe's; that of the model below is off."""
    lora = LoraConfig(lora_rank=4, lora_dropout=0.5)
    model = made("gpt2", tmp_path).model_copy(update={"lora": lora})
    network = load_causal_lm(model)
    start_training(network, dropout=False)
    drops = {
        name: module.training
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert {on for name, on in drops.items() if "lora_dropout" in name} == {True}
    assert {on for name, on in drops.items() if "lora_dropout" not in name} == {False}


def recipe(job: str, tmp_path: Path, rows: str, *overrides: str) -> Any:
    model = made("gpt2", tmp_path)
    load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+="))).save_pretrained(
        model.path
    )
    tree: dict[str, Any] = {
        "job": job,
        "run_dir": str(tmp_path / job),
        "model": {"path": model.path},
        "data": {"sources": [rows]},
        "train": {"train_batch_size": 4, "lr": 1e-20},
    }
    return load_config(tree, overrides)


def test_a_preference_run_starts_at_ln_2_and_an_rl_run_at_ratio_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2 with its dropout of 0.1: policy and reference are the same model, so h = 0 exactly. RL
    with a learning rate that changes no weight: two updates per rollout, all ratios 1."""
    caplog.set_level("INFO", logger="burnish")
    pairs, prompts = tmp_path / "pairs.jsonl", tmp_path / "prompts.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "37"}\n' * 8)
    prompts.write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}\n' * 2)
    config = recipe("preference", tmp_path, str(pairs), "max_steps=1")
    (line,) = (s for s in read_metrics(burnish.run(config).run_dir) if "train/loss" in s)
    assert line["train/loss"] == pytest.approx(math.log(2), abs=1e-6)  # fp32 sums of log-probs
    assert line["train/reward_margin"] == pytest.approx(0, abs=1e-6)
    assert "attn_pdrop=0.1" in caplog.text and caplog.text.count("attn_pdrop") == 1
    rollout = [
        "rollout.rollout_batch_size=4",
        "rollout.n_samples_per_prompt=2",
        "rollout.generate_max_len=6",
        "max_steps=1",
        "train.layout=padded",
    ]
    config = recipe("rl", tmp_path, str(prompts), *rollout)
    result = burnish.run(config, rewards=lambda response: float(len(response)))
    # 1e-5: rows stand beside others than where old log-probs were computed
    assert result.metrics["train/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert result.metrics["train/clip_frac"] == 0


def test_lora_dropout_in_a_job_with_a_reference_is_logged(tmp_path: Path) -> None:
    config = recipe("preference", tmp_path, "x", "model.lora.lora_dropout=0.1")
    assert any("lora_dropout=0.1" in warning for warning in config.warnings())
    config = recipe("preference", tmp_path, "x", "model.lora.lora_rank=4")
    assert not any("lora_dropout" in warning for warning in config.warnings())

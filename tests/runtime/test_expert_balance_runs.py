"""Mixtures of experts: the load-balancing loss in every job, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.steps.objectives import sft_objective, with_expert_balance
from burnish.tensors import pad_rows
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "mixtral": lambda **kw: MixtralConfig(num_local_experts=4, **kw),
    "qwen3_moe": lambda **kw: Qwen3MoeConfig(
        num_experts=4, moe_intermediate_size=16, head_dim=8, **kw
    ),
    "olmoe": lambda **kw: OlmoeConfig(num_experts=4, **kw),
}


@pytest.fixture
def mixture(tmp_path: Path) -> Callable[[str], str]:
    """``mixture("mixtral")``: the folder of a tiny mixture, 2 of 4 experts, 2 layers."""

    def make(family: str) -> str:
        folder = tmp_path / family
        tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig(alphabet="0123456789+=")))
        torch.manual_seed(5)
        config = FAMILIES[family](
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts_per_tok=2,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # routers that prefer some experts
            for name, weight in model.named_parameters():
                if name.endswith("gate.weight"):
                    weight.mul_(20)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def engine_for(path: str, coef: float = 1.0, **train: Any) -> TorchTrainEngine:
    config = ModelConfig(path=path)
    settings = TrainConfig(lr=1e-3, moe_aux_loss_coef=coef, **train)
    spec = EngineSpec(
        TrainRole.alone("policy", settings, config), micro_batch_size=train.pop("micro", None)
    )
    return TorchTrainEngine(load_causal_lm(config), spec)


def in_one_step(engine: TorchTrainEngine, micro: int | None) -> TorchTrainEngine:
    engine.spec = replace(engine.spec, micro_batch_size=micro)
    return engine


@pytest.fixture
def rows() -> Batch:
    """One group of three responses to one prompt, and two rows of their own; lengths 4 to 9."""
    ids = torch.Generator().manual_seed(2)

    def some(count: int) -> list[int]:
        return torch.randint(3, 15, (count,), generator=ids).tolist()

    prompt = some(3)
    tokens = [prompt + some(n) for n in (2, 6, 1)] + [some(7), some(4)]
    lens = [3, 3, 3, 2, 1]
    masks = [[t >= p for t in range(len(r))] for r, p in zip(tokens, lens, strict=True)]
    return rows_to_batch(tokens, masks, prompt_lens=lens, group_ids=[0, 0, 0, 1, 2])


def nothing(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    assert outputs.logprobs is not None
    return outputs.logprobs.sum() * 0.0, Stats()


def gradient(engine: TorchTrainEngine, batch: Batch, coef: float = 1.0) -> tuple[Any, Stats]:
    """(gradients by name, stats) of the balance alone."""
    stats = engine.forward_backward(batch, with_expert_balance(nothing, coef))
    assert engine.optimizer is not None
    found = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    engine.optimizer.zero_grad()
    return found, stats


def by_transformers(path: str, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the padded rows by the model's own forward, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = pad_rows(batch.tokens.float(), batch.offsets).long()
    mask = pad_rows(torch.ones(batch.tokens.numel()), batch.offsets)
    out = model(ids, attention_mask=mask, output_router_logits=True)
    told = model.config.to_dict()
    experts = told.get("num_experts") or told["num_local_experts"]
    loss = load_balancing_loss_func(out.router_logits, experts, 2, mask)
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_transformers_without_its_padding(
    mixture: Callable[[str], str], rows: Batch, family: str, layout: str
) -> None:
    path = mixture(family)
    loss, expected = by_transformers(path, rows)
    found, stats = gradient(engine_for(path, layout=layout), rows)
    assert stats.floats()["moe_aux_loss"] == pytest.approx(loss, rel=1e-5)  # fp32 sums
    assert loss > 2.02  # not the even spread, which would hide a wrong gradient
    routers = [name for name in expected if name.endswith("gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert expected[name].abs().max() > 1e-3
        # fp32: attention and products in another order
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6)


def test_micro_batches_weigh_what_they_have_of_the_steps_tokens(
    mixture: Callable[[str], str], rows: Batch
) -> None:
    """Rows 0 to 2 have 5 + 9 + 4 = 18, rows 3 and 4 have 7 + 4 = 11, together 29. Two
    passes of (3, 2) rows give 18/29 of one balance plus 11/29 of the other."""
    path = mixture("mixtral")
    engine = in_one_step(engine_for(path), 3)
    whole, stats = gradient(engine, rows)
    parts = [[0, 1, 2], [3, 4]]
    losses, grads = [], []
    for part in parts:
        loss, grad = by_transformers(path, rows.select(part))
        losses.append(loss)
        grads.append(grad)
    assert stats.floats()["moe_aux_loss"] == pytest.approx(
        18 / 29 * losses[0] + 11 / 29 * losses[1], rel=1e-5
    )
    for name in grads[0]:
        if name.endswith("gate.weight"):
            expected = 18 / 29 * grads[0][name] + 11 / 29 * grads[1][name]
            torch.testing.assert_close(whole[name], expected, rtol=1e-3, atol=1e-6)  # fp32 sums


def test_accumulation_changes_nothing_where_micro_batches_are_alike(
    mixture: Callable[[str], str], rows: Batch
) -> None:
    """The same two rows four times: every pass has the loads of the whole."""
    twice = rows.select([3, 4, 3, 4, 3, 4, 3, 4]).with_global_counts()
    engine = engine_for(mixture("mixtral"))
    (one, a), (four, b) = (gradient(in_one_step(engine, n), twice) for n in (8, 2))
    assert a.floats()["moe_aux_loss"] == pytest.approx(b.floats()["moe_aux_loss"], rel=1e-6)
    for name, grad in one.items():
        torch.testing.assert_close(four[name], grad, rtol=1e-4, atol=1e-7)  # fp32 sums


def test_recomputed_activations_change_nothing(mixture: Callable[[str], str], rows: Batch) -> None:
    path = mixture("qwen3_moe")
    (plain, a), (again, b) = (
        gradient(engine_for(path, gradient_checkpointing=on), rows) for on in (False, True)
    )
    assert a.floats()["moe_aux_loss"] == pytest.approx(b.floats()["moe_aux_loss"], rel=1e-6)
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-7)  # fp32 sums


def test_a_larger_weight_evens_the_load(mixture: Callable[[str], str], rows: Batch) -> None:
    engine = engine_for(mixture("mixtral"), lr_scheduler="constant")
    loss = with_expert_balance(nothing, 1.0)
    seen = []
    for _ in range(30):
        seen.append(engine.forward_backward(rows, loss).floats())
        engine.optim_step()
    assert seen[-1]["moe_aux_loss"] < seen[0]["moe_aux_loss"] - 0.02
    assert seen[-1]["moe_max_load"] <= seen[0]["moe_max_load"] <= 2.0  # 4 experts / 2 chosen


def test_without_a_weight_the_loss_is_untouched() -> None:
    loss = sft_objective()
    assert with_expert_balance(loss, 0.0) is loss


def test_a_model_without_experts_is_refused(tiny_config: ModelConfig) -> None:
    spec = EngineSpec(TrainRole.alone("policy", TrainConfig(moe_aux_loss_coef=0.01), tiny_config))
    with pytest.raises(ModelError, match="this llama model has none"):
        TorchTrainEngine(load_causal_lm(tiny_config), spec)


@pytest.mark.parametrize("job", ["sft", "rm", "preference", "rl"])
def test_every_job_that_trains_has_the_loss_and_its_metrics(
    job: str,
    mixture: Callable[[str], str],
    write_rows: Callable[..., str],
    tmp_path: Path,
    reward: Callable[[str], float],
) -> None:
    pairs = [
        {"prompt": f"{a}+{b}=", "response": f"{a + b}", "chosen": f"{a + b}", "rejected": "7"}
        for a in range(3)
        for b in range(3)
    ]
    tree: dict[str, Any] = {
        "job": job,
        "run_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "model": {"path": mixture("qwen3_moe")},
        "data": {"sources": [write_rows("rows", pairs)]},
        "train": {"train_batch_size": 4, "lr": 1e-3, "moe_aux_loss_coef": 0.01},
    }
    if job == "rl":
        tree["data"]["prompt_max_len"] = 16
        tree["rollout"] = {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "generate_max_len": 4,
        }
        tree["algorithm"] = {"kl": {"init_kl_coef": 0.1}}
    given = {"rewards": reward} if job == "rl" else {}
    last = read_metrics(burnish.run(load_config(tree), **given).run_dir)[-1]
    assert 1.9 < last["train/moe_aux_loss"] < 4
    assert 1 <= last["train/moe_max_load"] <= 2 and 0 <= last["train/moe_idle_experts"] <= 0.5

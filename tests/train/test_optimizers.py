"""Update rules of ``train.optimizer``: against torch and float64, in checkpoints, and their
refusals. Shards are tested in test_fsdp_engine.py and test_parallel_engines.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.optimization import Adafactor

from burnish.config.model import PrecisionConfig
from burnish.config.schedule import PolynomialLr
from burnish.config.train import TrainConfig, optimizer_rules
from burnish.optimizers.config import OptimizerSettings
from burnish.optimizers.muon.config import Muon
from burnish.optimizers.muon.rule import COEFFICIENTS, hidden_matrices, orthogonalize
from burnish.optimizers.rule import OptimizerError
from burnish.train.base import Loss
from burnish.train.optim import lr_factor
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

MakeEngine = Callable[..., TorchTrainEngine]
KINDS = ("adamw", "muon", "adamw_8bit", "adafactor")


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (3, 6, 4)])
def test_orthogonalized_matrices_have_the_mapped_singular_values(shape: tuple[int, ...]) -> None:
    """In float64, X = U S V^T becomes U p(S) V^T: five times p(s) = a s + b s^3 + c s^5, from
    S / |X|."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    found = orthogonalize(x, steps=5, dtype=torch.float64)
    # the result is rounded to fp32: 6e-8 of entries below 1
    torch.testing.assert_close(found.double(), u * s[..., None, :] @ v, atol=2e-7, rtol=0)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_is_that_of_torch_and_adamw_trains_the_rest(
    scale: str,
    make_engine: MakeEngine,
    tiny_model: LlamaForCausalLM,
    ragged_batch: Batch,
    nll: Loss,
) -> None:
    optimizer = {"kind": "muon", "matrix_lr": 2e-3, "lr_scale": scale}
    engine = make_engine(optimizer=optimizer, weight_decay=0.1, max_grad_norm=None)
    named = dict(tiny_model.named_parameters())
    hidden = [n for n, p in named.items() if ".layers." in n and p.ndim == 2]
    assert len(hidden) == 7 * len(tiny_model.model.layers)
    muon = torch.optim.Muon(
        [named[n] for n in hidden], lr=2e-3, weight_decay=0.1, adjust_lr_fn=scale
    )
    decay = [p for n, p in named.items() if n not in hidden and p.ndim == 2]
    plain = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(3):
        engine.forward_backward(ragged_batch, nll)
        own = {n: p.grad for n, p in engine.model.named_parameters()}
        for name, parameter in named.items():  # equal gradients: bf16 would amplify roundings
            parameter.grad = None if own[name] is None else own[name].clone()
        assert not engine.optim_step().skipped
        muon.step()
        adamw.step()
    for name, parameter in engine.model.named_parameters():
        # torch's products of single matrices may add in another order than products of batches,
        # before they are rounded to bf16: 2^-6 of updates of up to 2e-3 x 1.6, in each of 3 steps
        atol = 1.5e-4 if name in hidden else 1e-6
        torch.testing.assert_close(parameter, named[name], atol=atol, rtol=0)


def test_adafactor_is_that_of_transformers_without_relative_steps(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tiny_model: LlamaForCausalLM
) -> None:
    engine = make_engine(optimizer="adafactor", max_grad_norm=None)
    named = dict(tiny_model.named_parameters())
    theirs = Adafactor(tiny_model.parameters(), 1e-3, scale_parameter=False, relative_step=False)
    for _ in range(2):
        engine.forward_backward(ragged_batch, nll)
        for name, parameter in engine.model.named_parameters():
            named[name].grad = None if parameter.grad is None else parameter.grad.clone()
        engine.optim_step()
        theirs.step()
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, named[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_equal(
    kind: str, dtype: str, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    """With clipping, a moving average, accumulation, an infinite gradient, and in fp16 a loss
    scale: a skipped step changes nothing, and the steps after a restart are the same."""
    scale = {"loss_scale": 8.0} if dtype == "fp16" else {}
    precision = PrecisionConfig(dtype=dtype, **scale)
    options: dict[str, Any] = {"optimizer": kind, "ema_decay": 0.9, "max_grad_norm": 0.5}

    def steps(engine: TorchTrainEngine, count: int) -> list[float]:
        norms = []
        for _ in range(count):
            engine.forward_backward(ragged_batch, nll)
            norms.append(engine.optim_step().grad_norm)
        return norms

    first = make_engine(micro=2, precision=precision, **options)
    steps(first, 2)
    before = _state(first)
    first.forward_backward(ragged_batch, nll)
    trained = first.optimizer.params if dtype == "fp32" else first.optimizer.masters
    trained[3].grad.view(-1)[0] = torch.inf
    assert first.optim_step().skipped
    assert all(torch.equal(t, before[n]) for n, t in _state(first).items())
    first.save(tmp_path)
    written = sum(t.numel() * t.element_size() for t in _state(first).values())
    assert first.optimizer.num_bytes == written
    second = make_engine(micro=2, precision=precision, **options)
    second.load(tmp_path)
    assert steps(second, 2) == steps(first, 2)
    resumed = _state(second)
    assert all(torch.equal(t, resumed[n]) for n, t in _state(first).items())
    other = make_engine(optimizer="adamw" if kind != "adamw" else "muon")
    with pytest.raises(ValueError, match="has the state of optimizer"):
        other.load(tmp_path)


def _state(engine: TorchTrainEngine) -> dict[str, Tensor]:
    kinds = engine.optimizer.tensors()
    return {f"{k} {n}": t.clone() for k, tensors in kinds.items() for n, t in tensors.items()}


def test_experts_are_matrices_of_their_own_and_fused_projections_are_refused() -> None:
    """gate_up_proj of Mixtral: per expert two [48, 32] matrices. GPT-2's c_attn is refused, unless
    AdamW trains it."""
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        vocab_size=16,
    )
    model = MixtralForCausalLM(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    found = hidden_matrices(model, shapes, Muon())
    experts = {n.rpartition(".")[2]: halves for n, halves in found.items() if "experts" in n}
    assert experts == {"gate_up_proj": True, "down_proj": False}
    layer = model.model.layers[0]
    layer.self_attn.c_attn = nn.Linear(32, 96, bias=False)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    with pytest.raises(OptimizerError, match=r"adamw_params=\[c_attn\]"):
        hidden_matrices(model, shapes, Muon())
    assert hidden_matrices(model, shapes, Muon(adamw_params=("c_attn",))) == found


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"optimizer": "adafactor", "engine": "deepspeed"}, "no rows and columns"),
        (
            {"optimizer": "paged_adamw_8bit", "engine": {"sharding": "full"}},
            "with train.engine.sharding=full",
        ),
        ({"optimizer": "adamw_8bit", "engine": {"tensor_parallel_size": 2}}, "kind adamw or muon"),
        ({"optimizer": "paged_adamw_8bit", "engine": {"device": "cpu"}}, "needs CUDA"),
        ({"lr_warmup_steps": 3, "lr_warmup_ratio": 0.1}, "both set the length"),
        (
            {"lr_scheduler": {"kind": "wsd", "decay_ratio": 0.6}, "lr_warmup_ratio": 0.5},
            "more than all",
        ),
    ],
)
def test_settings_without_effect_and_engines_that_cannot_are_refused(
    train: dict[str, Any], problem: str
) -> None:
    (said,) = TrainConfig(**train).broken_rules()
    assert problem in said


class NewOptimizer(OptimizerSettings):
    """An optimizer without code for DeepSpeed, and without a rule of its own about engines."""

    kind: Literal["new"] = "new"


@pytest.mark.parametrize(
    ("engine", "optimizer", "refused"),
    [("torch", "new", False), ("deepspeed", "new", True), ("deepspeed", "muon", False)],
)
def test_an_engine_with_updates_of_its_own_refuses_other_optimizers(
    engine: str, optimizer: str, refused: bool
) -> None:
    """DeepSpeed would train with AdamW in their place."""
    settings = {"new": NewOptimizer(), "muon": Muon()}[optimizer]
    train = TrainConfig(engine=engine).model_copy(update={"optimizer": settings})
    assert bool(list(optimizer_rules(train))) == refused


def test_schedules_with_a_stable_phase_and_with_a_power() -> None:
    """wsd, 10 steps, 2 of warm-up (1/3, 2/3), decay over the last ceil(0.3 x 10) = 3 from 1 to 0.1:
    1, 0.7, 0.4. sqrt: 1 - sqrt(1/3) = 0.42265 of 0.9, and 0.18350. polynomial, power 2: steps 0 to
    3 of 4 have 1, 9/16, 4/16 and 1/16 of 0.9, above 0.1."""
    wsd: dict[str, Any] = {
        "lr_scheduler": {"kind": "wsd", "decay_ratio": 0.3},
        "lr_warmup_steps": 2,
    }
    linear = [lr_factor(i, TrainConfig(**wsd), 10) for i in range(10)]
    assert linear == pytest.approx([1 / 3, 2 / 3, *[1.0] * 6, 0.7, 0.4])
    wsd["lr_scheduler"] = {"kind": "wsd", "decay_ratio": 0.3, "decay_shape": "sqrt"}
    root = [lr_factor(i, TrainConfig(**wsd), 10) for i in (8, 9)]
    assert root == pytest.approx([0.1 + 0.9 * 0.42265, 0.1 + 0.9 * 0.18350], abs=1e-5)
    power = TrainConfig(lr_scheduler=PolynomialLr(power=2.0))
    found = [lr_factor(i, power, 4) for i in range(4)]
    assert found == pytest.approx([0.1 + 0.9 * x / 16 for x in (16, 9, 4, 1)])

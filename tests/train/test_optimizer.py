"""Steps: against a plain torch loop, in half precision, with gradients that are not finite, and
schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, get_scheduler

from burnish.config.model import Dtype, PrecisionConfig
from burnish.config.schedule import CosineWithMinLr
from burnish.config.train import TrainConfig
from burnish.models.load import DTYPES
from burnish.train.base import Loss, Outputs
from burnish.train.optim import Optimizer, lr_factor
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

MakeEngine = Callable[..., TorchTrainEngine]
StateOf = Callable[[TorchTrainEngine], dict[str, Tensor]]


class One(nn.Module):
    """A matrix and a vector, all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3))
        self.vector = nn.Parameter(torch.ones(3))


def optimizer_of(
    model: nn.Module,
    *,
    lr: float,
    total_steps: int = 100,
    precision: PrecisionConfig = PrecisionConfig(),
    **train: object,
) -> Optimizer:
    config = TrainConfig(**{"max_grad_norm": None, **train})
    return Optimizer(model, config, lr=lr, total_steps=total_steps, precision=precision)


def plain_nll(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        tokens, mask = batch.tokens[begin:end], batch.action_mask[begin:end]
        log_p = model(tokens[None]).logits[0].log_softmax(-1)
        total = total - log_p[:-1].gather(-1, tokens[1:, None])[:, 0][mask[1:]].sum()
    return total / batch.num_tokens


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_five_steps_are_those_of_a_plain_torch_loop(
    max_grad_norm: float | None,
    make_engine: MakeEngine,
    tiny_model: LlamaForCausalLM,
    ragged_batch: Batch,
    nll: Loss,
) -> None:
    options = {"weight_decay": 0.1, "max_grad_norm": max_grad_norm, "lr_scheduler": "linear"}
    engine = make_engine(micro=3, total_steps=8, **options)
    model = tiny_model
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(5):
        engine.forward_backward(ragged_batch, nll)
        stats = engine.optim_step()
        plain_nll(model, ragged_batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * (1 - step / 8)
        adamw.step()
        adamw.zero_grad()
        # norms of size 1 and 10 summed in another order
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert stats.lr == pytest.approx(1e-3 * (1 - step / 8)) and not stats.skipped
    assert engine.version == 5
    assert max_grad_norm is None or norm > 0.5, "clipping must act"
    start = dict(make_engine().model.named_parameters())
    for (name, ours), theirs in zip(
        engine.model.named_parameters(), model.parameters(), strict=True
    ):
        # five steps of up to 1e-3 whose directions m / sqrt(v) agree to about 1e-3 where v is tiny
        torch.testing.assert_close(
            ours, theirs, atol=5e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert (ours - start[name]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("dtype", "lr", "rounded"), [("bf16", 1e-3, 0.99609375), ("fp16", 1e-4, 1 - 2**-11)]
)
def test_an_update_too_small_to_see_accumulates_in_the_master(
    dtype: Dtype, lr: float, rounded: float
) -> None:
    """Below 1 bf16 has steps of 2^-8 = 0.0039, fp16 of 2^-11 = 0.00049. Adam with a constant
    gradient moves by lr a step (m and v are corrected for their bias). bf16 with lr 0.001: after
    one step the master is 0.999 and the weight still rounds to 1; after four 0.996 and 1 - 2^-8.
    fp16 with lr 0.0001: 0.9999 and 1; after four 0.9996 and 1 - 2^-11 = 0.99951."""
    model = One()
    # not 65536 for fp16: 65536 x a gradient of 1 is beyond its largest number
    scale = {"loss_scale": 256} if dtype == "fp16" else {}
    precision = PrecisionConfig(dtype=dtype, **scale)
    optimizer = optimizer_of(model, lr=lr, precision=precision)
    seen = []
    for step in range(4):
        ((model.matrix.sum() + model.vector.sum()) * optimizer.scaler.scale).backward()
        assert not optimizer.step(step).skipped
        seen.append(
            (float(optimizer.masters[0][0, 0].detach()), float(model.matrix.detach()[0, 0]))
        )
    # the master is rounded to fp32 once a step: 4 x 6e-8
    assert [m for m, _ in seen] == pytest.approx([1 - (k + 1) * lr for k in range(4)], abs=5e-7)
    assert seen[0][1] == 1.0 and seen[3][1] == rounded
    assert model.matrix.dtype == DTYPES[dtype] and optimizer.masters[0].dtype == torch.float32
    moments = optimizer.tensors()
    assert (
        moments["exp_avg"]["matrix"].dtype
        == moments["exp_avg_sq"]["matrix"].dtype
        == (torch.float32)
    )


def test_masters_keep_updates_that_the_compute_format_rounds_away() -> None:
    """1 + 2^-20 is 1 in fp16 and bf16; the master has it, and publishes from it."""
    model = One()
    with torch.no_grad():
        model.matrix.add_(2**-20)
    optimizer = optimizer_of(model, lr=1e-3, precision=PrecisionConfig(dtype="fp16"))
    assert float(optimizer.masters[0].detach()[0, 0]) == 1 + 2**-20
    assert float(model.matrix.detach()[0, 0]) == 1.0


@pytest.mark.parametrize(("dtype", "tiny", "stalls"), [("bf16", 1e-4, 0.1), ("fp16", 3e-5, 0.005)])
def test_1024_tiny_gradients_add_up_to_the_fp64_answer(
    dtype: Dtype, tiny: float, stalls: float
) -> None:
    """In bf16 a sum of equal terms stops growing at 256 of them (8 bits of mantissa), in fp16 its
    steps grow coarser than a tenth of a term."""
    model = One()
    optimizer = optimizer_of(model, lr=1e-3, precision=PrecisionConfig(dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(2, 3, dtype=torch.float64)
    naive = torch.zeros(2, 3, dtype=DTYPES[dtype])
    for _ in range(1024):
        term = (tiny * (1 + torch.rand(2, 3, generator=generator))).to(DTYPES[dtype])
        (model.matrix * term).sum().backward()
        assert model.matrix.grad is None, "the half-precision form is freed at once"
        exact += term.double()
        naive += term
    total = optimizer.masters[0].grad
    assert total is not None and total.dtype == torch.float32
    # 1024 roundings of at most 2^-24 relative each, on average far less
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=0)
    error = (naive.double() - exact).abs().max()
    assert error > stalls * exact.min(), "a sum in the compute format would have shown"


def test_gradients_can_add_up_in_the_compute_format_on_request() -> None:
    """Ones in bf16 add up to 256 and no further: 256 + 1 rounds to 256 (ties to even)."""
    model = One()
    precision = PrecisionConfig(dtype="bf16", grad_accum_dtype="bf16")
    optimizer = optimizer_of(model, lr=0.1, precision=precision)
    for _ in range(300):
        model.matrix.sum().backward()
    assert model.matrix.grad is not None and model.matrix.grad.dtype == torch.bfloat16
    assert optimizer.masters[0].grad is None
    # 6 entries of 256: sqrt(6) x 256
    assert optimizer.step(0).grad_norm == pytest.approx(6**0.5 * 256)
    assert model.matrix.grad is None and optimizer.masters[0].grad is None
    assert float(model.matrix.detach()[0, 0]) < 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_gradient_changes_no_weight(
    bad: float,
    dtype: str,
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    state_of: StateOf,
) -> None:
    engine = make_engine(dtype=dtype, ema_decay=0.9, lr_scheduler="linear")
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    before = state_of(engine)

    def poisoned(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        return outputs.logprobs.sum() * bad, Stats()

    engine.forward_backward(ragged_batch, poisoned)
    stats = engine.optim_step()
    assert stats.skipped and engine.version == 1
    after = state_of(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    engine.forward_backward(ragged_batch, nll)
    healthy = engine.optim_step()
    assert not healthy.skipped and engine.version == 2, "nothing of the bad gradient is left"
    assert healthy.lr == pytest.approx(1e-3 * 0.9), "the schedule did not move either"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_clears_the_gradient(
    dtype: str, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make_engine(dtype=dtype)
    engine.forward_backward(ragged_batch, nll)
    assert engine.optim_step().grad_norm > 0
    assert engine.optim_step().grad_norm == 0


def test_the_norm_is_taken_before_clipping() -> None:
    """Gradients of 3 on 6 + 3 entries: norm sqrt(9 x 9) = 9, reported unclipped, clipped to 1."""
    model = One()
    optimizer = optimizer_of(model, lr=1e-3, max_grad_norm=1.0)
    (3 * model.matrix.sum() + 3 * model.vector.sum()).backward()
    seen: list[Tensor] = []
    optimizer.rules[0].optimizer.register_step_pre_hook(
        lambda *_: seen.append(model.vector.grad.clone())
    )
    assert optimizer.step(0).grad_norm == pytest.approx(9)
    # clipping adds 1e-6 to the norm, so that a zero gradient divides by something
    assert seen[0].tolist() == pytest.approx([1 / 3] * 3, rel=1e-6)


def test_weight_decay_applies_only_to_matrices() -> None:
    """Without gradient a step multiplies by 1 - lr x decay = 1 - 0.1 x 0.5 = 0.95."""
    model = One()
    optimizer = optimizer_of(model, lr=0.1, weight_decay=0.5)
    (0 * model.matrix.sum() + 0 * model.vector.sum()).backward()
    optimizer.step(0)
    assert model.matrix.flatten().tolist() == pytest.approx([0.95] * 6)
    assert model.vector.tolist() == [1.0] * 3


def test_the_moving_average_follows_by_hand() -> None:
    """Constant gradient, lr 0.1: weights 1, 0.9, 0.8. With decay 0.75 the average is 1, then
    0.75 + 0.25 x 0.9 = 0.975, then 0.75 x 0.975 + 0.25 x 0.8 = 0.93125."""
    model = One()
    optimizer = optimizer_of(model, lr=0.1, ema_decay=0.75)
    assert optimizer.ema is not None
    for step, expected in enumerate((0.975, 0.93125)):
        (model.matrix.sum() + model.vector.sum()).backward()
        optimizer.step(step)
        assert optimizer.ema[0].flatten().tolist() == pytest.approx([expected] * 6, abs=1e-6)


def test_a_bf16_moving_average_follows_the_masters() -> None:
    """lr 0.001 and decay 0.5: the average is 0.5 + 0.5 x 0.999 = 0.9995, which bf16 does not
    have."""
    model = One()
    precision = PrecisionConfig(dtype="bf16")
    optimizer = optimizer_of(model, lr=1e-3, ema_decay=0.5, precision=precision)
    (model.matrix.sum() + model.vector.sum()).backward()
    optimizer.step(0)
    assert optimizer.ema is not None
    assert float(optimizer.ema[0][0, 0]) == pytest.approx(0.9995, abs=1e-6)


# ---- schedules -----------------------------------------------------------------------------------


def factors(scheduler: Any, total: int, warmup: float = 0.0) -> list[float]:
    config = TrainConfig(lr_scheduler=scheduler, lr_warmup_ratio=warmup)
    return [lr_factor(step, config, total) for step in range(total)]


def transformers_factors(scheduler: str, total: int, warmup: int, **more: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(scheduler, optimizer, warmup, total, scheduler_specific_kwargs=more)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine_with_min_lr", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 6])
def test_after_warm_up_schedules_are_those_of_transformers(
    ours: str, theirs: str, more: dict[str, float], warmup: int
) -> None:
    mine = factors(ours, 24, warmup / 24)
    oracle = transformers_factors(theirs, 24, warmup, **more)
    assert mine[warmup:] == pytest.approx(oracle[warmup:], abs=1e-12)  # the same formula in float64


def test_warm_up_updates_at_the_first_step_and_ends_at_the_peak() -> None:
    """ceil(0.25 x 10) = 3 steps of warm-up: 1/4, 2/4, 3/4, then the peak. (transformers starts at
    0, which
    wastes a step.)"""
    assert factors("constant", 10, 0.25) == [0.25, 0.5, 0.75, *[1.0] * 7]


def test_decay_by_hand() -> None:
    """No warm-up, 4 steps: linear 1 - k/4; cosine (1 + cos(k pi / 4)) / 2; with floor 0.2: 0.2 +
    0.8 x that."""
    assert factors("linear", 4) == [1.0, 0.75, 0.5, 0.25]
    cosine = [1.0, 0.8535534, 0.5, 0.1464466]
    assert factors("cosine", 4) == pytest.approx(cosine)
    floor = factors(CosineWithMinLr(min_ratio=0.2), 4)
    assert floor == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573])


def test_beyond_the_last_step_the_learning_rate_is_constant() -> None:
    config = TrainConfig(lr_scheduler=CosineWithMinLr(min_ratio=0.2))
    assert lr_factor(100, config, 4) == pytest.approx(0.2)
    assert lr_factor(5, TrainConfig(lr_warmup_ratio=1.0), 3) == 1.0

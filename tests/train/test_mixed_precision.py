"""The torch engine in fp16 and bf16: scaling, updates, skipped steps and messages."""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from burnish.config import load_config
from burnish.config.model import Dtype, Fp16Config, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import DTYPES, ModelError, load_causal_lm
from burnish.train.base import Loss, NonFiniteError, Outputs
from burnish.train.loss_scaler import DynamicLossScaler
from burnish.train.optim import Optimizer
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

TINY = ModelConfig(scratch=ScratchConfig(hidden_size=32))
MakeEngine = Callable[..., TorchTrainEngine]
Through = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
StateOf = Callable[[TorchTrainEngine], dict[str, Tensor]]


def fp16(**options: object) -> PrecisionConfig:
    return PrecisionConfig(dtype="fp16", fp16=Fp16Config(**options))


def times(factor: float) -> Loss:
    """The mean negative log-prob, so many times."""

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() / batch.num_tokens * factor, Stats()

    return loss


def hashes(state: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, t in state.items()
    }


def scale_of(engine: TorchTrainEngine) -> float:
    assert engine.optimizer is not None
    return engine.optimizer.scaler.scale


# 1e9 / 2^0 on a model with gradients around 0.1: far above 65504 at any loss scale.
OVERFLOW = times(1e9)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_the_model_computes_in_half_precision_and_all_state_is_fp32(
    role: str, dtype: Dtype, make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    precision = fp16(loss_scale=256) if dtype == "fp16" else PrecisionConfig(dtype=dtype)
    engine = make_engine(role=role, precision=precision, ema_decay=0.9)

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        out = outputs.logprobs if role == "policy" else outputs.values
        assert out is not None and out.dtype == torch.float32, "what losses see is fp32"
        return out.square().sum() / batch.num_tokens, Stats()

    seen: set[torch.dtype] = set()
    engine.body.layers[0].mlp.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    engine.forward_backward(ragged_batch, loss)
    assert seen == {DTYPES[dtype]}
    assert engine.optimizer is not None
    assert {m.grad.dtype for m in engine.optimizer.masters if m.grad is not None} == {torch.float32}
    assert not engine.optim_step().skipped
    assert {p.dtype for p in engine.model.parameters()} == {DTYPES[dtype]}
    for kind in ("master", "exp_avg", "exp_avg_sq", "ema"):
        assert {t.dtype for t in engine.optimizer.tensors()[kind].values()} == {torch.float32}
    for name, master in engine.optimizer.tensors()["master"].items():
        published = dict(engine.model.named_parameters())[name]
        assert torch.equal(published, master.to(DTYPES[dtype])), "the model has the master, rounded"


def test_norm_clipping_and_update_do_not_depend_on_the_loss_scale(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    """Multiplying by a power of two is exact in fp16 until something leaves its range; clipping to
    0.05 acts on the unscaled gradient."""
    norms, updates = [], []
    for scale in (2.0**4, 2.0**8, 2.0**12):
        engine = make_engine(precision=fp16(loss_scale=scale), max_grad_norm=0.05, micro=3)
        before = {n: p.detach().clone() for n, p in engine.optimizer.tensors()["master"].items()}
        engine.forward_backward(ragged_batch, nll)
        stats = engine.optim_step()
        assert stats.loss_scale == scale and not stats.skipped
        norms.append(stats.grad_norm)
        after = engine.optimizer.tensors()["master"]
        moved = engine.optimizer.tensors()["exp_avg"]
        assert sum(float(m.square().sum()) for m in moved.values()) ** 0.5 == pytest.approx(
            0.1 * 0.05, rel=1e-3
        ), "Adam's first moment is (1 - 0.9) of a gradient of norm 0.05"
        updates.append({n: after[n] - before[n] for n in before})
    # what differs is what fp16 flushed to 0 or rounded among its subnormals, at the smallest scale
    assert norms[1] == pytest.approx(norms[2], rel=1e-5)
    assert norms[0] == pytest.approx(norms[2], rel=1e-4)
    exact = make_engine(max_grad_norm=None, micro=3)
    exact.forward_backward(ragged_batch, nll)
    # fp16 has 11 bits: 2^-11 = 5e-4 per operation
    assert norms[2] == pytest.approx(exact.optim_step().grad_norm, rel=5e-3)


def test_small_gradients_underflow_only_without_loss_scaling(
    make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    """A loss times 2^-20 has gradients around 2^-24, the smallest number of fp16."""
    tiny = 2.0**-20
    norms = {}
    for scale in (1.0, 2.0**16):
        engine = make_engine(precision=fp16(loss_scale=scale), max_grad_norm=None)
        engine.forward_backward(ragged_batch, times(tiny))
        norms[scale] = engine.optim_step().grad_norm / tiny
    exact = make_engine(max_grad_norm=None)
    exact.forward_backward(ragged_batch, times(1.0))
    norm = exact.optim_step().grad_norm
    assert norms[2.0**16] == pytest.approx(norm, rel=5e-3)
    assert abs(norms[1.0] - norm) > 0.1 * norm


def test_an_overflow_changes_only_the_loss_scale(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, state_of: StateOf
) -> None:
    engine = make_engine(precision=fp16(), ema_decay=0.9, lr_scheduler="linear", micro=3)
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped
    before = hashes(state_of(engine))
    for scale_after in (65536.0, 32768.0, 16384.0):  # hysteresis 2: the first one is free
        engine.forward_backward(ragged_batch.select([0, 1, 2, 3]), nll)
        engine.forward_backward(ragged_batch.select([4, 5, 6, 7]), OVERFLOW)
        stats = engine.optim_step()
        assert stats.skipped and stats.overflow and scale_of(engine) == scale_after
    assert hashes(state_of(engine)) == before
    assert engine.skipped_total == stats.skipped_total == 3 and engine.version == 1
    assert engine.consecutive_skips == 0, "the scale may still cure it"
    engine.forward_backward(ragged_batch, nll)
    healthy = engine.optim_step()
    assert not healthy.skipped and healthy.skipped_total == 3
    assert healthy.lr == pytest.approx(1e-3 * 0.9), "the schedule counts steps that were taken"


def test_a_constant_scale_stays_and_its_overflows_are_skipped(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, state_of: StateOf
) -> None:
    engine = make_engine(precision=fp16(loss_scale=64.0))
    before = hashes(state_of(engine))
    for _ in range(3):
        engine.forward_backward(ragged_batch, OVERFLOW)
        assert engine.optim_step().skipped and scale_of(engine) == 64.0
    assert hashes(state_of(engine)) == before
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped


def test_the_scale_grows_after_its_window(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make_engine(precision=fp16(initial_scale_power=4, loss_scale_window=2))
    scales = []
    for _ in range(6):
        engine.forward_backward(ragged_batch, nll)
        scales.append(engine.optim_step().loss_scale)
    assert scales == [16, 16, 16, 32, 32, 64]


def test_an_overflow_at_the_floor_raises_and_names_the_first_bad_module(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, state_of: StateOf
) -> None:
    engine = make_engine(
        precision=fp16(initial_scale_power=1, hysteresis=1, min_loss_scale=1.0), micro=4
    )
    before = hashes(state_of(engine))
    engine.forward_backward(ragged_batch, OVERFLOW)
    assert engine.optim_step().skipped and scale_of(engine) == 1.0
    engine.forward_backward(ragged_batch, OVERFLOW)
    with pytest.raises(NonFiniteError) as caught:
        engine.optim_step()
    said = str(caught.value)
    assert "min_loss_scale=1" in said and "First bad tensor: " in said
    assert "rows [0, 1, 2, 3]" in said, "the micro-batch"
    for hint in ("learning rate", "train.max_grad_norm", "precision.dtype=bf16"):
        assert hint in said
    assert caught.value.stats.at_floor and caught.value.stats.skipped
    assert hashes(state_of(engine)) == before
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped, "nothing of the bad gradient is left"


def test_the_module_named_at_the_floor_is_the_one_that_overflows(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, through: Through
) -> None:
    """Backward through layer 0's MLP multiplies by 3.6e9: its gradient is the first to overflow."""
    engine = make_engine(precision=fp16(initial_scale_power=0, hysteresis=1))
    engine.body.layers[0].mlp.down_proj.register_forward_hook(
        lambda m, i, out: through(out, lambda grad: grad * 60000.0 * 60000.0)
    )
    engine.forward_backward(ragged_batch, nll)
    with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp"):
        engine.optim_step()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_persistently_bad_losses_stop_training_after_max_consecutive_skips(
    dtype: Dtype, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make_engine(dtype=dtype, max_consecutive_skips=3)
    bad = times(float("nan"))
    for loss in (bad, bad, nll, bad, bad):
        engine.forward_backward(ragged_batch, loss)
        engine.optim_step()
    assert engine.consecutive_skips == 2 and engine.skipped_total == 4
    engine.forward_backward(ragged_batch, bad)
    with pytest.raises(NonFiniteError, match=r"3 consecutive steps .*First bad tensor: .*loss"):
        engine.optim_step()


def test_a_bad_loss_without_a_bad_gradient_skips_too(
    make_engine: MakeEngine, ragged_batch: Batch, state_of: StateOf
) -> None:
    """inf + loss: the gradient is finite, but the statistics are meaningless."""
    engine = make_engine()
    before = hashes(state_of(engine))

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        return outputs.logprobs.sum() + float("inf"), Stats()

    engine.forward_backward(ragged_batch, loss)
    stats = engine.optim_step()
    assert stats.skipped and not stats.overflow and torch.isfinite(torch.tensor(stats.grad_norm))
    assert hashes(state_of(engine)) == before


def test_a_broken_weight_is_named(make_engine: MakeEngine, ragged_batch: Batch, nll: Loss) -> None:
    engine = make_engine(max_consecutive_skips=1)
    with torch.no_grad():
        engine.model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = float("nan")
    engine.forward_backward(ragged_batch, nll)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        engine.optim_step()


def test_scaler_and_skip_counts_survive_a_checkpoint(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    options = {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 2}
    engine = make_engine(precision=fp16(**options))
    losses = [nll, OVERFLOW, nll, OVERFLOW, nll, nll, nll, nll, nll]
    for loss in losses[:4]:
        engine.forward_backward(ragged_batch, loss)
        engine.optim_step()
    engine.save(tmp_path / "policy")
    resumed = make_engine(precision=fp16(**options))
    resumed.load(tmp_path / "policy")
    for loss in losses[4:]:
        both = []
        for one in (engine, resumed):
            one.forward_backward(ragged_batch, loss)
            both.append(one.optim_step())
        assert both[0] == both[1]
    assert both[0].loss_scale == 64.0 and both[0].skipped_total == 2


@pytest.mark.parametrize("after", ["bf16", "fp32"])
def test_a_checkpoint_of_fp16_resumes_in_another_format_from_the_same_masters(
    after: Dtype, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = make_engine(dtype="fp16")
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    engine.save(tmp_path / "policy")
    other = make_engine(dtype=after)
    other.load(tmp_path / "policy")
    assert engine.optimizer is not None and other.optimizer is not None
    for ours, theirs in zip(engine.optimizer.masters, other.optimizer.masters, strict=True):
        assert torch.equal(ours.detach(), theirs.detach())
    other.forward_backward(ragged_batch, nll)
    stats = other.optim_step()
    assert not stats.skipped and stats.loss_scale == 1.0


@pytest.mark.parametrize(
    ("dtype", "bound"),
    # unit round-off (half the spacing at 1) of 2^-8 and 2^-11, times logits of size 8, times a few
    # tens of roundings on the way that add up like a random walk
    [("bf16", 8 * 2**-8 * 6), ("fp16", 8 * 2**-11 * 6), ("fp32", 8 * 2**-24 * 6)],
)
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_logprobs_are_near_those_of_fp64(
    layout: str,
    dtype: Dtype,
    bound: float,
    make_engine: MakeEngine,
    ragged_batch: Batch,
) -> None:
    engine = make_engine(dtype=dtype, layout=layout)
    spread(engine.model)
    oracle = make_engine()
    spread(oracle.model)
    exact = oracle.model.double()
    ours = engine.logprobs(ragged_batch)
    assert ours.dtype == torch.float32
    ends = ragged_batch.offsets.tolist()
    largest = 0.0
    for begin, end in itertools.pairwise(ends):
        tokens = ragged_batch.tokens[begin:end]
        with torch.no_grad():
            logits = exact(tokens[None]).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        chosen = ragged_batch.action_mask[begin:end][1:]
        error = (ours[begin + 1 : end].double() - expected).abs()[chosen]
        largest = max(largest, float(error.max()))
        assert float(logits.abs().max()) < 30
    assert largest < bound
    if dtype != "fp32":
        assert largest > bound / 1000, "the bound says something about this model"


def spread(model: nn.Module) -> None:
    """Larger weights: distributions that are far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)


LACKING = {
    "linalg": lambda x: torch.linalg.inv(torch.eye(2, dtype=x.dtype)).sum(),
    "kernel": lambda x: torch.cdist(x.detach()[0], x.detach()[0]).sum(),
}


@pytest.mark.parametrize(("kind", "named"), [("linalg", "linalg.inv"), ("kernel", "cdist")])
@pytest.mark.parametrize("backward", [False, True])
def test_an_operation_that_the_device_lacks_in_fp16_is_named(
    backward: bool,
    kind: str,
    named: str,
    make_engine: MakeEngine,
    through: Through,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two operations without an fp16 form on a CPU, whose errors PyTorch words in two ways."""
    plain = LlamaMLP.forward

    def add(x: Tensor) -> Tensor:
        return x + LACKING[kind](x)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return plain(self, through(x, add) if backward else add(x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=f"in fp16 on cpu: .*no fp16 form of {named}"):
        make_engine(dtype="fp16")


def test_a_dynamic_scale_converges_from_far_too_high(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make_engine(precision=fp16(initial_scale_power=32), lr=1e-2)
    skipped = 0
    for _ in range(30):
        engine.forward_backward(ragged_batch, nll)
        skipped += engine.optim_step().skipped
    assert isinstance(engine.optimizer.scaler, DynamicLossScaler)
    assert 5 < skipped < 25 and engine.version == 30 - skipped
    assert scale_of(engine) < 2.0**28


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_accumulation_in_half_precision_does_not_depend_on_the_split(
    dtype: Dtype, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    """Each micro-batch's gradient is rounded once to the compute format and the sums are fp32, so
    splits differ by that rounding alone: unit round-off x the largest entry, a few times."""
    found = []
    for micro in (8, 4, 2, 1):
        engine = make_engine(dtype=dtype, micro=micro, max_grad_norm=None)
        engine.forward_backward(ragged_batch, nll)
        assert engine.optimizer is not None
        scale = engine.optimizer.scaler.scale
        found.append([g / scale for g in engine.optimizer.gradients()])
    round_off = {"fp16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    for other in found[1:]:
        for ours, whole in zip(other, found[0], strict=True):
            assert float((ours - whole).abs().max()) < 8 * round_off * float(whole.abs().max())


def test_frozen_weights_are_cast_too(make_engine: MakeEngine, ragged_batch: Batch) -> None:
    engine = make_engine(dtype="fp16", trainable=False)
    assert {p.dtype for p in engine.model.parameters()} == {torch.float16}
    assert engine.logprobs(replace(ragged_batch)).dtype == torch.float32


def test_a_parameter_without_a_gradient_is_unchanged_in_every_format() -> None:
    """AdamW would decay it, and move it by its old momentum, for a gradient of 0."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))

    config = TrainConfig(weight_decay=0.1)
    for precision in (
        PrecisionConfig(),
        PrecisionConfig(dtype="bf16"),
        PrecisionConfig(dtype="bf16", grad_accum_dtype="bf16"),
        fp16(loss_scale=64),
    ):
        model = Two()
        optimizer = Optimizer(model, config, lr=0.1, total_steps=9, precision=precision)
        for step in range(2):
            model.used.sum().backward()
            optimizer.step(step)
        assert float(model.used.detach().max()) < 1
        assert torch.equal(optimizer.masters[1].detach(), torch.ones(2, 2)), precision


def test_broken_weights_are_not_saved(
    make_engine: MakeEngine,
    ragged_batch: Batch,
    nll: Loss,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burnish.train.optim.MEASURED_FROM", torch.inf)
    engine = make_engine(lr=1e39, max_grad_norm=None)
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    with pytest.raises(ValueError, match=r"weights of the policy are not finite, e\.g\. model\."):
        engine.save(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("where", ["weight", "activation"])
def test_a_model_that_fp16_cannot_hold_is_refused_at_once(
    where: str, make_engine: MakeEngine
) -> None:
    def broken(dtype: Dtype) -> TorchTrainEngine:
        model = load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
        layer = model.model.layers[0].mlp
        with torch.no_grad():
            if where == "weight":
                layer.down_proj.weight[0, 0] = 1e5
            else:
                for part in (layer.up_proj, layer.gate_proj, layer.down_proj):
                    part.weight.mul_(1e4)
        spec = EngineSpec(
            TrainRole.alone("policy", TrainConfig(), TINY, precision=PrecisionConfig(dtype=dtype))
        )
        return TorchTrainEngine(model, spec)

    with pytest.raises(ModelError, match=r"float16.*use (precision\.dtype=)?bf16 or fp32"):
        broken("fp16")
    assert broken("bf16")


def test_the_hint_at_the_floor_resets_every_scaling_key() -> None:
    config = fp16(loss_scale=0, min_loss_scale=0.5, consecutive_hysteresis=True)
    recipe = {
        **{"job": "sft", "model": {"scratch": {}}, "data": {"sources": ["x.jsonl"]}},
        **{"train": {"train_batch_size": 4}, "precision": config.model_dump()},
    }
    hint = shlex.split(config.overrides_for("bf16"))
    assert load_config(recipe, hint).precision == PrecisionConfig(dtype="bf16")


def test_a_diagnosis_that_fails_does_not_hide_the_stop(
    make_engine: MakeEngine, ragged_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("burnish.train.engine.first_bad_tensor", out_of_memory)
    engine = make_engine(max_consecutive_skips=1)
    engine.forward_backward(ragged_batch, times(float("nan")))
    with pytest.raises(NonFiniteError, match=r"consecutive .*search .* failed: MemoryError"):
        engine.optim_step()

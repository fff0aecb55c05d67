"""What every train engine must do, whatever it is made of. A new engine adds one line to ENGINES.

Written against the protocol in ``train/base.py`` alone; the plain loop of transformers is the
oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.train import TorchEngine, TrainConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.train.base import Loss, Outputs, Role, TrainEngine
from burnish.train.deepspeed import DeepSpeedTrainEngine
from burnish.train.fsdp import ShardedTrainEngine
from burnish.train.ranks import ALONE, Ranks
from burnish.train.torch import EngineSpec, TorchTrainEngine
from burnish.types import Batch, Stats

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32))


@dataclass(frozen=True)
class Wanted:
    """What a factory is asked for."""

    role: Role = "policy"
    micro: int | None = None
    temperature: float = 1.0
    lr: float = 1e-2


def torch_engine(wanted: Wanted, ranks: Ranks = ALONE, **engine: Any) -> TrainEngine:
    scalar = wanted.role in ("critic", "reward")
    model: Any = load_scalar_model(MODEL, new_head=True) if scalar else load_causal_lm(MODEL)
    spec = EngineSpec(
        wanted.role,
        TrainConfig(lr=wanted.lr, engine=TorchEngine(**engine)),
        MODEL,
        micro_batch_size=wanted.micro,
        total_steps=10,
        temperature=wanted.temperature,
    )
    kind = TorchTrainEngine if ranks.group is None else ShardedTrainEngine
    return kind(model, spec, tokenizer=load_tokenizer(MODEL), ranks=ranks)


def deepspeed_engine(wanted: Wanted, stage: int) -> TrainEngine:
    scalar = wanted.role in ("critic", "reward")
    model: Any = load_scalar_model(MODEL, new_head=True) if scalar else load_causal_lm(MODEL)
    sizes = {"reduce_bucket_size": 50_000, "param_persistence_threshold": 40}
    engine = {"kind": "deepspeed", "zero_stage": stage, **sizes}
    spec = EngineSpec(
        wanted.role,
        TrainConfig(lr=wanted.lr, engine=engine),
        MODEL,
        micro_batch_size=wanted.micro,
        total_steps=10,
        temperature=wanted.temperature,
    )
    return DeepSpeedTrainEngine(model, spec, tokenizer=load_tokenizer(MODEL))


def sharded_engine(wanted: Wanted) -> TrainEngine:
    """FSDP2 over one rank; test_fsdp_engine.py has two."""
    return torch_engine(wanted, Ranks(torch.distributed.group.WORLD), sharding="full")


ENGINES: dict[str, Callable[[Wanted], TrainEngine]] = {
    "torch": torch_engine,
    "torch, sharded": sharded_engine,
    **{f"deepspeed-{n}": partial(deepspeed_engine, stage=n) for n in range(4)},
}

Make = Callable[[Wanted], TrainEngine]


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


FAST = ["torch", "torch, sharded"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ENGINES if name not in FAST]


@pytest.fixture(params=[*FAST, *SLOW])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "torch, sharded":
        request.getfixturevalue("group_of_one")
    return ENGINES[request.param]


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def bad(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.logprobs is not None
    return outputs.logprobs.sum() * float("nan"), Stats()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_in_line_with_the_tokens_and_zero_elsewhere(
    temperature: float, make: Make, ragged_batch: Batch
) -> None:
    ours = make(Wanted(temperature=temperature)).logprobs(ragged_batch)
    model, ends = load_causal_lm(MODEL), ragged_batch.offsets.tolist()
    expected = torch.zeros(ragged_batch.tokens.numel())
    for begin, end in itertools.pairwise(ends):
        tokens = ragged_batch.tokens[begin:end]
        with torch.no_grad():
            log_p = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        expected[begin + 1 : end] = log_p[:-1].gather(-1, tokens[1:, None])[:, 0]
    expected = torch.where(ragged_batch.action_mask, expected, 0.0)
    assert ours.shape == expected.shape and ours.dtype == torch.float32 and not ours.requires_grad
    torch.testing.assert_close(
        ours.cpu(), expected, atol=5e-6, rtol=0
    )  # log-probs of size 4 in fp32


def test_outputs_of_forward_backward_are_those_of_logprobs(make: Make, ragged_batch: Batch) -> None:
    engine, seen = make(Wanted()), []

    def watch(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None and outputs.logprobs.requires_grad
        seen.append(outputs.logprobs.detach().cpu())
        return outputs.logprobs.sum() / batch.num_tokens, Stats()

    engine.forward_backward(ragged_batch, watch)
    (ours,) = seen
    torch.testing.assert_close(ours, engine.logprobs(ragged_batch).cpu(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_values_stand_on_actions_or_on_last_tokens(
    role: Role, make: Make, ragged_batch: Batch
) -> None:
    values = make(Wanted(role)).values(ragged_batch).cpu()
    last = torch.zeros_like(ragged_batch.action_mask)
    last[ragged_batch.offsets[1:] - 1] = True
    where = ragged_batch.action_mask if role == "critic" else last
    assert bool((values[~where] == 0).all()) and bool((values[where] != 0).all())
    assert values.dtype == torch.float32 and not values.requires_grad


@pytest.mark.parametrize("micro", [None, 3, 1])
def test_one_step_is_the_same_step_for_every_split(
    micro: int | None, make: Make, ragged_batch: Batch, nll: Loss
) -> None:
    whole, parts = make(Wanted(lr=1e-3)), make(Wanted(micro=micro, lr=1e-3))
    stats = whole.forward_backward(ragged_batch, nll)
    assert parts.forward_backward(ragged_batch.select([3, 1]), nll).floats() == {"tokens": 18.0}
    parts.forward_backward(ragged_batch.select([7, 0, 6, 2, 4, 5]), nll)
    norms = [engine.optim_step().grad_norm for engine in (whole, parts)]
    # fp32 sums in another order
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert stats.floats() == {"tokens": 39.0}
    for name, tensor in weights(whole).items():
        # steps are of 1e-3. Where a gradient is as small as Adam's eps (1e-8), its rounding error
        # of
        # about 1e-10 is a hundredth of it, and so of the step; a wrong gradient is off by whole
        # steps
        torch.testing.assert_close(weights(parts)[name], tensor, atol=1e-5, rtol=0)


def test_a_step_lowers_the_loss_counts_and_clears(
    make: Make, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make(Wanted())
    assert engine.version == 0
    losses = []
    for step in range(1, 6):
        losses.append(-float(engine.logprobs(ragged_batch).sum()))
        engine.forward_backward(ragged_batch, nll)
        stats = engine.optim_step()
        assert engine.version == step and stats.lr == pytest.approx(1e-2) and not stats.skipped
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert engine.optim_step().grad_norm == 0, "the gradient was cleared"


def test_looking_moves_nothing(make: Make, ragged_batch: Batch, nll: Loss) -> None:
    engine = make(Wanted())
    before = weights(engine)
    first = engine.logprobs(ragged_batch)
    assert torch.equal(first, engine.logprobs(ragged_batch))
    engine.forward_backward(ragged_batch, nll)
    assert torch.equal(first, engine.logprobs(ragged_batch)), "nothing moves before the step"
    assert same(before, weights(engine)) and engine.version == 0


def test_a_gradient_that_is_not_finite_skips_the_step(
    make: Make, ragged_batch: Batch, nll: Loss
) -> None:
    engine = make(Wanted())
    before = weights(engine)
    engine.forward_backward(ragged_batch, nll)
    engine.forward_backward(ragged_batch, bad)
    assert engine.optim_step().skipped
    assert same(before, weights(engine)) and engine.version == 0
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped and engine.version == 1


def test_weights_have_the_names_and_shapes_of_transformers(make: Make) -> None:
    expected = {n: p.shape for n, p in load_causal_lm(MODEL).named_parameters()}
    assert {n: t.shape for n, t in make(Wanted()).weights()} == expected


def test_a_saved_engine_goes_on_bit_by_bit_in_a_new_one(
    make: Make, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    first, second = make(Wanted()), make(Wanted())
    for engine, steps in ((first, 3), (second, 1)):
        for _ in range(steps):
            engine.forward_backward(ragged_batch, nll)
            engine.optim_step()
    first.save(tmp_path / "policy")
    second.load(tmp_path / "policy")
    assert second.version == 3 and same(weights(first), weights(second))
    for engine in (first, second):
        engine.forward_backward(ragged_batch, nll)
        engine.optim_step()
    assert same(weights(first), weights(second))


def test_what_is_written_is_no_pickle_and_of_the_size_announced(
    make: Make, ragged_batch: Batch, nll: Loss, tmp_path: Path
) -> None:
    engine = make(Wanted())
    engine.forward_backward(ragged_batch, nll)
    engine.optim_step()
    engine.save(tmp_path / "policy")
    files = [f for f in (tmp_path / "policy").rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".jinja"}
    written = sum(f.stat().st_size for f in files)
    assert engine.state_bytes <= written <= engine.state_bytes + 100_000, (
        "headers, config, tokenizer"
    )


def test_the_checkpoint_of_another_role_is_refused(make: Make, tmp_path: Path) -> None:
    make(Wanted("critic")).save(tmp_path / "critic")
    with pytest.raises(ValueError, match="critic"):
        make(Wanted()).load(tmp_path / "critic")

"""A rank in this process, without Ray: what dropout draws on it, and what its constructor reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import RankGroup
from burnish.models.load import ModelError
from burnish.runtime.worker import TrainWorker, WorkerInfo, pack_share
from burnish.train.base import Outputs
from burnish.train.batching import Share
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32), lora=LoraConfig(lora_dropout=0.5))
ROWS = rows_to_batch([[7, 8, 9, 10, 11]], [[False] * 2 + [True] * 3], prompt_lens=[2])
BATCH = pack_share(Share(ROWS, passes=[[0]], row_numbers=[0]))


def nll(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    assert outputs.logprobs is not None
    loss = -outputs.logprobs.sum()
    return loss, Stats(sums={"loss": loss.detach()})


def started(
    rank: int = 0, *, seed: int = 3, group: str = "policy", tensor_parallel_size: int = 1
) -> TrainWorker:
    """A rank that computes alone, of a group that has just started. ``tensor_parallel_size``: as if
    so many ranks were a tensor-parallel team."""
    worker = TrainWorker(WorkerInfo(group, rank, 2, "cpu", 1), MODEL, PrecisionConfig())
    worker.ranks = RankGroup()
    spec = EngineSpec(
        TrainRole.alone("policy", TrainConfig(lr=0.5), MODEL), total_steps=100, seed=seed
    )
    worker.build(spec, scalar=False, seed=seed)
    train = spec.role.train.model_copy(
        update={"engine": TorchEngine(tensor_parallel_size=tensor_parallel_size)}
    )
    worker.engine.spec = replace(spec, role=replace(spec.role, train=train))
    return worker


def draw(worker: TrainWorker) -> float:
    """The loss of a pass, as dropout makes it."""
    return float(worker.stats("forward_backward", BATCH, nll).sums["loss"])


def step(worker: TrainWorker) -> float:
    """The same, and an optimizer step."""
    loss = draw(worker)
    worker.optim_step()
    return loss


@pytest.fixture
def moved(tmp_path: Path) -> Callable[..., TrainWorker]:
    """``moved(rank=1)``: a fresh rank that has read the state of after a first, large step, so that
    adapters, and what dropout does to them, show in the loss."""
    first = started()
    step(first)
    first.save(str(tmp_path / "state"))

    def make(*args: Any, noise: int = 0, **kwargs: Any) -> TrainWorker:
        worker = started(*args, **kwargs)
        torch.manual_seed(noise)
        worker.load(str(tmp_path / "state"))
        return worker

    return make


def test_a_resumed_group_draws_the_same_random_numbers(
    moved: Callable[..., TrainWorker],
) -> None:
    """Three steps of two passes each in one go; and once more from the start by a fresh group
    whose generator has another state."""
    whole, expected = moved(), []
    for _ in range(3):
        expected += [draw(whole), step(whole)]
    assert len(set(expected)) == 6, "every pass draws new numbers"
    again = moved(noise=99)
    assert [draw(again), step(again), draw(again)] == expected[:3]


def test_training_resumes_from_a_checkpoint_in_the_middle(
    moved: Callable[..., TrainWorker], tmp_path: Path
) -> None:
    whole = moved()
    step(whole)
    whole.save(str(tmp_path / "later"))
    expected = [step(whole), step(whole)]
    fresh = started()
    draw(fresh)  # a pass that led to nothing
    fresh.load(str(tmp_path / "later"))
    fresh.engine.optimizer.zero_grad()
    assert [step(fresh), step(fresh)] == expected


def test_random_numbers_differ_by_rank_and_seed_but_not_within_a_tensor_parallel_group(
    moved: Callable[..., TrainWorker],
) -> None:
    drawn = {
        "itself": draw(moved()),
        "another rank": draw(moved(rank=1)),
        "another seed": draw(moved(seed=4)),
        "another group": draw(moved(group="reference")),
    }
    assert len(set(drawn.values())) == 4, drawn
    assert (
        draw(moved(rank=1, tensor_parallel_size=2))
        == draw(moved(tensor_parallel_size=2))
        == drawn["itself"]
    )


def test_scoring_does_not_change_the_random_numbers(moved: Callable[..., TrainWorker]) -> None:
    plain, looking = moved(), moved()
    looking.per_token("logprobs", BATCH)
    looking.stats("measure", BATCH, nll)
    assert step(plain) == step(looking)


def test_a_missing_tokenizer_is_reported_when_the_model_is_built(tmp_path: Path) -> None:
    """And not by the constructor: to Ray that would be a death."""
    gone = MODEL.model_copy(update={"tokenizer_path": str(tmp_path / "gone")})
    worker = TrainWorker(WorkerInfo("policy", 0, 1, "cpu", 1), gone, PrecisionConfig())
    worker.ranks = RankGroup()
    with pytest.raises(ModelError, match=r"gone does not exist.*check model.tokenizer_path"):
        worker.build(
            EngineSpec(TrainRole.alone("policy", TrainConfig(lr=0.1), MODEL)), scalar=False, seed=0
        )

"""Memory of a tensor-parallel rank, in the plan and in the real engine (whose other ranks are
pretended: a process group of the backend ``fake``)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed import tensor_parallel
from burnish.distributed.process_group import RankGroup
from burnish.models.load import load_causal_lm
from burnish.plan.activations import Pass, key_of, measure
from burnish.plan.shapes import PlanError, shape_of
from burnish.plan.tracking import LiveBytes, num_bytes
from burnish.plan.train_role import rank_shape
from burnish.train.row_layout import RowSize
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Stats, rows_to_batch


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: Any) -> Iterator[RankGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield RankGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=8)], ids=["whole", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensor_parallel_part_matches_the_engine(
    lora: LoraConfig | None, checkpointing: bool, ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters exactly; the peak of a pass within a tenth, like any other model's."""
    # The engine compares outputs of the sharded and the full model; pretended ranks add nothing.
    monkeypatch.setattr(tensor_parallel, "_trial_hidden_states", lambda body: torch.zeros(1))
    scratch = ScratchConfig(
        hidden_size=128, num_layers=6, num_heads=8, num_kv_heads=4, max_position_embeddings=4096
    )
    config = ModelConfig(scratch=scratch, lora=lora)
    part = rank_shape(shape_of(config), ranks.size, lora)
    assert part is not None
    train = TrainConfig(
        train_batch_size=1,
        gradient_checkpointing=checkpointing,
        layout="packed",
        engine=TorchEngine(tensor_parallel_size=ranks.size),
    )
    spec = EngineSpec(
        TrainRole.alone("policy", train, config, precision=PrecisionConfig()), micro_batch_size=4
    )
    engine = TorchTrainEngine(
        load_causal_lm(config, dtype="fp32"), replace(spec, temperature=0.5), ranks=ranks
    )
    found = sum(p.numel() for p in engine.model.parameters())
    assert found == part.parameters + part.adapters
    rows = tuple(RowSize(128 - i % 2, 64, 0) for i in range(4))
    work = Pass(
        rows=rows,
        checkpointing=checkpointing,
        with_entropy=True,
        entropy_gradient=True,
        lora=lora,
        layout="packed",
    )
    predicted = measure(key_of(part), work).peak
    batch = rows_to_batch(
        [[10] * r.prompt + [9] * (r.length - r.prompt) for r in rows],
        [[False] * r.prompt + [True] * (r.length - r.prompt) for r in rows],
        prompt_lens=[r.prompt for r in rows],
        group_ids=[0] * len(rows),
    )
    assert engine.optimizer is not None
    own = [*engine.model.parameters(), *engine.model.buffers(), *engine.optimizer.masters]
    with LiveBytes() as live:
        live.hold(own)
        engine.forward_backward(
            batch, lambda o, _: (o.logprobs.exp().sum() + o.entropy.sum(), Stats())
        )
    real = live.peak - num_bytes(own)
    assert predicted == pytest.approx(real, rel=0.1), f"{predicted / real:.3f}"


def test_indivisible_heads_are_a_plan_error() -> None:
    shape = shape_of(ModelConfig(scratch=ScratchConfig(hidden_size=64, num_heads=4)))
    with pytest.raises(PlanError, match="tensor_parallel_size=3 does not divide"):
        rank_shape(shape, 3, None)


def test_tensor_parallel_ranks_split_every_expert() -> None:
    """Qwen3-30B-A3B, 48 layers of width 2048: 32 + 2 x 4 heads of 128 and 128 experts with 3
    matrices of 2048 x 768. Half of 48 x (2 x 32 + 2 x 4) x 128 x 2048 and of 48 x 128 x 3 x 2048 x
    768 entries is on the other rank; the router, norms and embeddings are on both."""
    shape = shape_of(ModelConfig(path="Qwen/Qwen3-30B-A3B"))
    part = rank_shape(shape, 2, None)
    assert part is not None
    split = 48 * (2 * 32 + 2 * 4) * 128 * 2048 + 48 * 128 * 3 * 2048 * 768
    assert shape.parameters - part.parameters == split // 2

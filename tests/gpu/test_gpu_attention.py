"""Attention kernels and reads back from the device, on a real one. Needs a device (``make
test-gpu``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.gpu import set_up_gpu
from burnish.models.load import load_causal_lm
from burnish.models.sdpa import Call, kernels_of, way_of
from burnish.steps.objectives import sft_objective
from burnish.train.batching import Layout
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, rows_to_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=64, num_heads=4, num_kv_heads=2))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """A run's settings, and cuDNN's attention as it was afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    set_up_gpu(torch.device("cuda"))
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dim", [20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_kernel_takes_each_call_unless_scores_are_planned(
    dtype: torch.dtype, dim: int, kv_heads: int, masked: bool
) -> None:
    """Asks torch which kernels would take the call that is made."""
    device = torch.device("cuda:0")
    query = torch.randn(2, 4, 48, dim, device=device, dtype=dtype)
    key = torch.randn(2, kv_heads, 48, dim, device=device, dtype=dtype)
    mask = torch.zeros(2, 1, 48, 48, device=device, dtype=dtype) if masked else None
    grouped = kv_heads < 4
    way = way_of(kernels_of(device), Call(dtype, (dim, dim), masked=masked, grouped=grouped))
    if way == "repeated":
        key = key.repeat_interleave(2, dim=1)
    given = (query, key, key, mask, 0.0, not masked, grouped and way != "repeated")
    params = SDPAParams(*given)
    fused = can_use_flash_attention(params) or can_use_efficient_attention(params)
    assert fused == (way != "scores")


@pytest.mark.parametrize("layout", ["shared_prefix", "packed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_reads_nothing_back_before_its_end(layout: Layout, dtype: Dtype) -> None:
    """Under torch's own check, in which an operation that waits for the device raises."""
    train = TrainConfig(lr=1e-3, layout=layout)
    precision = PrecisionConfig(dtype=dtype)
    spec = EngineSpec(
        TrainRole.alone("policy", train, MODEL, precision=precision), micro_batch_size=3
    )
    engine = TorchTrainEngine(load_causal_lm(MODEL, dtype="fp32", device="cuda:0"), spec)
    engine.forward_backward(_batch(), sft_objective())  # what is made at the first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = engine.forward_backward(_batch(), sft_objective())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.floats()["nll"] > 0


def _batch() -> Batch:
    """Two groups of three rows of unequal length behind a prompt of 5 tokens."""
    rows = [[7 + i // 3] * 5 + [11] * (2 + i) for i in range(6)]
    masks = [[False] * 5 + [True] * (2 + i) for i in range(6)]
    return rows_to_batch(rows, masks, prompt_lens=[5] * 6, group_ids=[0, 0, 0, 1, 1, 1])

"""FlashAttention over segment lengths, on a real device, beside scaled-dot-product attention. Needs
a device (``make test-gpu``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.attention import packed_attention, plan_segments
from burnish.models.attention_kernel import try_newer
from burnish.models.cache_attention import Options
from burnish.models.flash import FlashSwitch, schema_problem
from burnish.models.flash_merge import merge_by_torch, triton_merge
from burnish.models.flash_versions import activation_problem, newer_for, select
from burnish.models.load import load_causal_lm
from burnish.models.sdpa import kernels_of
from burnish.models.segments import Segment
from burnish.steps.objectives import sft_objective
from burnish.train.batching import Layout
from burnish.train.engines import load_engine
from burnish.train.row_layout import RowSize, place_rows, segments_of
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import rows_to_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=64, num_heads=4, num_kv_heads=2))
GROUPS = [(40, (30, 1, 170)), (1, (20, 20)), (300, (60,)), (129, (128, 257))]


def segments() -> list[Segment]:
    rows = [
        RowSize(prompt + response, prompt, number)
        for number, (prompt, responses) in enumerate(GROUPS)
        for response in responses
    ]
    return segments_of(place_rows(rows, "shared_prefix"))


def results(
    attention: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor],
    qkv: Sequence[Tensor],
    grad: Tensor,
) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    query, key, value = (x.clone().requires_grad_() for x in qkv)
    out = attention((query, key, value))
    out.backward(grad)
    found: list[Any] = [out.detach(), query.grad, key.grad, value.grad]
    return found


@pytest.mark.parametrize("window", [None, 64, 200, 1000])
@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 128), ((4, 4), 64), ((4, 1), 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_and_gradients_are_those_of_rectangles_in_fp32(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, window: int | None
) -> None:
    """Within the rounding of the format: 2^-9 and 2^-12 of the largest value, several times."""
    assert schema_problem() is None
    rows = segments()
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in rows]).cuda()
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    *qkv, grad = (
        torch.randn(positions.numel(), h, dim, device="cuda", generator=draw).to(dtype)
        for h in sizes
    )
    options = Options(layer=0, scale=dim**-0.5, window=window, dropout=0.0, softcap=None)
    plans = [
        plan_segments(rows, positions, flash=flash)
        for flash in (FlashSwitch(may_fall_back=False), None)
    ]
    ours = results(lambda x: packed_attention(plans[0], x, options), qkv, grad)
    wide = [x.float() for x in qkv]
    expected = results(lambda x: packed_attention(plans[1], x, options), wide, grad.float())
    for x, y in zip(ours, expected, strict=True):
        assert x.dtype == dtype
        assert (x.float() - y).abs().max() <= 0.02 * y.abs().max()


@pytest.mark.parametrize("layout", ["shared_prefix", "packed"])
def test_an_engine_takes_flash_and_agrees_with_sdpa(layout: Layout) -> None:
    found = {}
    for attention in ("sdpa", "flash", "auto"):
        train = TrainConfig(lr=1e-3, layout=layout, attention=attention)  # type: ignore[arg-type]
        role = TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig(dtype="bf16"))
        torch.manual_seed(0)
        model = load_causal_lm(MODEL, dtype="fp32", device="cuda:0")
        engine = TorchTrainEngine(model, EngineSpec(role, micro_batch_size=4))
        batch = rows_to_batch(
            [[3, 4, 5, 6, *range(7, 7 + n)] for n in (3, 9, 1, 14)],
            [[False] * 4 + [True] * n for n in (3, 9, 1, 14)],
            prompt_lens=[4] * 4,
            group_ids=[0, 0, 0, 1],
        )
        logprobs = engine.logprobs(batch).cpu()
        engine.forward_backward(batch, sft_objective())
        found[attention] = engine.attention.kernel, logprobs, engine.optim_step().grad_norm
    assert found["auto"][0] == found["flash"][0] == "flash" and found["sdpa"][0] == "sdpa"
    assert torch.equal(found["auto"][1], found["flash"][1])
    assert (found["flash"][1] - found["sdpa"][1]).abs().max() <= 0.05  # nats; bf16
    assert found["flash"][2] == pytest.approx(found["sdpa"][2], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_triton_kernel_merges_like_torch(dtype: torch.dtype) -> None:
    draw, tokens = torch.Generator("cuda").manual_seed(0), 1003
    reads = torch.rand(tokens, device="cuda", generator=draw) > 0.4
    parts = [
        (
            torch.randn(tokens, 14, 80, device="cuda", generator=draw).to(dtype),
            3 * torch.randn(14, tokens, device="cuda", generator=draw),
        )
        for _ in range(2)
    ]
    parts[0][0][~reads], parts[0][1][:, ~reads] = torch.nan, torch.inf
    expected = merge_by_torch(parts[0], parts[1], reads)
    ours = triton_merge()(parts[0], parts[1], reads)
    for x, y in zip(ours, expected, strict=True):
        rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-5)


def test_two_passes_have_equal_bits_with_deterministic_algorithms() -> None:
    rows = segments()
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in rows]).cuda()
    plan = plan_segments(rows, positions, flash=FlashSwitch(may_fall_back=False))
    options = Options(layer=0, scale=0.1, window=None, dropout=0.0, softcap=None)
    draw = torch.Generator("cuda").manual_seed(0)
    *qkv, grad = (
        torch.randn(positions.numel(), h, 128, device="cuda", generator=draw).bfloat16()
        for h in (16, 8, 8, 16)
    )
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            results(lambda x: packed_attention(plan, x, options), qkv, grad) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def trained(*, deterministic: bool) -> list[Tensor]:
    """Weights after two steps of an engine on the device."""
    torch.manual_seed(0)
    train = TrainConfig(lr=1e-3, attention="flash", deterministic=deterministic)
    role = TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig(dtype="bf16"))
    engine = load_engine(EngineSpec(role), scalar=False, device=torch.device("cuda"))
    rows = [[3, 4, 5] + [6 + i] * (100 * i + 5) for i in range(6)]
    masks = [[False] * 3 + [True] * (len(row) - 3) for row in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[3] * 6, group_ids=[0, 0, 0, 1, 1, 1])
    for _ in range(2):
        engine.forward_backward(batch, sft_objective())
        engine.optim_step()
    return [tensor.clone() for _, tensor in engine.weights()]


def test_two_runs_with_train_deterministic_have_equal_bits() -> None:
    first, second = (trained(deterministic=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_installed_newer_flash_attention_agrees_with_sdpa() -> None:
    device = torch.device("cuda")
    name = newer_for(kernels_of(device))
    if name is None or (problem := activation_problem(name)) is not None:
        pytest.skip(f"no newer FlashAttention: {name and problem}")
    try:
        for dim, group in ((64, 2), (128, 4), (256, 4)):
            problem = try_newer(name, device, "bf16", dim, group, window=True)
            print(f"{name}, size {dim}: {problem or 'agrees'}")
        assert try_newer(name, device, "bf16", 128, 2, window=False) is None
    finally:
        select(None)

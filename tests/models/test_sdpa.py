"""The choice of torch's attention kernel for a call; all choices compute the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from burnish.models.attention import NO_MASK, plan_segments
from burnish.models.gpu import set_up_gpu
from burnish.models.load import choose_attention
from burnish.models.sdpa import Call, Kernels, Way, attend, way_of
from burnish.models.segments import Segment

OLD, NEW = (2, 13), (2, 14)
A100, H100, V100 = (8, 0), (9, 0), (7, 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

WAYS: list[tuple[Way, Kernels, Call]] = [
    # flash: half formats, no mask
    ("grouped", Kernels(OLD, A100), Call(BF16, (128, 128), masked=False, grouped=True)),
    ("grouped", Kernels(OLD, H100), Call(FP16, (256, 256), masked=False, grouped=True)),
    # memory-efficient: a mask, fp32, or sizes that flash does not take
    ("repeated", Kernels(OLD, A100), Call(BF16, (128, 128), masked=True, grouped=True)),
    ("repeated", Kernels(OLD, H100), Call(BF16, (64, 64), masked=True, grouped=True)),
    ("repeated", Kernels(OLD, A100), Call(FP32, (64, 64), masked=False, grouped=True)),
    ("repeated", Kernels(OLD, A100), Call(BF16, (192, 128), masked=False, grouped=True)),
    ("repeated", Kernels(OLD, A100), Call(BF16, (200, 200), masked=False, grouped=True)),
    ("repeated", Kernels(OLD, V100), Call(FP16, (64, 64), masked=False, grouped=True)),
    ("grouped", Kernels(NEW, A100), Call(BF16, (128, 128), masked=True, grouped=True)),
    ("repeated", Kernels(NEW, A100, hip=True), Call(BF16, (64, 64), masked=True, grouped=True)),
    ("grouped", Kernels(OLD, A100), Call(BF16, (128, 128), masked=True, grouped=False)),
    # nothing fused
    ("scores", Kernels(NEW, V100), Call(BF16, (64, 64), masked=False, grouped=True)),
    ("scores", Kernels(NEW, A100), Call(FP64, (64, 64), masked=True, grouped=False)),
    ("scores", Kernels(NEW, A100), Call(BF16, (20, 20), masked=True, grouped=False)),
    ("scores", Kernels(OLD, A100), Call(FP32, (6, 6), masked=True, grouped=False)),
]


@pytest.mark.parametrize(("way", "kernels", "call"), WAYS)
def test_the_kernel_choice_depends_on_version_gpu_and_call(
    way: Way, kernels: Kernels, call: Call
) -> None:
    assert way_of(kernels, call) == way


def test_a_cpu_supports_every_call() -> None:
    assert way_of(None, Call(FP64, (6, 6), masked=True, grouped=True)) == "grouped"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernels", [Kernels(OLD, A100), Kernels(NEW, A100), Kernels(NEW, V100)])
def test_every_kernel_choice_gives_equal_outputs_and_gradients(
    kernels: Kernels, masked: bool
) -> None:
    """Three ways for bf16 operands; in fp32 here they are two: repeated and grouped."""
    torch.manual_seed(0)
    sizes = [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8)]
    mask = torch.zeros(2, 1, 9, 9).masked_fill_(torch.rand(2, 1, 9, 9) < 0.3, -torch.inf)
    mask[..., 0] = 0
    results = []
    for which in (None, kernels):
        qkv = [torch.randn(s, requires_grad=True) for s in sizes]
        for x, y in zip(qkv, results[0][1:] if results else qkv, strict=True):
            x.data = y.data.clone()
        out = attend((qkv[0], qkv[1], qkv[2]), mask if masked else None, which, scale=0.3)
        grads = torch.autograd.grad(out.square().sum(), qkv)
        results.append((torch.cat([out.flatten(), *(g.flatten() for g in grads)]), *qkv))
    # fp32 sums of up to 18 terms near 1, in another order
    torch.testing.assert_close(results[0][0], results[1][0], atol=5e-6, rtol=1e-5)


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=6),
    "softcap": Gemma2Config(**SIZES, head_dim=8, sliding_window=6),
}
"""Queries of the packed rows below: 21 and 14 tokens, so a mask is [2, 1, 21, 21]."""


class Rectangles(TorchDispatchMode):
    """Operations with an output [.., 21, 21 or more] that is not a view: masks, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and tuple(out.shape[-2:]) in {(21, 21), (21, 32)}:
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_a_mask_is_created_once_for_all_layers(name: str, dtype: torch.dtype) -> None:
    """Three layers: no conversion in any of them, and one mask among the tensors kept for
    backward. Its rows begin at multiples of 16 numbers (a row of 21 takes 32)."""
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=dtype)
    choose_attention(model, name)
    positions = torch.cat([torch.arange(21), torch.arange(14)])
    plan = plan_segments([Segment(0, 21), Segment(21, 14)], positions)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape[-2:]) == (21, 21):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Rectangles() as made, saved_tensors_hooks(keep, lambda x: x):
        inputs = {"position_ids": positions[None], "attention_mask": NO_MASK, "plan": plan}
        out = model(torch.arange(35)[None], **inputs).logits
    assert not {x for x in made.names if "where" in x or "_to_copy" in x}
    assert sum("masked_fill_" in x for x in made.names) == 1
    [mask] = kept.values()
    assert mask.dtype == dtype and mask.shape == (2, 1, 21, 21)
    assert all(stride % 16 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    out.float().sum().backward()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_packed_rows_equal_separate_rows_for_every_kernel_choice(name: str) -> None:
    """Hidden states of both rows, with the kernels of a CPU, of old and of new torch on a GPU."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).eval()
    choose_attention(model, name)
    positions = torch.cat([torch.arange(21), torch.arange(14)])
    ids = torch.arange(35)
    plan = plan_segments([Segment(0, 21), Segment(21, 14)], positions)
    alone = torch.cat([model(part[None]).logits[0] for part in (ids[:21], ids[21:])])
    for kernels in (None, Kernels(OLD, A100), Kernels(NEW, A100)):
        inputs = {"position_ids": positions[None], "attention_mask": NO_MASK}
        found = model(ids[None], plan=replace(plan, kernels=kernels), **inputs).logits[0]
        # fp32 sums of at most a few hundred terms of size 1, in another order
        torch.testing.assert_close(found, alone, atol=5e-6, rtol=0)


def test_a_process_on_a_gpu_does_without_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its execution plans are per shape, and packed rows have a new shape in each pass."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        set_up_gpu(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled() and not chosen
        set_up_gpu(torch.device("cuda"))  # set_device rejects a device without an index
        assert not torch.backends.cuda.cudnn_sdp_enabled() and not chosen
        set_up_gpu(torch.device("cuda:0"))
        assert chosen == [torch.device("cuda:0")]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
        matmul.allow_fp16_reduced_precision_reduction = reduced
        matmul.allow_bf16_reduced_precision_reduction = reduced

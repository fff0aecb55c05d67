"""Compiled layers (``train.compile``) with FlashAttention, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from burnish.config.model import Dtype
from burnish.models.attention import ATTENTION_NAME, NO_MASK, plan_segments
from burnish.models.compiled_layers import Compilations, CompiledLayers, device_problem
from burnish.models.flash import FlashSwitch
from burnish.models.segments import Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def config(depth: int) -> Qwen3Config:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}
    return Qwen3Config(num_hidden_layers=depth, **sizes, **heads)


def body_of(depth: int) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(depth))
    model.set_attn_implementation(ATTENTION_NAME)
    return model.to("cuda", torch.bfloat16).get_decoder()


def run(body: Any, responses: list[int]) -> list[Tensor]:
    """Last hidden states and gradients of one prompt of 40 tokens with responses."""
    segments, end = [Segment(0, 40)], 40
    for length in responses:
        segments.append(Segment(end, length, 0, 40))
        end += length
    positions = torch.cat([torch.arange(s.prefix_len, s.k_len) for s in segments]).cuda()
    plan = plan_segments(segments, positions, flash=FlashSwitch(may_fall_back=False))
    inputs: dict[str, Any] = {"position_ids": positions[None], "attention_mask": NO_MASK.cuda()}
    ids = torch.arange(end, device="cuda")[None] * 7 % 64
    body.zero_grad()
    hidden = body(input_ids=ids, use_cache=False, plan=plan, **inputs).last_hidden_state
    hidden.float().square().mean().backward()
    return [hidden.detach(), *(p.grad.clone() for p in body.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_compute_what_eager_layers_do(checkpointing: bool) -> None:
    """bf16: several roundings of 2^-8, of the largest value."""
    rows = ([30, 17], [5, 64, 9], [21], [33, 2, 50, 8])
    expected = [run(body_of(3), lengths) for lengths in rows]
    body = body_of(3).train()
    layers = CompiledLayers(body)
    if checkpointing:
        body.activation_checkpointing_enable({"use_reentrant": False})
    counts = []
    for lengths, reference in zip(rows, expected, strict=True):
        for x, y in zip(reference, run(body, lengths), strict=True):
            error = float((x.float() - y.float()).abs().max() / x.float().abs().max())
            assert error <= 0.05
        counts.append(Compilations.so_far().graphs)
    assert len(set(counts)) == 1, "no graph is made for rows of other lengths"
    assert layers.uses == 12 * (1 + checkpointing)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_small_copy_passes_its_trial(dtype: Dtype) -> None:
    assert device_problem(config(2), torch.device("cuda"), dtype) is None

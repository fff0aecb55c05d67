"""Deterministic kernels (``train.deterministic``): repeated passes on a GPU have equal bits.

PyTorch selects them for the process, and raises for an operation that has none. Sampling has such
operations, so they are selected within the passes of train engines only. On a CPU passes have equal
bits in any case.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.config.model import Dtype
from burnish.models.attention import ATTENTION_NAME, NO_MASK, plan_segments
from burnish.models.family_check import failure_text
from burnish.models.gpu import limited_trial
from burnish.models.load import DTYPES
from burnish.models.logprobs import Head, token_logprobs
from burnish.models.paths import ModelError
from burnish.models.segments import Segment
from burnish.models.shrink import build, shrink
from burnish.models.support import below_rope_border, cached_result, model_support, runs_own_code

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WAY_OUT = "use train.deterministic=false (passes then differ in their last bits on a GPU)"


@contextmanager
def deterministic_kernels(on: bool) -> Iterator[None]:
    """Select PyTorch's deterministic kernels within the context. No effect without ``on``."""
    if not on:
        yield
        return
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # costs time, and changes nothing here
    try:
        yield
    except RuntimeError as error:
        if "deterministic" in str(error):
            error.add_note(f"train.deterministic=true: {WAY_OUT}")
        raise
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


@dataclass(frozen=True)
class DeterministicSupport:
    """Result of two passes of a small random copy of a model with deterministic kernels."""

    model_type: str
    refusal: str = ""
    """Why passes of this model do not have equal bits; empty if they do."""


def check_deterministic(
    config: PretrainedConfig | None, device: torch.device, dtype: Dtype = "fp32"
) -> None:
    """Prepare the process for deterministic kernels. Raise ModelError if an operation of the model
    (None: unknown) has none on ``device`` in ``dtype``."""
    os.environ.setdefault(WORKSPACE, ":4096:8")  # read by cuBLAS at its first product
    if config is None:
        return
    trust = runs_own_code(config)
    packed = model_support(config, trust=trust).packed
    tiny = below_rope_border(shrink(config))
    on_cpu = device.type == "cpu"  # (results of a GPU are not cached: others may use the cache)
    number_format = torch.float32 if on_cpu else DTYPES[dtype]
    run = functools.partial(_try, tiny, device, number_format, packed=packed, trust=trust)
    result = cached_result(DeterministicSupport, tiny, run, trust=trust) if on_cpu else run()
    if result.refusal:
        raise ModelError(f"train.deterministic=true: {result.refusal}; {WAY_OUT}")


def _try(
    tiny: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, packed: bool, trust: bool
) -> DeterministicSupport:
    model: Any = build(tiny, trust=trust)
    if packed:
        model.set_attn_implementation(ATTENTION_NAME)
    model.to(device, dtype)
    try:
        with (
            limited_trial("two passes by deterministic kernels", WAY_OUT, device),
            torch.enable_grad(),
            deterministic_kernels(True),
        ):
            first, second = (_pass(model, packed=packed) for _ in range(2))
    except RuntimeError as error:
        if "deterministic" not in str(error):  # (other problems have their own checks)
            return DeterministicSupport(tiny.model_type)
        return DeterministicSupport(
            tiny.model_type, f"its layers have no deterministic kernel ({failure_text(error)})"
        )
    if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
        return DeterministicSupport(tiny.model_type, "two passes of its layers have other bits")
    return DeterministicSupport(tiny.model_type)


def _pass(model: Any, *, packed: bool) -> list[Tensor]:
    """Return log-probs and gradients of a pass over two rows of 8 tokens."""
    head = model.get_output_embeddings()
    device = head.weight.device
    ids = torch.arange(16, device=device) % model.get_input_embeddings().num_embeddings
    inputs: dict[str, Any] = {"input_ids": ids.view(2, 8)}
    if packed:
        positions = torch.arange(8, device=device).repeat(2)
        inputs = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": NO_MASK.to(device),
            "plan": plan_segments([Segment(0, 8), Segment(8, 8)], positions),
        }
    model.zero_grad()
    hidden = model.get_decoder()(use_cache=False, **inputs).last_hidden_state.flatten(0, 1)
    targets = ids % head.weight.shape[0]
    logprobs, _ = token_logprobs(
        hidden.to(head.weight.dtype), targets, Head(head.weight, head.bias), with_entropy=False
    )
    logprobs.sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logprobs.detach(), *grads]

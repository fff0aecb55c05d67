"""Log-probs by Triton kernels on a real device, against fp64. Needs one (``make test-gpu``)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from burnish.models.fused_head import (
    FusedHead,
    Softmax,
    Transform,
    Upstream,
    accumulates,
    choose_head,
    fused_chunk_tokens,
    triton_kernels,
)
from burnish.models.logit_scaling import UNSCALED, LogitScaling
from burnish.models.logprobs import Head, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("vocabulary", [7, 4096, 50_257, 151_936])
def test_results_equal_fp64(vocabulary: int, dtype: torch.dtype) -> None:
    """Temperatures 0.3 to 2, with and without a cap; excluded entries."""
    draw = torch.Generator("cuda").manual_seed(0)
    kernels = triton_kernels()
    for temperature, softcap in product((0.3, 1.0, 2.0), (None, 6.0)):
        outputs = (2 * torch.randn(5, vocabulary, device=CUDA, generator=draw)).to(dtype)
        if softcap is None:
            outputs[0, : vocabulary // 2] = -torch.inf
        targets = torch.full((5,), vocabulary - 1, device=CUDA)
        upstream = Upstream(*torch.randn(2, 5, device=CUDA, generator=draw))
        leaf = outputs.double().requires_grad_()
        logits = leaf if softcap is None else softcap * (leaf / softcap).tanh()
        log_p = (logits / temperature).log_softmax(-1)
        logprobs = log_p[:, -1]
        entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
        loss = (logprobs * upstream.logprobs).sum() + (entropy * upstream.entropy).sum()
        (expected,) = torch.autograd.grad(loss, leaf)
        softmax = Softmax.empty(outputs, with_entropy=True)
        transform = Transform(LogitScaling(1.0, softcap), temperature)
        kernels.reduce(outputs, targets, transform, softmax)
        kernels.backward_(outputs, targets, transform, softmax, upstream)
        torch.testing.assert_close(softmax.logprobs.double(), logprobs, atol=1e-5, rtol=0)
        assert softmax.entropy is not None
        torch.testing.assert_close(softmax.entropy.double(), entropy, atol=1e-5, rtol=0)
        smallest = 2.0**-25 if dtype == torch.float16 else 0.0
        room = 1e-5 * float(expected.abs().max()) + smallest
        torch.testing.assert_close(outputs.double(), expected, atol=room, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_the_kernels_are_chosen(dtype: torch.dtype) -> None:
    for vocabulary, scaling in ((151_936, UNSCALED), (1000, LogitScaling(0.5, 30.0))):
        choice = choose_head(CUDA, dtype, vocabulary, scaling)
        assert choice.kernels is not None, choice.sentence
    if dtype != torch.float32 and accumulates(CUDA, dtype):
        assert choice.kernels.accumulate is not None


def test_a_head_keeps_one_chunk_and_equals_pytorch() -> None:
    """Peak above the inputs, the gradients and the fp32 sum: one chunk, and a tenth for workspaces.
    Gradients within the rounding of bf16."""
    draw = torch.Generator("cuda").manual_seed(0)
    tokens, vocabulary, width = 5000, 151_936, 256
    hidden = torch.randn(tokens, width, device=CUDA, generator=draw).bfloat16()
    weight = (0.1 * torch.randn(vocabulary, width, device=CUDA, generator=draw)).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), device=CUDA, generator=draw)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    choice = choose_head(CUDA, torch.bfloat16, vocabulary, UNSCALED)
    assert choice.kernels is not None
    chunk = fused_chunk_tokens(None, vocabulary, 2)
    plain = Head(weight, temperature=0.7, chunk_tokens=512)
    results = []
    for head in (replace(plain, fused=FusedHead(choice.kernels, chunk)), plain):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, entropy = token_logprobs(hidden, targets, head, with_entropy=True)
        assert entropy is not None
        grads = torch.autograd.grad(logprobs.sum() - 0.1 * entropy.sum(), leaves)
        peak = torch.cuda.max_memory_allocated() - before
        results.append((peak, [logprobs.detach(), entropy.detach(), *grads]))
    peak = results[0][0]
    if choice.kernels.accumulate is not None:
        assert peak <= 1.1 * chunk * vocabulary * 2 + vocabulary * width * (4 + 2)
    assert peak < results[1][0]
    for index, (x, y) in enumerate(zip(results[0][1], results[1][1], strict=True)):
        most = 1e-5 if index < 2 else 2**-6
        assert (x.float() - y.float()).abs().max() <= most * y.float().abs().max()

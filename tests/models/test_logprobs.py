"""Chunked log-probs and entropy against plain float64 log-softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.models.logprobs import Head, chunk_tokens, token_logprobs
from burnish.plan.tracking import LiveBytes


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_logprobs_entropy_and_gradients_equal_float64(
    masked: bool, chunk: int, temperature: float
) -> None:
    """``masked``: rows are over 1 to 5 ids; the first row is over the full vocabulary, as is the
    entropy of every row."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(10, 16, generator=generator),
        torch.randn(30, 16, generator=generator),
    )
    bias, targets = (
        torch.randn(30, generator=generator),
        torch.randint(0, 30, (10,), generator=generator),
    )
    upstream = torch.randn(2, 10, generator=generator)
    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = (exact[0] @ exact[1].T + exact[2]) / temperature
    log_p = full = logits.log_softmax(-1)
    kept = None
    if masked:
        kept = (targets[:, None] + torch.arange(5)).int() % 30
        kept[torch.arange(5) > torch.arange(10)[:, None] % 6 - 1] = -1
        allowed = torch.zeros(10, 31, dtype=torch.bool).scatter_(-1, kept.long() % 31, True)[:, :30]
        allowed[(kept < 0).all(-1)] = True
        log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    expected = log_p[torch.arange(10), targets], -(full.exp() * full).sum(-1)
    (upstream[0].double() * expected[0] + upstream[1].double() * expected[1]).sum().backward()

    ours = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    head = Head(ours[1], ours[2], temperature=temperature, chunk_tokens=chunk)
    logprobs, entropy = token_logprobs(ours[0], targets, head, with_entropy=True, kept_ids=kept)
    assert entropy is not None
    (upstream[0] * logprobs + upstream[1] * entropy).sum().backward()

    # fp32 with logits up to ~20: 20 x 1.2e-7 per operation, a few operations
    torch.testing.assert_close(logprobs.double(), expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected[1], atol=2e-5, rtol=0)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=5e-5, rtol=1e-5)


def test_at_most_one_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = Head.logits

    def counted(self: Head, hidden: torch.Tensor) -> torch.Tensor:
        made.append(hidden.shape[0])
        return original(self, hidden)

    monkeypatch.setattr(Head, "logits", counted)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden, torch.zeros(10, dtype=torch.int64), Head(weight, chunk_tokens=4)
    )
    logprobs.sum().backward()
    assert made == [4, 4, 2, 4, 4], "four rows at a time; the last two are kept for backward"


@pytest.mark.parametrize(
    ("with_entropy", "in_loss", "forward", "backward"),
    [(False, False, 1.3, 1.6), (True, False, 2.3, 1.6), (True, True, 2.3, 4.6)],
)
def test_number_of_chunk_buffers(
    with_entropy: bool, in_loss: bool, forward: float, backward: float
) -> None:
    """Most live bytes, in [chunk, vocab] fp32 buffers; the weight's gradient is a quarter of one.
    Entropies that are measured and not in the loss cost no buffer in backward."""
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(4096, 8)
    weight.requires_grad_()
    with LiveBytes() as live:
        logprobs, entropy = token_logprobs(
            hidden,
            torch.zeros(256, dtype=torch.int64),
            Head(weight, chunk_tokens=32),
            with_entropy=with_entropy,
        )
        loss = logprobs.sum()
        if in_loss:
            assert entropy is not None
            loss = loss + entropy.sum()
        live.stage("backward")
        loss.backward()
    unit = 4 * 32 * 4096
    assert live.peaks["start"][0] < forward * unit
    assert live.peaks["backward"][0] < backward * unit


def test_only_entropies_in_the_loss() -> None:
    """The log-probs have no gradient then."""
    hidden, weight = torch.randn(5, 8).double(), torch.randn(30, 8).double()
    exact, ours = hidden.clone().requires_grad_(), hidden.float().requires_grad_()
    log_p = (exact @ weight.T).log_softmax(-1)
    (log_p.exp() * log_p).sum().backward()
    entropy = token_logprobs(
        ours, torch.zeros(5, dtype=torch.int64), Head(weight.float()), with_entropy=True
    )[1]
    assert entropy is not None and ours.grad is None
    (-entropy).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=2e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8)
    token_logprobs(hidden, torch.zeros(4, dtype=torch.int64), Head(weight))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reduces_in_fp32(dtype: torch.dtype) -> None:
    """Logits are rounded to the dtype (8 or 11 bits of mantissa), the softmax over them is not:
    against the float64 softmax of the same rounded logits the error stays at fp32's level."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 32, generator=generator).to(dtype)
    weight = torch.randn(1000, 32, generator=generator).to(dtype)
    targets = torch.arange(6)
    logits = torch.nn.functional.linear(hidden, weight).double()
    expected = logits.log_softmax(-1)[torch.arange(6), targets]
    logprobs, _ = token_logprobs(hidden, targets, Head(weight))
    assert logprobs.dtype == torch.float32
    # a sum of 1000 exponentials in fp32: below 1000 x 6e-8 relative
    torch.testing.assert_close(logprobs.double(), expected, atol=6e-5, rtol=0)


def test_chunks_are_larger_on_a_gpu_unless_the_recipe_says() -> None:
    assert [chunk_tokens(None, device) for device in ("cpu", "cuda", "meta")] == [512, 2048, 512]
    assert chunk_tokens(7, "cuda") == 7


def test_without_a_temperature_no_logit_is_divided() -> None:
    """Bit for bit: x / 1 is x, so the pass over [chunk, vocab] can be left out."""
    hidden, weight = torch.randn(6, 8), torch.randn(11, 8)

    class Divisions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += "div" in str(func)
            return func(*args, **(kwargs or {}))

    with Divisions() as divisions:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out, entropy = token_logprobs(
            leaves[0], torch.arange(6), Head(leaves[1], chunk_tokens=4), with_entropy=True
        )
        (out.sum() + entropy.sum()).backward()
    assert divisions.count == 0
    expected = (hidden @ weight.T).div(1.0).log_softmax(-1)
    torch.testing.assert_close(out, expected[torch.arange(6), torch.arange(6)])


def test_collision_entropies_are_those_of_the_squared_probabilities() -> None:
    """Probabilities 1/2, 1/4, 1/4: -ln(1/4 + 1/16 + 1/16) = ln(8/3). One token with p = 1: 0, also
    with excluded tokens. Log-probs do not depend on the order."""
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64)
    head = Head(torch.eye(3), chunk_tokens=1)
    hidden, targets = p.log().clamp(min=-1e30).float(), torch.tensor([1, 0])
    with torch.no_grad():
        found = [
            token_logprobs(hidden, targets, head, with_entropy=True, entropy_order=order)
            for order in (1, 2)
        ]
    assert torch.equal(found[0][0], found[1][0]) and found[1][1] is not None
    # 1e-6: fp32
    assert found[1][1].tolist() == pytest.approx([math.log(8 / 3), 0.0], abs=1e-6)
    with pytest.raises(AssertionError, match="only Shannon's"):
        token_logprobs(hidden, targets, head, with_entropy=True, entropy_order=2)

"""The chunked comparison of a student with its teacher against the plain one over the full
vocabulary."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from burnish.algorithms.distill import DIVERGENCES, SLOPES, forward_kl
from burnish.models.distill import DistillOutputs, DistillTarget, distill_logprobs
from burnish.models.logprobs import Head, token_logprobs
from burnish.plan.tracking import LiveBytes
from burnish.plan.train_role import MORE_BUFFERS

KINDS = ["forward_kl", "reverse_kl", "jsd"]
OPTIONS = {"jsd": {"beta": 0.3}}


def distill_target(
    kind: str, weight: Tensor, *, chunk: int, temperature: float = 1.0
) -> DistillTarget:
    value, slope = DIVERGENCES[kind], SLOPES[kind]
    if kind in OPTIONS:
        value, slope = partial(value, **OPTIONS[kind]), partial(slope, **OPTIONS[kind])
    head = Head(weight, chunk_tokens=chunk)
    return DistillTarget(head, value, slope, forward_kl, temperature)


class Case:
    """17 tokens, a student of width 6 with 13 tokens and a bias, a teacher of width 4."""

    def __init__(self, shared: int = 13, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.hidden = torch.randn(17, 6, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(13, 6, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(13, dtype=dtype, requires_grad=True)
        self.states, self.teacher = torch.randn(17, 4, dtype=dtype), torch.randn(shared, 4)
        self.teacher = self.teacher.to(dtype)
        self.targets = torch.randint(0, 13, (17,))
        self.upstream = torch.randn(2, 17)

    def chunked(self, kind: str, chunk: int, temperature: float = 1.0) -> DistillOutputs:
        head = Head(self.weight, self.bias, chunk_tokens=chunk)
        how = distill_target(kind, self.teacher, chunk=chunk, temperature=temperature)
        return distill_logprobs(
            self.hidden, self.targets, head, states=self.states, distill_target=how
        )

    def plain(self, kind: str, temperature: float = 1.0) -> DistillOutputs:
        """All logits at once, in fp64, by autograd."""
        logits = self.hidden.double() @ self.weight.double().T + self.bias.double()
        logprobs = logits.log_softmax(-1).gather(-1, self.targets[:, None])[:, 0]
        shared = self.teacher.shape[0]
        log_p = (logits[:, :shared] / temperature).log_softmax(-1)
        log_q = (self.states.double() @ self.teacher.double().T / temperature).log_softmax(-1)
        value = partial(DIVERGENCES[kind], **OPTIONS.get(kind, {}))
        same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
        return DistillOutputs(logprobs, value(log_p, log_q), forward_kl(log_p, log_q), same)

    def grads(self, found: DistillOutputs, *, nll: bool = True) -> tuple[Tensor, ...]:
        loss = (found.divergence * self.upstream[0]).sum()
        if nll:
            loss = loss + (found.logprobs * self.upstream[1]).sum()
        return torch.autograd.grad(loss, (self.hidden, self.weight, self.bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("shared", [13, 9])
@pytest.mark.parametrize("nll", [True, False])
def test_values_and_gradients_equal_those_of_unchunked_logits(
    kind: str, temperature: float, shared: int, nll: bool
) -> None:
    case = Case(shared)
    ours, exact = case.chunked(kind, 5, temperature), case.plain(kind, temperature)
    for name in ("logprobs", "divergence", "kl", "agreement"):
        # 1e-5: fp32 sums over 13 numbers of size up to 10
        torch.testing.assert_close(
            vars(ours)[name].double(), vars(exact)[name].double(), atol=1e-5, rtol=1e-5
        )
    for mine, theirs in zip(case.grads(ours, nll=nll), case.grads(exact, nll=nll), strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=1e-5)  # sums of 17 of them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 16, 17])
def test_the_size_of_a_chunk_does_not_matter(kind: str, chunk: int) -> None:
    case = Case(11)
    whole, parts = case.chunked(kind, 512), case.chunked(kind, chunk)
    for name in ("logprobs", "divergence", "kl", "agreement"):
        torch.testing.assert_close(vars(parts)[name], vars(whole)[name], atol=2e-6, rtol=1e-6)
    for mine, theirs in zip(case.grads(parts), case.grads(whole), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)  # fp32 in another order


def test_a_second_backward_finds_the_same_gradient() -> None:
    """The last chunk's logits are kept for the first one only."""
    case = Case()
    found = case.chunked("jsd", 5)
    loss = found.divergence.sum() - found.logprobs.sum()
    first = torch.autograd.grad(loss, (case.hidden, case.weight), retain_graph=True)
    second = torch.autograd.grad(loss, (case.hidden, case.weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)  # fp32


def test_log_probs_alone_have_the_same_gradient_as_without_a_teacher() -> None:
    case = Case(9)
    found = case.chunked("forward_kl", 5)
    plain, _ = token_logprobs(case.hidden, case.targets, Head(case.weight, case.bias))
    torch.testing.assert_close(found.logprobs, plain, atol=1e-6, rtol=0)
    parts = (case.hidden, case.weight, case.bias)
    ours = torch.autograd.grad(found.logprobs.sum(), parts)
    for mine, theirs in zip(ours, torch.autograd.grad(plain.sum(), parts), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)  # fp32
    assert not found.kl.requires_grad and not found.agreement.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_formats_are_reduced_in_fp32(kind: str, dtype: torch.dtype) -> None:
    case = Case(9, dtype)
    ours, exact = case.chunked(kind, 5), case.plain(kind)
    assert ours.divergence.dtype == torch.float32
    # logits of size 5 rounded to 8 bits (bf16): 0.02 each, in differences of two of them
    torch.testing.assert_close(ours.divergence.double(), exact.divergence, atol=0.06, rtol=0.03)
    for mine, theirs in zip(case.grads(ours), case.grads(exact), strict=True):
        assert mine.dtype == dtype
        scale = float(theirs.double().abs().max())
        # the gradients' own 8 bits besides
        torch.testing.assert_close(mine, theirs, atol=0.03 * scale, rtol=0.05)


def test_no_tokens_give_empty_outputs_and_a_zero_gradient() -> None:
    case = Case()
    head, how = Head(case.weight), distill_target("jsd", case.teacher, chunk=4)
    empty = case.hidden[:0]
    found = distill_logprobs(
        empty, case.targets[:0], head, states=case.states[:0], distill_target=how
    )
    assert found.divergence.shape == (0,)
    (grad,) = torch.autograd.grad(found.divergence.sum(), case.weight)
    assert bool((grad == 0).all())


def buffers(tokens: int, size: int, kind: str | None, *, chunk: int = 32) -> tuple[float, float]:
    """Most live bytes in forward and in backward, in [chunk, size] fp32 buffers. ``kind`` None:
    plain log-probs."""
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(size, 8)
    states, targets = torch.randn(tokens, 8), torch.zeros(tokens, dtype=torch.int64)
    weight.requires_grad_()
    head, live = Head(weight, chunk_tokens=chunk), LiveBytes()
    with live:
        if kind is None:
            loss = token_logprobs(hidden, targets, head)[0].sum()
        else:
            how = distill_target(kind, weight.detach(), chunk=chunk)
            found = distill_logprobs(hidden, targets, head, states=states, distill_target=how)
            loss = (found.divergence - found.logprobs).sum()
        live.stage("backward")
        loss.backward()
    unit = 4.0 * chunk * size
    return live.peaks["start"][0] / unit, live.peaks["backward"][0] / unit


@pytest.mark.parametrize("kind", KINDS)
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(kind: str) -> None:
    """From 4 chunks of tokens to 32 (full logits of both models: 64 buffers) the peak grows by at
    most 32 numbers per token (the gradient of width 8, and the outputs of a token), of the 4096 in
    one row of logits; with twice the vocabulary it stays the same number of buffers."""
    size, few, many = 4096, max(buffers(128, 4096, kind)), max(buffers(1024, 4096, kind))
    assert many - few <= (1024 - 128) * 32 / (32 * size)
    assert many < 9
    assert max(buffers(1024, 2 * size, kind)) <= many


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_allocated_buffers(kind: str) -> None:
    """In addition to those of plain log-probs, at the larger of forward and backward; at most one
    too many."""
    plain = max(buffers(256, 4096, None))
    more = max(buffers(256, 4096, kind)) - plain
    # 0.1: a few numbers per token, of 4096 in a row
    assert more - 0.1 <= MORE_BUFFERS[kind] <= more + 1

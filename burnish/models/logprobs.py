"""Log-probabilities and entropies over a large vocabulary without materializing all logits.

Logits are computed in chunks of ``chunk_tokens``, reduced in fp32, discarded, and recomputed in
backward. The last chunk is kept, because backward processes it first. Above the fp32 gradient of
the weight, peak memory is 2.3 ``[chunk, vocab]`` fp32 buffers (4.5 if the loss contains entropies)
instead of ``[tokens, vocab]``, at the cost of a second output projection of the other chunks.

On a GPU, Triton kernels (``fused_head.py``) replace PyTorch's operations. Then it is one buffer in
the compute dtype, of at most 0.7 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from burnish.models.fused_head import FusedHead, Softmax, Transform, Upstream
from burnish.models.half_linear import is_slow_half, linear, wide_matmul
from burnish.models.logit_scaling import UNSCALED, LogitScaling

EntropyOrder = Literal[1, 2]

CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
"""Device type -> default number of tokens per chunk of logits. Each chunk reads and writes the fp32
sum of the head's gradient, [V, H], once. That traffic matters on a GPU, so chunks are larger
there."""


def chunk_tokens(num_tokens: int | None, device_type: str) -> int:
    """Return ``num_tokens`` (``train.logprob_chunk_tokens``), or the device's default if it is
    None."""
    return CHUNK_TOKENS.get(device_type, CHUNK_TOKENS["cpu"]) if num_tokens is None else num_tokens


@dataclass(frozen=True)
class Head:
    """The output projection of a language model.

    ``logits = cap(scale * (hidden @ weight.T + bias)) / temperature``, with
    ``cap(x) = softcap * tanh(x / softcap)``.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    temperature: float = 1.0
    chunk_tokens: int = CHUNK_TOKENS["cpu"]
    scaling: LogitScaling = UNSCALED
    fused: FusedHead | None = None
    """Kernels for log-probs over the full vocabulary. None: PyTorch's operations."""

    @property
    def transform(self) -> Transform:
        """The logits of the projection's outputs."""
        return Transform(self.scaling, self.temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the fp32 logits [K, V] of ``hidden`` [K, H]."""
        return self.transform.logits_(linear(hidden, self.weight, self.bias).float())


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    with_entropy: bool = False,
    entropy_order: EntropyOrder = 1,
    kept_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(logits)[target] and, if ``with_entropy``, the entropy of each
    distribution.

    ``hidden`` [K, H] is in the compute dtype, ``targets`` [K] is int64. ``kept_ids`` [K, C] int32
    restricts the softmax of a row to these ids, which must contain the target; -1 is padding, and
    a row of padding is not restricted. The entropy is always that of the full vocabulary: Shannon's
    for ``entropy_order`` 1, and for 2 the collision entropy -log sum p^2, without gradient. Returns
    ``logprobs`` [K] fp32 in nats and ``entropy`` [K] fp32 or None. Both are differentiable with
    respect to ``hidden`` and the head.
    """
    order = entropy_order if with_entropy else 0
    assert order < 2 or not torch.is_grad_enabled(), "only Shannon's entropy has a gradient"
    if head.fused is not None and head.fused.on and kept_ids is None and order < 2:
        logprobs, entropy = _FusedLogprobs.apply(
            hidden, head.weight, head.bias, targets.contiguous(), head, with_entropy
        )
        return logprobs, entropy
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, targets, head, order, kept_ids
    )
    return logprobs, entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # house: ok autograd's signature: tensors are separate arguments
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        entropy_order: int,
        kept_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        log_norm, kept_mass = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        log_p = None
        for begin in range(0, count, head.chunk_tokens):
            logits = log_p = None  # freed before the next chunk exists
            rows = slice(begin, begin + head.chunk_tokens)
            logits = head.logits(hidden[rows])
            norm = logits.logsumexp(-1)
            log_norm[rows] = norm
            logprobs[rows] = logits.gather(-1, targets[rows, None])[:, 0] - norm
            log_p = _bounded(logits.sub_(norm[:, None]))
            if kept_ids is not None:
                kept_mass[rows] = _log_mass(log_p, kept_ids[rows])
                logprobs[rows] -= kept_mass[rows]
            if entropy_order == 1:
                entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
            elif entropy_order == 2:
                entropy[rows] = -(2 * log_p).logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm, entropy, kept_ids, kept_mass)
        ctx.head, ctx.with_entropy = head, entropy_order == 1
        ctx.last_log_p = log_p
        ctx.set_materialize_grads(False)  # entropies are often measured and not in the loss
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, targets, log_norm, entropy, kept_ids, kept_mass = ctx.saved_tensors
        head: Head = ctx.head
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_norm)
        if not ctx.with_entropy:
            grad_entropy = None
        others = (grad_entropy, kept_ids, head.scaling.softcap)
        log_p_is_read = any(reader is not None for reader in others)
        sums = HeadGradients(hidden, weight, bias, needed=ctx.needs_input_grad[:3])
        for begin in reversed(range(0, hidden.shape[0], head.chunk_tokens)):
            rows = slice(begin, begin + head.chunk_tokens)
            if ctx.last_log_p is not None:
                log_p, ctx.last_log_p = ctx.last_log_p, None
            else:
                log_p = _bounded(head.logits(hidden[rows]).sub_(log_norm[rows, None]))
            if kept_ids is None:
                probabilities = log_p.exp() if log_p_is_read else log_p.exp_()
                grad = grad_logits_(probabilities, targets[rows], grad_logprobs[rows])
                del probabilities
            else:
                grad = _kept_grad_logits(
                    log_p, targets[rows], grad_logprobs[rows], kept_ids[rows], kept_mass[rows]
                )
            if grad_entropy is not None:
                # dH/dz = -p (log p + H)
                share = log_p.exp().mul_(grad_entropy[rows, None])
                grad -= share.mul_(log_p + entropy[rows, None])
                del share
            capped = None
            if head.scaling.softcap is not None:
                capped = log_p.add_(log_norm[rows, None])  # restores the logits
            sums.add(rows, head.transform.backward_(grad, capped))
            del log_p, grad, capped  # freed before the next chunk exists
        return (*sums.gradients(), None, None, None, None)


class _FusedLogprobs(torch.autograd.Function):
    """Log-probs by the kernels of ``head.fused``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        assert head.fused is not None
        softmax = Softmax.empty(hidden, with_entropy=with_entropy)
        outputs = None
        for begin in range(0, hidden.shape[0], head.fused.chunk_tokens):
            outputs = None  # freed before the next chunk exists
            rows = slice(begin, begin + head.fused.chunk_tokens)
            outputs = linear(hidden[rows], weight, bias)
            head.fused.reduce(outputs, targets[rows], head.transform, softmax.rows(rows))
        saved = hidden, weight, bias, targets, softmax.log_norm, softmax.entropy
        ctx.save_for_backward(*saved)
        ctx.head, ctx.last_outputs = head, outputs
        ctx.set_materialize_grads(False)
        return softmax.logprobs, softmax.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_norm, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = (None if x is None else x.contiguous() for x in grads)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_norm)
        softmax, upstream = Softmax(log_norm, log_norm, entropy), Upstream(of_logprobs, of_entropy)
        head: Head = ctx.head
        assert head.fused is not None
        needed, wide = ctx.needs_input_grad[:3], head.fused.kernels.accumulate
        sums = HeadGradients(hidden, weight, bias, needed=needed, accumulate=wide)
        for begin in reversed(range(0, hidden.shape[0], head.fused.chunk_tokens)):
            rows = slice(begin, begin + head.fused.chunk_tokens)
            outputs, ctx.last_outputs = ctx.last_outputs, None
            if outputs is None:
                outputs = linear(hidden[rows], weight, bias)
            chunk = outputs, targets[rows], head.transform
            head.fused.backward_(*chunk, softmax.rows(rows), upstream=upstream.rows(rows))
            sums.add(rows, outputs)
            del outputs, chunk  # freed before the next chunk exists
        return (*sums.gradients(), None, None, None)


def _bounded(log_p: Tensor) -> Tensor:
    """Replace -inf in ``log_p`` by the smallest finite number, in place.

    The probability is still 0, and so is 0 x log_p, while 0 x -inf is NaN. -inf occurs for entries
    that only pad a vocabulary.
    """
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


class HeadGradients:
    """Accumulates the gradients of hidden states [K, H] and of the output projection over chunks of
    logit gradients."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        needed: Sequence[bool],
        accumulate: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Allocate the gradients that are needed. ``needed``: flags for hidden, weight and bias.
        ``accumulate``: that of ``HeadKernels``."""
        self._accumulate = accumulate or _add_matmul
        self._hidden_states, self._weight, self._bias = hidden, weight, bias
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self._of_bias = None
        if bias is not None and needed[2]:
            self._of_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add the contribution of ``grad`` [k, V], the gradient of the projection's outputs of
        ``rows``."""
        low = grad.to(self._hidden_states.dtype)
        if self._of_hidden is not None:
            _matmul_into(self._of_hidden[rows], low, self._weight)
        if self._of_weight is not None:
            self._accumulate(self._of_weight, low, self._hidden_states[rows])
        if self._of_bias is not None:
            self._of_bias += grad.sum(0, dtype=torch.float32)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, weight and bias, each in its tensor's dtype."""
        weight, bias = self._of_weight, self._of_bias
        return (
            self._of_hidden,
            None if weight is None else weight.to(self._weight.dtype),
            None if bias is None or self._bias is None else bias.to(self._bias.dtype),
        )


def grad_logits_(p: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    """Replace the probabilities ``p`` [K, V] fp32 by d(sum upstream x logprob)/d logits =
    upstream (onehot - p)."""
    grad = p.mul_(-upstream[:, None])
    return grad.scatter_add_(-1, targets[:, None], upstream[:, None].to(grad.dtype))


def _log_mass(log_p: Tensor, kept_ids: Tensor) -> Tensor:
    """Return [K] the log of the total probability of ``kept_ids`` [K, C]; 0 for rows without ids.
    ``log_p`` [K, V]."""
    padding = kept_ids < 0
    kept_log_p = log_p.gather(-1, kept_ids.clamp(min=0).long()).masked_fill_(padding, -torch.inf)
    return torch.where(padding.all(-1), 0.0, kept_log_p.logsumexp(-1))


def _kept_grad_logits(
    log_p: Tensor, targets: Tensor, upstream: Tensor, kept_ids: Tensor, log_mass: Tensor
) -> Tensor:
    """Return the result of :func:`grad_logits_` for log-probs over ``kept_ids`` [K, C]: p is
    p / mass for these ids and 0 for the others. Rows without ids are over the full vocabulary."""
    padding, ids = kept_ids < 0, kept_ids.clamp(min=0).long()
    full = padding.all(-1)
    grad = log_p.exp().mul_(torch.where(full, -upstream, 0.0)[:, None])
    p = (log_p.gather(-1, ids) - log_mass[:, None]).exp_().masked_fill_(padding, 0.0)
    grad.scatter_add_(-1, ids, p.mul_(-upstream[:, None]))
    return grad.scatter_add_(-1, targets[:, None], upstream[:, None].to(grad.dtype))


def _matmul_into(out: Tensor, grad: Tensor, weight: Tensor) -> None:
    """Compute out = grad @ weight in the operands' dtype."""
    if is_slow_half(grad):
        out.copy_(wide_matmul(grad, weight))
    else:
        torch.mm(grad, weight, out=out)


def _add_matmul(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Compute total += grad.T @ hidden, where ``total`` is fp32.

    Each chunk's product is rounded to the operands' dtype, except for fp16 on a CPU, which is
    computed in fp32.
    """
    if grad.dtype == torch.float32 or is_slow_half(grad):
        total.addmm_(grad.T.float(), hidden.float())
    else:
        total += grad.T @ hidden

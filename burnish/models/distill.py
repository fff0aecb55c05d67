"""Divergence of a student's next-token distributions from a teacher's, without materializing all
logits of either.

The teacher provides its last hidden states [K, H], which are small. The [K, V] logits of both
models are large: they are computed in chunks of ``chunk_tokens`` rows, reduced in fp32, discarded,
and recomputed in backward (except for the last chunk). The divergence and its gradient are passed
in as functions.

Not here: the vocabulary shared by both models and the teacher's output projection
(``teacher.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.models.logprobs import Head, HeadGradients, grad_logits_

Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DistillTarget:
    """A teacher's output projection and the divergence from its distribution.

    In the functions, ``log_p`` and ``log_q`` [K, V] are the log-probs of student and teacher at
    ``temperature``.
    """

    head: Head
    """The teacher's output projection for the first V tokens, the vocabulary of both models."""
    divergence: Divergence
    """(log_p, log_q) -> [K]"""
    slope: Divergence
    """(log_p, log_q) -> [K, V]: gradient of ``divergence`` with respect to the student's logits."""
    kl: Divergence
    """(log_p, log_q) -> [K]: reported metric, KL(teacher || student) at ``temperature`` in nats."""
    temperature: float = 1.0


@dataclass(frozen=True)
class DistillOutputs:
    """Outputs of a student and its comparison with the teacher, [K] each, fp32."""

    logprobs: Tensor
    """Log-probs of the targets at temperature 1, over the student's full vocabulary"""
    divergence: Tensor
    kl: Tensor
    """Reported metric, without gradient"""
    agreement: Tensor
    """1 if both models rank the same token first, else 0; without gradient"""


def distill_logprobs(
    hidden: Tensor, targets: Tensor, head: Head, *, states: Tensor, distill_target: DistillTarget
) -> DistillOutputs:
    """Return the student's log-probs and its divergences from the teacher.

    ``hidden`` [K, H] are the student's hidden states, ``targets`` [K] is int64, and ``states``
    [K, H'] are the teacher's hidden states of the same tokens. ``logprobs`` and ``divergence`` are
    differentiable with respect to ``hidden`` and the student's head.
    """
    assert head.temperature == 1.0, "the temperature is that of distill_target"
    work = _Work(targets, head, states, distill_target)
    return DistillOutputs(*_DistillLogprobs.apply(hidden, head.weight, head.bias, work))


@dataclass(frozen=True)
class _Work:
    """Inputs of :class:`_DistillLogprobs` without gradient."""

    targets: Tensor
    head: Head
    states: Tensor
    distill_target: DistillTarget

    def rows(self, hidden: Tensor, begin: int) -> tuple[slice, Tensor, Tensor]:
        """Return the chunk that starts at row ``begin``: its rows, the student's logits [k, V_s]
        and the teacher's log-probs [k, V]."""
        rows = slice(begin, begin + self.head.chunk_tokens)
        log_q = self.distill_target.head.logits(self.states[rows])
        if self.distill_target.temperature != 1.0:
            log_q = log_q.div_(self.distill_target.temperature)
        return rows, self.head.logits(hidden[rows]), log_q.sub_(log_q.logsumexp(-1, keepdim=True))

    def log_p(self, logits: Tensor) -> Tensor:
        """Return the student's log-probs [k, V] over the shared vocabulary."""
        known = logits[:, : self.distill_target.head.weight.shape[0]]
        scale = self.distill_target.temperature
        return (known if scale == 1.0 else known / scale).log_softmax(-1)


class _DistillLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work
    ) -> tuple[Tensor, ...]:
        distill_target, count = work.distill_target, hidden.shape[0]
        outputs = [hidden.new_zeros(count, dtype=torch.float32) for _ in range(4)]
        logprobs, divergence, kl, agreement = outputs
        log_norm = torch.empty_like(logprobs)
        last = None
        for begin in range(0, count, work.head.chunk_tokens):
            last = None
            rows, logits, log_q = work.rows(hidden, begin)
            log_norm[rows] = logits.logsumexp(-1)
            target_logits = logits.gather(-1, work.targets[rows, None])[:, 0]
            logprobs[rows] = target_logits - log_norm[rows]
            log_p = work.log_p(logits)
            divergence[rows] = distill_target.divergence(log_p, log_q)
            same = distill_target.kl is distill_target.divergence
            kl[rows] = divergence[rows] if same else distill_target.kl(log_p, log_q)
            agreement[rows] = (log_p.argmax(-1) == log_q.argmax(-1)).float()
            del log_p
            last = rows, logits, log_q
        ctx.save_for_backward(hidden, weight, bias, log_norm)
        ctx.work, ctx.last = work, last
        ctx.mark_non_differentiable(kl, agreement)
        ctx.set_materialize_grads(False)
        return logprobs, divergence, kl, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_divergence = grads[:2]
        hidden, weight, bias, log_norm = ctx.saved_tensors
        work: _Work = ctx.work
        distill_target, size = work.distill_target, work.distill_target.head.weight.shape[0]
        sums = HeadGradients(hidden, weight, bias, needed=ctx.needs_input_grad[:3])
        for begin in reversed(range(0, hidden.shape[0], work.head.chunk_tokens)):
            (rows, logits, log_q), ctx.last = ctx.last or work.rows(hidden, begin), None
            capped = logits if work.head.scaling.softcap is not None else None
            grad = torch.zeros_like(logits)
            if of_logprobs is not None:
                probabilities = (logits - log_norm[rows, None]).exp_()
                grad = grad_logits_(probabilities, work.targets[rows], of_logprobs[rows])
                del probabilities
            if of_divergence is not None:
                log_p = work.log_p(logits)
                del logits
                slope = distill_target.slope(log_p, log_q)
                del log_p, log_q
                grad[:, :size] += slope.mul_(of_divergence[rows, None] / distill_target.temperature)
                del slope
            sums.add(rows, work.head.transform.backward_(grad, capped))
            del grad, capped
        return (*sums.gradients(), None)

"""Log-probs and entropies of a chunk of logits on a GPU, in one sweep over the vocabulary.

cuBLAS computes the projection [K, V] in the compute dtype; two Triton kernels do the rest. Forward
reads each entry once and keeps the maximum, the sum of exponentials, their mean logit and the
target's logit in registers. Backward reads each entry once more and replaces it by its gradient.
PyTorch's operations take 18 and 26 sweeps over fp32 copies for the same (12 and 14 without
entropies).

Reading order: Transform, Softmax, FusedHead, choose_head, jit_kernels. The loop over chunks and
the autograd function are in ``logprobs.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from burnish.models.gpu import KernelHangsError, limited_trial
from burnish.models.logit_scaling import UNSCALED, LogitScaling
from burnish.models.sdpa import Kernels, kernels_of
from burnish.oom import is_out_of_memory

log = logging.getLogger("burnish")

CHUNK_BYTES = 0.7e9
"""Most bytes of a chunk of logits. Larger chunks read and write the fp32 sum of the head's gradient
[V, H] less often."""
CHUNK_MULTIPLE = 128
"""Rows of a chunk are a multiple of this, for the tiles of matmuls."""
AMPERE = (8, 0)
_WAY_OUT = "uninstall triton (PyTorch's operations then compute log-probs)"
BLOCK, WARPS = 4096, 8
"""Entries of the vocabulary per step of a kernel (a power of two), and warps that share them."""


@dataclass(frozen=True)
class Transform:
    """Logits of a projection's outputs x: ``cap(scale * x) / temperature``."""

    scaling: LogitScaling = UNSCALED
    temperature: float = 1.0

    def logits_(self, outputs: Tensor) -> Tensor:
        """Replace fp32 ``outputs`` [K, V] by their logits."""
        logits = self.scaling.apply_(outputs)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def backward_(self, grad: Tensor, logits: Tensor | None) -> Tensor:
        """Backpropagate ``grad`` [K, V] of the logits to the outputs, in place.

        ``logits`` [K, V] are those of :meth:`logits_`; None is allowed without a softcap.
        """
        if self.temperature != 1.0:
            grad = grad.div_(self.temperature)
        return self.scaling.backward_(grad, logits, temperature=self.temperature)


@dataclass(frozen=True)
class Softmax:
    """Results for rows of logits, [K] fp32 each."""

    logprobs: Tensor
    log_norm: Tensor
    """log of the sum of exponentials"""
    entropy: Tensor | None
    """None: not computed"""

    @staticmethod
    def empty(hidden: Tensor, *, with_entropy: bool) -> Softmax:
        """Return unset results for ``hidden`` [K, H]."""
        logprobs, log_norm, entropy = (
            hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3)
        )
        return Softmax(logprobs, log_norm, entropy if with_entropy else None)

    def rows(self, rows: slice) -> Softmax:
        """Return the results of some rows, as views."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Softmax(self.logprobs[rows], self.log_norm[rows], entropy)


@dataclass(frozen=True)
class Upstream:
    """Gradients of a loss with respect to log-probs and entropies, [K] fp32 each, contiguous."""

    logprobs: Tensor
    entropy: Tensor | None
    """None: entropies are not in the loss"""

    def rows(self, rows: slice) -> Upstream:
        """Return those of some rows."""
        return Upstream(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])


@dataclass(frozen=True)
class HeadKernels:
    """The computations of one chunk. ``outputs`` [K, V] are those of the projection, ``targets``
    [K] int64."""

    reduce: Callable[[Tensor, Tensor, Transform, Softmax], None]
    """(outputs, targets, transform, softmax): fill ``softmax``."""
    backward_: Callable[[Tensor, Tensor, Transform, Softmax, Upstream], None]
    """The same and the gradients: replace the outputs by their gradient."""
    accumulate: Callable[[Tensor, Tensor, Tensor], None] | None = None
    """(total [V, H] fp32, gradient [K, V], hidden [K, H]): add their product to ``total``, without
    rounding it. None: this torch has no operation for it."""


@dataclass
class FusedHead:
    """Log-probs by :class:`HeadKernels` for the passes of one model. PyTorch's operations replace a
    kernel that raises."""

    kernels: HeadKernels
    chunk_tokens: int
    on: bool = True
    """False after a kernel raised: later calls do not use it."""

    def reduce(
        self, outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax
    ) -> None:
        """Fill ``softmax`` for ``outputs`` [K, V]."""
        if self.on:
            try:
                return self.kernels.reduce(outputs, targets, transform, softmax)
            except Exception as error:  # whatever a compiler raises
                self._failed(error, "forward", outputs)
        BY_TORCH.reduce(outputs, targets, transform, softmax)

    def backward_(
        self,
        outputs: Tensor,
        targets: Tensor,
        transform: Transform,
        softmax: Softmax,
        *,
        upstream: Upstream,
    ) -> None:
        """Replace ``outputs`` [K, V] by their gradient."""
        if self.on:
            try:
                return self.kernels.backward_(outputs, targets, transform, softmax, upstream)
            except Exception as error:
                self._failed(error, "backward", outputs)
        BY_TORCH.backward_(outputs, targets, transform, softmax, upstream)

    def _failed(self, error: Exception, direction: str, outputs: Tensor) -> None:
        if is_out_of_memory(error):
            raise error
        self.on = False
        log.warning(
            "the Triton kernel of log-probs raised an error in %s, so this model uses PyTorch's "
            "operations from now on. The call: logits %s in %s. The error: %s: %s",
            direction,
            list(outputs.shape),
            outputs.dtype,
            type(error).__name__,
            error,
        )


def fused_chunk_tokens(num_tokens: int | None, vocabulary: int, itemsize: int) -> int:
    """Return ``num_tokens`` (``train.logprob_chunk_tokens``) or, if it is None, the number of rows
    of logits that take at most :data:`CHUNK_BYTES`."""
    if num_tokens is not None:
        return num_tokens
    rows = max(1, int(CHUNK_BYTES // (vocabulary * itemsize)))
    return rows if rows < CHUNK_MULTIPLE else rows - rows % CHUNK_MULTIPLE


# ---- choice --------------------------------------------------------------------------------------


def device_problem(kernels: Kernels | None) -> str | None:
    """Return why a device cannot run the Triton kernels, or None. ``kernels``: properties of the
    GPU, None for a CPU."""
    if kernels is None:
        return "Triton has no kernels for a CPU"
    if kernels.hip:
        return "its kernels were not tried on AMD GPUs"
    if kernels.capability < AMPERE:
        major, minor = kernels.capability
        return f"they need a GPU of compute capability 8.0, and this one has {major}.{minor}"
    return None


@dataclass(frozen=True)
class HeadChoice:
    """Computation of a model's log-probs on a device."""

    kernels: HeadKernels | None
    problem: str = ""
    """Why the Triton kernels are not used"""

    @property
    def sentence(self) -> str:
        """The choice for logs."""
        if self.kernels is None:
            return f"PyTorch's operations, because {self.problem}"
        wide = "" if self.kernels.accumulate else ", the head's gradient rounded once per chunk"
        return f"Triton kernels{wide}"


@cache
def choose_head(
    device: torch.device, dtype: torch.dtype, vocabulary: int, scaling: LogitScaling
) -> HeadChoice:
    """Return the computation of log-probs over ``vocabulary`` logits in ``dtype``. The kernels are
    compiled, and compared with PyTorch's operations on a small call."""
    problem = device_problem(kernels_of(device))
    if problem is not None:
        return HeadChoice(None, problem)
    try:
        kernels = triton_kernels()
        problem = trial_problem(kernels, device, dtype, vocabulary, scaling=scaling)
    except Exception as error:  # whatever a compiler raises
        if is_out_of_memory(error) or isinstance(error, KernelHangsError):
            raise
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if problem is not None:
        return HeadChoice(None, problem)
    wide = accumulate_wide if dtype != torch.float32 and accumulates(device, dtype) else None
    return HeadChoice(HeadKernels(kernels.reduce, kernels.backward_, wide))


def trial_problem(
    kernels: HeadKernels,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int,
    *,
    scaling: LogitScaling,
) -> str | None:
    """Return how a small call of ``kernels`` differs from PyTorch's operations, or None."""
    draw = torch.Generator(device).manual_seed(0)
    outputs = (4 * torch.randn(3, vocabulary, device=device, generator=draw)).to(dtype)
    targets = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=device)
    upstream = Upstream(*(torch.randn(3, device=device, generator=draw) for _ in range(2)))
    transform = Transform(scaling, temperature=0.7)
    results = []
    with limited_trial("a small call of the Triton kernels of log-probs", _WAY_OUT, device):
        for each in (kernels, BY_TORCH):
            softmax, grad = Softmax.empty(outputs, with_entropy=True), outputs.clone()
            each.reduce(grad, targets, transform, softmax)
            each.backward_(grad, targets, transform, softmax, upstream)
            results.append([softmax.logprobs, softmax.log_norm, softmax.entropy, grad])
    names = ("log-probs", "normalization", "entropies", "gradients")
    for name, x, y in zip(names, *results, strict=True):
        assert x is not None and y is not None
        most = _ROUNDING[dtype] if name == "gradients" else 1e-5
        difference = float((x.float() - y.float()).abs().max() / y.float().abs().max())
        if not difference <= most:
            return f"{name} of a small call differ by {difference:.2g} of the largest value"
    return None


_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference of gradients, of the largest one: two roundings of the format."""


def accumulate_wide(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Compute total += grad.T @ hidden with fp32 ``total`` and half-precision operands, without
    rounding the product."""
    torch.addmm(total, grad.T, hidden, out_dtype=torch.float32, out=total)


def accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch computes :func:`accumulate_wide` on ``device``. (Some versions want
    a sum in the operands' dtype, and none has a kernel for CPUs.)"""
    draw = torch.Generator(device).manual_seed(0)
    grad, hidden = (torch.randn(64, n, device=device, generator=draw).to(dtype) for n in (128, 64))
    total = torch.randn(128, 64, device=device, generator=draw)
    expected = total.double() + grad.T.double() @ hidden.double()
    try:
        with limited_trial("a small product with an fp32 sum", _WAY_OUT, device):
            accumulate_wide(total, grad, hidden)
    except (RuntimeError, TypeError):  # KernelHangsError is none
        return False
    return float((total - expected).abs().max()) <= 1e-4  # 64 fp32 additions of values below 50


# ---- by PyTorch ----------------------------------------------------------------------------------


def _reduce_by_torch(
    outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax
) -> None:
    logits = transform.logits_(outputs.to(torch.float32, copy=True))
    norm = logits.logsumexp(-1)
    softmax.log_norm.copy_(norm)
    softmax.logprobs.copy_(logits.gather(-1, targets[:, None])[:, 0] - norm)
    if softmax.entropy is not None:
        log_p = logits.sub_(norm[:, None]).clamp_(min=torch.finfo(torch.float32).min)
        softmax.entropy.copy_(-(log_p.exp() * log_p).sum(-1))


def _backward_by_torch(
    outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax, upstream: Upstream
) -> None:
    logits = transform.logits_(outputs.to(torch.float32, copy=True))
    log_p = (logits - softmax.log_norm[:, None]).clamp_(min=torch.finfo(torch.float32).min)
    p = log_p.exp()
    grad = p * -upstream.logprobs[:, None]
    grad.scatter_add_(-1, targets[:, None], upstream.logprobs[:, None])
    if upstream.entropy is not None:
        assert softmax.entropy is not None
        # dH/dz = -p (log p + H)
        grad -= p.mul_(upstream.entropy[:, None]).mul_(log_p + softmax.entropy[:, None])
    outputs.copy_(transform.backward_(grad, logits))


BY_TORCH = HeadKernels(_reduce_by_torch, _backward_by_torch)
"""The same computations by PyTorch's operations."""


def _read_outputs(outputs: Tensor, _: Tensor, __: Transform, softmax: Softmax) -> None:
    torch.sum(outputs, -1, dtype=torch.float32, out=softmax.logprobs)


def _replace_outputs(outputs: Tensor, *_: object) -> None:
    outputs.neg_().neg_()


def _multiply(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    torch.mm(grad.T, hidden, out_dtype=torch.float32, out=total)


SIZES_ONLY = HeadKernels(_read_outputs, _replace_outputs, _multiply)
"""Operations that read and write as much as the kernels, and allocate nothing either, for tensors
that have sizes and no values."""


# ---- by Triton -----------------------------------------------------------------------------------


def jit_kernels() -> tuple[Any, Any]:
    """Return Triton's functions for forward and backward. Raises ImportError without Triton."""
    import triton
    import triton.language as tl

    # (No helper function: Triton's interpreter finds none inside a function.)
    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def reduce_kernel(  # type: ignore[no-untyped-def] # house: ok pointers, strides and sizes  # pragma: no cover
        outputs, targets, logprobs, log_norm, entropy, stride, scale, softcap, per_temperature,
        VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        begin = outputs + row.to(tl.int64) * stride
        columns = tl.arange(0, BLOCK)
        target, chosen = tl.load(targets + row), 0.0
        largest, total, moment = float("-inf"), 0.0, 0.0  # moment: sum of e^(z - m) (z - m)
        for first in range(0, VOCABULARY, BLOCK):
            inside = first + columns < VOCABULARY
            z = tl.load(begin + first + columns, mask=inside, other=0.0).to(tl.float32) * scale
            if CAPPED:
                x = z / softcap  # tanh: a series within 7e-8 near 0, elsewhere by exp
                s = x * x
                series = -0.05378329 + s * (0.02079462 - 0.00589395 * s)
                series = x + x * s * (-0.33333298 + s * (0.13331915 + s * series))
                far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
                z = softcap * tl.where(tl.abs(x) < 0.6, series, far)
            z = tl.where(inside, z * per_temperature, float("-inf"))
            larger = tl.maximum(largest, tl.max(z, 0))
            shift = tl.where(larger == float("-inf"), 0.0, larger)  # -inf minus itself is NaN
            before = tl.exp(largest - shift)
            share = tl.exp(z - shift)
            if ENTROPY:
                moved = tl.where(before > 0.0, total * (largest - shift), 0.0)
                moment = before * (moment + moved)
                moment += tl.sum(tl.where(share > 0.0, share * (z - shift), 0.0), 0)
            total = before * total + tl.sum(share, 0)
            largest = larger
            chosen += tl.sum(tl.where(first + columns == target, z, 0.0), 0)
        log_total = tl.log(total)
        tl.store(logprobs + row, chosen - largest - log_total)
        tl.store(log_norm + row, largest + log_total)
        if ENTROPY:
            tl.store(entropy + row, log_total - moment / total)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def backward_kernel(  # type: ignore[no-untyped-def] # house: ok pointers, strides and sizes  # pragma: no cover
        outputs, targets, log_norm, entropy, of_logprobs, of_entropy, stride, scale, softcap,
        per_temperature, vocabulary,
        CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        place = outputs + row.to(tl.int64) * stride + columns
        z = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale
        slope = scale * per_temperature
        if CAPPED:
            x = z / softcap  # tanh: a series within 7e-8 near 0, elsewhere by exp
            s = x * x
            series = -0.05378329 + s * (0.02079462 - 0.00589395 * s)
            series = x + x * s * (-0.33333298 + s * (0.13331915 + s * series))
            far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
            saturation = tl.where(tl.abs(x) < 0.6, series, far)
            z = softcap * saturation
            slope = slope * (1.0 - saturation * saturation)
        log_p = z * per_temperature - tl.load(log_norm + row)
        p = tl.exp(log_p)
        upstream = tl.load(of_logprobs + row)
        grad = tl.where(columns == tl.load(targets + row), upstream - upstream * p, -upstream * p)
        if ENTROPY:  # dH/dz = -p (log p + H)
            change = p * (log_p + tl.load(entropy + row))
            grad -= tl.load(of_entropy + row) * tl.where(p > 0.0, change, 0.0)
        tl.store(place, (grad * slope).to(outputs.dtype.element_ty), mask=inside)

    return reduce_kernel, backward_kernel


@cache
def triton_kernels(block: int = BLOCK, warps: int = WARPS) -> HeadKernels:
    """Return the Triton kernels. Raises ImportError without Triton."""
    import triton

    reduce_kernel, backward_kernel = jit_kernels()

    def numbers(transform: Transform) -> tuple[float, float, float]:
        softcap = transform.scaling.softcap
        return transform.scaling.scale, softcap or 1.0, 1.0 / transform.temperature

    def reduce(outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax) -> None:
        rows, vocabulary = outputs.shape
        entropy = softmax.logprobs if softmax.entropy is None else softmax.entropy
        reduce_kernel[(rows,)](
            *(outputs, targets, softmax.logprobs, softmax.log_norm, entropy, outputs.stride(0)),
            *numbers(transform),
            VOCABULARY=vocabulary,
            CAPPED=transform.scaling.softcap is not None,
            ENTROPY=softmax.entropy is not None,
            BLOCK=min(block, triton.next_power_of_2(vocabulary)),
            num_warps=warps,
        )

    def backward_(
        outputs: Tensor, targets: Tensor, transform: Transform, softmax: Softmax, upstream: Upstream
    ) -> None:
        rows, vocabulary = outputs.shape
        entropy = softmax.log_norm if softmax.entropy is None else softmax.entropy
        of_entropy = upstream.logprobs if upstream.entropy is None else upstream.entropy
        size = min(block, triton.next_power_of_2(vocabulary))
        backward_kernel[(rows, triton.cdiv(vocabulary, size))](
            *(outputs, targets, softmax.log_norm, entropy, upstream.logprobs, of_entropy),
            *(outputs.stride(0), *numbers(transform), vocabulary),
            CAPPED=transform.scaling.softcap is not None,
            ENTROPY=upstream.entropy is not None,
            BLOCK=size,
            num_warps=warps,
        )

    return HeadKernels(reduce, backward_)

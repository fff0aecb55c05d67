"""Results that a checkpointed layer keeps for backward (``train.gradient_checkpointing:
selective``).

Checkpointing keeps the input of a layer and computes the layer again in backward. Selectively, the
results of expensive operations are kept as well: matrix products, and attention by fused kernels
with its log-sum-exp. Only the rest is computed again, such as norms, activations, rotary embedding
and residual sums: few FLOPs, but most of the memory.

PyTorch's selective checkpointing keeps results by operator. FlashAttention over shared prefixes
(``flash.py``) is several calls whose merge overwrites one of their results, so it keeps its final
result through :func:`keep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
"""Product of an activation and a weight -> places of its factors."""
_KEPT = frozenset(
    {
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Other operators whose results are kept. ``bmm`` is not one of them: it computes attention without
a fused kernel, whose scores are what checkpointing should not keep."""
CHEAP = 16
"""A product whose inner size is less than 1/16 of its output's width is cheaper to compute again
than to keep: the second product of an adapter."""


def is_kept(operator: Any, args: Any) -> bool:
    """Return whether the results of a call of ``operator`` are kept."""
    name = operator._schema.name
    if operator._overloadname != "default":  # a product written into a given tensor
        return False
    if name in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[name])
        return bool(left.shape[1] * CHEAP >= right.shape[1])
    return name in _KEPT


def _policy(_context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    kept = is_kept(operator, args)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Region:
    """Context manager of one computation of a layer: the first, which keeps results, or the one in
    backward, which takes them."""

    begun: ClassVar[int] = 0
    """Number of computations so far."""

    def __init__(
        self, operators: AbstractContextManager[Any], results: deque[Any], *, again: bool
    ) -> None:
        self.results, self.again = results, again
        self._operators = operators
        self._token: Token[Region | None] | None = None

    def __enter__(self) -> None:
        Region.begun += 1
        self._token = _REGION.set(self)
        self._operators.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._operators.__exit__(kind, error, trace)
        assert self._token is not None
        _REGION.reset(self._token)


_REGION: ContextVar[Region | None] = ContextVar("region", default=None)


def regions() -> tuple[Region, Region]:
    """Return the contexts of a layer's first computation and of the one in backward: the
    ``context_fn`` of ``torch.utils.checkpoint``."""
    first, again = create_selective_checkpoint_contexts(_policy)
    results: deque[Any] = deque()
    return Region(first, results, again=False), Region(again, results, again=True)


def keep(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the result of ``compute``. In a layer that is computed again, return that of the first
    computation."""
    region = _REGION.get()
    if region is not None and region.again:
        first: tuple[Tensor, Tensor] = region.results.popleft()
        return first
    out, lse = compute()
    if region is not None:
        region.results.append((out.detach(), lse.detach()))  # without the graph of the first
    return out, lse

"""Results that a checkpointed layer keeps for backward (``train.gradient_checkpointing:
selective``).

Checkpointing keeps the input of a layer and computes the layer again in backward. Selectively, the
results of expensive operations are kept as well: matrix products, and attention by fused kernels
with its log-sum-exp. Only the rest is computed again, such as norms, activations, rotary embedding
and residual sums: few FLOPs, but most of the memory.

PyTorch's own selective checkpointing gives wrong gradients, without an error, where a kept result
is overwritten through a view that does not share its version (a bias that is added in place to a
product of three dimensions). Here it is copied before.

FlashAttention over shared prefixes (``flash.py``) is several calls whose merge overwrites one of
their results, so it keeps its final result through :func:`keep`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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


class _Kept:
    """A tensor that is kept, without the graph of the computation that gave it."""

    def __init__(self, tensor: Tensor) -> None:
        # (below autograd a detached tensor shares its version only like this)
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = tensor.detach()
        self._version = self._tensor._version

    @property
    def storage(self) -> int:
        """Identity of the memory."""
        return self._tensor.untyped_storage()._cdata

    def copy(self) -> None:
        """Move to memory of its own."""
        self._tensor = self._tensor.clone()
        self._version = self._tensor._version

    def take(self) -> Tensor:
        """Return the tensor."""
        if self._tensor._version != self._version:
            raise RuntimeError("a result that is kept for backward was changed behind its layer")
        return self._tensor


class LayerPass(TorchDispatchMode):
    """Context manager of one computation of a layer: the first, which keeps results, or the one in
    backward, which takes them in the same order."""

    begun: ClassVar[int] = 0
    """Number of computations so far."""

    def __init__(self, results: deque[Any], *, again: bool) -> None:
        super().__init__()
        self.results, self.again = results, again
        self._token: Token[LayerPass | None] | None = None

    def __enter__(self) -> LayerPass:
        LayerPass.begun += 1
        self._token = _PASS.set(self)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        assert self._token is not None
        _PASS.reset(self._token)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        compute = functools.partial(operator, *args, **kwargs or {})
        if is_kept(operator, args):
            return self.kept(compute)
        if operator._schema.is_mutable and not self.again:
            self._copy_what_changes(operator._schema, args, kwargs or {})
        return compute()

    def kept(self, compute: Callable[[], Any]) -> Any:
        """Return the result of ``compute``, or what it was in the first computation."""
        if self.again:
            return tree_map_only(_Kept, _Kept.take, self.results.popleft())
        result = compute()
        self.results.append(tree_map_only(Tensor, _Kept, result))
        return result

    def _copy_what_changes(self, schema: Any, args: Any, kwargs: Any) -> None:
        """Copy the results so far whose memory a call of an operator is about to overwrite."""
        values = {**kwargs}
        for argument, value in zip(schema.arguments, args, strict=False):
            values[argument.name] = value
        changed = {
            tensor.untyped_storage()._cdata
            for argument in schema.arguments
            if argument.is_write
            for tensor in tree_leaves(values.get(argument.name))
            if isinstance(tensor, Tensor)
        }
        for kept in tree_leaves(list(self.results)):
            if isinstance(kept, _Kept) and kept.storage in changed:
                kept.copy()


_PASS: ContextVar[LayerPass | None] = ContextVar("pass", default=None)


def layer_passes() -> tuple[LayerPass, LayerPass]:
    """Return the contexts of a layer's first computation and of the one in backward: the
    ``context_fn`` of ``torch.utils.checkpoint``."""
    results: deque[Any] = deque()
    return LayerPass(results, again=False), LayerPass(results, again=True)


def keep(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the result of ``compute``, which calls none of the operators above. In a layer that is
    computed again, return that of the first computation."""
    layer_pass = _PASS.get()
    result: tuple[Tensor, Tensor] = compute() if layer_pass is None else layer_pass.kept(compute)
    return result

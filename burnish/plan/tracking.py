"""Count the bytes of live tensors, operation by operation.

The same counter works on real tensors and on fake ones (which have sizes but no storage), so that
predictions and measurements are comparable. Memory that an operation allocates and frees internally
is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_DEVICE = torch.ops.prim.device.default
"""A question about a fake tensor, more frequent than all operations together."""


class LiveBytes(TorchDispatchMode):
    """Context manager that counts every storage created by an operation until it is freed.

    ``peaks`` contains the peak bytes of each stage, which lasts until the next call of
    :meth:`stage`: of all storages, and of those that are not gradients. A storage counts as a
    gradient after a call of :meth:`is_gradient`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.gradients = 0
        self.peaks: dict[str, tuple[int, int]] = {}
        self._stage = "start"
        self._sizes: Any = WeakIdKeyDictionary()  # storage -> bytes
        self._gradients: Any = WeakIdKeyDictionary()

    def stage(self, name: str) -> None:
        """Start the stage ``name``."""
        self._stage = name
        self._mark()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._take(tensor)
        self._mark()

    def is_gradient(self, tensor: Tensor) -> None:
        """Count this tensor as a gradient from now on."""
        storage = tensor.untyped_storage()
        size = self._sizes.get(storage)
        if size is None or storage in self._gradients:
            return
        self._gradients[storage] = True
        self.gradients += size
        weakref.finalize(storage, self._drop_gradient, size)

    def hold_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Count gradients that existed in all stages so far."""
        before = self.now
        for tensor in tensors:
            self._take(tensor)
            self.is_gradient(tensor)
        more = self.now - before
        self.peaks = {stage: (total + more, other) for stage, (total, other) in self.peaks.items()}

    @property
    def peak(self) -> int:
        """Peak bytes over all stages."""
        return max((total for total, _ in self.peaks.values()), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._take(leaf)
        self._mark()
        return out

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        have = self._sizes.get(storage)
        if have is None:
            self._sizes[storage] = size
            self.now += size
            weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size

    def _drop_gradient(self, size: int) -> None:
        self.gradients -= size

    def _mark(self) -> None:
        total, other = self.peaks.get(self._stage, (0, 0))
        self.peaks[self._stage] = max(total, self.now), max(other, self.now - self.gradients)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())

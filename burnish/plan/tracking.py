"""Counts the bytes of live tensors, operation by operation.

The same counter looks at real tensors and at fake ones (which have sizes and no memory), so a
prediction and a measurement are the same thing counted twice. What an operation takes and gives
back inside of itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Inside ``with``, every storage that an operation makes is counted until it is freed.

    ``peaks`` has the most bytes seen in each stage between two calls of :meth:`stage`: all of them,
    and those that are no gradient (of a parameter, once :meth:`is_gradient` was told of it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.gradients = 0
        self.peaks: dict[str, tuple[int, int]] = {}
        self._stage = "start"
        self._sizes: Any = WeakIdKeyDictionary()  # storage -> bytes
        self._gradients: Any = WeakIdKeyDictionary()

    def stage(self, name: str) -> None:
        """From here on count under ``name``."""
        self._stage = name
        self._mark()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before."""
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

    @property
    def peak(self) -> int:
        """Most bytes in any stage."""
        return max((total for total, _ in self.peaks.values()), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Bytes of the storages behind ``tensors``, each counted once."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())

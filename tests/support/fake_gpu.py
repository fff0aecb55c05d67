"""Tensors that claim to be on a GPU, with the rules of its copies to the host.

A copy into pinned memory is asynchronous: the source is read at once, in the order of the stream,
but the target changes only when somebody waits for it. A copy into any other memory, or one that
has to cast, passes through pageable memory and is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from burnish import host_copies

DEVICE = torch.device("cuda:0")


@dataclass
class FakeGpu:
    """The copies of one test."""

    pinned_copies: int = 0
    pageable_copies: list[str] = field(default_factory=list)
    most_pinned_bytes: int = 0
    waiting: list[Callable[[], object]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    def tensor(self, data: Tensor) -> Tensor:
        """Return ``data`` on the fake device."""
        return _OnGpu(data.clone(), self)

    def pinned_buffer(self, num_bytes: int) -> Tensor:
        """Return memory that counts as pinned, filled with rubbish."""
        self.buffers.append(torch.full((num_bytes,), 0xAA, dtype=torch.uint8))
        self.most_pinned_bytes = max(self.most_pinned_bytes, num_bytes)
        return self.buffers[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory of :meth:`pinned_buffer`."""
        place = tensor.untyped_storage().data_ptr()
        return any(place == buffer.untyped_storage().data_ptr() for buffer in self.buffers)

    def copies_done(self, device: torch.device) -> Callable[[], None]:
        """Return a function that completes the copies so far."""
        assert device == DEVICE
        count = len(self.waiting)

        def wait() -> None:
            nonlocal count
            for copy in self.waiting[:count]:
                copy()
            del self.waiting[:count]
            count = 0

        return wait

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        """Copy from the fake device to the host."""
        if not self.is_pinned(target) or not non_blocking or target.dtype != source.dtype:
            self.pageable_copies.append(f"{tuple(source.shape)} {source.dtype} to {target.dtype}")
            return target.copy_(source)
        self.pinned_copies += 1
        now = source.clone()
        self.waiting.append(lambda: target.copy_(now))
        return target


class _OnGpu(Tensor):
    """A wrapper around a CPU tensor."""

    inner: Tensor
    gpu: FakeGpu

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: FakeGpu) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner: Tensor, gpu: FakeGpu) -> None:
        self.inner, self.gpu = inner, gpu

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = next(a for a in args if isinstance(a, _OnGpu))
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], _OnGpu):
            rest = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return first.gpu.copy(args[0], first.inner, non_blocking=rest)
        device = kwargs.pop("device", None)
        plain = tree_map(lambda a: a.inner if isinstance(a, _OnGpu) else a, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if device is not None and torch.device(device).type == "cpu":
            first.gpu.pageable_copies.append(f"{func} of {tuple(first.shape)}")
            return result
        return tree_map(lambda a: _OnGpu(a, first.gpu) if isinstance(a, Tensor) else a, result)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let host copies use a fake device."""
    gpu = FakeGpu()
    monkeypatch.setattr(host_copies, "pinned_buffer", gpu.pinned_buffer)
    monkeypatch.setattr(host_copies, "copies_done", gpu.copies_done)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: gpu.is_pinned(tensor))
    return gpu

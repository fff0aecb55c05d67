"""Copies of tensors from a GPU to host memory, through two pinned buffers.

A copy from a GPU to pageable memory runs at 1.4 GB/s on an H100, a copy to pinned memory at 55
(docs/benchmarks.md). Everything that leaves a GPU in large amounts (weights for other processes and
files, checkpoints) therefore passes through :class:`HostStream`: one pinned buffer is filled by the
GPU while the other one is written to its destination.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

BUFFER_BYTES = 256 << 20
"""Size of a pinned buffer. A power of two, because torch rounds pinned memory up to one."""
PIECE_BYTES = 8 << 20
"""Most bytes of a tensor on the CPU that are consumed at once, so that they stay in the cache."""
ALIGN = 16
"""Tensors begin at multiples of this many bytes in a buffer."""

Take = Callable[[Tensor], object]
"""Consumer of bytes, uint8 [n] on the CPU, which are valid during the call."""


def pinned_buffer(num_bytes: int) -> Tensor:
    """Return uninitialized pinned memory, uint8 [num_bytes]. torch keeps freed pinned memory for
    the next request of this size."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copies_done(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies that were started on ``device`` so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


class _Buffer:
    """A pinned buffer, and the consumers of its parts."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.used = data, 0
        self.parts: list[tuple[Take, int, int]] = []
        self.wait: Callable[[], None] = lambda: None

    def put(self, flat: Tensor, dtype: torch.dtype, take: Take) -> int:
        """Start to copy the first entries of ``flat`` that fit; return their number."""
        begin = -(-self.used // ALIGN) * ALIGN
        count = min(flat.numel(), max(self.data.numel() - begin, 0) // dtype.itemsize)
        if count:
            end = begin + count * dtype.itemsize
            part = flat.narrow(0, 0, count).to(dtype)  # on its device: see HostStream.fill
            self.data[begin:end].view(dtype).copy_(part, non_blocking=True)
            self.parts.append((take, begin, end))
            self.used = end
        return count

    def consume(self) -> None:
        """Wait for the copies and pass them to their consumers."""
        self.wait()
        parts, self.parts, self.used = self.parts, [], 0
        for take, begin, end in parts:
            take(self.data[begin:end])


def memory_of(data: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU. ``Tensor.numpy`` would forbid to resize
    its storage, which offloading does."""
    return np.from_dlpack(data).data  # type: ignore[arg-type]


class HostStream:
    """Bytes of tensors for consumers in host memory, in the order in which they were added.

    Used as a context manager, which flushes at its end. Tensors on the CPU are consumed at once,
    from their own memory. Copies from a GPU run on its current stream, so a tensor may be changed
    or freed after it was added.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffer_bytes = buffer_bytes
        self._filling: _Buffer | None = None
        self._full: _Buffer | None = None
        self._device = torch.device("cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.flush()
        self._filling = self._full = None

    def add(self, tensor: Tensor, take: Take, dtype: torch.dtype | None = None) -> None:
        """Pass the bytes of ``tensor``, converted to ``dtype``, to ``take`` in one or several
        calls. Calls for tensors on a GPU may be made in a later ``add`` or in :meth:`flush`."""
        dtype = dtype or tensor.dtype
        flat = tensor.detach().reshape(-1).contiguous()  # (a column can be flat and strided)
        if tensor.device.type == "cpu" and not self._pending:
            for piece in flat.split(max(PIECE_BYTES // dtype.itemsize, 1)):
                if piece.numel():
                    take(piece.to(dtype).view(torch.uint8))
            return
        if tensor.device.type != "cpu":
            self._device = tensor.device
        while flat.numel():
            count = self._current().put(flat, dtype, take)
            flat = flat.narrow(0, count, flat.numel() - count)
            if flat.numel():
                self._advance()

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a contiguous copy in new host memory, which is complete after :meth:`flush`."""
        dtype = dtype or tensor.dtype
        if tensor.device.type == "cpu":
            return tensor.detach().to(dtype, copy=True).contiguous()
        target = torch.empty(tensor.shape, dtype=dtype)
        self.fill(target, tensor)
        return target

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` into ``target``, which is contiguous and has as many entries; cast if the
        formats differ. A target in host memory is complete after :meth:`flush`."""
        source = source.detach().reshape(target.shape)
        if source.device.type == "cpu" or target.device.type != "cpu":
            target.copy_(source)
        elif target.is_pinned():
            self._device = source.device
            # torch would cast on the CPU, through pageable memory
            target.copy_(source.to(target.dtype), non_blocking=True)
        else:
            self.add(source, _Fill(target), target.dtype)

    def flush(self) -> None:
        """Wait for all copies and make the remaining calls."""
        self.submit()()

    def submit(self) -> Callable[[], None]:
        """Make the remaining calls, and return a function that waits for the copies that
        :meth:`fill` started into pinned memory."""
        full, filling, self._full = self._full, self._filling, None
        if full is not None:
            full.consume()
        if filling is not None and filling.parts:
            filling.wait = copies_done(self._device)
            filling.consume()
        return _nothing if self._device.type == "cpu" else copies_done(self._device)

    @property
    def _pending(self) -> bool:
        """True if copies of tensors on a GPU were not passed on yet."""
        return self._full is not None or (self._filling is not None and bool(self._filling.parts))

    def _current(self) -> _Buffer:
        if self._filling is None:
            self._filling = _Buffer(pinned_buffer(self._buffer_bytes))
        return self._filling

    def _advance(self) -> None:
        """Pass the other buffer on while this one is copied, then fill that one."""
        submitted, other = self._current(), self._full
        submitted.wait = copies_done(self._device)
        if other is not None:
            other.consume()
        self._full, self._filling = submitted, other


class _Fill:
    """Consumer that writes into a tensor from its begin."""

    def __init__(self, target: Tensor) -> None:
        self._bytes, self._done = target.view(-1).view(torch.uint8), 0

    def __call__(self, part: Tensor) -> None:
        self._bytes[self._done : self._done + part.numel()].copy_(part)
        self._done += part.numel()


class HostBuffers:
    """Two buffers in host memory that are filled in turn: pinned for tensors on a GPU."""

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        """``device``: that of the tensors. On a CPU there is one buffer, because nothing is copied
        while it is in use."""
        self.pinned = torch.device(device).type != "cpu"
        self._buffers = (
            [pinned_buffer(num_bytes) for _ in "ab"]
            if self.pinned
            else [torch.empty(num_bytes, dtype=torch.uint8)]
        )

    def take(self) -> Tensor:
        """Return the next buffer to fill, uint8 [num_bytes]."""
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]


def to_host(tensor: Tensor, dtype: torch.dtype | None = None, *, copy: bool = False) -> Tensor:
    """Return ``tensor`` in host memory, contiguous and in ``dtype``. A tensor that is all of this
    already is returned itself, unless ``copy``."""
    if tensor.device.type == "cpu":
        return tensor.detach().to(dtype or tensor.dtype, copy=copy).contiguous()
    with HostStream(buffer_bytes_for(tensor.numel() * (dtype or tensor.dtype).itemsize)) as stream:
        return stream.copy(tensor, dtype)


def buffer_bytes_for(num_bytes: int) -> int:
    """Return the size of pinned buffers for ``num_bytes`` in total: less than
    :data:`BUFFER_BYTES` if one smaller buffer contains everything."""
    return min(BUFFER_BYTES, 1 << (max(num_bytes, ALIGN) - 1).bit_length())


def _nothing() -> None:
    pass

"""Move the tensors of an engine to host memory between phases, and back before the next one.

A storage is emptied and filled again in place, so every view of it stays valid: masters and their
rounded copies, the local shards of FSDP2, the flat buffers of ZeRO, tied weights. On a CPU the
tensors are copied to another buffer in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

CHUNK_BYTES = 256 << 20
"""Size of the host buffers. A power of two, because torch rounds pinned buffers up to one."""


class HostMemory:
    """Host copies of the storages of one engine."""

    def __init__(self, device: torch.device, *, frozen: bool) -> None:
        """``device``: compute device. ``frozen``: the tensors never change, so their first copy
        remains valid and is not repeated."""
        self.device, self.frozen = device, frozen
        self._storages: list[UntypedStorage] = []
        self._sizes: list[int] = []
        self._chunks: list[Tensor] = []
        self.resident = True
        """True if the tensors are on the device."""

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to host memory and free their device memory.

        Storages on another device stay. Does nothing if they are already in host memory. Raises
        RuntimeError if the host has too little memory; nothing is freed then.
        """
        if not self.resident:
            return
        if not (self.frozen and self._storages):
            self._storages = storages_of(tensors, self.device)
            self._sizes = [storage.nbytes() for storage in self._storages]
            self._allocate(sum(self._sizes))
            self._copy(lambda device, host: host.copy_(device, non_blocking=True))
        for storage in self._storages:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.resident = False

    def reload(self) -> None:
        """Allocate device memory again and copy the storages back. Does nothing if they are on the
        device."""
        if self.resident:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._copy(lambda device, host: device.copy_(host, non_blocking=True))
        self.resident = True
        if self.device.type != "cuda":  # pinned buffers are kept: allocating them is slow
            self._chunks = []
            self._storages = []

    def _allocate(self, size: int) -> None:
        pinned = self.device.type == "cuda"
        while len(self._chunks) * CHUNK_BYTES < size:
            left = size - len(self._chunks) * CHUNK_BYTES
            count = CHUNK_BYTES if pinned else min(left, CHUNK_BYTES)
            self._chunks.append(torch.empty(count, dtype=torch.uint8, pin_memory=pinned))

    def _copy(self, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Call ``copy`` with each piece on the device and its host buffer, then wait for the
        device."""
        position = 0
        for storage in self._storages:
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            for part, chunk, begin in _pieces(position, storage.nbytes()):
                host = self._chunks[chunk][begin : begin + part.stop - part.start]
                copy(flat[part], host)
            position += storage.nbytes()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _pieces(position: int, size: int) -> Iterator[tuple[slice, int, int]]:
    """Yield (slice of a storage, chunk, first byte in the chunk) for a storage of ``size`` bytes
    that begins ``position`` bytes after the first byte of the first chunk.

    >>> list(_pieces(CHUNK_BYTES - 1, 3))
    [(slice(0, 1, None), 0, 268435455), (slice(1, 3, None), 1, 0)]
    """
    done = 0
    while done < size:
        chunk, begin = divmod(position + done, CHUNK_BYTES)
        count = min(size - done, CHUNK_BYTES - begin)
        yield slice(done, done + count), chunk, begin
        done += count


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Return the distinct storages of ``tensors`` on ``device`` that hold memory."""
    storages: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == device.type:
            storage = local.untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


@torch.no_grad()
def own_storages(model: nn.Module) -> None:
    """Give each parameter a storage of its own that can be emptied. Weights read from a file may be
    views of the mapped file."""
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.numel():
            storage = parameter.untyped_storage()
            size = parameter.numel() * parameter.element_size()
            if not storage.resizable() or storage.nbytes() != size:
                parameter.data = parameter.data.clone()


def tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, down to ``depth`` levels."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth - 1)

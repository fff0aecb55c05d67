"""Recognizes errors about memory that could not be allocated, on a GPU or on the host."""

from __future__ import annotations

import torch

_SIGNS = (
    "not enough memory: you tried to allocate",  # torch's allocator on the CPU, as a RuntimeError
    "can't allocate memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)

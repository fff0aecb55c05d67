"""Free memory of GPUs, and errors about memory that could not be allocated."""

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


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process can still allocate: free ones and those that
    torch's allocator keeps for reuse. None for a CPU, whose memory is taken when it is written."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

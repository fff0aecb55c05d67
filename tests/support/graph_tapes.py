"""CUDA graphs on a CPU: a capture records operations with their tensors, and a replay runs them
again on the same tensors.

As on a GPU, a replay calls no Python code of the captured function, reads its inputs from the
memory of the capture and writes its outputs there. Operations that fail in a capture are errors:
reads of values by the host, shapes that depend on values, and copies of new tensors from host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FORBIDDEN = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_unique2"}


class Tape(TorchDispatchMode):
    """Takes the place of ``torch.cuda.CUDAGraph``."""

    replays = 0
    """Replays of all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _FORBIDDEN, f"{name} fails in a capture"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a bool index"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(out)))
        return out

    def replay(self) -> None:
        Tape.replays += 1
        with torch.no_grad():
            for func, args, kwargs, outputs in self.calls:
                new = _tensors(func(*args, **kwargs))
                for old, tensor in zip(outputs, new, strict=True):
                    if old is not tensor and old.data_ptr() != tensor.data_ptr():
                        old.copy_(tensor)

    def pool(self) -> str:
        return "pool"


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


@contextmanager
def _capture(graph: Tape, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
    with graph:
        yield


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls of CUDA's graphs."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(Tape, "replays", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", _capture)

"""Copies from a GPU to the host through pinned buffers, and compiled layers, on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.host_copies import HostBuffers, HostStream, to_host
from burnish.models.tensor_files import save_tensors
from burnish.sync.base import End, encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import SnapshotSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weights() -> dict[str, Tensor]:
    """Tensors that span several of the small buffers of these tests."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = {"large": (700, 900), "odd": (33, 7), "scalar": (), "empty": (0, 3)}
    return {n: torch.randn(s, device="cuda", generator=draw) for n, s in shapes.items()}


def reused(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors whose memory is overwritten when the next one is requested."""
    for name, tensor in tensors.items():
        copy = tensor.clone()
        yield name, copy
        copy.fill_(torch.nan)


def test_pinned_buffers_have_all_bytes_of_tensors_that_are_reused() -> None:
    tensors = weights()
    with HostStream(buffer_bytes=1 << 16) as stream:
        received = {name: stream.copy(tensor) for name, tensor in reused(tensors)}
    assert all(torch.equal(received[n], t.cpu()) for n, t in tensors.items())
    assert torch.equal(to_host(tensors["odd"], torch.bfloat16), tensors["odd"].bfloat16().cpu())


def test_buckets_are_complete_when_they_are_yielded() -> None:
    tensors, buffers = weights(), HostBuffers(1 << 18, "cuda")
    headers, stored = [], []
    for message, payload in messages(
        reused(tensors), buffers.take, push=0, version=1, dtype=torch.bfloat16, ahead=True
    ):
        assert isinstance(message, End) or payload.is_pinned()
        headers.append(encode(message))
        stored.append(payload.clone().numpy())
    with SnapshotSource(headers, stored[:-1]).open(1) as transfer:
        received = {name: tensor.clone() for name, tensor in transfer}
    assert all(torch.equal(received[n], t.bfloat16().cpu()) for n, t in tensors.items())


def test_files_are_written_from_the_device(tmp_path: Path) -> None:
    tensors = weights()
    save_tensors(tensors, tmp_path / "a.safetensors")
    received = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(received[n], t.cpu()) for n, t in tensors.items())

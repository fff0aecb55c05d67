"""Tensors on a GPU reach the host through pinned buffers only, complete and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, install
from safetensors.torch import load_file
from torch import Tensor

from burnish import host_copies
from burnish.host_copies import HostBuffers, HostStream, buffer_bytes_for, to_host
from burnish.models.tensor_files import (
    GrowingTensorFile,
    TensorInfo,
    TensorShard,
    in_parts,
    save_tensors,
    write_shards,
    write_tensors,
)
from burnish.rollout.vllm.weights import weight_files
from burnish.sync.base import End, encode
from burnish.sync.buckets import messages
from burnish.sync.disk import DiskSender, DiskSource
from burnish.sync.snapshot import SnapshotSource

BUFFER = 256
"""Bytes of a pinned buffer here, so that tensors span several."""

WEIGHTS = {
    "large": torch.arange(500, dtype=torch.float32).view(50, 10),  # 2000 bytes: 8 buffers
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "steps": torch.tensor([3, 4, 5], dtype=torch.int64),
    "half": torch.linspace(-1, 1, 21).to(torch.bfloat16).view(3, 7),
    "turned": torch.arange(12.0).view(3, 4).T,
    "column": torch.arange(8.0).view(4, 2)[:, :1],  # flat without a copy, and strided
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Host copies from a fake device, with small buffers."""
    monkeypatch.setattr(host_copies.HostStream.__init__, "__defaults__", (BUFFER,))
    return install(monkeypatch)


def reused(gpu: FakeGpu, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a sharded engine: the memory of one is overwritten when the next is requested."""
    for name, data in weights.items():
        tensor = gpu.tensor(data)
        yield name, tensor
        tensor.fill_(0)


def check(gpu: FakeGpu, received: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """All weights have arrived, and no copy went through pageable memory."""
    assert gpu.pageable_copies == [] and gpu.pinned_copies > 0 and gpu.waiting == []
    assert received.keys() == WEIGHTS.keys()
    for name, data in WEIGHTS.items():
        expected = data if dtype is None or not data.is_floating_point() else data.to(dtype)
        assert received[name].dtype is expected.dtype
        assert torch.equal(received[name], expected), name


def by_parts(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    return {n: t for part in in_parts(reused(gpu, WEIGHTS), 900) for n, t in part.items()}


def by_disk(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    class Policy:
        version = 3

        def weights(self) -> Iterator[tuple[str, Tensor]]:
            return reused(gpu, WEIGHTS)

    DiskSender(Policy(), folder, bucket_bytes=1024).push()
    with DiskSource(folder, timeout_s=1).open(3) as transfer:
        return {name: tensor.clone() for name, tensor in transfer}


def by_object_store(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    buffers = HostBuffers(512, "cuda")
    stored, headers = [], []
    for message, payload in messages(
        reused(gpu, WEIGHTS), buffers.take, push=0, version=3, ahead=buffers.pinned
    ):
        headers.append(encode(message))
        if not isinstance(message, End):
            stored.append(payload.clone().numpy())  # as the store does, before the next
    with SnapshotSource(headers, stored).open(3) as transfer:
        return {name: tensor.clone() for name, tensor in transfer}


def by_buckets_in_pageable_memory(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    stored, headers = [], []
    weights = reused(gpu, WEIGHTS)
    for message, payload in messages(
        weights, lambda: torch.empty(512, dtype=torch.uint8), push=0, version=3
    ):
        headers.append(encode(message))
        stored.append(payload.numpy())
    with SnapshotSource(headers, stored[:-1]).open(3) as transfer:
        return {name: tensor.clone() for name, tensor in transfer}


def by_one_file(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    save_tensors({n: gpu.tensor(t) for n, t in WEIGHTS.items()}, folder / "a.safetensors")
    return load_file(folder / "a.safetensors")


def by_a_file_of_known_shapes(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    infos = [TensorInfo(n, tuple(t.shape), t.dtype) for n, t in WEIGHTS.items()]
    write_tensors(folder / "a.safetensors", infos, (t for _, t in reused(gpu, WEIGHTS)))
    return load_file(folder / "a.safetensors")


def by_shards(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    shards = {n: TensorShard(gpu.tensor(t), 0, tuple(t.shape)) for n, t in WEIGHTS.items()}
    write_shards(folder, {"master": shards}, (0, 1))
    return load_file(folder / "master-00001-of-00001.safetensors")


def by_single_copies(gpu: FakeGpu, folder: Path) -> dict[str, Tensor]:
    return {name: to_host(tensor) for name, tensor in reused(gpu, WEIGHTS)}


WAYS: dict[str, Callable[[FakeGpu, Path], dict[str, Tensor]]] = {
    "parts": by_parts,
    "disk": by_disk,
    "object store": by_object_store,
    "pageable buckets": by_buckets_in_pageable_memory,
    "a file": by_one_file,
    "a file of known shapes": by_a_file_of_known_shapes,
    "shards": by_shards,
    "single copies": by_single_copies,
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_leaves_a_gpu_through_pageable_memory(
    way: str, gpu: FakeGpu, tmp_path: Path
) -> None:
    check(gpu, WAYS[way](gpu, tmp_path))


def test_files_for_vllm_are_cast_on_the_device(gpu: FakeGpu, tmp_path: Path) -> None:
    floats = {n: t for n, t in WEIGHTS.items() if t.is_floating_point()}
    files = list(weight_files(reused(gpu, floats), tmp_path, torch.bfloat16))
    received = load_file(files[0])
    assert gpu.pageable_copies == [] and received.keys() == floats.keys()
    assert all(torch.equal(received[n], t.to(torch.bfloat16)) for n, t in floats.items())


def test_buckets_are_cast_on_the_device(gpu: FakeGpu) -> None:
    buffers = HostBuffers(4096, "cuda")
    floats = {"a": torch.linspace(0, 1, 100)}
    (_, payload), _ = messages(
        reused(gpu, floats), buffers.take, push=0, version=1, dtype=torch.bfloat16, ahead=True
    )
    assert gpu.pageable_copies == []
    assert torch.equal(payload.view(torch.bfloat16), floats["a"].to(torch.bfloat16))


def test_a_stream_uses_two_buffers_of_its_size(gpu: FakeGpu) -> None:
    received: list[Tensor] = []
    with HostStream() as stream:
        stream.add(gpu.tensor(WEIGHTS["large"]), lambda part: received.append(part.clone()))
    assert [buffer.numel() for buffer in gpu.buffers] == [BUFFER, BUFFER]
    assert [part.numel() for part in received] == [256] * 7 + [208], "2000 bytes"


def test_one_buffer_is_consumed_while_the_next_is_copied(gpu: FakeGpu) -> None:
    """Copies that were started when each part is consumed: the next buffer's is among them."""
    started: list[int] = []
    with HostStream() as stream:
        stream.add(gpu.tensor(WEIGHTS["large"]), lambda part: started.append(gpu.pinned_copies))
    assert started == [2, 3, 4, 5, 6, 7, 8, 8]


def test_order_is_kept_between_devices(gpu: FakeGpu) -> None:
    received: list[float] = []
    with HostStream() as stream:
        for number, where in enumerate((gpu.tensor, Tensor.clone, gpu.tensor, Tensor.clone)):
            tensor = where(torch.tensor([float(number)]))
            stream.add(tensor, lambda part: received.extend(part.view(torch.float32).tolist()))
    assert received == [0.0, 1.0, 2.0, 3.0]


def test_tensors_on_the_cpu_are_not_copied_before_they_are_consumed() -> None:
    tensor, places = torch.arange(10.0), []
    with HostStream() as stream:
        stream.add(tensor, lambda part: places.append(part.data_ptr()))
        assert places == [tensor.data_ptr()]
    assert to_host(tensor).data_ptr() == tensor.data_ptr() != to_host(tensor, copy=True).data_ptr()


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 16), (17, 32), (1000, 1024), (1 << 40, 1 << 28)]
)
def test_buffers_of_few_bytes_are_small(num_bytes: int, expected: int) -> None:
    assert buffer_bytes_for(num_bytes) == expected


def test_a_file_of_unknown_tensors_is_read_by_safetensors(tmp_path: Path) -> None:
    file = GrowingTensorFile(tmp_path / "a.safetensors")
    for name, tensor in WEIGHTS.items():
        file.add(name, tensor, tensor.dtype)
    assert file.num_bytes == 2000 + 4 + 0 + 24 + 42 + 48 + 16
    received = load_file(file.close())
    assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())


def test_files_equal_those_of_the_library(tmp_path: Path) -> None:
    """Both sort by the size of an entry, then by name; metadata is kept."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    plain = {name: tensor.contiguous() for name, tensor in WEIGHTS.items()}
    save_file(plain, tmp_path / "theirs", metadata={"format": "pt"})
    save_tensors(WEIGHTS, tmp_path / "ours", metadata={"format": "pt"})
    files: list[Any] = [safe_open(tmp_path / name, "pt") for name in ("ours", "theirs")]
    assert files[0].metadata() == files[1].metadata()
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(*(file.get_tensor(n) for file in files)) for n in WEIGHTS)

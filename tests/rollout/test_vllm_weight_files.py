"""A worker of a vLLM engine with several processes maps a file of weights and reads its own shard,
as vLLM's loaders narrow a tensor before they copy it."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.rollout.vllm.weights import WorkerExtension, shared_folder, weight_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

RANKS, RANK = 4, 1
SHAPE = (2048, 1024)
TENSOR_BYTES = 2048 * 1024 * 2
NAMES = ("layers.0.weight", "layers.1.weight", "layers.2.weight")
FAULT_BYTES = 1 << 16
"""Bytes that the kernel maps around one that is read."""


def mapped(file: Path) -> tuple[int, int]:
    """Return the bytes of a file that this process has read through mappings, and the bytes of
    private copies of its pages."""
    counts = {"Rss": 0, "Anonymous": 0}
    of_file = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            of_file = words[-1] == str(file)
        elif of_file and (key := words[0][:-1]) in counts:
            counts[key] += 1024 * int(words[1])
    return counts["Rss"], counts["Anonymous"]


class ShardedModel:
    """A model whose loader copies the rows, or columns, of one rank out of a full tensor."""

    def __init__(self, file: Path, dim: int) -> None:
        self.file, self.dim = file, dim
        self.shards: dict[str, Tensor] = {}
        self.before: list[int] = []
        """Bytes read before each copy."""
        self.after = (0, 0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        size = SHAPE[self.dim] // RANKS
        for name, tensor in weights:
            self.before.append(mapped(self.file)[0])
            shard = torch.empty_like(tensor.narrow(self.dim, 0, size))
            self.shards[name] = shard.copy_(tensor.narrow(self.dim, RANK * size, size))
            self.after = mapped(self.file)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(SHAPE, generator=draw).bfloat16() for name in NAMES}


@pytest.fixture
def file(weights: dict[str, Tensor]) -> Iterator[Path]:
    folder = shared_folder(len(NAMES) * TENSOR_BYTES)
    (path,) = weight_files(weights.items(), folder, torch.bfloat16)
    yield path
    path.unlink()
    folder.rmdir()


def loaded(file: Path, dim: int) -> ShardedModel:
    """Load the file as a worker does."""
    worker: Any = WorkerExtension()
    model = ShardedModel(file, dim)
    worker.model_runner = SimpleNamespace(model=model)
    worker.burnish_given, worker.burnish_kept, worker.burnish_findings = {}, set(), []
    worker.burnish_load(str(file), "bf16")
    assert worker.burnish_findings == []
    return model


def test_a_worker_reads_the_rows_of_its_shard(file: Path, weights: dict[str, Tensor]) -> None:
    model = loaded(file, dim=0)
    size, faults = SHAPE[0] // RANKS, 4 * FAULT_BYTES
    for name, tensor in weights.items():
        assert torch.equal(model.shards[name], tensor[RANK * size : (RANK + 1) * size])
    for number, read in enumerate(model.before):  # nothing of a tensor before its shard is copied
        assert read <= number * (TENSOR_BYTES // RANKS + faults) + faults
    read, copied = model.after
    assert len(NAMES) * TENSOR_BYTES / RANKS <= read
    assert read <= len(NAMES) * (TENSOR_BYTES // RANKS + faults)
    assert copied == 0


def test_columns_of_a_shard_are_read_without_a_copy_of_the_tensor(
    file: Path, weights: dict[str, Tensor]
) -> None:
    """Each row has a part of every shard, so that all pages are mapped."""
    model = loaded(file, dim=1)
    size = SHAPE[1] // RANKS
    for name, tensor in weights.items():
        assert torch.equal(model.shards[name], tensor[:, RANK * size : (RANK + 1) * size])
    assert model.after[1] == 0

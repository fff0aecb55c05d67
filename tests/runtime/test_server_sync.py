"""Weights for vLLM servers in the controller of a Ray run, with a stand-in for the object store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.config.cluster import ClusterConfig
from burnish.runtime.base import WorkerLostError
from burnish.runtime.ray.server_sync import ServerSync
from burnish.runtime.worker import TransferOptions
from burnish.sync.base import SyncError, encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import WeightSnapshot

OPTIONS = TransferOptions(64, "fp32", verify=True)
SIZE = 4 * 32  # 4 weights of 8 numbers in 2 buckets


class Lost(Exception):
    """What Ray raises for an object on a lost node."""


class Policy:
    """A train engine whose weights all have the value of their version."""

    def __init__(self) -> None:
        self.version = 0
        self.objects: dict[str, np.ndarray[Any, Any]] = {}
        ray = SimpleNamespace(get=self.get, exceptions=SimpleNamespace(RayError=Lost))
        self.group = SimpleNamespace(cluster=SimpleNamespace(ray=ray, config=ClusterConfig()))

    def get(self, ref: str, timeout: float) -> np.ndarray[Any, Any]:
        if ref not in self.objects:
            raise Lost(ref)
        return self.objects[ref]

    def transfer_weights(self, push: int, options: TransferOptions) -> WeightSnapshot[str]:
        weights = {f"w{i}": torch.full((8,), float(self.version)) for i in range(4)}
        buffer = torch.empty(options.bucket_bytes, dtype=torch.uint8)
        found = messages(weights.items(), lambda: buffer, push=push, version=self.version)
        headers, refs = [], []
        for message, payload in found:
            headers.append(encode(message))
            if payload.numel():
                refs.append(f"{push}/{len(refs)}")
                self.objects[refs[-1]] = payload.clone().numpy()
        return WeightSnapshot(tuple(headers), tuple(refs))


class Engine:
    """A rollout engine that keeps what it loads."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, dict[str, Tensor]]] = []

    def load_weights(self, version: int, tensors: Any) -> None:
        self.loads.append((version, {name: tensor.clone() for name, tensor in tensors}))

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.loads]


@pytest.fixture
def parts() -> tuple[Any, Any, ServerSync]:
    policy, engine = Policy(), Engine()
    ends: tuple[Any, Any] = policy, engine
    return policy, engine, ServerSync(*ends, OPTIONS)


def test_a_push_loads_all_weights_of_the_version(parts: tuple[Any, Any, ServerSync]) -> None:
    policy, engine, sync = parts
    policy.version = 3
    metrics = sync.push()
    assert engine.versions == [0, 3]
    assert {name: tensor.tolist() for name, tensor in engine.loads[1][1].items()} == {
        f"w{i}": [3.0] * 8 for i in range(4)
    }
    assert (metrics["sync/version"], metrics["sync/bytes"], metrics["sync/buckets"]) == (3, SIZE, 2)


def test_staged_weights_are_dropped_for_newer_ones(parts: tuple[Any, Any, ServerSync]) -> None:
    """Version 2 is staged before the load of version 1 begins, and 3 within that of 2. A push, as
    after a rollback, replaces the staged version 3."""
    policy, engine, sync = parts
    policy.version = 1
    first = sync.stage("recompute")
    policy.version = 2
    second = sync.stage("finish")
    assert (first.needs_idle, second.needs_idle) == (False, True)
    first.load(engine)
    assert engine.versions == [0]
    third: list[Any] = []

    def stages_first(version: int, tensors: Any) -> None:
        policy.version = 3
        third.append(sync.stage("recompute"))
        Engine.load_weights(engine, version, tensors)

    engine.load_weights = stages_first
    second.load(engine)
    del engine.load_weights
    assert third[0].metrics["sync/stored_bytes"] == 2 * SIZE
    assert second.metrics["sync/stored_bytes"] == SIZE
    policy.version = 2
    sync.push()
    third[0].load(engine)
    assert engine.versions == [0, 2, 2]


def test_a_damaged_bucket_and_a_lost_one_are_reported(parts: tuple[Any, Any, ServerSync]) -> None:
    """The first ends the run, the second makes it roll back; the next push is complete."""
    policy, engine, sync = parts
    staged = sync.stage("recompute")
    policy.objects["1/1"][5] ^= 1
    with pytest.raises(SyncError, match="bucket 1"):
        staged.load(engine)
    staged = sync.stage("recompute")
    del policy.objects["2/1"]
    with pytest.raises(WorkerLostError, match=r"\(2/1\)"):
        staged.load(engine)
    assert engine.versions == [0]
    assert sync.push()["sync/version"] == 0 and engine.versions == [0, 0]

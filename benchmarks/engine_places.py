"""Places of tensor-parallel rollout engines on the ranks' GPUs, on two simulated nodes.

    python benchmarks/engine_places.py

Starts two Ray nodes with four GPUs each, which exist only as numbers, and one small process for
each of 8 policy ranks, 8 reference ranks and 4 engines over two GPUs. Prints the node and the GPUs
that each process sees, and raises AssertionError if an engine is not on the GPUs of its ranks. Then
prints the error for an engine over eight GPUs, which no node has."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.cluster_utils import Cluster

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.runtime.base import ClusterError
from burnish.runtime.ray.cluster import RayCluster

ROLES = ("policy", "reference", "rollout")


class Seen:
    """Worker that reports its place."""

    def __init__(self, info: Any, *_: Any) -> None:
        self.info = info

    def heartbeat(self, *_: Any) -> tuple[str, int]:
        """Return the answer of a started worker."""
        return "", os.getpid()

    def seen(self) -> tuple[str, list[str]]:
        """Return the node and the visible GPUs."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ray.get_runtime_context().get_node_id(), devices.split(",")


def reserve(parts: int) -> RayCluster:
    """Reserve the places of 8 ranks, with engines over ``parts`` GPUs."""
    config = ClusterConfig(
        runtime="ray", policy_ranks=8, rollout_workers=8 // parts, gpus_per_worker=1
    )
    places = placement_groups_for(config, ROLES, tensor_parallel_size=parts)
    model = ModelConfig(scratch=ScratchConfig())
    return RayCluster(model, config, placements=places, precision=PrecisionConfig())


def check_places(parts: int) -> None:
    """Print and check the places of all workers."""
    cluster = reserve(parts)
    found: dict[tuple[str, int], tuple[str, list[str]]] = {}
    try:
        for role in ROLES:
            size = 8 // parts if role == "rollout" else 8
            workers = [cluster.start_one(role, Seen, i, size) for i in range(size)]
            for i, worker in enumerate(workers):
                found[role, i] = ray.get(worker.seen.remote())
    finally:
        cluster.close()
    nodes = sorted({node for node, _ in found.values()})
    for (role, i), (node, devices) in found.items():
        print(f"{role} {i}: node {nodes.index(node)}, GPUs {','.join(devices)}")
        if role != "rollout":
            assert found[role, i] == found["policy", i]
            continue
        ranks = [found["policy", i * parts + k] for k in range(parts)]
        assert [(node, [device]) for device in devices] == ranks
    assert len({(node, *ids) for (role, _), (node, ids) in found.items() if role == "policy"}) == 8


def main() -> None:
    """Start the nodes and print the places."""
    four: dict[str, Any] = {"num_cpus": 8, "num_gpus": 4, "object_store_memory": 100 << 20}
    nodes = Cluster(initialize_head=True, head_node_args=four)
    nodes.add_node(**four)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        check_places(2)
        try:
            reserve(8)
        except ClusterError as error:
            print(error)
        else:
            raise AssertionError("an engine over eight GPUs fits into nodes of four")
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main()

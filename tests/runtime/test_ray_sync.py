"""Weights on Ray: every way gives the workers what the policy has, a damaged hand-over is caught
and nothing is sampled from it, and replaced workers get the weights that the others have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.config.roles import TrainRole
from burnish.config.sync import DiskSync, LinkSync
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.runtime.base import ClusterError, WorkerLostError
from burnish.runtime.ray.rollout_worker import RolloutWorker
from burnish.runtime.ray.runtime import RayRuntime
from burnish.runtime.ray.weight_sync import ObjectStoreSync
from burnish.runtime.worker import TrainWorker, TransferOptions
from burnish.sync.base import InvalidWeightsError, SyncError
from burnish.sync.snapshot import WeightSnapshot
from burnish.train.base import Outputs
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=False))
STORE = LinkSync(kind="object_store")
HOW = TransferOptions(bucket_bytes=16_384, dtype=None, verify=True)  # five buckets or so
REQUESTS = [Request("a", (7, 8, 9), seed=1), Request("b", (10, 11), seed=2)]
BATCH = rows_to_batch([[7, 8, 9, 10, 11]], [[False] * 2 + [True] * 3], prompt_lens=[2])


def nll(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, Stats]:
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats()


@pytest.fixture(scope="module")
def runtime(ray_cluster: Any) -> Iterator[RayRuntime]:
    config = ClusterConfig(
        runtime="ray",
        layout="separate",
        policy_ranks=2,
        rollout_workers=2,
        max_restarts=20,
        heartbeat_timeout_s=6,
    )
    made = RayRuntime(
        load_tokenizer(MODEL),
        MODEL,
        config,
        placements=placement_groups_for(config, ["policy", "rollout"]),
        precision=PrecisionConfig(),
        timeline=Timeline(),
    )
    yield made
    made.close()


def test_a_worker_that_cannot_be_created_ends_the_run_with_the_reason(runtime: RayRuntime) -> None:
    """(Before the policy takes its places.)"""

    class Broken(TrainWorker):
        def __init__(self, *_: Any) -> None:
            raise OSError("libnothing.so is not on this node")

    with pytest.raises(ClusterError) as caught:
        runtime.cluster.start("policy", Broken, 1)
    assert not isinstance(caught.value, WorkerLostError), "nothing that another try would mend"
    said = str(caught.value).splitlines()[0]
    assert "rank 0 of the policy could not be created" in said
    assert said.endswith("libnothing.so is not on this node")
    assert runtime.cluster.restarts == 0


@pytest.fixture(scope="module")
def policy(runtime: RayRuntime) -> Any:
    """In shards, so that both ranks take part in gathering."""
    train = TrainConfig(lr=0.1, engine=TorchEngine(sharding="full"))
    engine = runtime.language_model(
        EngineSpec(TrainRole.alone("policy", train, MODEL), total_steps=1000)
    )
    assert runtime.attention["policy"].startswith("torch's scaled-dot-product attention")
    return engine


@pytest.fixture(scope="module")
def rollout(runtime: RayRuntime, policy: Any) -> Any:
    return runtime.rollout(policy, LocalEngine())


def step(policy: Any) -> None:
    """New weights, far from the last."""
    policy.forward_backward(BATCH, nll)
    policy.optim_step()


def sample(rollout: Any) -> list[Completion]:
    return sorted(rollout.generate(REQUESTS, Sampling(6, 1.0)), key=lambda c: c.request_id)


def in_step(policy: Any, rollout: Any) -> None:
    """Both workers sample from the policy's weights: its log-probs of what they drew are theirs."""
    found = sample(rollout)
    assert [c.version for c in found] == [policy.version] * 2
    prompts = {r.request_id: r.prompt_ids for r in REQUESTS}
    for c in found:
        row = [*prompts[c.request_id], *c.token_ids]
        begin = len(prompts[c.request_id])
        mask = [i >= begin for i in range(len(row))]
        ours = policy.logprobs(rows_to_batch([row], [mask], prompt_lens=[begin]))[begin:]
        # fp32, log-probs of size 4 through a cache instead of one pass
        torch.testing.assert_close(torch.tensor(c.logprobs), ours, atol=3e-5, rtol=0)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def state_of(worker: RolloutWorker) -> dict[str, bytes]:
    """In a worker's process: every parameter that its engine samples from, bit by bit."""
    engine: Any = worker.engine
    return {name: bits_of(own) for name, own in engine.engine.model.named_parameters()}


def same_bits(policy: Any, rollout: Any, ray: Any) -> None:
    """Each worker has the policy's weights, and no others."""
    expected = {name: bits_of(weight) for name, weight in policy.weights()}
    for worker in rollout.workers:
        assert ray.get(worker.__ray_call__.remote(state_of)) == expected


def limits(worker: TrainWorker) -> list[float]:
    """In the rank's process: seconds that a collective of each of its groups may take."""
    from torch.distributed import distributed_c10d

    cpu = torch.device("cpu")
    groups = list(distributed_c10d._world.pg_map)
    return [g._get_backend(cpu).options._timeout.total_seconds() for g in groups]


def test_a_collective_may_take_as_long_as_a_call(runtime: RayRuntime, policy: Any) -> None:
    """And not only as long as the start."""
    found = policy.group.all(lambda w: w.__ray_call__.remote(limits))
    assert found[0] and set(found[0]) == {runtime.cluster.config.call_timeout_s}, found
    assert found[1] == found[0]


def kinds(folder: Any) -> dict[str, LinkSync | DiskSync]:
    small: dict[str, Any] = {"bucket_bytes": 16_384, "timeout_s": 3000}
    return {
        "object_store": LinkSync(kind="object_store", **small),
        "collective": LinkSync(kind="collective", **small),
        "ipc": LinkSync(kind="ipc", **small),
        "disk": DiskSync(kind="disk", folder=str(folder), **small),
    }


@pytest.mark.parametrize("kind", ["object_store", "collective", "ipc", "disk"])
def test_replaced_workers_and_ranks_are_reconnected(
    kind: str, runtime: RayRuntime, policy: Any, rollout: Any, tmp_path: Any
) -> None:
    """Pushes before and after a rollout worker is replaced. Then one dies unseen, one hangs (tried
    on one of the connections), and the entire train group restarts. The time limit of a connection
    is far above that of the test."""
    sync = runtime.sync(policy, rollout, kinds(tmp_path / "weights")[kind])
    in_step(policy, rollout)
    for _ in range(2):
        step(policy)
        metrics = sync.push()
        in_step(policy, rollout)
        same_bits(policy, rollout, runtime.cluster.ray)
    whole = sum(t.nbytes for _, t in policy.weights())
    assert metrics["sync/bytes"] == whole and metrics["sync/version"] == policy.version
    assert metrics["sync/buckets"] >= 3 and metrics["sync/bytes_per_s"] > 0
    rollout.replace({1: "was let go"})
    in_step(policy, rollout)
    step(policy)
    sync.push()
    in_step(policy, rollout)
    if kind in ("ipc", "disk"):
        return
    ray = runtime.cluster.ray
    pid = ray.get(rollout.workers[1].ping.remote())
    deaths = [lambda: ray.kill(rollout.workers[0]), lambda: os.kill(pid, signal.SIGSTOP)]
    for die in deaths if kind == "collective" else deaths[:1]:
        die()
        step(policy)
        sync.push()
        rollout.replace({})
        in_step(policy, rollout)
    policy.group.end()
    policy.group.restart()
    policy.version = 0
    sync.push()
    in_step(policy, rollout)


@pytest.mark.parametrize("kind", ["object_store", "collective"])
def test_a_dead_rank_is_named_and_the_push_after_its_restart_succeeds(
    kind: str, runtime: RayRuntime, policy: Any, rollout: Any, tmp_path: Any
) -> None:
    sync = runtime.sync(policy, rollout, kinds(tmp_path)[kind])
    for rank in (0, 1):
        runtime.cluster.ray.kill(policy.group.workers[rank])
        with pytest.raises(WorkerLostError, match=f"rank {rank} of the policy"):
            sync.push()
        policy.group.restart()
        policy.version = 0
        sync.push()
        in_step(policy, rollout)


# ---- while requests run --------------------------------------------------------------------------

MANY = [Request(f"many {i}", (7, 8, 9), seed=i, max_tokens=40 + 6 * i) for i in range(64)]
"""Some responses are long enough for a load between their first and their last token."""
FEW = [Request(f"few {i}", (7, 8, 9), seed=i, max_tokens=2) for i in range(4)]
"""Requests that end while a worker is replaced."""
LONG = Sampling(400)


def poll_all(rollout: Any) -> list[Completion]:
    found: list[Completion] = []
    while rollout.busy:
        found += rollout.poll()
    return found


@pytest.mark.parametrize(
    ("kind", "in_flight"),
    [
        ("object_store", "recompute"),
        ("disk", "continue"),
        ("collective", "finish"),
    ],
)
def test_staged_weights_are_loaded_while_requests_run(  # house: ok fixtures and parameters
    kind: str, in_flight: Any, runtime: RayRuntime, policy: Any, rollout: Any, tmp_path: Any
) -> None:
    """Two pushes during 64 responses. With ``finish`` no response has two versions. Otherwise some
    do, and if keys are computed again, the newest tokens have the policy's log-probs."""
    sync = runtime.sync(policy, rollout, kinds(tmp_path / "weights")[kind])
    first = policy.version
    rollout.submit(MANY, LONG)
    found = rollout.poll()
    for version in (first + 1, first + 2):
        step(policy)
        staged = sync.stage(in_flight)
        assert staged.version == version and staged.waits == (kind == "collective")
        staged.load(rollout)
        assert rollout.version == (version if staged.waits else first)
        if not staged.waits:
            size = staged.metrics["sync/bytes"]
            assert size > 0 and staged.metrics["sync/stored_bytes"] <= 2 * size
            while rollout.version != version:
                found += rollout.poll()
        first = version
    rollout.submit([Request("last", (7, 8, 9), seed=99)], LONG)
    found += poll_all(rollout)
    assert sorted(c.request_id for c in found) == sorted(["last", *(r.request_id for r in MANY)])
    runtime.peaks()  # asks the workers, and does not wait for them
    runtime.cluster.ray.get([worker.ping.remote() for worker in rollout.workers])
    assert ("rollout", 1) in {(peaks.role, peaks.rank) for peaks in runtime.peaks()}
    versions = [set(c.versions) for c in found]
    if in_flight == "finish":
        assert all(len(v) == 1 for v in versions) and {policy.version} in versions
        return
    mixed = [c for c in found if len(c.spans) > 1 and c.version == policy.version]
    assert mixed, "a response was in progress"
    if in_flight == "recompute":
        row = [7, 8, 9, *mixed[0].token_ids]
        begin = 3 + mixed[0].spans[-1].begin
        mask = [i >= begin for i in range(len(row))]
        ours = policy.logprobs(rows_to_batch([row], [mask], prompt_lens=[3]))[begin:]
        # fp32, log-probs of size 4 through a cache instead of one pass
        theirs = torch.tensor(mixed[0].logprobs[begin - 3 :])
        torch.testing.assert_close(theirs, ours, atol=3e-5, rtol=0)


def test_a_killed_worker_does_not_stop_the_other(
    runtime: RayRuntime, policy: Any, rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement takes time to start and load. Meanwhile the other worker has all requests,
    and new weights are confirmed. The replacement joins with these weights."""
    sync = ObjectStoreSync(policy, rollout, STORE, HOW)
    rollout.replace({})
    pid = runtime.cluster.ray.get(rollout.workers[1].ping.remote())
    rollout.submit(MANY, LONG)
    found = rollout.poll()
    os.kill(pid, signal.SIGKILL)
    step(policy)
    sync.stage("recompute").load(rollout)
    rollout.submit(FEW, LONG)
    early: list[Any] = []  # the replacement loads no weights before the other worker has answered
    may_load = rollout.pool._may_load
    monkeypatch.setattr(
        rollout.pool, "_may_load", lambda index: may_load(index) and (index == 0 or bool(early))
    )
    while rollout.busy:
        new = rollout.poll()
        found += new
        early += [] if rollout.pool.complete else new
    assert early and rollout.version == policy.version
    assert sorted(c.request_id for c in found) == sorted(r.request_id for r in [*MANY, *FEW])
    rollout.replace({})
    assert runtime.cluster.ray.get(rollout.workers[1].ping.remote()) != pid
    in_step(policy, rollout)
    same_bits(policy, rollout, runtime.cluster.ray)


# ---- what is damaged on the way ------------------------------------------------------------------

Stored = tuple[list[bytes], list[Any]]


def corrupt(headers: list[bytes], payloads: list[Any]) -> Stored:
    payloads[1] = payloads[1].copy()
    payloads[1][100] ^= 1
    return headers, payloads


def drop(headers: list[bytes], payloads: list[Any]) -> Stored:
    return headers[:1] + headers[2:], payloads[:1] + payloads[2:]


def reorder(headers: list[bytes], payloads: list[Any]) -> Stored:
    headers[0], headers[1] = headers[1], headers[0]
    return headers, [payloads[1], payloads[0], *payloads[2:]]


def swap_bytes(headers: list[bytes], payloads: list[Any]) -> Stored:
    return headers, [payloads[1], payloads[0], *payloads[2:]]


def truncate(headers: list[bytes], payloads: list[Any]) -> Stored:
    return headers, [payloads[0][:-16], *payloads[1:]]


def no_end(headers: list[bytes], payloads: list[Any]) -> Stored:
    return [*headers[:-2], headers[-1]], payloads[:-1]


def damaged_header(headers: list[bytes], payloads: list[Any]) -> Stored:
    return [headers[0][:-3] + b"9" + headers[0][-2:], *headers[1:]], payloads


FAULTS = {
    corrupt: r"bucket 1 of version \d+ is corrupted: its checksum should be",
    drop: "was received instead of bucket 1: one was lost",
    reorder: r"bucket 1 of version \d+ was received instead of bucket 0",
    swap_bytes: r"bucket 0 of version \d+",
    truncate: r"bucket 0 of version \d+ should have",
    no_end: r"the end of version \d+",
    damaged_header: "its CRC-32 is",
}


@pytest.fixture(scope="module")
def stored(policy: Any, rollout: Any) -> ObjectStoreSync:
    return ObjectStoreSync(policy, rollout, STORE, HOW)


def damaged(kept: WeightSnapshot[Any], fault: Any, ray: Any) -> WeightSnapshot[Any]:
    arrays: Sequence[np.ndarray[Any, Any]] = [ray.get(ref) for ref in kept.payloads]
    headers, payloads = fault(list(kept.headers), list(arrays))
    return WeightSnapshot(tuple(headers), tuple(ray.put(p) for p in payloads))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_in_the_store_stops_sampling_until_a_successful_push(
    fault: Any, stored: ObjectStoreSync, runtime: RayRuntime, policy: Any, rollout: Any
) -> None:
    stored.push()
    step(policy)
    transfer_weights = policy.transfer_weights

    def tampered(push: int, how: TransferOptions) -> WeightSnapshot[Any]:
        return damaged(transfer_weights(push, how), fault, runtime.cluster.ray)

    policy.transfer_weights = tampered
    try:
        with pytest.raises(SyncError, match=FAULTS[fault]):
            stored.push()
    finally:
        del policy.transfer_weights
    with pytest.raises(InvalidWeightsError):
        sample(rollout)
    stored.push()
    in_step(policy, rollout)


def test_weights_of_another_model_are_rejected(
    stored: ObjectStoreSync, policy: Any, rollout: Any, runtime: RayRuntime
) -> None:
    good = dict(policy.weights())
    with pytest.raises(ValueError, match=r"weight model\.norm\.weight has shape \[3\]"):
        rollout.load_weights(9, (good | {"model.norm.weight": torch.ones(3)}).items())
    with pytest.raises(InvalidWeightsError):
        sample(rollout)
    stored.push()
    in_step(policy, rollout)


def test_without_checksums_a_flipped_bit_is_not_detected(
    policy: Any, rollout: Any, runtime: RayRuntime
) -> None:
    """So it is the checksum that finds it."""
    how = replace(HOW, verify=False)
    kept = damaged(policy.transfer_weights(0, how), corrupt, runtime.cluster.ray)
    rollout.receive_snapshot(kept, verify=False)
    assert sample(rollout)
    ObjectStoreSync(policy, rollout, STORE, HOW)

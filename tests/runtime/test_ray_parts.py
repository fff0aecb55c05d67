"""What the Ray runtime does around Ray, with a Ray in name only: places that no node has, paths
that workers would look for elsewhere, workers that cannot be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import burnish
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import PlacementGroupSpec
from burnish.config.roles import TrainRole
from burnish.config.sync import DiskSync
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import CollectiveTimeoutError
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.teacher import DistillTargetSpec
from burnish.observe.timeline import Timeline
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.vllm.config import VllmEngine
from burnish.runtime import inline
from burnish.runtime.base import ClusterError, WorkerLostError
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.phases import Phases
from burnish.runtime.ray import runtime as ray_runtime
from burnish.runtime.ray.cluster import RayCluster, worker_environment
from burnish.runtime.ray.connect import start_ray
from burnish.runtime.ray.errors import constructor_error
from burnish.runtime.ray.runtime import RayRuntime
from burnish.runtime.ray.train_engine import BatchStore, RemoteTrainEngine
from burnish.runtime.ray.worker_group import WorkerGroup
from burnish.runtime.worker import to_array, unpack_share
from burnish.train.batching import RowSplit
from burnish.train.spec import EngineSpec
from burnish.types import rows_to_batch

ray = pytest.importorskip("ray")
MODEL = ModelConfig(scratch=ScratchConfig())
ROOT = Path(burnish.__file__).parents[1]

# ---- batches in the object store ----------------------------------------------------------------


class SumRank:
    """A rank whose log-prob of a token, and state, is the token."""

    def __init__(self, rank: int) -> None:
        self.rank, self.received = rank, list[Any]()
        self.row_split = SimpleNamespace(remote=self._row_split)
        self.per_token = SimpleNamespace(
            remote=lambda method, packed: {"logprobs": self._logprobs, "states": self._states}[
                method
            ](packed)
        )

    def _row_split(self) -> tuple[RowSplit, int]:
        return RowSplit(3, None, max_tokens=10, layout="packed"), self.rank // 2

    def _logprobs(self, packed: Any) -> Any:
        self.received.append(packed)
        share = unpack_share(packed)
        return share.batch.tokens.float().numpy() if self.rank % 2 == 0 else None

    def _states(self, packed: Any) -> Any:
        states = unpack_share(packed).batch.tokens[:, None].expand(-1, 4).bfloat16()
        return to_array(states.contiguous()) if self.rank % 2 == 0 else None


def test_a_batch_is_put_once_per_share_and_its_results_are_put_in_order() -> None:
    """Six ranks in three model-parallel groups; rows of 6, 2, 3, 5 and 4 tokens under a budget, so
    that the rows of a share are not neighbors. Only rank 0 of a group returns values."""
    put: list[Any] = []
    ranks = [SumRank(rank) for rank in range(6)]

    def call_all(call: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [call(*own) for own in zip(ranks, *arguments, strict=True)]

    def keep(value: Any) -> Any:
        put.append(value)
        return value

    cluster = SimpleNamespace(ray=SimpleNamespace(put=keep))
    group = cast(Any, SimpleNamespace(cluster=cluster, role="policy", all=call_all))
    batches = BatchStore(cluster.ray)
    first, second = RemoteTrainEngine(group, batches), RemoteTrainEngine(group, batches)
    rows = [[i] * n for i, n in enumerate([6, 2, 3, 5, 4], start=1)]
    batch = rows_to_batch(
        rows, [[False] + [True] * (len(r) - 1) for r in rows], prompt_lens=[1] * 5
    )
    expected = [float(token) for row in rows for token in row]
    found = first.logprobs(batch)
    assert found.tolist() == expected and found.dtype == torch.float32
    assert [rank.received[0] is put[rank.rank // 2] for rank in ranks] == [True] * 6
    assert sorted(sorted(share["row_numbers"]) for share in put) == [[0], [1, 3], [2, 4]]
    later = replace(batch, ref_logprobs=found)
    states = second.states(later)
    assert len(put) == 3, "another engine reads the same rows, and no model reads log-probs"
    assert states.dtype == torch.bfloat16 and states[:, 3].tolist() == expected
    first.logprobs(replace(later, num_tokens=7))
    assert len(put) == 6, "other denominators"
    del put[:], batch, later
    for rank in ranks:
        del rank.received[:]
    assert batches._last is None, "references are dropped with the batch"


# ---- places ----------------------------------------------------------------------------------


def node(gpus: float, cpus: float, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus} | ({"GPU": gpus} if gpus else {})}


def test_a_worker_larger_than_every_node_is_rejected_at_once() -> None:
    """16 GPUs of one rollout worker, on two nodes of 8 that have 16 together."""
    nodes = [node(8, 64), node(8, 32), node(16, 64, alive=False)]
    cluster = cast(RayCluster, SimpleNamespace(ray=SimpleNamespace(nodes=lambda: nodes)))
    fits = PlacementGroupSpec(("policy",), 2, cpus=8, gpus=8)
    RayCluster._check_nodes(cluster, [fits])
    wide = PlacementGroupSpec(("rollout",), 1, cpus=16, gpus=16)
    with pytest.raises(ClusterError) as caught:
        RayCluster._check_nodes(cluster, [fits, wide])
    said = str(caught.value)
    assert "1 x rollout (16 GPUs each) needs 16 GPUs and 16 CPUs on one node" in said
    assert "have 8 GPUs and 32 CPUs or 8 GPUs and 64 CPUs" in said
    assert "tensor_parallel_size" in said
    spanning = PlacementGroupSpec(("policy", "rollout"), 6, cpus=1, gpus=1, span=3)
    RayCluster._check_nodes(cluster, [spanning, replace(spanning, count=12)])
    with pytest.raises(ClusterError, match="tensor_parallel_"):
        RayCluster._check_nodes(cluster, [replace(spanning, count=15)])
    with pytest.raises(ClusterError, match="16 GPUs"):
        RayCluster._check_nodes(cluster, [replace(spanning, count=16, span=16)])
    many = PlacementGroupSpec(("policy",), 1, cpus=65, gpus=0)
    with pytest.raises(ClusterError, match="65 CPUs"):
        RayCluster._check_nodes(cluster, [many])


# ---- paths -----------------------------------------------------------------------------------


def test_local_paths_become_absolute_and_hub_names_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    local = ModelConfig(
        path="models/mine", tokenizer_path="models/mine", chat_template="chat.jinja"
    )
    found = local.with_absolute_paths()
    assert found.path == found.tokenizer_path == str(tmp_path / "models" / "mine")
    assert found.chat_template == str(tmp_path / "chat.jinja")
    hub = ModelConfig(path="HuggingFaceTB/SmolLM2-135M", chat_template="{% for m in messages %}")
    assert hub.with_absolute_paths() == hub
    assert MODEL.with_absolute_paths() == MODEL


def test_workers_get_absolute_paths_of_everything_they_read_or_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}

    def recorder(name: str) -> Callable[..., Any]:
        def record(*args: Any, **_: Any) -> Any:
            given[name] = args
            return SimpleNamespace(name="policy", role="policy", push=None, attention="flash")

        return record

    for name in ("WorkerGroup", "RemoteTrainEngine", "RemoteRolloutEngine", "ray_sync", "timed"):
        monkeypatch.setattr(ray_runtime, name, recorder(name))
    runtime = RayRuntime.__new__(RayRuntime)
    runtime.groups, runtime.rollouts, runtime.timeline = [], [], Timeline()
    runtime.attention = {}
    runtime.cluster, runtime.batches = cast(Any, None), cast(Any, None)
    runtime.precision = cast(Any, SimpleNamespace(sampler_dtype="fp32"))
    runtime.phases = Phases()
    mine, absolute = ModelConfig(path="mine"), str(tmp_path / "mine")
    none = cast(Any, None)
    distill_target = DistillTargetSpec(mine, "fp32", 10, none, none, none)
    runtime.language_model(
        EngineSpec(
            TrainRole.alone("policy", TrainConfig(lr=0.1), mine), distill_target=distill_target
        )
    )
    spec = given["WorkerGroup"][1]
    assert (spec.role.model.path, spec.distill_target.teacher.path) == (absolute, absolute)
    runtime.standalone_rollout(mine, LocalEngine())
    assert given["RemoteRolloutEngine"][1].path == absolute
    runtime.sync(none, none, DiskSync(kind="disk", folder="weights"))
    assert given["ray_sync"][2].folder == str(tmp_path / "weights"), "which is not there yet"


@pytest.mark.parametrize("ready", [True, False])
def test_vllm_reads_no_weights_if_a_transfer_follows(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=1))
    load_causal_lm(scratch).save_pretrained(tmp_path)
    given: list[Any] = []
    loaded: list[int] = []

    def engine(model: Any, *_: Any, **__: Any) -> Any:
        given.append(model)
        return SimpleNamespace(load_weights=lambda version, tensors: loaded.append(version))

    monkeypatch.setattr(inline, "make_rollout_engine", engine)
    monkeypatch.setattr(inline, "_check_weights", lambda *_: None)  # it samples
    runtime = InlineRuntime(
        load_tokenizer(scratch), precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    folder = ModelConfig(path=str(tmp_path))
    runtime.standalone_rollout(folder, VllmEngine(kind="vllm"), ready=ready)
    assert {p.is_meta for p in given[0].parameters()} == {not ready}
    assert loaded == [0] * ready


def test_environment_variables_of_model_locations_are_passed_to_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        if name.startswith("HF_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = worker_environment(on_gpu=True)
    assert {n: v for n, v in found.items() if n.startswith("HF_")} == {
        "HF_HOME": "/models",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "NCCL_my_secret", "DS_PASSWORD", "HF_HUB_TOKEN_2"]
)
def test_secrets_are_not_passed_to_ray(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes what it is handed into a log that every user of the machine can read."""
    monkeypatch.setenv(name, "hidden")
    assert "hidden" not in worker_environment(on_gpu=False).values()


@pytest.mark.slow
def test_a_local_ray_listens_on_the_loopback_and_requires_its_own_token(
    tmp_path: Path,
) -> None:
    """In a process of its own, whose environment has a secret: a worker inherits it, and no file
    that Ray writes contains it. Two ranks meet there, too."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"HF_TOKEN": "hf_hidden_value", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("local_ray.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mode"] == "token" and found["inherited"] == "hf_hidden_value"
    assert len(found["token"]) == 64
    assert not (tmp_path / ".ray" / "auth_token").exists(), "a token that other users may read"
    assert found["listening"] and all(ip_address(a).is_loopback for a in found["listening"])
    assert found["written"] == [], "files with a secret"
    assert found["after"] == {}, "the environment is as it was"


def test_a_ray_without_tokens_is_rejected() -> None:
    old: Any = SimpleNamespace(__version__="2.51.9")
    with pytest.raises(
        ClusterError, match=r"Ray 2\.51\.9 does not support authentication tokens.*ray>=2\.52"
    ):
        start_ray(old, num_cpus=1, environment={})


# ---- workers that cannot be made -------------------------------------------------------------


def test_a_failed_environment_setup_is_not_a_worker_loss() -> None:
    error = ray.exceptions.RuntimeEnvSetupError("pip found no such package")
    said = str(constructor_error(ray, error, "rank 0 of the policy"))
    assert "rank 0 of the policy could not be created" in said
    assert "pip found no such package" in said
    assert constructor_error(ray, ray.exceptions.ActorDiedError(), "rank 0 of the policy") is None
    assert constructor_error(ray, ValueError("mine"), "rank 0 of the policy") is None


# ---- ranks that wait for each other in vain ------------------------------------------------------


def test_two_threads_call_the_ranks_of_a_group_in_one_order() -> None:
    """The second thread calls while the first one has called rank 0 only."""
    called, go_on = threading.Event(), threading.Event()
    orders: list[list[str]] = [[], []]

    def value(rank: int, what: str) -> str:
        orders[rank].append(what)
        if rank == 0 and what == "training":
            called.set()
            assert go_on.wait(60)
        return what

    group = WorkerGroup.__new__(WorkerGroup)
    group.workers, group._complete, group._calling = [0, 1], True, threading.RLock()
    wait = SimpleNamespace(wait=lambda refs, workers, limit_s: (list(refs), []))
    get = SimpleNamespace(get=lambda ref: ref, exceptions=ray.exceptions)
    config = ClusterConfig(runtime="ray")
    group.cluster = cast(Any, SimpleNamespace(ray=get, monitor=wait, config=config))

    def start(what: str) -> threading.Thread:
        thread = threading.Thread(target=group.all, args=(lambda rank: value(rank, what),))
        thread.start()
        return thread

    threads = [start("training")]
    assert called.wait(60)
    threads.append(start("evaluation"))
    threads[1].join(0.3)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert orders == [["training", "evaluation"]] * 2


def test_ranks_that_miss_a_collective_are_named_with_the_collectives_of_the_others() -> None:
    """Rank 0 and 1 waited in two collectives, rank 2 still computes: a loss of the group."""
    raised = {
        "call 0": CollectiveTimeoutError(
            "timed out after 600 s waiting for the other ranks in all_gather"
        ),
        "call 1": CollectiveTimeoutError(
            "timed out after 600 s waiting for the other ranks in reduce_scatter"
        ),
    }

    def get(ref: str) -> Any:
        if ref in raised:
            raise ray.exceptions.RayTaskError.make_dual_exception_instance(
                ray.exceptions.RayTaskError("forward_backward", "", raised[ref])
            )
        return ref

    group = WorkerGroup.__new__(WorkerGroup)
    group.name, group.workers, group._complete = "policy", [0, 1, 2], True
    group.cluster = cast(
        Any,
        SimpleNamespace(
            config=ClusterConfig(runtime="ray", policy_ranks=3),
            ray=SimpleNamespace(
                exceptions=ray.exceptions,
                get=get,
                wait=lambda refs, **_: (refs[:2], refs[2:]),
            ),
            monitor=SimpleNamespace(
                wait=lambda refs, workers, limit_s: (["call 1"], []),
                wait_for_heartbeats=lambda workers: [],
                name=lambda worker: f"rank {worker} of the policy",
                names=lambda workers: ", ".join(f"rank {w} of the policy" for w in workers),
            ),
        ),
    )
    with pytest.raises(WorkerLostError) as caught:
        group.gather(["call 0", "call 1", "call 2"])
    assert str(caught.value) == (
        "a collective of the policy timed out: rank 0 of the policy timed out after 600 s waiting "
        "for the other ranks in all_gather; rank 1 of the policy timed out after 600 s waiting "
        "for the other ranks in reduce_scatter; rank 2 of the policy did not reach it "
        "(cluster.collective_timeout_s)"
    )
    assert not group._complete, "the group is restarted before its next call"

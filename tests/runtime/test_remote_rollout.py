"""Rollout workers behind one engine, with a Ray in name only: workers that are lost while others
sample, weights that are staged while requests run, requests that move between workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.rollout.local.config import LocalEngine
from burnish.runtime.base import WorkerLostError
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine
from burnish.runtime.ray.rollout_pool import Weights
from burnish.runtime.ray.rollout_worker import Orders
from burnish.sync.base import SyncError

ray = pytest.importorskip("ray")
MODEL = ModelConfig(scratch=ScratchConfig())


class Lost:
    """A reference to what is gone."""


class Dead:
    """A reference to the result of a call on a dead worker."""


class Result:
    """A reference to what a worker returned."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Worker:
    """Finishes a sample per answer, from the weights that it has then; the ``lost``-th answer is
    gone. What it was called with is in ``asked`` and ``given``."""

    def __init__(self, lost: int | None = None) -> None:
        self.lost = lost
        self.asked: list[str] = []
        self.given: list[int] = []
        self.left: list[Completion] = []
        self.answers = 0
        self.advance = SimpleNamespace(remote=self._advance)
        self.build = SimpleNamespace(remote=lambda *_, **__: Result(512))
        self.sleep = SimpleNamespace(remote=lambda **_: Dead() if self.dead else Result())
        self.close = SimpleNamespace(remote=Result)
        self.dead = False

    def _advance(self, orders: Orders) -> Any:
        if self.dead:
            return Dead()
        self.left = [c for c in self.left if c.request_id not in orders.cancel]
        self.asked += [r.request_id for r, _ in orders.submit]
        self.left += [
            Completion(r.request_id, k, (7,), (-0.5,), "stop", "x", ())
            for r, _ in orders.submit
            for k in range(r.n)
        ]
        self.answers += 1
        spans = (VersionSpan(self.given[-1] if self.given else 0, 0, 1),)
        done, self.left = [replace(c, spans=spans) for c in self.left[:1]], self.left[1:]
        return Lost() if self.answers - 1 == self.lost else Result(done)

    def load(self, version: int) -> Result:
        """Load weights."""
        self.given.append(version)
        return Result()


class Cluster:
    """In the place of ``RayCluster``. ``silent`` workers owe their answers; ``hung`` ones are found
    at the next wait."""

    unresponsive_reason = "hangs"
    late_reason = "is late"

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.config = ClusterConfig(runtime="ray", rollout_workers=2, layout="separate")
        self.fresh = list(workers)
        self.ended: list[Worker] = []
        self.said: list[str] = []
        self.silent: set[Worker] = set()
        self.hung: set[Worker] = set()
        self._callers: dict[Any, Worker] = {}
        self.ray = SimpleNamespace(
            exceptions=ray.exceptions, get=self._get, wait=lambda refs, **_: (refs, [])
        )
        self.monitor = SimpleNamespace(
            wait=self._wait, name=lambda _: "rollout worker", every_s=1.0
        )

    def _wait(
        self, refs: list[Any], handles: list[Worker], *, limit_s: float
    ) -> tuple[list[Any], list[Worker]]:
        found = [h for h in handles if h in self.hung]
        ready = [r for r in refs if self.owner(r) not in self.silent | self.hung]
        assert ready or found, "nothing would ever be ready"
        return ready, found

    def owner(self, ref: Any) -> Worker | None:
        """The worker of an outstanding call."""
        calls = self.engine.pool._calls
        return calls[ref].worker.handle if ref in calls else None

    def _get(self, ref: Any) -> Any:
        if isinstance(ref, Lost):
            raise ray.exceptions.ObjectLostError("00" * 28, b"", "")
        if isinstance(ref, Dead):
            raise ray.exceptions.ActorDiedError
        return ref.value

    def start_one(self, *_: Any) -> Worker:
        return self.fresh.pop(0)

    def first_response(self, _: Worker) -> Result:
        return Result()

    def check_started(self, worker: Worker, _: Any) -> str | None:
        return None

    def end(self, workers: Any) -> None:
        self.ended += workers

    def count_restart(self, what: str) -> None:
        self.said.append(what)


def engine_of(cluster: Any) -> RemoteRolloutEngine:
    cluster.engine = SimpleNamespace(pool=SimpleNamespace(_calls={}))
    engine = RemoteRolloutEngine(cluster, MODEL, LocalEngine(max_batch_size=2), max_len=None)
    cluster.engine = engine
    return engine


def weights(version: int, in_flight: Any = "recompute") -> Weights:
    return Weights(version, lambda worker: worker.load(version), in_flight)


def finish(engine: RemoteRolloutEngine) -> list[Completion]:
    """All completions that are left."""
    found: list[Completion] = []
    while engine.busy:
        found += engine.poll()
    return found


FOUR = [Request(name, (5,), n=2) for name in "abcd"]
EIGHT = [(name, k) for name in "abcd" for k in range(2)]


def test_lost_unread_samples_are_sampled_again_by_the_others() -> None:
    """Its machine died: that is the loss of a worker and no reason to go back a step. What had
    arrived before is kept. The fresh worker takes over what the other cannot have begun."""
    broken, whole, fresh = Worker(lost=1), Worker(lost=None), Worker(lost=None)
    cluster: Any = Cluster([broken, whole, fresh])
    engine = engine_of(cluster)
    found = [(c.request_id, c.index) for c in engine.generate(FOUR, Sampling(4))]
    assert sorted(found) == EIGHT
    assert cluster.ended == [broken] and set(whole.asked) | set(fresh.asked) == set("abcd")
    (said,) = cluster.said
    assert "its unread samples are lost" in said


def test_the_requests_of_a_worker_replaced_between_two_polls_are_sampled_again() -> None:
    """Its loss is found twice, and one worker is started."""
    broken, whole, fresh = Worker(), Worker(), Worker()
    cluster: Any = Cluster([broken, whole, fresh])
    engine = engine_of(cluster)
    engine.submit(FOUR, Sampling(4))
    found = engine.poll()
    broken.dead = True
    engine.sleep()
    assert cluster.ended == [broken]
    found += finish(engine)
    assert sorted((c.request_id, c.index) for c in found) == EIGHT
    assert len(cluster.said) == 1 and "c" in {*whole.asked, *fresh.asked}


def test_a_worker_that_starts_does_not_stop_the_others_and_takes_what_they_have_not_begun() -> None:
    """The batch of a worker has two samples. While the replacement starts, the other worker has all
    requests; once it is ready, it gets some that the other has not begun."""
    hung, whole, fresh = Worker(), Worker(), Worker()
    cluster: Any = Cluster([hung, whole, fresh])
    engine = engine_of(cluster)
    engine.submit(FOUR, Sampling(4))
    cluster.hung, cluster.silent = {hung}, {fresh}
    found = engine.poll()
    cluster.hung = set()
    assert cluster.said == ["rollout worker hangs"] and not hung.given
    found += engine.poll()
    assert len(found) == 2 and set(whole.asked) == set("abcd") and not fresh.asked
    cluster.silent = set()
    found += finish(engine)
    assert sorted((c.request_id, c.index) for c in found) == EIGHT and fresh.asked


def test_a_worker_that_loads_its_first_weights_does_not_keep_the_engine_busy() -> None:
    quick, lost, fresh = Worker(), Worker(), Worker()
    cluster: Any = Cluster([quick, lost, fresh])
    engine = engine_of(cluster)
    engine.load(weights(1))
    engine.lose({1: "was let go"})
    while engine.pool.called("load") != {1}:
        engine.pool.wait()
    assert not engine.busy and fresh.given == [1]
    assert len(list(engine.generate(FOUR, Sampling(4)))) == 8 and engine.version == 1


def test_staged_weights_keep_the_engine_busy_if_all_workers_are_lost_while_they_load() -> None:
    """No request is open, so only this lets the caller poll until the new workers have loaded."""
    workers = [Worker() for _ in range(4)]
    cluster: Any = Cluster(workers)
    engine = engine_of(cluster)
    cluster.silent = cluster.hung = set(workers[:2])
    engine.stage(weights(1))
    engine.poll()
    assert cluster.ended == workers[:2] and engine.busy and engine.version == 0
    finish(engine)
    assert [worker.given for worker in workers] == [[1]] * 4
    assert engine.version == 1 and engine.pool.complete


def older_load() -> tuple[Any, RemoteRolloutEngine, Weights]:
    """An engine whose replaced worker loads version 1 while version 2 is staged and loaded by the
    other one; no request is open."""
    fresh = Worker()
    cluster: Any = Cluster([Worker(), Worker(), fresh])
    engine = engine_of(cluster)
    engine.load(weights(0))
    first = weights(1)
    engine.stage(first)
    finish(engine)
    engine.lose({1: "died"})
    while engine.pool.called("load") != {1}:
        engine.pool.wait()
    cluster.silent = {fresh}
    engine.stage(weights(2))
    engine.poll()
    assert engine.version == 2 and not first.released.is_set()
    return cluster, engine, first


def test_a_load_of_older_weights_keeps_the_engine_busy_until_they_are_released() -> None:
    """The trainer waits for the release before it stages the next version."""
    cluster, engine, first = older_load()
    assert engine.busy
    cluster.silent = set()
    finish(engine)
    assert first.released.is_set()


def test_a_paused_engine_settles_without_sampling() -> None:
    cluster, engine, first = older_load()
    engine.submit(FOUR, Sampling(4))
    cluster.silent = set()
    engine.settle()
    assert first.released.is_set() and not engine.pool.called("advance")


def test_cancels_and_releases_sample_nothing_and_let_due_weights_be_loaded() -> None:
    """They happen while sampling is paused, too."""
    cluster: Any = Cluster([Worker(), Worker()])
    engine = engine_of(cluster)
    engine.submit(FOUR, Sampling(4))
    engine.cancel("a")
    engine.release(["a conversation"])
    assert not engine.pool.called("advance")
    engine.poll()
    engine.stage(weights(1, "finish"))
    while engine.pool.called("advance"):
        engine.pool.wait()
    assert not engine.pool.called("load")
    engine.cancel("bcd")
    assert engine.busy and engine.pool.called("load") == {0, 1}
    finish(engine)
    assert len(list(engine.generate([Request("e", (5,), conversation="e")], Sampling(4)))) == 1
    engine.release(["e"])
    assert len(engine.pool.called("advance")) == 1, "its cache is freed before the next poll"


def test_weights_that_were_lost_with_a_machine_are_one_error() -> None:
    """Two new workers are called to load them."""
    workers = [Worker() for _ in range(5)]
    cluster: Any = Cluster(workers)
    cluster.config = ClusterConfig(runtime="ray", rollout_workers=3, layout="separate")
    engine = engine_of(cluster)
    engine.stage(Weights(1, lambda w: Lost() if w in workers[3:] else w.load(1)))
    finish(engine)
    engine.lose({1: "its machine died", 2: "its machine died"})
    while engine.pool.called("load") != {1, 2}:
        engine.pool.wait()
    with pytest.raises(WorkerLostError):
        engine.load(weights(2))
    engine.load(weights(3))
    assert engine.version == 3 and engine.pool.complete


def test_a_version_is_confirmed_by_all_workers_and_older_ones_are_skipped() -> None:
    """Worker 1 owes an answer while versions 5, 6 and 7 are staged. It had been told to load 5, so
    5 stays available; 6 is skipped and dropped."""
    slow, quick = Worker(), Worker()
    cluster: Any = Cluster([slow, quick])
    engine = engine_of(cluster)
    staged = [weights(version) for version in (5, 6, 7)]
    cluster.silent = {slow}
    engine.submit(FOUR, Sampling(4))
    for one in staged:
        engine.stage(one)
        engine.poll()
    assert quick.given == [5, 6, 7] and slow.given == [5] and engine.version == 0
    assert [one.released.is_set() for one in staged] == [False, True, False]
    assert staged[1].send is None
    cluster.silent = set()
    found = finish(engine)
    assert slow.given == [5, 7] and engine.version == 7
    assert [one.released.is_set() for one in staged] == [True, True, False]
    assert {c.version for c in found} >= {7}


def test_with_finish_a_worker_loads_once_its_running_requests_are_done() -> None:
    """Both workers run two requests of two samples each; new ones wait for the new weights."""
    cluster: Any = Cluster([Worker(), Worker()])
    engine = engine_of(cluster)
    engine.submit(FOUR, Sampling(4))
    found = engine.poll()
    engine.stage(weights(1, "finish"))
    engine.submit([Request("new", (5,), n=3)], Sampling(4))
    found += finish(engine)
    versions = {c.request_id: c.version for c in found}
    assert versions == {"a": 0, "b": 0, "c": 0, "d": 0, "new": 1} and len(found) == 11


def test_a_rejected_load_raises_in_poll_and_the_next_weights_are_loaded() -> None:
    cluster: Any = Cluster([Worker(), Worker()])
    engine = engine_of(cluster)
    reason = ray.exceptions.RayTaskError.make_dual_exception_instance(
        ray.exceptions.RayTaskError("receive_snapshot", "", SyncError("bucket 1 is corrupted"))
    )

    class Raised:
        @property
        def value(self) -> None:
            raise reason

    bad = Weights(2, lambda worker: Raised())
    engine.stage(bad)
    with pytest.raises(SyncError, match="bucket 1 is corrupted"):
        finish(engine)
    assert bad.released.is_set() and not engine.busy
    engine.load(weights(3))
    assert engine.version == 3
    engine.stage(weights(4))
    assert engine.busy
    assert {c.version for c in engine.generate(FOUR, Sampling(4))} == {engine.version} == {4}


def test_an_unread_completion_of_a_canceled_request_is_not_that_of_the_next_with_its_id() -> None:
    worker = Worker()
    cluster: Any = Cluster([worker, Worker()])
    engine = engine_of(cluster)
    request = Request("a", (5,), n=3)
    engine.submit([request], Sampling(4))
    assert [c.index for c in engine.poll()] == [0]
    engine.cancel(["a"])  # the worker's second answer is unread
    engine.submit([request], Sampling(4))
    engine.cancel(["a"])
    engine.submit([request], Sampling(4))
    polls = [[c.index for c in engine.poll()] for _ in range(4)]
    assert polls == [[], [0], [1], [2]] and not engine.busy
    assert worker.asked == ["a", "a"], "the second one was canceled before it was sent"
    engine.submit([request], Sampling(4))
    engine.close()
    assert not engine.busy


def test_replaced_workers_get_weights_without_a_copy_once_the_policy_is_idle() -> None:
    """Both workers die while the policy, which has to send its weights, is in use. Requests wait,
    and the next workers sample them from the weights of the last transfer."""
    workers = [Worker() for _ in range(4)]
    engine = engine_of(Cluster(workers))
    waits, idle, sent = [], False, Weights(3)

    def refill(indices: Sequence[int], timeout_s: float) -> dict[int, str]:
        waits.append(timeout_s)
        if idle:
            for index in indices:
                workers[2 + index].given.append(3)
            engine.pool.mark_loaded(indices, sent)
        return {}

    engine.pool.refill = refill
    engine.pool.mark_loaded([0, 1], sent)
    engine.submit(FOUR, Sampling(4))
    engine.lose({0: "died", 1: "died"})
    for _ in range(6):
        assert engine.poll() == [] and engine.busy
    assert waits[-1] == 1.0, "nothing else to do"
    assert engine.version == 3 and not engine.pool.complete
    idle = True
    found = finish(engine)
    assert sorted((c.request_id, c.index) for c in found) == EIGHT
    assert {c.spans[0].version for c in found} == {3} and engine.pool.complete

"""Who is called silent, and who is not: on a fake Ray with a clock of its own, then on real
processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.runtime import heartbeat
from burnish.runtime.heartbeat import HeartbeatMonitor, HeartbeatRegistry, start_heartbeat

TIMEOUT_S = 60.0


class FakeRay:
    """No result is ever ready; waiting moves the clock on; workers beat unless they are silent."""

    class exceptions:
        GetTimeoutError = TimeoutError
        RayActorError = ConnectionError

    def __init__(self) -> None:
        self.now = 0.0
        self.heartbeats = HeartbeatRegistry()
        self.alive: set[int] = set()
        self.board_answers = True
        self.board_restarts = 0

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list, list]:
        self.now += timeout
        for worker in self.alive:
            self.heartbeats.heartbeat(worker)
        return [], refs

    def get(self, ref: Any, *, timeout: float) -> Any:
        if not self.board_answers:
            raise TimeoutError
        return dict(ref)

    def kill(self, registry: Any, *, no_restart: bool) -> None:
        assert not no_restart
        self.board_restarts += 1
        self.heartbeats.counts.clear()
        self.board_answers = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(
        heartbeat,
        "time",
        SimpleNamespace(
            monotonic=lambda: ray.now, sleep=lambda s: ray.wait([], num_returns=1, timeout=s)
        ),
    )
    return ray


def watch_two(ray: FakeRay) -> tuple[HeartbeatMonitor, list[object]]:
    registry = SimpleNamespace(read=SimpleNamespace(remote=lambda: ray.heartbeats.counts))
    monitor = HeartbeatMonitor(ray, registry, timeout_s=TIMEOUT_S)
    workers = [object(), object()]
    for i, worker in enumerate(workers):
        heartbeat = monitor.add(worker, f"rank {i} of the policy")
        ray.alive.add(heartbeat.worker)
        monitor.mark_started(worker, ("host", 100 + i))
    return monitor, workers


def test_a_worker_that_misses_heartbeats_is_named_within_the_timeout(
    fake: FakeRay,
) -> None:
    monitor, workers = watch_two(fake)
    assert monitor.wait(["result"], workers, limit_s=200) == ([], [])
    fake.alive.remove(2)
    since = fake.now
    assert monitor.wait(["result"], workers, limit_s=1000) == ([], [workers[1]])
    assert TIMEOUT_S * 5 / 6 <= fake.now - since <= TIMEOUT_S
    assert monitor.names([workers[1]]) == "rank 1 of the policy (node host, pid 101)"


def test_long_calls_of_workers_with_heartbeats_do_not_time_out(fake: FakeRay) -> None:
    monitor, workers = watch_two(fake)
    assert monitor.wait(["result"], workers, limit_s=36_000) == ([], [])
    assert fake.now == pytest.approx(36_000)


def test_pausing_the_controller_is_not_a_missed_heartbeat(fake: FakeRay) -> None:
    """An hour in which neither anybody beat nor anybody looked counts as two intervals of six."""
    monitor, workers = watch_two(fake)
    for _ in range(5):
        monitor.wait(["result"], workers, limit_s=30)
        fake.now += 3600
        assert monitor.unresponsive(workers) == []


def test_workers_that_have_not_started_are_not_unresponsive(fake: FakeRay) -> None:
    monitor, workers = watch_two(fake)
    fresh = object()
    monitor.add(fresh, "rank 2 of the policy")
    assert monitor.wait(["result"], [*workers, fresh], limit_s=600) == ([], [])


def test_a_hung_registry_is_restarted_and_no_worker_is_reported(fake: FakeRay) -> None:
    monitor, workers = watch_two(fake)
    monitor.wait(["result"], workers, limit_s=100)
    fake.board_answers = False
    assert monitor.wait(["result"], workers, limit_s=600) == ([], [])
    assert fake.board_restarts == 1


def test_waiting_for_heartbeats_ends_with_a_heartbeat_or_unresponsive(fake: FakeRay) -> None:
    monitor, workers = watch_two(fake)
    monitor.wait(["result"], workers, limit_s=100)
    assert monitor.wait_for_heartbeats(workers) == []
    fake.alive.remove(1)
    assert monitor.wait_for_heartbeats(workers) == [workers[0]]


class Board:
    """A registry for threads: one of them may read it at a time, and a read may take a while."""

    def __init__(self) -> None:
        self.reading, self.entered, self.released = 0, threading.Event(), threading.Event()
        self.read = SimpleNamespace(remote=dict)
        self.released.set()

    def get(self, ref: Any, *, timeout: float) -> Any:
        self.reading += 1
        assert self.reading == 1, "two threads read"
        self.entered.set()
        assert self.released.wait(60)
        self.reading -= 1
        return ref


def test_two_threads_share_a_monitor() -> None:
    """Each adds, starts and drops its own workers, and polls at every call."""
    board = Board()
    monitor = HeartbeatMonitor(SimpleNamespace(get=board.get), board, timeout_s=0.0)
    numbers: list[int] = []

    def work() -> None:
        for i in range(500):
            worker = object()
            numbers.append(monitor.add(worker, "rank").worker)
            monitor.mark_started(worker, ("host", i))
            monitor.unresponsive([worker])
            assert monitor.name(worker) == f"rank (node host, pid {i})"
            monitor.drop(worker)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work) for _ in range(2)]:
                done.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(numbers) == list(range(1, 1001))


def test_a_thread_does_not_wait_while_another_reads_the_registry() -> None:
    """The registry hangs in the read of one thread. The other thread works on."""
    board, worker = Board(), object()
    monitor = HeartbeatMonitor(SimpleNamespace(get=board.get), board, timeout_s=0.0)
    monitor.add(worker, "rank 0")
    board.released.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(monitor.unresponsive, [worker])
        assert board.entered.wait(60)
        assert monitor.unresponsive([]) == [] and monitor.name(worker) == "rank 0"
        monitor.drop(object())
        board.released.set()
        assert first.result(60) == [worker]


# ---- real processes ------------------------------------------------------------------------------


class Busy:
    """A worker that does one thing for a while."""

    def heartbeat(self, heartbeat: Any, every_s: float) -> tuple[str, int]:
        return start_heartbeat(heartbeat, every_s)

    def hold_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)  # PyDLL keeps the interpreter's lock

    def compute(self, seconds: float) -> int:
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            n += 1
        return n

    def wait_for_a_lock(self, seconds: float) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=seconds)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_hung_processes_are_reported_and_busy_ones_are_not(ray: Any) -> None:
    """Four workers at a time-out of 5 s: one computes and one waits for 9 s, both well; one holds
    its interpreter's lock and one is stopped."""
    registry = ray.remote(HeartbeatRegistry).options(num_cpus=0).remote()
    monitor = HeartbeatMonitor(ray, registry, timeout_s=5.0)
    workers = [ray.remote(Busy).options(num_cpus=0).remote() for _ in range(4)]
    for i, worker in enumerate(workers):
        heartbeat = monitor.add(worker, f"worker {i}")
        monitor.mark_started(worker, ray.get(worker.heartbeat.remote(heartbeat, monitor.every_s)))
    computes, waits, holds, stopped = workers
    results = [computes.compute.remote(9), waits.wait_for_a_lock.remote(9)]
    results += [holds.hold_the_interpreter.remote(30), stopped.wait_for_a_lock.remote(30)]
    pid = int(monitor.name(stopped).split("pid ")[1].rstrip(")"))
    os.kill(pid, signal.SIGSTOP)
    found: list[Any] = []
    waiting = list(results)
    while len(found) < 2 or results[0] in waiting or results[1] in waiting:
        ready, unresponsive = monitor.wait(
            waiting, [w for w in workers if w not in found], limit_s=60
        )
        assert ready or unresponsive, "nothing within a minute"
        found += unresponsive
        waiting = [ref for ref in waiting if ref not in ready]
    assert {monitor.name(w) for w in found} == {monitor.name(w) for w in (holds, stopped)}
    for worker in workers:
        ray.kill(worker)

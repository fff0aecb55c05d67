"""Detection of unresponsive workers, independent of their current work.

A thread of every worker process reports to one small process on the controller's node
(:class:`HeartbeatRegistry`) several times per timeout. The thread runs only while the worker's
interpreter runs. Heartbeats stop if the process is stopped, its interpreter is deadlocked, or its
machine is lost. Long computation and waiting in a collective do not stop them.

:class:`HeartbeatMonitor` is the controller's side. It waits for results and polls the registry
meanwhile. Each poll without a new heartbeat adds the time since the previous poll to the worker's
timeout, at most two intervals. Pausing the controller or all processes therefore causes no false
positives. Several threads of the controller may use one monitor, each for its own workers.

The classes do not depend on Ray, which is passed as an argument."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HEARTBEATS_PER_TIMEOUT = 6
"""Missed heartbeats are counted in full intervals from the first poll without one. A worker is
unresponsive after 5 of them, which is at most 6 after its last heartbeat."""


_MANY, _GATHER_S = 32, 0.05
"""Polling a thousand results takes milliseconds, so with many results the poll waits for more."""


class HeartbeatRegistry:
    """Process that counts the heartbeats of each worker."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def heartbeat(self, worker: int) -> None:
        """Count a heartbeat of ``worker``."""
        self.counts[worker] = self.counts.get(worker, 0) + 1

    def read(self) -> dict[int, int]:
        """Return worker -> number of heartbeats so far."""
        return self.counts


@dataclass(frozen=True)
class Heartbeat:
    """Callable that reports one worker; it runs in the worker's process."""

    registry: Any
    """Handle of :class:`HeartbeatRegistry`."""
    worker: int

    def __call__(self) -> None:
        self.registry.heartbeat.remote(self.worker)


def start_heartbeat(heartbeat: Callable[[], None], every_s: float) -> tuple[str, int]:
    """Call ``heartbeat`` periodically in a thread of this process. Return (host name, process
    id)."""

    def run() -> None:
        while True:
            with suppress(Exception):  # the controller handles lost heartbeats
                heartbeat()
            time.sleep(every_s)

    threading.Thread(target=run, name="burnish-beat", daemon=True).start()
    return socket.gethostname(), os.getpid()


@dataclass
class _WorkerRecord:
    handle: Any  # also keeps the object and its id() alive
    name: str
    number: int
    counted: int = 0
    missed_s: float = 0.0
    started: bool = False


class HeartbeatMonitor:
    """Waits for results of workers and detects unresponsive workers."""

    def __init__(self, ray: Any, registry: Any, *, timeout_s: float) -> None:
        """Store the arguments. ``registry``: a handle of :class:`HeartbeatRegistry`. ``timeout_s``:
        maximum time without a heartbeat."""
        self.ray, self.registry, self.timeout_s = ray, registry, timeout_s
        self.every_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._lock = threading.Lock()
        """Protects the workers. Never held while waiting for a process."""
        self._workers: dict[int, _WorkerRecord] = {}
        self._number = 0
        self._reading = threading.Lock()
        """Held by the thread that reads the registry, so that counts are applied in the order of
        reading. Only :meth:`wait_for_heartbeats` waits for it, at most ``timeout_s``."""
        self._polled_at = time.monotonic()

    # ---- names -----------------------------------------------------------------------------

    def add(self, handle: Any, name: str) -> Heartbeat:
        """Register a worker under a name. Return the heartbeat that it has to call."""
        with self._lock:
            self._number += 1
            record = _WorkerRecord(handle, name, self._number)
            self._workers[id(handle)] = record
        return Heartbeat(self.registry, record.number)

    def mark_started(self, handle: Any, where: tuple[str, int]) -> None:
        """Mark a worker as started, on this node and in this process. Its heartbeats are required
        from now on."""
        node, pid = where
        with self._lock:
            worker = self._workers[id(handle)]
            worker.started, worker.name = True, f"{worker.name} (node {node}, pid {pid})"

    def drop(self, handle: Any) -> None:
        """Unregister a worker that is ended on purpose."""
        with self._lock:
            self._workers.pop(id(handle), None)

    def name(self, handle: Any) -> str:
        """Return the name for messages: role, rank and, if known, node and process."""
        with self._lock:
            return self._workers[id(handle)].name

    def names(self, handles: Iterable[Any]) -> str:
        """Return the names of several workers."""
        return ", ".join(self.name(handle) for handle in handles)

    # ---- waiting ---------------------------------------------------------------------------

    def wait(
        self, refs: Sequence[Any], handles: Sequence[Any], *, limit_s: float
    ) -> tuple[list[Any], list[Any]]:
        """Return (ready results, unresponsive workers) once either is nonempty; both are empty
        after ``limit_s``."""
        waited = 0.0
        while True:
            part = min(self.every_s, limit_s - waited)
            ready, _ = self.ray.wait(list(refs), num_returns=1, timeout=max(part, 0.0))
            if ready and len(refs) > 1:  # and all others that are ready
                more = _GATHER_S if len(refs) > _MANY else 0
                ready, _ = self.ray.wait(list(refs), num_returns=len(refs), timeout=more)
            unresponsive = self.unresponsive(handles)
            waited += part
            if ready or unresponsive or waited >= limit_s:
                return ready, unresponsive

    def unresponsive(self, handles: Iterable[Any]) -> list[Any]:
        """Return those of ``handles`` without a heartbeat for too long."""
        self._poll()
        enough = (HEARTBEATS_PER_TIMEOUT - 1) * self.every_s
        with self._lock:
            return [h for h in handles if self._workers[id(h)].missed_s >= enough]

    def wait_for_heartbeats(self, handles: Sequence[Any]) -> list[Any]:
        """Wait until each of ``handles`` sent a heartbeat or timed out. Return the latter."""
        self._poll(at_once=True)  # earlier heartbeats do not count
        before = self._counts(handles)
        while True:
            unresponsive = self.unresponsive(handles)
            now = self._counts(handles)
            silent = sum(new == old for new, old in zip(now, before, strict=True))
            if silent <= len(unresponsive):
                return unresponsive
            time.sleep(self.every_s)

    def _counts(self, handles: Iterable[Any]) -> list[int]:
        with self._lock:
            return [self._workers[id(h)].counted for h in handles]

    def _poll(self, *, at_once: bool = False) -> None:
        """Count heartbeats, at most once per interval and not while another thread does."""
        if not self._reading.acquire(blocking=at_once):
            return
        try:
            now = time.monotonic()
            if now - self._polled_at < self.every_s and not at_once:
                return
            passed, self._polled_at = min(now - self._polled_at, 2 * self.every_s), now
            heartbeats = self._read()
            with self._lock:
                for worker in self._workers.values():
                    count = heartbeats.get(worker.number, 0)
                    if count != worker.counted or not worker.started:
                        worker.counted, worker.missed_s = count, 0.0
                    else:
                        worker.missed_s += passed
        finally:
            self._reading.release()

    def _read(self) -> dict[int, int]:
        """Return the heartbeats so far. If the registry does not respond, no worker counts as
        unresponsive: the registry is killed, and Ray restarts it."""
        try:
            counts: dict[int, int] = self.ray.get(
                self.registry.read.remote(), timeout=self.timeout_s
            )
        except self.ray.exceptions.GetTimeoutError:
            self.ray.kill(self.registry, no_restart=False)
            return {}
        except self.ray.exceptions.RayActorError:
            return {}
        return counts

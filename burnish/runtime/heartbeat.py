"""Which workers still answer, whatever they are busy with.

A thread of every worker process reports to one small process beside the controller
(:class:`HeartbeatRegistry`) a few times per time-out. It can do so only while the worker's
interpreter runs: a process that is stopped or whose interpreter is held by a deadlock, and a
machine that is gone, fall silent. One that computes for long, or waits in a collective for another,
does not.

:class:`HeartbeatMonitor` is the controller's side: it waits for results and counts silence
meanwhile. It counts how often it looked in vain and trusts no clock, so a pause of the controller,
or of everything at once, is taken for nobody's death.

Plain classes: Ray is handed in.
"""

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
"""Silence is counted in whole intervals from the first look that found no beat, so a worker is
called silent after 5 of them: at most 6 after its last beat."""


_MANY, _GATHER_S = 32, 0.05
"""Looking at a thousand results costs milliseconds, so with many a moment is waited for more."""


class HeartbeatRegistry:
    """The process that workers report to: how often each did."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def heartbeat(self, worker: int) -> None:
        """``worker`` is there."""
        self.counts[worker] = self.counts.get(worker, 0) + 1

    def read(self) -> dict[int, int]:
        """Worker -> beats so far."""
        return self.counts


@dataclass(frozen=True)
class Heartbeat:
    """Reports one worker; called in its process."""

    registry: Any
    """Handle of :class:`HeartbeatRegistry`."""
    worker: int

    def __call__(self) -> None:
        self.registry.heartbeat.remote(self.worker)


def start_heartbeat(heartbeat: Callable[[], None], every_s: float) -> tuple[str, int]:
    """Call ``heartbeat`` in a thread of this process from now on. Returns (host name, process
    id)."""

    def run() -> None:
        while True:
            with suppress(Exception):  # a beat that is not heard is the controller's business
                heartbeat()
            time.sleep(every_s)

    threading.Thread(target=run, name="burnish-beat", daemon=True).start()
    return socket.gethostname(), os.getpid()


@dataclass
class _WorkerRecord:
    handle: Any  # also keeps it, and so its id(), alive
    name: str
    number: int
    counted: int = 0
    missed_s: float = 0.0
    started: bool = False


class HeartbeatMonitor:
    """Waits for workers and knows who has fallen silent."""

    def __init__(self, ray: Any, registry: Any, *, timeout_s: float) -> None:
        """``registry``: a handle of :class:`HeartbeatRegistry`. ``timeout_s``: the longest
        silence."""
        self.ray, self.registry, self.timeout_s = ray, registry, timeout_s
        self.every_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._workers: dict[int, _WorkerRecord] = {}
        self._number = 0
        self._polled_at = time.monotonic()

    # ---- who is who ------------------------------------------------------------------------

    def add(self, handle: Any, name: str) -> Heartbeat:
        """Know a worker by name. Returns what it has to call."""
        self._number += 1
        self._workers[id(handle)] = _WorkerRecord(handle, name, self._number)
        return Heartbeat(self.registry, self._number)

    def mark_started(self, handle: Any, where: tuple[str, int]) -> None:
        """It beats from now on, on this node and in this process."""
        worker = self._workers[id(handle)]
        node, pid = where
        worker.started, worker.name = True, f"{worker.name} (node {node}, pid {pid})"

    def drop(self, handle: Any) -> None:
        """It is gone, knowingly."""
        self._workers.pop(id(handle), None)

    def name(self, handle: Any) -> str:
        """For messages: role, rank, and node and process where they are known."""
        return self._workers[id(handle)].name

    def names(self, handles: Iterable[Any]) -> str:
        """Several of them."""
        return ", ".join(self.name(handle) for handle in handles)

    # ---- waiting ---------------------------------------------------------------------------

    def wait(
        self, refs: Sequence[Any], handles: Sequence[Any], *, limit_s: float
    ) -> tuple[list[Any], list[Any]]:
        """(results that are ready, workers that are silent), as soon as there is one of either;
        both empty after ``limit_s``."""
        waited = 0.0
        while True:
            part = min(self.every_s, limit_s - waited)
            ready, _ = self.ray.wait(list(refs), num_returns=1, timeout=max(part, 0.0))
            if ready and len(refs) > 1:  # and whatever else is ready by now
                more = _GATHER_S if len(refs) > _MANY else 0
                ready, _ = self.ray.wait(list(refs), num_returns=len(refs), timeout=more)
            unresponsive = self.unresponsive(handles)
            waited += part
            if ready or unresponsive or waited >= limit_s:
                return ready, unresponsive

    def unresponsive(self, handles: Iterable[Any]) -> list[Any]:
        """Those of ``handles`` that have not been heard for too long."""
        self._poll()
        enough = (HEARTBEATS_PER_TIMEOUT - 1) * self.every_s
        return [h for h in handles if self._workers[id(h)].missed_s >= enough]

    def wait_for_heartbeats(self, handles: Sequence[Any]) -> list[Any]:
        """Wait until each of ``handles`` sent a heartbeat or timed out; return the latter."""
        self._poll(at_once=True)  # beats from before do not count
        before = {id(h): self._workers[id(h)].counted for h in handles}
        while True:
            unresponsive = self.unresponsive(handles)
            open_ = [h for h in handles if self._workers[id(h)].counted == before[id(h)]]
            if len(open_) <= len(unresponsive):
                return unresponsive
            time.sleep(self.every_s)

    def _poll(self, *, at_once: bool = False) -> None:
        """Count beats, at most once per interval."""
        now = time.monotonic()
        if now - self._polled_at < self.every_s and not at_once:
            return
        passed, self._polled_at = min(now - self._polled_at, 2 * self.every_s), now
        counts = self._read()
        for worker in self._workers.values():
            count = counts.get(worker.number, 0)
            if count != worker.counted or not worker.started:
                worker.counted, worker.missed_s = count, 0.0
            else:
                worker.missed_s += passed

    def _read(self) -> dict[int, int]:
        """Return the heartbeats so far. If the registry does not answer, no worker counts as
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

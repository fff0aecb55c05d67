"""Detection of failed ranks when no controller watches them (``runtime.py``).

The ranks share a key-value store. A thread of each rank counts heartbeats in it, watches the next
rank (rank r watches r + 1, the last watches 0), and reads the failures that ranks have published.
A rank that waits in a collective for a rank that failed is ended by its thread, because the
collective itself would wait until its timeout.

An exception that all ranks raise, such as a run that stops itself, is reported by rank 0 alone: the
others wait until rank 0 has published the same text, and for the end of its last writes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from burnish.distributed.process_group import CollectiveTimeoutError, OtherRankError
from burnish.errors import BurnishError
from burnish.runtime.heartbeat import HEARTBEATS_PER_TIMEOUT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("burnish")

_GRACE_S = 5.0
"""Seconds in which a rank may end by itself after another rank has published a failure."""
_SAME_S = 3.0
"""Seconds in which rank 0 may publish the same failure as another rank."""
_LAST_WRITES_S = 120.0
"""Maximum seconds for which the other ranks wait for the report of rank 0."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""Texts of gloo's errors about another rank that has ended. They have no type of their own."""


class RankLostError(BurnishError, RuntimeError):
    """Another rank failed, was killed or hangs. The message contains the rank and its cause."""


class RankMonitor:
    """Monitor of one rank. Starts a thread, which :meth:`close` ends."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_s: float) -> None:
        """``store``: used by this monitor only. ``timeout_s``: time without a heartbeat after
        which a rank is lost."""
        self._store, self.rank, self.size = store, rank, size
        self._timeout_s = timeout_s
        self._every_s = min(1.0, timeout_s / HEARTBEATS_PER_TIMEOUT)
        self._failing, self._closed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        where = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._set(f"where/{rank}", where)
        self._add(f"beats/{rank}", 1)
        self._thread = threading.Thread(target=self._run, name="rank monitor", daemon=True)
        self._thread.start()

    # ---- the store -------------------------------------------------------------------------

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def _add(self, key: str, amount: int) -> int:
        with self._lock:
            return int(self._store.add(key, amount))

    def _get(self, key: str) -> str | None:
        with self._lock:
            if not self._store.check([key]):
                return None
            return bytes(self._store.get(key)).decode()

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._get(f'where/{rank}') or 'not started'})"

    def _publish(self, rank: int, text: str) -> None:
        """Publish a failure of ``rank``; the first one counts."""
        if self._add(f"failed/{rank}", 1) == 1:
            self._set(f"failure/{rank}", text)
            number = self._add("numbered", 1)
            self._set(f"number/{number}", str(rank))
            self._add("failures", 1)

    def _first_failure(self) -> tuple[int, str] | None:
        """Return (rank, text) of the first published failure of another rank."""
        for number in range(1, self._add("failures", 0) + 1):
            rank = int(self._get(f"number/{number}") or self.rank)
            if rank != self.rank:
                return rank, self._get(f"failure/{rank}") or "an unknown failure"
        return None

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        watched, beats, silent_s = (self.rank + 1) % self.size, 0, 0.0
        while not self._closed.wait(self._every_s):
            try:
                self._add(f"beats/{self.rank}", 1)
                if self._failing.is_set():
                    continue
                now = self._add(f"beats/{watched}", 0)
                silent_s = 0.0 if now != beats else silent_s + self._every_s
                beats = now
                if silent_s >= self._timeout_s and self._get(f"ended/{watched}") is None:
                    text = f"sent no heartbeat for {self._timeout_s:g} s: killed, stopped or hung"
                    self._publish(watched, text)
                failure = self._first_failure()
                cause = (
                    None if failure is None else f"{self._name(failure[0])} failed: {failure[1]}"
                )
            except RuntimeError as error:  # the store ended with the process that served it
                text = f"the store of the ranks does not respond ({first_line(error)})"
                cause = f"rank 0 failed: {text}"
            if cause is None or self._failing.wait(_GRACE_S) or self._closed.is_set():
                continue  # the main thread failed or ended by itself
            # the main thread cannot be interrupted in a collective
            log.error("%s; this rank waits for it and ends", cause, extra={"file_only": True})
            print(f"[rank {self.rank}] error: {cause}", file=sys.stderr, flush=True)
            os._exit(1)

    # ---- the main thread -------------------------------------------------------------------

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Publish an exception of the block to the other ranks.

        If it is about another rank that has ended, raise RankLostError with that rank's cause. If
        rank 0 raises the same one, the other ranks raise OtherRankError.
        """
        try:
            yield
        except BaseException as error:
            self._failing.set()
            if isinstance(error, (RankLostError, OtherRankError)):
                raise  # from another rank, which reports it
            with _sigterm_ignored():
                lost = self._lost_rank(error)
            if lost is not None:
                log.error("%s", lost, extra={"file_only": True})
                raise lost from error
            text = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):
                self._publish(self.rank, text)
                if self.rank != 0 and self._rank_0_reports(text):
                    code = error.exit_code if isinstance(error, BurnishError) else 1
                    raise OtherRankError(text, code) from error
            raise

    def _lost_rank(self, error: BaseException) -> RankLostError | None:
        """Return the error for an exception that only follows from the end of another rank."""
        text = str(error)
        timed_out = isinstance(error, CollectiveTimeoutError)
        if not timed_out and not (
            isinstance(error, RuntimeError) and any(t in text for t in _LOST)
        ):
            return None
        cause: str | None = None
        with suppress(RuntimeError):
            cause = self._cause()
        if cause is None and timed_out:
            return None
        return RankLostError(
            f"{cause or 'another rank ended without a message'}. All ranks end; resume the run "
            "with --resume RUN_FOLDER"
        )

    def _cause(self) -> str | None:
        """Return a published failure, or the rank whose heartbeats stop soon."""
        ends = time.monotonic() + _GRACE_S
        before = [self._add(f"beats/{rank}", 0) for rank in range(self.size)]
        alive = {self.rank}
        while time.monotonic() < ends:
            failure = self._first_failure()
            if failure is not None:
                return f"{self._name(failure[0])} failed: {failure[1]}"
            self._closed.wait(self._every_s / 4)
            now = [self._add(f"beats/{rank}", 0) for rank in range(self.size)]
            alive |= {r for r, (a, b) in enumerate(zip(before, now, strict=True)) if b > a}
        silent = [r for r in range(self.size) if r not in alive]
        if not silent:
            return None
        return f"{', '.join(map(self._name, silent))} ended without a message, e.g. killed"

    def _rank_0_reports(self, text: str) -> bool:
        """Return whether rank 0 failed with the same text, after the end of its last writes."""
        ends = time.monotonic() + _SAME_S
        report = None
        while report is None and time.monotonic() < ends:
            report = self._get("failure/0")
            self._closed.wait(0.05)
        if report != text:
            return False
        ends, beats, silent_s = time.monotonic() + _LAST_WRITES_S, 0, 0.0
        with suppress(RuntimeError):  # the store may end with rank 0
            while self._get("ended/0") is None and time.monotonic() < ends:
                now = self._add("beats/0", 0)
                silent_s = 0.0 if now != beats else silent_s + 0.2
                beats = now
                if silent_s >= _GRACE_S:
                    break
                self._closed.wait(0.2)
        return True

    @contextmanager
    def long_block_of_first(self, name: str) -> Iterator[None]:
        """Block the other ranks here until rank 0 has left its block, however long it takes.

        A collective has a time limit; this wait ends only with the block or with a failure of rank
        0, which the thread notices. ``name``: used once per run. Raises RankLostError if the store
        has ended.
        """
        if self.rank == 0:
            try:
                yield
            finally:
                self._set(f"left/{name}", "")
            return
        try:
            while self._get(f"left/{name}") is None:
                self._closed.wait(self._every_s / 4)
        except RuntimeError as error:
            raise RankLostError(
                f"rank 0 ended during {name}: the store of the ranks does not respond "
                f"({first_line(error)}). All ranks end"
            ) from error
        yield

    def wait_for_first(self) -> None:
        """Block until rank 0, which writes the results, has ended: a launcher may kill the other
        ranks a short time after one has ended. The thread ends this process if rank 0 fails."""
        with suppress(RuntimeError):  # the store may end with rank 0
            while self.rank != 0 and self._get("ended/0") is None:
                self._closed.wait(0.2)

    def close(self) -> None:
        """Stop watching, and tell the other ranks that this one has ended."""
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._set(f"ended/{self.rank}", "")


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to the other ranks as soon as one has ended: this rank
    ends by itself, with the cause."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]

"""Small messages between one sender and its receivers, through a torch store: headers, marks and
answers.

The store is a TCPStore that the sender serves, or a file. Weights are never sent through it. A
store is used instead of a process group for two reasons. A wait on it can time out without side
effects, and it identifies the processes that did not respond.

A process that is lost writes nothing. Any other process that learns of the loss ends the connection
with a reason (:func:`end_connection`), and every wait of the others raises it within seconds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from burnish.sync.base import LinkError, SyncError


def serve_store(host: str, port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """Serve a store from this process, on the address ``host`` only.

    (A store that opens its own port listens on every address.) Port 0 selects any free one; read it
    from ``.port``. Raises LinkError if the store cannot be served.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise LinkError(f"could not serve the store at {host}:{port}: {error}") from error
    port = int(listener.getsockname()[1])
    return _tcp_store(host, port, listener=listener.detach(), timeout_s=timeout_s)


def connect_store(host: str, port: int, *, timeout_s: float = 300.0) -> TCPStore:
    """Connect to a store that another process serves. Raises LinkError after a timeout."""
    return _tcp_store(host, port, listener=None, timeout_s=timeout_s)


def _tcp_store(host: str, port: int, *, listener: int | None, timeout_s: float) -> TCPStore:
    """Return a store. ``listener``: file descriptor of the socket to serve on; None: connect."""
    limit, serve = timedelta(seconds=timeout_s), listener is not None
    try:
        return TCPStore(
            host,
            port,
            None,
            serve,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (DistError, RuntimeError) as error:
        doing = "serve" if serve else "reach"
        raise LinkError(
            f"could not {doing} the store at {host}:{port} within {timeout_s:g} s: {error}"
        ) from error


LOOK_S = 1.0
"""Seconds between two looks of a waiting process for the end of the connection."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 0.02
"""Pauses between two looks for a key, which grow by a quarter. (The store itself waits for all
keys, not for any, and a wait of it that times out prints warnings.)"""
_ENDED = "ended"


def end_connection(store: Store, name: str, reason: str) -> None:
    """End connection ``name``: every wait of its processes for something that is missing raises
    LinkError with ``reason``, within :data:`LOOK_S`. The caller need not belong to the connection.
    Raises LinkError if the store is gone."""
    try:
        PrefixStore(_prefix(name), store).set(_ENDED, reason.encode())  # type: ignore[arg-type]
    except (DistError, RuntimeError) as error:
        raise LinkError(f"the store of connection {name!r} is lost ({error})") from error


def _prefix(name: str) -> str:
    return f"burnish-sync/{name}"


class Channel:
    """One connection on a store: rank 0 sends, ranks 1 to ``num_receivers`` receive.

    ``name`` distinguishes connections on one store; each name is used once.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, num_receivers: int, timeout_s: float
    ) -> None:
        if not 0 <= rank <= num_receivers:
            raise SyncError(f"rank {rank} is not in 0 (the sender) to {num_receivers}")
        self.store = PrefixStore(_prefix(name), store)
        self.name, self.rank, self.timeout_s = name, rank, timeout_s
        self.receivers = range(1, num_receivers + 1)
        self._next = self._forgotten = 0

    def rendezvous(self) -> None:
        """Wait until all processes have joined. Raises LinkError with the names of the missing
        ones."""
        if self.store.add(f"here/{self.rank}", 1) > 1:
            raise SyncError(
                f"{self.who(self.rank)} of connection {self.name!r} has already joined: give "
                "every process its own rank, and every connection a new name"
            )
        self.wait({r: f"here/{r}" for r in (0, *self.receivers)}, "did not join")

    def who(self, rank: int) -> str:
        """Return a display name of a rank; receivers count from 0."""
        return "the sender" if rank == 0 else f"receiver {rank - 1}"

    def set(self, key: str, value: bytes) -> None:
        """Write a key. Raises LinkError if the store is gone."""
        with self._alive():
            self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, *, rank: int, awaited: str) -> bytes:
        """Wait for a key of ``rank`` and return its value. Raises LinkError that names the rank and
        ``awaited``."""
        self.wait({rank: key}, awaited)
        with self._alive():
            return bytes(self.store.get(key))

    def wait(self, keys: Mapping[int, str], awaited: str) -> None:
        """Wait for the key of every rank. Raises LinkError with the reason if the connection is
        ended, and with the ranks whose key is missing after the timeout: "receiver 1 ``awaited``
        within 5 s"."""
        if not keys:
            return
        names, waited, pause, looked = list(keys.values()), 0.0, FIRST_PAUSE_S, 0.0
        while not self._have(names):
            if waited - looked >= LOOK_S:
                self.check_not_ended()
                looked = waited
            if waited >= self.timeout_s:
                self._raise_missing(keys, awaited)
            time.sleep(pause)
            waited, pause = waited + pause, min(pause * 1.25, LONGEST_PAUSE_S)

    def _raise_missing(self, keys: Mapping[int, str], awaited: str) -> NoReturn:
        """Raise the error of a wait that has timed out."""
        missing = [r for r, key in keys.items() if not self.has(key)]
        names = ", ".join(self.who(r) for r in missing) or "somebody"
        raise LinkError(
            f"{names} {awaited} within {self.timeout_s:g} s (connection {self.name!r}); check "
            "whether that process is running and its log, or raise sync.timeout_s"
        )

    def parts_s(self) -> Iterator[float]:
        """Yield the parts of the timeout after which a waiting process has to call
        :meth:`check_not_ended`."""
        left = self.timeout_s
        while left > 0:
            yield min(LOOK_S, left)
            left -= LOOK_S

    def end(self, reason: str) -> None:
        """End the connection for all processes; see :func:`end_connection`. Does nothing if it is
        ended, or if the store is gone, which ends it too."""
        with suppress(LinkError):
            if not self.has(_ENDED):
                self.set(_ENDED, reason.encode())

    def check_not_ended(self) -> None:
        """Raise LinkError with the reason if the connection is ended."""
        if self.has(_ENDED):
            with self._alive():
                reason = bytes(self.store.get(_ENDED)).decode(errors="replace")
            raise LinkError(
                f"connection {self.name!r} has ended: {reason}; make a new one on both sides"
            )

    def has(self, key: str) -> bool:
        """Return whether a key exists now."""
        return self._have([key])

    def _have(self, keys: list[str]) -> bool:
        with self._alive():
            return bool(self.store.check(keys))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys that are no longer read."""
        with self._alive():
            for key in keys:
                self.store.delete_key(key)

    # ---- ordered messages --------------------------------------------------------------------

    def post(self, data: bytes) -> int:
        """Send the next message to all receivers; return its number. Sender only."""
        number, self._next = self._next, self._next + 1
        self.set(f"message/{number}", data)
        return number

    def next(self) -> tuple[int, bytes]:
        """Wait for the next message. Raises LinkError after a timeout. Receiver only."""
        number = self._next
        data = self.get(f"message/{number}", rank=0, awaited="sent nothing more")
        self._next += 1
        return number, data

    def peek(self) -> bool:
        """Return whether the next message has arrived. Receiver only."""
        return self.has(f"message/{self._next}")

    def mark(self, number: int) -> None:
        """Mark a message: its bytes are no longer needed. Receiver only."""
        self.set(f"done/{number}/{self.rank}", b"1")

    def wait_marks(self, number: int, awaited: str) -> None:
        """Wait until every receiver has marked a message. Raises LinkError after a timeout. Sender
        only."""
        self.wait({r: f"done/{number}/{r}" for r in self.receivers}, awaited)

    def answer(self, push: int, problem: str | None) -> None:
        """Report the result of a transfer; None: accepted. Receiver only."""
        self.set(f"answer/{push}/{self.rank}", (problem or "").encode() or b"\0")

    def answers(self, push: int) -> dict[int, str]:
        """Wait for all answers; return rank -> problem of the receivers that refused. Raises
        LinkError after a timeout. Sender only."""
        keys = {r: f"answer/{push}/{r}" for r in self.receivers}
        self.wait(keys, "did not report whether it has the new weights")
        with self._alive():
            answers = {r: bytes(self.store.get(key)) for r, key in keys.items()}
        self.forget(keys.values())
        return {r: text.decode() for r, text in answers.items() if text != b"\0"}

    def forget_messages(self) -> None:
        """Delete all messages so far and their marks, which all receivers have read. Sender
        only."""
        for number in range(self._forgotten, self._next):
            self.forget([f"message/{number}", *(f"done/{number}/{r}" for r in self.receivers)])
        self._forgotten = self._next

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (DistError, RuntimeError) as error:
            raise LinkError(
                f"the store of connection {self.name!r} is lost ({error}): the process that "
                "serves it (the sender's) has exited; make a new connection"
            ) from error

"""Small messages between one sender and its receivers: headers, marks and answers, through a torch
store (a TCPStore that the sender serves, or a file).

Weights never go this way. A store is used and not a process group because it can be waited on with
a time limit that leaves everything as it was, and because it says who has not spoken.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from burnish.sync.base import LinkError, SyncError


def serve_store(host: str, port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """A store served by this process, on the address ``host`` alone (a store that opens its own
    port listens on every address); port 0: any free one, then ``.port`` says which."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise LinkError(f"could not serve the store at {host}:{port}: {error}") from error
    port = int(listener.getsockname()[1])
    return _tcp_store(host, port, listener=listener.detach(), timeout_s=timeout_s)


def connect_store(host: str, port: int, *, timeout_s: float = 300.0) -> TCPStore:
    """The store that another process serves. Raises LinkError if there is none in time."""
    return _tcp_store(host, port, listener=None, timeout_s=timeout_s)


def _tcp_store(host: str, port: int, *, listener: int | None, timeout_s: float) -> TCPStore:
    """``listener``: file descriptor of the socket to serve on; None: connect."""
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


class Channel:
    """One connection on a store: rank 0 sends, ranks 1 to ``num_receivers`` receive.

    ``name`` tells connections on one store apart; each one is made once.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, num_receivers: int, timeout_s: float
    ) -> None:
        if not 0 <= rank <= num_receivers:
            raise SyncError(f"rank {rank} is not one of 0 (the sender) to {num_receivers}")
        self.store = PrefixStore(f"burnish-sync/{name}", store)
        self.name, self.rank, self.timeout_s = name, rank, timeout_s
        self.receivers = range(1, num_receivers + 1)
        self._next = self._forgotten = 0

    def rendezvous(self) -> None:
        """Wait until all are here. Raises LinkError with the names of those who are not."""
        if self.store.add(f"here/{self.rank}", 1) > 1:
            raise SyncError(
                f"{self.who(self.rank)} of connection {self.name!r} is here already: give every "
                "process a rank of its own, and a new connection a new name"
            )
        self.wait({r: f"here/{r}" for r in (0, *self.receivers)}, "did not join")

    def who(self, rank: int) -> str:
        """A rank in words; receivers count from 0."""
        return "the sender" if rank == 0 else f"receiver {rank - 1}"

    def set(self, key: str, value: bytes) -> None:
        """Write a key. Raises LinkError if the store is gone."""
        with self._alive():
            self.store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, *, rank: int, what: str) -> bytes:
        """Wait for a key of ``rank``. Raises LinkError with what was waited for."""
        self.wait({rank: key}, what)
        with self._alive():
            return bytes(self.store.get(key))

    def wait(self, keys: Mapping[int, str], what: str) -> None:
        """Wait for the key of every rank. Raises LinkError with those whose key is not there in
        time: "receiver 1 ``what`` within 5 s"."""
        if not keys:
            return
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=self.timeout_s))
        except (DistError, RuntimeError) as error:
            missing = [r for r, key in keys.items() if not self.has(key)]
            names = ", ".join(self.who(r) for r in missing) or "somebody"
            raise LinkError(
                f"{names} {what} within {self.timeout_s:g} s (connection {self.name!r}); look "
                "whether that process lives and what it said, or raise sync.timeout_s"
            ) from error

    def has(self, key: str) -> bool:
        """Return whether a key is there now."""
        with self._alive():
            return bool(self.store.check([key]))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys that nobody reads any more."""
        with self._alive():
            for key in keys:
                self.store.delete_key(key)

    # ---- the row of messages -----------------------------------------------------------------

    def post(self, data: bytes) -> int:
        """Sender: the next message to all receivers; returns its number."""
        number, self._next = self._next, self._next + 1
        self.set(f"message/{number}", data)
        return number

    def next(self) -> tuple[int, bytes]:
        """Receiver: wait for the next message. Raises LinkError if none comes in time."""
        number = self._next
        data = self.get(f"message/{number}", rank=0, what="sent nothing more")
        self._next += 1
        return number, data

    def peek(self) -> bool:
        """Receiver: whether the next message is there already."""
        return self.has(f"message/{self._next}")

    def mark(self, number: int) -> None:
        """Receiver: this message's bytes are no longer needed."""
        self.set(f"done/{number}/{self.rank}", b"1")

    def wait_marks(self, number: int, what: str) -> None:
        """Sender: until every receiver has marked a message. Raises LinkError."""
        self.wait({r: f"done/{number}/{r}" for r in self.receivers}, what)

    def answer(self, push: int, problem: str | None) -> None:
        """Receiver: how a transfer went; an empty text is a yes."""
        self.set(f"answer/{push}/{self.rank}", (problem or "").encode() or b"\0")

    def answers(self, push: int) -> dict[int, str]:
        """Sender: rank -> problem of those who refused, once all have answered. Raises
        LinkError."""
        keys = {r: f"answer/{push}/{r}" for r in self.receivers}
        self.wait(keys, "did not say whether it has the new weights")
        with self._alive():
            found = {r: bytes(self.store.get(key)) for r, key in keys.items()}
        self.forget(keys.values())
        return {r: text.decode() for r, text in found.items() if text != b"\0"}

    def forget_messages(self) -> None:
        """Sender: drop all messages so far and their marks; everybody has read them."""
        for number in range(self._forgotten, self._next):
            self.forget([f"message/{number}", *(f"done/{number}/{r}" for r in self.receivers)])
        self._forgotten = self._next

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (DistError, RuntimeError) as error:
            raise LinkError(
                f"the store of connection {self.name!r} is gone ({error}): the process that serves "
                "it (the sender's) has ended; make a new connection"
            ) from error

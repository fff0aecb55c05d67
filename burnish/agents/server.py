"""The server of open episodes: a key and a base URL for each, in the event loop of the episodes."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import shutil
import socket
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.agents.calls import Backend, CallError, key_digest
from burnish.agents.episodes import Endpoint
from burnish.serve.base import ServeError

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger("burnish")

MAX_CLOSED = 100_000
"""Closed endpoints that are remembered. Keys of older ones are unknown (401 instead of 410)."""
MAX_CONNECTIONS = 16_384
SHUTDOWN_S = 5.0


@dataclass
class _Admitted:
    """One endpoint. ``backend`` is None once it is closed."""

    name: str
    backend: Backend | None


class Endpoints:
    """Keys of open and closed endpoints. Keys are found by their SHA-256 digest, so the time of the
    search says nothing about them."""

    def __init__(self) -> None:
        self._admitted: OrderedDict[bytes, _Admitted] = OrderedDict()
        self._closed: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, backend: Backend) -> tuple[str, str]:
        """Return name and key of a new endpoint."""
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(32)
        self._admitted[key_digest(key)] = _Admitted(name, backend)
        return name, key

    def dismiss(self, key: str) -> None:
        """Close an endpoint."""
        digest = key_digest(key)
        self._admitted[digest].backend = None
        self._closed[digest] = None
        while len(self._closed) > MAX_CLOSED:
            oldest, _ = self._closed.popitem(last=False)
            del self._admitted[oldest]

    def resolve(self, key: str | None, name: str | None) -> Backend:
        """Return the backend of a key. Implements :class:`burnish.agents.app.Resolve`."""
        if not key:
            message = (
                "there is no key; send the episode's key as 'Authorization: Bearer KEY' or as "
                "'x-api-key: KEY'"
            )
            raise CallError(message, status=401, kind="authentication_error")
        admitted = self._admitted.get(key_digest(key))
        if admitted is None or name not in (None, admitted.name):
            message = "the key does not belong to an episode of this address"
            raise CallError(message, status=401, kind="authentication_error")
        if admitted.backend is None:
            raise CallError("this episode has ended", status=410, kind="episode_closed")
        return admitted.backend


class EpisodeServer:
    """Serves open episodes. Implements :class:`burnish.agents.episodes.AgentServer`.

    ``unix_socket``: also listen on a Unix socket, for agents in a sandbox without a network.
    """

    def __init__(self, host: str, port: int, *, unix_socket: bool = False) -> None:
        self._host, self._port, self._unix_socket = host, port, unix_socket
        self._unix_path: Path | None = None
        self._endpoints = Endpoints()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.root_url = ""
        """Address of the server, once started."""

    @property
    def is_local(self) -> bool:
        """Return whether only processes of this machine can reach the server."""
        from burnish.serve.guard import is_loopback

        return is_loopback(self._host)

    @property
    def unix_path(self) -> Path:
        """Return the path of the Unix socket, once started."""
        assert self._unix_path is not None
        return self._unix_path

    async def start(self) -> None:
        """Listen. Raises ServeError if the address cannot be used or a package is missing."""
        try:
            from burnish.agents.app import AgentApp
            from burnish.serve.guard import RequestGuard, ServerLimits, listener, make_server
        except ImportError as error:
            raise ServeError(
                f"agents need the packages of burnish[serve], and importing them failed ({error}); "
                "install them with: pip install 'burnish[serve]'"
            ) from error
        _allow_open_files()
        limits = ServerLimits(max_connections=MAX_CONNECTIONS, max_per_address=MAX_CONNECTIONS)
        guard = RequestGuard(limits, token=None, names=(self._host,))
        app = AgentApp(self._endpoints.resolve, guard)
        listening = [listener(self._host, self._port, token="one per episode")]
        port = listening[0].getsockname()[1]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.root_url = f"http://{shown}:{port}"
        if self._unix_socket:
            self._unix_path, local = _unix_listener()
            listening.append(local)
        self._server = make_server(app.asgi, guard, shutdown_s=SHUTDOWN_S)
        self._serving = asyncio.create_task(self._server.serve(sockets=listening))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()  # raises its error
            raise ServeError(f"the server of the agents ended at its start ({self.root_url})")

    def admit(self, backend: Backend) -> Endpoint:
        name, key = self._endpoints.admit(backend)
        return Endpoint(f"{self.root_url}/s/{name}", key)

    def dismiss(self, endpoint: Endpoint) -> None:
        self._endpoints.dismiss(endpoint.api_key)

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._unix_path is not None:
            shutil.rmtree(self._unix_path.parent, ignore_errors=True)


def _unix_listener() -> tuple[Path, socket.socket]:
    """Return path and socket of a new Unix socket.

    It is in /tmp, because paths of sockets are limited to 107 bytes, and open to other users,
    because sandboxes run as ``nobody`` if Burnish runs as root. As on the loopback interface, a
    call needs a key.
    """
    folder = Path(tempfile.mkdtemp(prefix="burnish-", dir="/tmp"))
    folder.chmod(0o711)
    path = folder / "server"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    path.chmod(0o666)
    listening.listen(1024)
    return path, listening


def _allow_open_files() -> None:
    """Raise this process's limit of open files as far as possible: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * MAX_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        limit = min(hard, limit)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

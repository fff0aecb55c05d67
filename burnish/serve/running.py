"""Start and end of every server: its packages, its token, its address, and its signals."""

from __future__ import annotations

import importlib
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from burnish.secret import read_token
from burnish.serve.base import ListenOptions, ServeError

if TYPE_CHECKING:
    import uvicorn


def check_extra() -> None:
    """Raise ServeError if a package for serving is missing."""
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ServeError(
                f"serving needs the package {package}, but importing it failed ({error}); install "
                "it with: pip install 'burnish[serve]'"
            ) from error


def token_of(options: ListenOptions) -> str | None:
    """Return the token that requests must contain; None if they need none. Raises ServeError if
    the environment variable is not set or is not a token."""
    if options.token_env is None:
        return None
    try:
        return read_token(options.token_env)
    except ValueError as error:
        raise ServeError(str(error)) from error


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Make SIGTERM raise SystemExit during the ``with`` block, so that temporary folders are
    removed. For the main thread, before and after the server runs."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_until_signal(server: uvicorn.Server, listener: socket.socket, ready: str) -> None:
    """Print ``ready`` and serve until SIGTERM or SIGINT. Requests in flight are finished first.

    uvicorn raises the signal that stopped it again, so it is handled here: for a server it is the
    normal exit.
    """

    def end(*_: object) -> None:
        server.should_exit = True  # for a signal before uvicorn installs its handlers

    before = {s: signal.signal(s, end) for s in (signal.SIGINT, signal.SIGTERM)}
    print(ready, flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""``burnish serve-reward``: a reward model as a process that listens, from options to exit."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.config.model import ModelConfig
from burnish.rewards.base import RewardError
from burnish.rewards.remote import read_token
from burnish.serve.base import ServeError, ServeOptions
from burnish.serve.scorer import load_text_scorer

if TYPE_CHECKING:
    import uvicorn

    from burnish.serve.app import RewardApp

log = logging.getLogger("burnish")

_KEEP_ALIVE_S = 30  # longer than clients keep idle connections (httpx: 5), so that they end them
_MAX_CONNECTIONS = 1024


def serve_reward(model: str, options: ServeOptions, *, version: str) -> None:
    """Serve the reward model of a folder or hub name until SIGTERM or SIGINT; requests under way
    are finished first.

    Raises ServeError or ModelError before anything is answered: options that contradict each other,
    an address in use, an address that others can reach without a token, no reward model.
    """
    options.check()
    _check_extra()
    token = _token(options)
    if (Path(model) / "checkpoints").is_dir():
        raise ServeError(
            f"{model} is a run folder; write its model to a folder first: "
            f"burnish export {model} --model reward --out DIR"
        )
    with _listener(options, token) as listener:  # before the model, which can take minutes to load
        from burnish.serve.app import REWARD_PATH, RewardApp

        scorer = load_text_scorer(ModelConfig(path=model), options)
        name = Path(model).name if Path(model).is_dir() else model
        app = RewardApp(scorer, options, token=token, model=name, version=version)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready = f"serving {name} at http://{shown}:{port}{REWARD_PATH}"
        _run(make_server(app, options), listener, ready)


def make_server(app: RewardApp, options: ServeOptions) -> uvicorn.Server:
    """The HTTP server around ``app``; ``run(sockets=[...])`` serves until ``should_exit``."""
    import uvicorn

    config = uvicorn.Config(
        app.asgi,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.shutdown_s)),
        limit_concurrency=_MAX_CONNECTIONS,
    )
    return uvicorn.Server(config)


def _run(server: uvicorn.Server, listener: socket.socket, ready: str) -> None:
    """uvicorn sends itself once more the signal that ended it. For a server that is the ordinary
    end, so it does no harm here."""

    def end(*_: object) -> None:
        server.should_exit = True  # for a signal that comes before uvicorn listens to them

    before = {s: signal.signal(s, end) for s in (signal.SIGINT, signal.SIGTERM)}
    print(ready, flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_extra() -> None:
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ServeError(
                f"serving needs the package {package}, and importing it failed ({error}); install "
                "it with: pip install 'burnish[serve]'"
            ) from error


def _token(options: ServeOptions) -> str | None:
    if options.token_env is None:
        return None
    try:
        return read_token(options.token_env)
    except RewardError as error:
        raise ServeError(str(error)) from error


def _listener(options: ServeOptions, token: str | None) -> socket.socket:
    """A socket that listens on the address; what connects waits until the server runs. Raises
    ServeError: unknown, in use, or open to others without a token."""
    host, port = options.host, options.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(f"host={host!r} is no address of this machine ({error})") from error
    local = all(ipaddress.ip_address(str(a[4][0]).partition("%")[0]).is_loopback for a in found)
    if not local and token is None:
        raise ServeError(
            f"host={host!r} can be reached from other machines, and there is no token, so anyone "
            "could use the model; put a secret into an environment variable and name it with "
            "--token-env, or leave --host out to listen on 127.0.0.1 only"
        )
    if not local:
        log.warning("the token and all texts can be read on the way; use a TLS proxy or a tunnel")
    family, kind, protocol, _, address = min(found, key=lambda a: a[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()  # until then a second server could bind to the same port
    except OSError as error:
        listener.close()
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener

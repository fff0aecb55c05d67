"""The command ``burnish serve-reward``: serve a reward model over HTTP."""

from __future__ import annotations

import importlib
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


def serve_reward(model: str, options: ServeOptions, *, version: str) -> None:
    """Serve the reward model of a folder or hub name until SIGTERM or SIGINT.

    Requests in flight are finished first. Raises ServeError or ModelError before any request is
    answered: for contradictory options, an address in use, an address that other machines can reach
    without a token, or a model that is not a reward model.
    """
    options.check()
    _check_extra()
    token = _token(options)
    if (Path(model) / "checkpoints").is_dir():
        raise ServeError(
            f"{model} is a run folder; write its model to a folder first: "
            f"burnish export {model} --model reward --out DIR"
        )
    from burnish.serve.app import REWARD_PATH, RewardApp
    from burnish.serve.guard import listener as listen
    from burnish.serve.guard import make_server

    # Listen before loading the model, which can take minutes.
    with listen(options.host, options.port, token=token) as listener:
        scorer = load_text_scorer(ModelConfig(path=model), options)
        name = Path(model).name if Path(model).is_dir() else model
        app = RewardApp(scorer, options, token=token, model=name, version=version)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready = f"serving {name} at http://{shown}:{port}{REWARD_PATH}"
        _run(make_server(app.asgi, app.guard, shutdown_s=options.shutdown_s), listener, ready)


def _run(server: uvicorn.Server, listener: socket.socket, ready: str) -> None:
    """Run the server. uvicorn raises the signal that stopped it again, so it is handled here: for a
    server it is the normal exit."""

    def end(*_: object) -> None:
        server.should_exit = True  # for a signal before uvicorn installs its handlers

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
                f"serving needs the package {package}, but importing it failed ({error}); install "
                "it with: pip install 'burnish[serve]'"
            ) from error


def _token(options: ServeOptions) -> str | None:
    if options.token_env is None:
        return None
    try:
        return read_token(options.token_env)
    except RewardError as error:
        raise ServeError(str(error)) from error

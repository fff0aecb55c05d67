"""``burnish serve-reward``: a reward model as a process that listens, from options to exit."""

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
    from burnish.serve.app import REWARD_PATH, RewardApp
    from burnish.serve.guard import listener as listen
    from burnish.serve.guard import make_server

    # before the model, which can take minutes to load
    with listen(options.host, options.port, token=token) as listener:
        scorer = load_text_scorer(ModelConfig(path=model), options)
        name = Path(model).name if Path(model).is_dir() else model
        app = RewardApp(scorer, options, token=token, model=name, version=version)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready = f"serving {name} at http://{shown}:{port}{REWARD_PATH}"
        _run(make_server(app.asgi, app.guard, shutdown_s=options.shutdown_s), listener, ready)


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

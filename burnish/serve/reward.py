"""The command ``burnish serve-reward``: serve a reward model over HTTP."""

from __future__ import annotations

from pathlib import Path

from burnish.config.model import ModelConfig
from burnish.serve.base import ServeError, ServeOptions
from burnish.serve.running import address_of, check_extra, run_until_signal, token_of
from burnish.serve.scorer import load_text_scorer


def serve_reward(model: str, options: ServeOptions, *, version: str) -> None:
    """Serve the reward model of a folder or hub name until SIGTERM or SIGINT.

    Requests in flight are finished first. Raises ServeError or ModelError before any request is
    answered: for contradictory options, an address in use, an address that other machines can reach
    without a token, or a model that is not a reward model.
    """
    options.check()
    check_extra()
    token = token_of(options)
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
        ready = f"serving {name} at {address_of(listener)}{REWARD_PATH}"
        server = make_server(app.asgi, app.guard, shutdown_s=options.shutdown_s)
        run_until_signal(server, listener, ready)

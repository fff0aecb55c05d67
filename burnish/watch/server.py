"""``burnish watch``: start the server of the page, and end it."""

from __future__ import annotations

from pathlib import Path

from burnish.runs.errors import RunFolderError
from burnish.serve.base import ListenOptions
from burnish.serve.running import address_of, check_extra, run_until_signal, token_of


def watch(folder: Path, options: ListenOptions) -> None:
    """Serve the page of the runs in ``folder`` until SIGINT or SIGTERM.

    Raises RunFolderError if the folder cannot be read; ServeError if the address is in use, or
    reachable from other machines without a token.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise RunFolderError(
            f"{folder} {problem}; give a run folder, or the folder that contains run folders "
            "(runs/ by default)"
        )
    check_extra()
    from burnish.serve.guard import listener, make_server
    from burnish.watch.app import WatchApp
    from burnish.watch.library import Library

    options.check()
    token = token_of(options)
    library = Library(folder.resolve())
    count = len(library.scan())
    app = WatchApp(library, token=token, names=(options.host, *options.allowed_hosts))
    listening = listener(options.host, options.port, token=token)
    with listening:
        runs = "1 run" if count == 1 else f"{count} runs"
        ready = f"{folder}: {runs}; open {address_of(listening)} (Ctrl-C ends the server)"
        server = make_server(app.asgi, app.guard, shutdown_s=1)
        app.is_closing = lambda: server.should_exit
        run_until_signal(server, listening, ready)

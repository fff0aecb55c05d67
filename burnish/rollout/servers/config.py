"""Config of a rollout engine on running vLLM servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from burnish.config.base import PathText
from burnish.config.paths import client_advice, client_problems, is_local, url_problems
from burnish.rollout.config import RolloutEngineSettings

_SERVER = "http://127.0.0.1:8000"


class VllmServers(RolloutEngineSettings):
    """vLLM servers that are already running (``vllm serve``), each with a copy of the model.

    The run sends them weights through files, verifies every load, and checks which weights sampled
    each token. The servers must run with the flags in docs/engines.md. Other clients of a server
    would get the weights of this run."""

    kind: Literal["vllm_server"]
    urls: tuple[str, ...] = Field(min_length=1)
    """Base addresses, such as ``http://127.0.0.1:8000``. A request goes to the least busy server;
    those of a server that fails are repeated by the others."""
    token_env: str | None = None
    """Environment variable with the token of ``--api-key``. Set its name, not the token: the recipe
    is written to the run folder. None: no token."""
    weights_folder: PathText | None = None
    """Folder that this process (on Ray: the controller) and all servers see at the same path, for
    the files of new weights. None: shared memory of this machine, for servers on this machine
    only."""
    max_concurrency: int = Field(256, ge=1)
    """Maximum responses requested at once, over all ``urls``. Others wait here."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds to wait for the servers at the start of the run."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Timeout of opening a connection."""
    read_timeout_s: float = Field(1800.0, gt=0)
    """Timeout of one response, from the request to its last token, including loads of weights in
    between."""
    load_timeout_s: float = Field(600.0, gt=0)
    """Timeout of each part of a load of weights: a file, or the check of all weights."""
    retries: int = Field(5, ge=0)
    """Failures in a row (connection errors, timeouts, status 408, 425, 429 or 5xx) after which a
    server is not used until the next load of weights. Failures of concurrent requests count
    once."""
    backoff_s: float = Field(1.0, ge=0)
    """Seconds without requests to a server after its first failure; doubles each time."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Maximum of these seconds."""

    on_servers: ClassVar[bool] = True
    keeps_cache_on_update: ClassVar[bool] = False

    def rules(self) -> Iterator[str]:
        yield from client_problems(self, _SERVER)
        for i, url in enumerate(self.urls):
            if not list(url_problems(url, _SERVER)) and urlsplit(url).path.strip("/"):
                yield (
                    f"urls[{i}] is {url!r}, but must be the base address of a server without a "
                    f"path; use the form {_SERVER}"
                )
        far = [url for url in self.urls if not list(url_problems(url, _SERVER))]
        far = [url for url in far if not is_local(url)]
        if far and self.weights_folder is None:
            yield (
                f"weights_folder is not set, and {urlsplit(far[0]).hostname} may be another "
                "machine, which cannot read this machine's shared memory; set weights_folder to a "
                "folder that both see at the same path"
            )

    def advice(self) -> Iterator[str]:
        yield from client_advice(self)

    @property
    def slots(self) -> int:
        """Maximum number of responses that a server decodes at once, as if requests were equally
        distributed."""
        return max(1, self.max_concurrency // len(self.urls))

    def num_workers(self, ranks: int) -> int:
        """Return the number of servers."""
        return len(self.urls)

"""HTTP client of vLLM servers: requests, failures, and the choice of a server.

:class:`Server` has the state of one server, :class:`ServerClient` sends requests to it. All methods
run on one event loop. ``engine.py`` is the rollout engine on top.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.rollout.servers.config import VllmServers

log = logging.getLogger("burnish")

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
_TRANSIENT_STATUSES = (408, 425, 429)
"""Transient statuses below 500: Request Timeout, Too Early, Too Many Requests."""
_ADVICE = {
    401: "; set token_env to the variable that has the token of the server's --api-key",
    404: "; start the server with VLLM_SERVER_DEV_MODE=1, and set urls to its base address",
}
_KEEPALIVE_S = 1.0
"""Idle connections are closed after this time, because vLLM closes its side after 5 seconds, maybe
while a request is on its way."""
_BODY_CHARS = 400
"""Characters of the body of a failed reply in a message."""


class ServerError(BurnishError, RuntimeError):
    """A vLLM server cannot be used. The message has its URL, the reason and a fix."""


class TransientServerError(ServerError):
    """A transient failure. The request may succeed later, or on another server."""


@dataclass(eq=False)
class Server:
    """One server, and its recent failures."""

    url: str
    in_flight: int = 0
    """Samples that it computes or that will be sent to it next."""
    failures: int = 0
    """Failures since its last reply; those of concurrent requests count once."""
    backoff_until: float = 0.0
    """End of the backoff after its last failure, in time.monotonic seconds."""
    lost: str | None = None
    """Reason why it is not used until the next load of weights. None: it is used."""
    attempts: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running requests for samples. They are canceled if the server is lost."""

    def lose(self, reason: str) -> None:
        """Stop using the server until it has loaded weights again."""
        if self.lost is None:
            log.warning("%s; its requests go to the other servers, if there are some", reason)
        self.lost = reason
        for attempt in self.attempts:
            attempt.cancel()

    def fail(self, error: Exception, *, begun: float, config: VllmServers) -> None:
        """Count the failure of a request that was sent at ``begun`` (time.monotonic seconds). The
        server is lost after more than ``retries`` failures in a row."""
        if begun < self.backoff_until or self.lost is not None:
            return  # sent before the failure that is counted already
        self.failures += 1
        if self.failures > config.retries:
            self.lose(f"{error} (failed {self.failures} times in a row)")
            return
        seconds = min(config.backoff_s * 2.0 ** (self.failures - 1), config.max_backoff_s)
        self.backoff_until = time.monotonic() + seconds
        log.warning("%s; no requests to it for %g s", error, seconds)

    def restore(self) -> None:
        """Use the server again: it replied, or has loaded weights."""
        self.failures, self.backoff_until, self.lost = 0, 0.0, None


def least_busy(servers: Sequence[Server]) -> Server:
    """Return the server for a new request: one that is not in backoff, if possible, with the fewest
    samples in flight. Raises ServerError if all are lost."""
    left = [server for server in servers if server.lost is None]
    if not left:
        reasons = "\n".join(f"  {server.lost}" for server in servers)
        raise ServerError(
            f"all vLLM servers are lost:\n{reasons}\n  What to do: restart the servers, and "
            "resume the run from its last checkpoint"
        )
    now = time.monotonic()
    return min(left, key=lambda s: (max(s.backoff_until - now, 0.0), s.in_flight))


class ServerClient:
    """Sends requests to vLLM servers."""

    def __init__(self, config: VllmServers, token: str | None) -> None:
        self.config, self._token = config, token
        self.servers = [Server(url.rstrip("/")) for url in config.urls]
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s),
            # samples, and one call for each server
            limits=httpx.Limits(
                max_connections=config.max_concurrency + len(config.urls),
                keepalive_expiry=_KEEPALIVE_S,
            ),
            trust_env=False,
            verify=httpx.create_ssl_context(trust_env=True),  # SSL_CERT_FILE
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def post(
        self, server: Server, path: str, body: Any = None, *, timeout_s: float, **query: str
    ) -> Any:
        """Send a POST request with a JSON body. Return the JSON of the reply, None if it is empty.
        Raises TransientServerError or ServerError."""
        async with self._sent(server, path, body, timeout_s, query) as response:
            data = await response.aread()
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise ServerError(
                f"{server.url}{path} replied with {self._shown(data)}, which is not JSON; check "
                "that a vLLM server has this address"
            ) from error

    async def rpc(self, server: Server, method: str, *args: str) -> list[Any]:
        """Call a method of all workers of a server; return their results."""
        body = {"method": method, "args": args}
        limit = self.config.load_timeout_s
        reply = await self.post(server, "/collective_rpc", body, timeout_s=limit)
        results: list[Any] = reply["results"]
        return results

    async def events(self, server: Server, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Send a POST request; yield the JSON of each server-sent event. Raises as
        :meth:`post`."""
        limit = self.config.read_timeout_s
        async with self._sent(server, path, body, limit, {}) as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise TransientServerError(f"{server.url}: {self._shown(data)}")
                yield event

    async def health(self, server: Server) -> None:
        """Raise ServerError if the server does not reply, or its engine has ended."""
        with self._translated(server):
            response = await self._http.get(
                f"{server.url}/health", timeout=self.config.connect_timeout_s
            )
        self._check(server, "/health", response.status_code, response.content)

    @asynccontextmanager
    async def _sent(
        self, server: Server, path: str, body: Any, timeout_s: float, query: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; yield its reply, whose status is 200."""
        with self._translated(server):
            async with (
                asyncio.timeout(self.config.connect_timeout_s + timeout_s),
                self._http.stream(
                    "POST",
                    server.url + path,
                    json=body,
                    params=query,
                    timeout=httpx.Timeout(timeout_s, connect=self.config.connect_timeout_s),
                ) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    self._check(server, path, response.status_code, await response.aread())
                yield response

    @contextmanager
    def _translated(self, server: Server) -> Iterator[None]:
        """Convert the errors of httpx."""
        try:
            yield
        except TimeoutError as error:
            raise TransientServerError(
                f"{server.url} sent no complete reply in time (read_timeout_s="
                f"{self.config.read_timeout_s:g}, load_timeout_s={self.config.load_timeout_s:g})"
            ) from error
        except httpx.TransportError as error:
            reason = self._shown(f"{type(error).__name__}: {error}".removesuffix(": "))
            raise TransientServerError(f"{server.url} sent no complete reply ({reason})") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            reason = self._shown(f"{type(error).__name__}: {error}")
            raise ServerError(f"the request to {server.url} failed ({reason})") from error

    def _check(self, server: Server, path: str, status: int, body: bytes) -> None:
        """Raise an error if the status of a reply is not 200."""
        if status == httpx.codes.OK:
            return
        message = f"{server.url}{path} replied with status {status}: {self._shown(body)}"
        if status in _TRANSIENT_STATUSES or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise TransientServerError(message)
        raise ServerError(f"{message}{_ADVICE.get(status, '')}")

    def _shown(self, text: str | bytes) -> str:
        """Shorten a text and redact the token, which a server may echo."""
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        text = text.replace(self._token, "[token]") if self._token else text
        return library_text(text[:_BODY_CHARS]) or "no text"

"""The guard of a server: who may ask, how much may arrive, and how long a client may take.

Every HTTP server of this package stands behind a :class:`Guard`. Reading order: :class:`Limits`,
:class:`Guard` (what an application asks of it), :func:`listener` and :func:`make_server` (socket
and server), :class:`GuardedProtocol` (limits of a connection, before there is a request).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from burnish.serve.base import ServeError

log = logging.getLogger("burnish")

T = TypeVar("T")
_RETRY_AFTER_S = 1
_KEEP_ALIVE_S = 30  # longer than clients keep idle connections (httpx: 5), so that they end them


@dataclass(frozen=True)
class Limits:
    """Limits of a server, per request, per connection and in total."""

    max_request_bytes: int = 16 << 20
    """Size of a request's body."""
    max_held: int = 16
    """Bodies of the largest size that may be in memory at a time."""
    max_header_bytes: int = 16 << 10
    """Size of a request line with all headers."""
    header_timeout_s: float = 10.0
    """From the first byte of a request (of a new connection: from its start) to the end of its
    headers. Also the time to send the rest of a body that is not read any more."""
    body_timeout_s: float = 60.0
    """From the headers to the end of the body."""
    write_timeout_s: float = 60.0
    """Longest time in which a client reads nothing of a reply that is ready."""
    max_connections: int = 1024
    """Open connections."""
    max_per_address: int = 256
    """Open connections of one client address."""


class Guard:
    """Checks requests and bounds the memory that they take until :meth:`body` is left."""

    def __init__(self, limits: Limits, *, token: str | None, names: Iterable[str] = ()) -> None:
        """``token``: secret that requests must bring; None: no token. ``names``: host names of this
        server beside those of this machine."""
        self.limits = limits
        self._token = None if token is None else token.encode()
        own = {"localhost", socket.gethostname(), *names}
        self._names = {name.lower().rstrip(".") for name in own}
        self.held_bytes = 0
        """Size of the bodies that have arrived, completely or in part, and are still used."""

    def asgi(self, app: ASGIApp) -> ASGIApp:
        """``app`` behind the check of the Host header.

        A web page can have its own name resolve to this machine (DNS rebinding), and then ask this
        server as if it were the page's own. The name is all that gives it away, so names that are
        not this server's are refused. Addresses need no name service and pass.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (why := self._wrong_host(scope)):
                await JSONResponse({"error": why}, status_code=421)(scope, receive, send)
                return
            await app(scope, receive, send)

        return guarded

    def _wrong_host(self, scope: Scope) -> str | None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _host_name(given[0]) if len(given) == 1 else ""
        if name in self._names or name.endswith(".localhost") or _is_address(name):
            return None
        return (
            f"the Host header {', '.join(given)[:100]!r} is not a name of this server; use its "
            "address, or start it with --allowed-host NAME"
        )

    def check_token(self, request: Request) -> None:
        """Raise HTTPException 401 without the token. Takes the same time for every wrong token."""
        if self._token is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise HTTPException(
                401,
                "the header 'Authorization: Bearer TOKEN' is missing or has another token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @asynccontextmanager
    async def json_body(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request that may be made: with the token, as JSON, within the limits.

        Inside the block its bytes count as held. Raises HTTPException with the reason.
        """
        self.check_token(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no web page can send to another server unasked
            raise HTTPException(415, "the header 'Content-Type: application/json' is needed")
        body = bytearray()
        try:
            await self._read(request, body)
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Fill ``body``."""
        limits = self.limits
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                size = await self._collect(request, body)
        except TimeoutError as error:
            what = f"the request did not arrive within {limits.body_timeout_s:g} s"
            raise HTTPException(408, what, headers={"Connection": "close"}) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection ended before the request did") from error
        if size > limits.max_request_bytes:
            raise HTTPException(
                413,
                f"the request is larger than {limits.max_request_bytes} bytes; send fewer texts at "
                "a time",
            )

    async def _collect(self, request: Request, body: bytearray) -> int:
        """Fill ``body`` up to the limit; returns how much came. A good part of a body that is too
        large is read and dropped: a client that is cut off while it writes may never see why."""
        size, limit = 0, self.limits.max_request_bytes
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                self._hold(body, chunk)
            elif size > 4 * limit:
                break
        return size

    def _hold(self, body: bytearray, chunk: bytes) -> None:
        if self.held_bytes + len(chunk) > self.limits.max_held * self.limits.max_request_bytes:
            raise come_back_later("too many large requests arrive at once")
        body += chunk
        self.held_bytes += len(chunk)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled once the client has left (uvicorn and Starlette
    let a handler run on). ``request`` must have been read to its end."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_has_left(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(400, "the connection ended before the reply")
        return await task
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


async def _has_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def come_back_later(why: str) -> HTTPException:
    """The refusal of a request that may be repeated."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return HTTPException(429, f"{why}; come back later", headers=headers)


async def refusal(_: Request, error: Exception) -> Response:
    """Answer to an HTTPException: ``{"error": why}``."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": error.detail}, status_code=error.status_code, headers=error.headers
    )


def _host_name(header: str) -> str:
    """``[::1]:80`` is ``::1``, ``Localhost.:5000`` is ``localhost``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


# ---- socket and server -------------------------------------------------------------------------


def listener(host: str, port: int, *, token: str | None) -> socket.socket:
    """A socket that listens on the address; what connects waits until the server runs. Raises
    ServeError: unknown, in use, or open to others without a token."""
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
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen()  # until then a second server could bind to the same port
    except OSError as error:
        made.close()
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return made


def make_server(app: ASGIApp, guard: Guard, *, shutdown_s: float) -> uvicorn.Server:
    """The HTTP server around ``app``; ``run(sockets=[...])`` serves until ``should_exit``."""
    limits = guard.limits
    protocol: Any = functools.partial(GuardedProtocol, limits=limits)
    config = uvicorn.Config(
        guard.asgi(app),
        http=protocol,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        log_config=None,
        log_level="error",  # a warning for every malformed request would let anyone fill the log
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(shutdown_s)),
    )
    return uvicorn.Server(config)


# ---- connections -------------------------------------------------------------------------------


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 on h11, with an end for every connection on which nothing is asked.

    A connection is *idle* unless a request of it is being answered. At the limits of connections,
    the one that is idle for the longest makes room for a new one: clients that open connections and
    send nothing, or half a header, displace each other, and a client that asks is answered.
    """

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.limits = limits
        self.idle_since = self.loop.time()
        self._new = True
        """Whether no request has begun yet."""
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or end it if there is no room."""
        super().connection_made(transport)
        if self._make_room():
            self._watch()
        else:
            transport.write(
                b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n"
                b"Retry-After: %d\r\n\r\n" % _RETRY_AFTER_S
            )
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, or of a body whose request was refused."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        limit = self.limits.write_timeout_s
        self._write_deadline = self.loop.call_later(limit, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().resume_writing()

    @property
    def _body_is_open(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _has_begun(self) -> bool:
        """Return whether a request is on its way. A new connection is expected to bring one."""
        return self._new or self._body_is_open or bool(self.conn.trailing_data[0])

    def _watch(self) -> None:
        """Set the time limit if a request has begun to arrive and is not complete; else lift it. (A
        connection between two requests has uvicorn's own limit.)"""
        self._new = self._new and self.cycle is None
        if self.transport.is_closing() or not (self.is_idle and self._has_begun):
            self._stop_timer()
        elif self._deadline is None:
            limit = self.limits.header_timeout_s
            self._deadline = self.loop.call_later(limit, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_timers(self) -> None:
        self._stop_timer()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    def _make_room(self) -> bool:
        """Return whether the connection may stay; ends idle ones for it."""
        everyone = [c for c in self.connections if isinstance(c, GuardedProtocol)]
        mine = [c for c in everyone if c.client and self.client and c.client[0] == self.client[0]]
        for group, limit in (
            (mine, self.limits.max_per_address),
            (everyone, self.limits.max_connections),
        ):
            if sum(not c.transport.is_closing() for c in group) <= limit:
                continue
            others = [c for c in group if c is not self and c.may_go]
            if not others:
                return False
            min(others, key=lambda c: c.idle_since).transport.abort()
        return True

    @property
    def may_go(self) -> bool:
        """Return whether the connection can be ended for another one."""
        return self.is_idle and not self.transport.is_closing()

"""The guard of a server: authentication, size limits and timeouts.

Every HTTP server of this package has a :class:`RequestGuard`. Reading order: that class and its
:class:`ServerLimits`, :func:`listener` and :func:`make_server` (socket and server),
:class:`GuardedProtocol` (limits of a connection, before there is a request).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
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
from burnish.serve.compression import COMPRESSED, CompressionError, decompressed

log = logging.getLogger("burnish")

T = TypeVar("T")
_RETRY_AFTER_S = 1
_FREE_CHUNKS, _CHUNK_BYTES = 1000, 64  # most chunks of a body, plus one per bytes
_KEEP_ALIVE_S = 30  # longer than clients keep idle connections (httpx: 5), so clients close first


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server, per request, per connection and in total."""

    max_request_bytes: int = 16 << 20
    """Largest size of a request body."""
    max_held: int = 16
    """Most bodies of the largest size in memory at once. Smaller bodies count by their size."""
    max_header_bytes: int = 16 << 10
    """Largest size of a request line with all headers."""
    header_timeout_s: float = 10.0
    """Timeout from the first byte of a request to the end of its headers. For a new connection, it
    starts with the connection. Also the timeout for the rest of a body that is no longer read."""
    body_timeout_s: float = 60.0
    """Timeout from the end of the headers to the end of the body."""
    write_timeout_s: float = 60.0
    """Timeout for a client that does not read its reply."""
    max_connections: int = 1024
    """Most open connections."""
    max_per_address: int = 256
    """Most open connections of one client address."""


class RequestGuard:
    """Checks of requests, and a limit on the memory of their bodies (see :meth:`json_body`)."""

    def __init__(
        self, limits: ServerLimits, *, token: str | None, names: Iterable[str] = ()
    ) -> None:
        """``token``: secret that requests must contain. None: no token. ``names``: host names of
        this server, in addition to those of this machine."""
        self.limits = limits
        self._token = None if token is None else token.encode()
        self._names = {n.lower().rstrip(".") for n in ("localhost", socket.gethostname(), *names)}
        self.refusal: Callable[[Request, Exception], Awaitable[Response]] = refusal
        """Converts an HTTPException to the reply of the server's API."""
        self.held_bytes = 0
        """Bytes of complete and partial bodies that are in use."""
        self._incomplete: dict[int, _Incomplete] = {}
        """Bodies that arrive, in the order of their beginning."""

    def asgi(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app`` with a check of the Host header.

        A web page can make its own name resolve to this machine (DNS rebinding) and then send
        same-origin requests to this server. Only the Host header reveals this, so unknown names are
        refused. IP addresses involve no name resolution and are accepted.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (error := self._refused(scope)):
                reply = await self.refusal(Request(scope), error)
                await reply(scope, receive, send)
                return
            await app(scope, receive, send)

        return guarded

    def _refused(self, scope: Scope) -> HTTPException | None:
        """Return why the headers of a request are refused."""
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self.limits.max_header_bytes:  # h11 counts only those of several reads
            return HTTPException(
                431, f"the headers have more than {self.limits.max_header_bytes} bytes"
            )
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _host_name(hosts[0]) if len(hosts) == 1 else ""
        if name in self._names or name.endswith(".localhost"):
            return None
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return None
        return HTTPException(
            421,
            f"the Host header {', '.join(hosts)[:100]!r} is not a name of this server; use its "
            "address, or start it with --allowed-host NAME",
        )

    def is_token(self, text: str) -> bool:
        """Return whether ``text`` is the token, if there is one. Compares in constant time."""
        return self._token is None or hmac.compare_digest(
            text.encode("utf-8", "replace"), self._token
        )

    def check_token(self, request: Request, *, cookie: str | None = None) -> None:
        """Raise HTTPException 401 if the token is missing or wrong. It is a header, or the cookie
        of this name."""
        header = request.headers.get("authorization", "")
        given = header.removeprefix("Bearer ") if header.startswith("Bearer ") else ""
        if cookie is not None and not given:
            given = request.cookies.get(cookie, "")
        if not self.is_token(given):
            raise HTTPException(
                401,
                "the header 'Authorization: Bearer TOKEN' is missing or has another token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @asynccontextmanager
    async def json_body(self, request: Request) -> AsyncIterator[bytearray]:
        """Check and read a request. Yield its body.

        The request needs the token and the content type JSON, and must be within the limits. The
        body counts toward ``held_bytes`` inside the block. Raises HTTPException with the reason.
        """
        self.check_token(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page cannot send it cross-origin without preflight
            raise HTTPException(415, "the header 'Content-Type: application/json' is required")
        compression = request.headers.get("content-encoding", "identity").strip().lower()
        if compression not in ("identity", *COMPRESSED):
            known = ", ".join(COMPRESSED)
            raise HTTPException(415, f"the header 'Content-Encoding' must be one of: {known}")
        body = bytearray()
        try:
            await self._read(request, body)
            if compression in COMPRESSED:
                await self._decompress(body)
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _decompress(self, body: bytearray) -> None:
        """Replace a compressed body. Raises HTTPException if it is not well-formed or too large."""
        limit = self.limits.max_request_bytes
        try:
            whole = await asyncio.to_thread(decompressed, bytes(body), limit)
        except CompressionError as error:
            raise HTTPException(400, f"the request cannot be decompressed: {error}") from error
        if len(whole) > limit:
            raise _too_large(limit)
        self.held_bytes -= len(body)
        body.clear()
        self._hold(body, whole)

    async def _read(self, request: Request, body: bytearray) -> None:
        """Fill ``body``."""
        limits = self.limits
        arriving = _Incomplete(body, asyncio.timeout(limits.body_timeout_s))
        self._incomplete[id(arriving)] = arriving
        try:
            async with arriving.timer:
                size = await self._collect(request, body)
        except TimeoutError as error:
            problem = f"the request did not arrive within {limits.body_timeout_s:g} s"
            if arriving.is_displaced:
                problem = "the request was incomplete when there was no room for another one"
            raise HTTPException(408, problem, headers={"Connection": "close"}) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection closed before the request ended") from error
        finally:
            del self._incomplete[id(arriving)]
        if arriving.is_displaced:
            raise come_back_later("too many large requests arrive at the same time")
        if size > limits.max_request_bytes:
            raise _too_large(limits.max_request_bytes)

    async def _collect(self, request: Request, body: bytearray) -> int:
        """Fill ``body`` up to the limit. Return the number of bytes received.

        Up to 4 times the limit is read and discarded, because a client that is disconnected while
        it writes may never see the error.
        """
        size, limit = 0, self.limits.max_request_bytes
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                self._hold(body, chunk)
            elif size > 4 * limit:
                break
        return size

    def _hold(self, body: bytearray, chunk: bytes) -> None:
        """Append to a body. If there is no room, the body that began first is given up, so that
        bodies that never end make room."""
        most = self.limits.max_held * self.limits.max_request_bytes
        for other in list(self._incomplete.values()):
            if self.held_bytes + len(chunk) <= most:
                break
            if other.body is not body:
                self.held_bytes -= other.displace()
        if self.held_bytes + len(chunk) > most:
            raise come_back_later("too many large requests arrive at the same time")
        body += chunk
        self.held_bytes += len(chunk)


@dataclass
class _Incomplete:
    """A body that arrives."""

    body: bytearray
    timer: asyncio.Timeout
    is_displaced: bool = False

    def displace(self) -> int:
        """Give the body up. Return the number of its bytes."""
        size = len(self.body)
        if not self.is_displaced:
            self.is_displaced = True
            self.timer.reschedule(asyncio.get_running_loop().time())
        self.body.clear()
        return size


def _too_large(limit: int) -> HTTPException:
    return HTTPException(
        413, f"the request is larger than {limit} bytes; send fewer texts per request"
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, and cancel it if the client disconnects.

    uvicorn and Starlette would let the handler continue. ``request`` must have been read to its
    end.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_has_left(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(400, "the connection closed before the reply")
        return await task
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


async def _has_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def come_back_later(reason: str) -> HTTPException:
    """Return the HTTPException (429) for a request that may be retried."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return HTTPException(429, f"{reason}; retry later", headers=headers)


async def refusal(_: Request, error: Exception) -> Response:
    """Convert an HTTPException to the reply ``{"error": reason}``."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": error.detail}, status_code=error.status_code, headers=error.headers
    )


def _host_name(header: str) -> str:
    """Return the name in a Host header: ``::1`` for ``[::1]:80``, ``localhost`` for
    ``Localhost.:5000``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


# ---- socket and server -------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. Raises ServeError if it is not an
    address of this machine."""
    return all(
        ipaddress.ip_address(str(at[4][0]).partition("%")[0]).is_loopback
        for at in _addresses(host, 0)
    )


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(f"host={host!r} is not an address of this machine ({error})") from error


def listener(host: str, port: int, *, token: str | None) -> socket.socket:
    """Return a socket that listens on the address. Connections wait until the server runs.

    Raises ServeError if the address is unknown, in use, or reachable from other machines without a
    token.
    """
    addresses, local = _addresses(host, port), is_loopback(host)
    if not local and token is None:
        raise ServeError(
            f"host={host!r} can be reached from other machines, but there is no token, so anyone "
            "could use the server; put a secret into an environment variable and name it with "
            "--token-env, or omit --host to listen on 127.0.0.1 only"
        )
    if not local:
        log.warning("the token and all texts are sent unencrypted; use a TLS proxy or a tunnel")
    family, kind, protocol, _, address = min(addresses, key=lambda a: a[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()  # without this a second server could bind to the same port
    except OSError as error:
        listening.close()
        way_out = "; choose another port (0: a free one)" if error.errno == errno.EADDRINUSE else ""
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}{way_out}") from error
    return listening


def make_server(app: ASGIApp, guard: RequestGuard, *, shutdown_s: float) -> uvicorn.Server:
    """Return the HTTP server of ``app``. ``run(sockets=[...])`` serves until ``should_exit``."""
    limits = guard.limits
    protocol: Any = functools.partial(GuardedProtocol, limits=limits)
    config = uvicorn.Config(
        guard.asgi(app),
        http=protocol,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        log_config=None,
        log_level="error",  # with warnings, any client could flood the log with bad requests
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
    """uvicorn's HTTP/1.1 protocol on h11, with timeouts and eviction of idle connections.

    A connection is *idle* unless one of its requests is being answered. A request whose body is
    incomplete is not. At the connection limits, the connection that has been idle the longest is
    closed to make room for a new one. Clients that open connections and send nothing, or only part
    of a request, therefore evict each other, and clients that send requests are served.
    """

    def __init__(self, *arguments: Any, limits: ServerLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.limits = limits
        self.conn = _Connection(h11.SERVER, limits.max_header_bytes)
        self.idle_since = self.loop.time()
        self._new = True
        """True until the first request has begun."""
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it with status 503 if there is no room."""
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
        """Stop the timers of the connection."""
        self._stop_timer()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request, or of the body of a refused request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Mark the connection as idle and wait for the next request."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        limit = self.limits.write_timeout_s
        self._write_deadline = self.loop.call_later(limit, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout, because the client reads again."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().resume_writing()

    @property
    def _body_is_open(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _watch(self) -> None:
        """Start the timeout if a request has begun but is incomplete; otherwise stop it.

        Between two requests, uvicorn's own keep-alive timeout applies.
        """
        self._new = self._new and self.cycle is None
        # A new connection counts as a request that is incomplete.
        has_begun = self._new or self._body_is_open or bool(self.conn.trailing_data[0])
        if self.transport.is_closing() or not (self.is_idle and has_begun):
            self._stop_timer()
        elif self._deadline is None:
            limit = self.limits.header_timeout_s
            self._deadline = self.loop.call_later(limit, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> bool:
        """Return whether the connection may stay, after closing idle ones if necessary."""
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
        """Return whether the connection can be closed for another one."""
        return (self.is_idle or self._body_is_open) and not self.transport.is_closing()


class _Connection(h11.Connection):
    """A connection that refuses bodies in very small chunks, each of which costs as much time as a
    large one."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError for too many chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks", error_status_hint=413)
        return event

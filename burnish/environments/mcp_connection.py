"""A connection to one MCP server: its start, requests, and the end of its process.

Servers are not trusted to work: they may end, hang, print other text, or send too much. Reading
order: Connection, then the limits of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from burnish.config.episodes import McpServerConfig
from burnish.environments.base import EnvironmentSetupError
from burnish.errors import BurnishError
from burnish.messages import visible

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""Time in which a closed connection must have ended its server. The connection is then dropped."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of one message of a server."""
MAX_TOOLS, MAX_PAGES = 1000, 100
MAX_ERROR_CHARS = 500
RECONNECT_S = 0.2
"""Minimum time between two streams of a connection that the server ended. A server may ask for
less, down to 0, which would keep the thread of MCP busy."""

_ENDS = {
    types.CONNECTION_CLOSED: ("SSE stream ",),
    types.INVALID_REQUEST: (
        "server answered a request with 202", "Redirect to ", "Session terminated",
        "Unexpected content type",
    ),
}  # fmt: skip
"""Code -> beginnings of the messages with which the package itself answers a request, because the
server's reply over HTTP is the end of the session."""

# The package logs each invalid message with a traceback; the call's error has the reason.
logging.getLogger("mcp").addHandler(logging.NullHandler())

_GUARD = str(Path(__file__).with_name("mcp_guard.py"))


SESSION_NOT_FOUND = -32001
"""Code with which servers of the field refuse a call of a session that they do not know."""
_LOST = frozenset({401, 403, 404, 410, 429, 502, 503, 504})
"""HTTP statuses that are no answer to a call: the server, its session or the token is gone. Others
are the refusal of one call."""


class ServerLostError(BurnishError, RuntimeError):
    """A server ended, or its connection did."""


class SessionLostError(ServerLostError):
    """A server does not know the session any more. It has not run the call."""


class Connection:
    """A started server and the session with it. Its methods run in the thread of MCP.

    One task enters and leaves the contexts of the package, as anyio requires.
    """

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self._closing = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._lost_by: type[ServerLostError] | None = None
        """Kind of the loss that an HTTP status has shown."""
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def ready(self, limit_s: float) -> None:
        """Wait for the start. Raises ServerLostError."""
        done, _ = await asyncio.wait([self._client], timeout=limit_s)
        if not done:
            self.close()
            raise self._lost(f"did not start within {limit_s:g} s")
        self._client.result()

    async def tools(self) -> list[types.Tool]:
        """Return all tools of the server. Raises EnvironmentSetupError if there is no end."""
        tools: list[types.Tool] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await self._guarded(self._client.result().list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if len(tools) > MAX_TOOLS:
                break
            if cursor is None:
                return tools
        raise EnvironmentSetupError(
            f"episodes.mcp.{self._name}: the server lists more than {MAX_TOOLS} tools or "
            f"{MAX_PAGES} pages of tools"
        )

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Return the result of a call.

        Raises ServerLostError (SessionLostError if the call can be sent again in another session);
        MCPError if the server refuses the call; pydantic.ValidationError or RuntimeError if the
        result is invalid.
        """
        return await self._guarded(self._client.result().call_tool(tool, arguments))

    def close(self) -> None:
        """Begin to end the session and the server."""
        self._closing.set()
        if not self._client.done():  # it hangs in its start
            self._task.cancel()

    async def closed(self) -> None:
        """Wait for the end of the server."""
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    async def _guarded(self, request: Coroutine[Any, Any, T]) -> T:
        """Return the reply to a request. Raises ServerLostError if the connection ends."""
        call = asyncio.ensure_future(request)
        try:
            await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # (another call may have found that the session is lost)
                raise self._lost("ended", self._lost_by or ServerLostError)
            return call.result()
        except MCPError as error:
            kind = self._loss(error)
            if kind is None:
                raise
            raise self._lost(f"ended ({error.message[:MAX_ERROR_CHARS]})", kind) from error
        finally:
            call.cancel()

    def _loss(self, error: MCPError) -> type[ServerLostError] | None:
        """Return the kind of loss that an error of a request means; None: a refusal."""
        if self._lost_by is not None:
            return self._lost_by
        if error.code == types.CONNECTION_CLOSED:
            return ServerLostError
        if self._config.url is None:
            return None
        if error.code == SESSION_NOT_FOUND:
            self._lost_by = SessionLostError
            return SessionLostError
        return ServerLostError if error.code == types.INVALID_REQUEST else None

    async def _run(self) -> None:
        reason = "ended during its start"
        try:
            async with asyncio.timeout(None) as limit, AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = Client(self._with_refusals(transport), cache=None)
                await stack.enter_async_context(client)
                self._client.set_result(client)
                await self._closing.wait()
                # A server may never answer the end of its session.
                limit.reschedule(asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S)
        except Exception as error:  # the failure of a server, reported by ready() or as a loss
            reason = f"cannot be used: {reason_of(error)}"
            self._last_lines.append(reason_of(error))
        finally:
            if not self._client.done():
                self._client.set_exception(self._lost(reason))
                self._client.exception()  # (read, or asyncio reports it as forgotten)

    @asynccontextmanager
    async def _with_refusals(self, transport: Any) -> AsyncIterator[tuple[Any, Any]]:
        """Enter a transport and return its streams."""
        async with transport as (incoming, outgoing):
            yield _Incoming(incoming, self._refusal), outgoing

    def _refusal(self, item: Any) -> Any:
        """Return a message, with the code of an internal error if it is an error of the server.

        The package gives the end of a connection codes that servers send for failed calls, too.
        (Before the session has started, the package reads the code.)
        """
        message = item.message if isinstance(item, SessionMessage) else None
        if isinstance(message, types.JSONRPCError) and self._client.done():
            error = message.error
            ends = _ENDS.get(error.code, ()) if self._config.url is not None else ()
            if error.code in _ENDS and not error.message.startswith(ends):
                message.error = error.model_copy(update={"code": types.INTERNAL_ERROR})
        return item

    async def _transport(self, stack: AsyncExitStack) -> Any:
        """Return the transport to the server, which is not connected."""
        config = self._config
        if config.url is not None:
            http = await stack.enter_async_context(self._http_client())
            return streamable_http_client(
                config.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        env = {**_from_environment(config.pass_env, "pass_env"), **config.env}
        program = shutil.which(config.command[0], path=env.get("PATH"))
        if program is None:
            raise ServerLostError(
                f"there is no program {config.command[0]!r}; give its path, or a name that is "
                "found in PATH"
            )
        read, write = os.pipe()
        log = stack.enter_context(os.fdopen(write, "w"))
        reader = asyncio.create_task(self._read_log(read))
        stack.push_async_callback(_ended, reader)
        arguments = ["-I", "-S", _GUARD, str(MAX_MESSAGE_BYTES), program, *config.command[1:]]
        server = StdioServerParameters(
            command=sys.executable, args=arguments, env=env, encoding_error_handler="replace"
        )
        return stdio_client(server, errlog=log)

    def _http_client(self) -> httpx2.AsyncClient:
        headers = {"Accept-Encoding": "identity"}
        if self._config.token_env is not None:
            (token,) = _from_environment((self._config.token_env,), "token_env").values()
            headers["Authorization"] = f"Bearer {token}"

        async def note(response: httpx2.Response) -> None:
            if response.status_code >= 400:
                self._last_lines.append(f"HTTP status {response.status_code}")
                if self._client.done() and response.request.method == "POST":
                    self._lost_by = await _loss_of(response) or self._lost_by

        return httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(30.0, read=None),  # (calls have their own time limit)
            transport=_LimitedTransport(),
            event_hooks={"response": [note]},
        )

    async def _read_log(self, pipe: int) -> None:
        """Copy the server's stderr to that of the worker."""
        reader = asyncio.StreamReader()
        loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb"))
        try:
            while chunk := await reader.read(1 << 16):
                for line in chunk.decode(errors="replace").splitlines():
                    self._last_lines.append(line[:MAX_ERROR_CHARS])
                    print(f"MCP server {self._name}: {visible(line)}", file=sys.stderr)
        finally:
            transport.close()

    def _lost(self, reason: str, kind: type[ServerLostError] = ServerLostError) -> ServerLostError:
        """Return the error, with the last output of the server."""
        shown = self._config.url or " ".join(self._config.command)
        summary = f"MCP server {self._name} ({shown}) {reason}"
        return kind("\n".join([summary, *self._last_lines]))


async def _loss_of(response: httpx2.Response) -> type[ServerLostError] | None:
    """Return the kind of loss that an HTTP error means; None: the refusal of one call.

    A request of a session that the server does not know gets 404, by the protocol; some servers
    send 400 with a JSON-RPC error about the session.
    """
    status = response.status_code
    in_session = "mcp-session-id" in response.request.headers
    if in_session and status in (404, 410):
        return SessionLostError
    if in_session and status == 400:
        no_error = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
        with suppress(httpx2.StreamError, *no_error):
            error = json.loads(await response.aread())["error"]
            if error["code"] == SESSION_NOT_FOUND or "session" in error["message"].lower():
                return SessionLostError
    return ServerLostError if status in _LOST else None


class _Incoming:
    """The messages of a server, each changed by ``change``, for the package."""

    def __init__(self, stream: Any, change: Callable[[Any], Any]) -> None:
        self._stream, self._change = stream, change

    async def receive(self) -> Any:
        return self._change(await self._stream.receive())

    def __aiter__(self) -> _Incoming:
        return self

    async def __anext__(self) -> Any:
        return self._change(await self._stream.__anext__())

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> _Incoming:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return bool(await self._stream.__aexit__(*error))


_running: set[asyncio.Task[None]] = set()
"""Tasks of connections: asyncio itself keeps only weak references."""


class _LimitedTransport(httpx2.AsyncHTTPTransport):
    """HTTP whose JSON replies are limited to MAX_MESSAGE_BYTES, and whose streams are opened again
    after RECONNECT_S at the earliest. (The package limits events.)"""

    _next_stream_at = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next_stream_at)
            self._next_stream_at = begin + RECONNECT_S
            await asyncio.sleep(begin - now)
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.StreamError("the reply is compressed, which the client did not ask for")
        kind = response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            response.stream = _LimitedStream(response.stream)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_MESSAGE_BYTES
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise httpx2.StreamError(f"the reply has more than {MAX_MESSAGE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _from_environment(names: tuple[str, ...], key: str) -> dict[str, str]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ServerLostError(
            f"{key}: the environment variable {missing[0]} is not set; set it where the run starts"
        )
    return {name: os.environ[name] for name in names}


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error)[:MAX_ERROR_CHARS]
    if isinstance(error, BurnishError | MCPError | TimeoutError):
        return text
    return f"{type(error).__name__}: {text}"


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task. The log is read to its end if that comes soon."""
    with suppress(TimeoutError):
        await asyncio.wait_for(task, 1.0)

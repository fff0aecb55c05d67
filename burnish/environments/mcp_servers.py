"""Tools of MCP servers (Model Context Protocol), called by ToolEnvironment.

The package ``mcp`` speaks the protocol, over the pipes of a program (stdio) or over HTTP. All
connections of a process run in one thread with an event loop of its own, so that neither code of
environments nor a server blocks the other.

A server with ``per_episode`` holds state of the episode. If it is lost, the episode ends with
``infra_error``. A shared server has no such state: its loss is an error message for the policy, and
the next call starts it again. If it has only lost the session, the call is sent again in a new one.

Reading order: McpCalls, open_servers, McpServers, SharedServer; then ``mcp_connection.py``.
"""

from __future__ import annotations

import asyncio
import json
import re  # house: ok names of at most 128 characters
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import mcp_types as types
from mcp import MCPError
from pydantic import ValidationError

from burnish.config.episodes import McpServerConfig
from burnish.config.explain import nearest
from burnish.environments.base import EnvironmentSetupError, EpisodeInfraError, ToolError
from burnish.environments.mcp_connection import (
    MAX_ERROR_CHARS,
    Connection,
    ServerLostError,
    SessionLostError,
    reason_of,
)
from burnish.errors import BurnishError
from burnish.tool_arguments import argument_problem, without_draft

T = TypeVar("T")

LIST_TIMEOUT_S = 90.0
"""Time in which all servers must have started and listed their tools, before the run. Less than
``pool.START_TIMEOUT_S``."""
START_TIMEOUT_S = 60.0
"""Maximum time of the start of a server for an episode. The time limit of the turn also holds."""
MAX_LOSSES = 5
"""Consecutive losses of a shared server, without a reply between them, after which each loss ends
the episode with ``infra_error``."""
MAX_SESSIONS = 3
"""Sessions in which a call of a shared server is tried. A server that restarts loses its sessions,
and has not run the call then. After these tries the episode ends with ``infra_error``."""
MAX_TIMEOUTS = 3
"""Consecutive calls of a shared server that time out, after which it is started again."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class McpTool:
    """A tool of a server."""

    name: str
    """Name for the policy, with the prefix."""
    server: str
    remote: str
    """Name at the server."""
    schema: Mapping[str, Any]
    """Description for the chat template, as of ``tools.Tool``."""

    @property
    def origin(self) -> str:
        """Place of the definition, for messages."""
        return f"MCP server {self.server}"

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments. Raises ToolError if they violate the schema."""
        problem = argument_problem(self.schema["function"]["parameters"], dict(arguments))
        if problem is not None:
            raise ToolError(f"ValidationError: {problem[:MAX_ERROR_CHARS]}")
        return dict(arguments)


class McpCalls:
    """The calls of one environment object. Its coroutines run in the caller's event loop."""

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._own: dict[str, Connection] = {}
        self.restarts = 0
        """Number of shared servers that calls of this object started again."""

    async def ready(self, tool: McpTool, limit_s: float) -> None:
        """Wait for the start of the tool's server. Raises EpisodeInfraError."""
        await _in_thread(self._ready(tool.server, min(limit_s, START_TIMEOUT_S)))

    async def call(self, tool: McpTool, arguments: Mapping[str, Any]) -> str:
        """Return the result as text. Raises ToolError, or EpisodeInfraError."""
        result = await _in_thread(self._call(tool, dict(arguments)))
        text = result_text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed without a message")
        return text

    def close(self) -> None:
        """End the servers of this object, without waiting for their end."""
        if self._own:
            _thread_loop().call_soon_threadsafe(self._close)

    async def _ready(self, server: str, limit_s: float) -> None:
        shared = self._servers.shared.get(server)
        try:
            if shared is not None:
                self.restarts += await shared.ready(limit_s)
                return
            if server not in self._own:
                self._own[server] = Connection(server, self._servers.configs[server])
            await self._own[server].ready(limit_s)
        except ServerLostError as error:
            raise EpisodeInfraError(str(error)) from error

    async def _call(self, tool: McpTool, arguments: dict[str, Any]) -> types.CallToolResult:
        shared = self._servers.shared.get(tool.server)
        try:
            if shared is not None:
                result, restarts = await shared.call(tool.remote, arguments)
                self.restarts += restarts
                return result
            return await self._own[tool.server].call(tool.remote, arguments)
        except ServerLostError as error:
            raise EpisodeInfraError(f"{error}; the state of the episode is lost") from error
        except MCPError as error:
            raise ToolError(f"{error.message[:MAX_ERROR_CHARS]}") from error
        except (ValidationError, RuntimeError) as error:  # the client refuses the result
            if isinstance(error, BurnishError):
                raise
            raise ToolError(
                f"MCP server {tool.server} returned an invalid result: {reason_of(error)}"
            ) from error

    def _close(self) -> None:
        for connection in self._own.values():
            connection.close()
        self._own.clear()


def open_servers(mcp: Mapping[str, Any]) -> McpServers:
    """Return the servers of a recipe's ``mcp``, with their tools. They are started and listed at
    the first call in a process.

    Blocks. Raises EnvironmentSetupError if the config is invalid, a server cannot be started, or
    its tools cannot be used.
    """
    with _opening:
        return _open_servers(json.dumps(mcp, sort_keys=True))


_opening = threading.Lock()


@lru_cache(maxsize=16)
def _open_servers(mcp: str) -> McpServers:
    configs = {}
    for name, fields in json.loads(mcp).items():
        try:
            configs[name] = McpServerConfig.model_validate(fields)
        except ValidationError as error:
            raise EnvironmentSetupError(f"mcp.{name}: {error}") from error
        broken = [f"mcp.{name}: {rule}" for rule in configs[name].rules()]
        if broken:
            raise EnvironmentSetupError("; ".join(broken))
    servers = McpServers(configs)
    asyncio.run_coroutine_threadsafe(servers.open(), _thread_loop()).result()
    return servers


class McpServers:
    """The servers of a recipe in this process."""

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self.configs = configs
        self.tools: list[McpTool] = []
        self.shared = {
            name: SharedServer(name, config)
            for name, config in configs.items()
            if not config.per_episode
        }

    async def open(self) -> None:
        """Start all servers and list their tools. Those of episodes are ended again."""
        listed = await asyncio.gather(
            *(self._listed(name) for name in self.configs), return_exceptions=True
        )
        for result in listed:
            if isinstance(result, BaseException):
                for shared in self.shared.values():
                    shared.close()
                raise result
            self.tools += result

    async def _listed(self, name: str) -> list[McpTool]:
        config = self.configs[name]
        shared = self.shared.get(name)
        connection = Connection(name, config)
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                await connection.ready(LIST_TIMEOUT_S)
                tools = _selected(name, config, await connection.tools())
        except (ServerLostError, MCPError, ValidationError, TimeoutError) as error:
            connection.close()
            reason = reason_of(error) or f"it did not list its tools within {LIST_TIMEOUT_S:g} s"
            raise EnvironmentSetupError(f"episodes.mcp.{name}: {reason}") from error
        except BaseException:
            connection.close()
            raise
        if shared is None:
            connection.close()
            await connection.closed()
        else:
            shared.connection = connection
        return tools


def _selected(name: str, config: McpServerConfig, tools: list[types.Tool]) -> list[McpTool]:
    """Return the tools that the recipe allows, in the order of the server."""
    names = [tool.name for tool in tools]
    allowed = names if config.tools is None else config.tools
    for tool_name in allowed:
        if tool_name not in names:
            raise EnvironmentSetupError(
                f"episodes.mcp.{name}.tools: the server has no tool {tool_name!r}"
                f"{nearest(tool_name, names)}; it has {', '.join(names) or 'none'}"
            )
    if not allowed:
        raise EnvironmentSetupError(f"episodes.mcp.{name}: the server has no tools; remove it")
    return [_make_tool(name, config, tool) for tool in tools if tool.name in allowed]


def _make_tool(server: str, config: McpServerConfig, tool: types.Tool) -> McpTool:
    name = config.prefix + tool.name
    label = f"episodes.mcp.{server}: the tool {name!r:.200}"
    hint = "name the other tools in `tools` to leave it out"
    if not _NAME.fullmatch(name):
        raise EnvironmentSetupError(
            f"{label} has a name that calls cannot contain (letters, digits, '_', '-' and '.', at "
            f"most 128); {hint}"
        )
    try:
        parameters = {"properties": {}, **without_draft(tool.input_schema)}
    except Exception as error:
        raise EnvironmentSetupError(
            f"{label} has an invalid JSON schema ({reason_of(error)}); {hint}"
        ) from error
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.description or tool.title or "",
            "parameters": parameters,
        },
    }
    return McpTool(name, server, tool.name, schema)


class SharedServer:
    """A server that all episodes of a process use."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self.connection: Connection | None = None
        self._losses = self._timeouts = 0

    async def ready(self, limit_s: float) -> int:
        """Wait for the start of the server. Return 1 if this call started it again, else 0.

        Raises ServerLostError if it does not start.
        """
        started = int(self.connection is None)
        if self.connection is None:
            self.connection = Connection(self._name, self._config)
        connection = self.connection
        try:
            await connection.ready(limit_s)
        except ServerLostError:
            self._drop(connection)
            raise
        return started

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[types.CallToolResult, int]:
        """Return the result of a call, and the number of sessions that it started because the
        server had lost its own. Raises as :meth:`Connection.call`, or ToolError if the server is
        lost."""
        restarts = 0
        for left in reversed(range(MAX_SESSIONS)):
            restarts += await self.ready(START_TIMEOUT_S)
            assert self.connection is not None
            try:
                return await self._call(self.connection, tool, arguments), restarts
            except SessionLostError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _call(
        self, connection: Connection, tool: str, arguments: dict[str, Any]
    ) -> types.CallToolResult:
        try:
            result = await connection.call(tool, arguments)
        except ServerLostError as error:
            self._drop(connection)
            if self._losses > MAX_LOSSES or isinstance(error, SessionLostError):
                raise
            raise ToolError(f"the MCP server {self._name} ended during the call") from error
        except asyncio.CancelledError:  # a timeout
            self._timeouts += 1
            if self._timeouts >= MAX_TIMEOUTS:
                self._drop(connection)
            raise
        except Exception:  # an answer of the server, although not a result
            self._answered()
            raise
        self._answered()
        return result

    def close(self) -> None:
        """End the server."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _answered(self) -> None:
        self._losses = self._timeouts = 0

    def _drop(self, connection: Connection) -> None:
        """End a connection, which several calls may have found lost."""
        if connection is self.connection:
            self._losses += 1
            self._timeouts = 0
            self.close()


def result_text(result: types.CallToolResult) -> str:
    """Return the content of a result as text. Structured content is used if there is no other."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_part_text(part) for part in result.content)


def _part_text(part: Any) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.ImageContent() | types.AudioContent():
            return f"({part.type} of type {part.mime_type} left out)"
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"(resource {part.resource.uri} left out: it is not text)"
        case types.ResourceLink():
            return f"(link to {part.uri}: {part.description or part.name})"
    return f"(content of type {part.type} left out)"


async def _in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs in the thread of MCP."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _thread_loop()))


@lru_cache(maxsize=1)
def _thread_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop

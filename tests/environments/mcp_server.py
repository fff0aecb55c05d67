"""An MCP server of the tests, written with the package ``mcp``.

``mcp_server.py stdio`` or ``mcp_server.py http TOKEN PORT``; ``http`` prints its port."""

import json
import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import SamplingMessage, TextContent
from pydantic import BaseModel

server = MCPServer("tests")
notes: list[str] = []


class Point(BaseModel):
    x: int
    y: int


class Answer(BaseModel):
    yes: bool


@server.tool(structured_output=False)
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool(structured_output=False)
def note(text: str) -> str:
    """Keep a note and return all notes."""
    notes.append(text)
    return json.dumps({"notes": notes, "pid": os.getpid()})


@server.tool(structured_output=False)
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def point(x: int) -> Point:
    """Return structured content."""
    return Point(x=x, y=2)


@server.tool(structured_output=False)
def picture() -> list:
    """Return text and an image."""
    return ["seen:", Image(data=b"1234", format="png")]


@server.tool(structured_output=False)
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool(structured_output=False)
async def sample(ctx: Context) -> str:
    """Ask the client for a sample."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text="hi"))
    return str(await ctx.session.create_message([message], max_tokens=5))


@server.tool(structured_output=False)
async def ask(ctx: Context) -> str:
    """Ask the user."""
    return str(await ctx.elicit("Really?", Answer))


class Token:
    """Refuses requests without the token."""

    def __init__(self, app, token):
        self.app, self.token = app, token

    async def __call__(self, scope, receive, send):
        sent = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and self.token and sent != f"Bearer {self.token}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def serve_http(token: str, port: str) -> None:
    listening = socket.create_server(("127.0.0.1", int(port)))
    print(listening.getsockname()[1], flush=True)
    app = Token(server.streamable_http_app(), token)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    {"stdio": server.run, "http": serve_http}[sys.argv[1]](*sys.argv[2:])

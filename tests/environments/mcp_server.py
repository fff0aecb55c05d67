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


class Odd:
    """Has sessions, which the newest protocol does not, and answers calls of tools with what a file
    says, as long as it exists: number of answers left, status, type and text."""

    def __init__(self, app, path):
        self.app, self.path = app, path

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST" or not self.path:
            await self.app(scope, receive, send)
            return
        message = await receive()
        while message.get("more_body"):
            more = await receive()
            message = {**more, "body": message["body"] + more["body"]}
        answers = os.path.exists(self.path) and b"tools/call" in message["body"]
        if b"server/discover" in message["body"]:
            answers, status, kind, text = True, 404, "text/plain", "Not Found"
        elif answers:
            status, kind, text = self.next_answer()
        if not answers:
            first = [message]

            async def again():
                return first.pop() if first else await receive()

            await self.app(scope, again, send)
            return
        headers = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    def next_answer(self):
        with open(self.path) as file:
            left, *answer = json.load(file)
        if left == 1:
            os.remove(self.path)
        else:
            with open(self.path, "w") as file:
                json.dump([left - 1, *answer], file)
        return answer


def serve_http(token: str, port: str, odd: str = "") -> None:
    listening = socket.create_server(("127.0.0.1", int(port)))
    print(listening.getsockname()[1], flush=True)
    app = Odd(Token(server.streamable_http_app(), token), odd)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    {"stdio": server.run, "http": serve_http}[sys.argv[1]](*sys.argv[2:])

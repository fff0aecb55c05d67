"""An MCP server over HTTP, in this process, whose tools misbehave. Written without the package
``mcp``, which would not send such replies."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVENTS, JSON = "text/event-stream", "application/json"
NOTE = (
    b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": '
    b'{"level": "info", "data": "x"}}\n\n'
)


class HostileServer(ThreadingHTTPServer):
    """``requests`` counts requests by method and tool."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mcp"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients close connections."""


@contextmanager
def hostile_server() -> Iterator[HostileServer]:
    with HostileServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HostileServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        """End every stream at once, and ask to open it again at once."""
        self.server.requests["GET"] += 1
        self._reply(EVENTS, b"id: 1\nretry: 0\ndata:\n\n")

    def do_DELETE(self) -> None:
        """Never answer."""
        self.server.requests["DELETE"] += 1
        self.server.ended.wait()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match body.get("method"):
            case "initialize":
                result: Any = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "hostile", "version": "1"},
                }
            case "tools/list":
                schema = {"type": "object"}
                result = {"tools": [{"name": n, "inputSchema": schema} for n in BEHAVIORS]}
            case "tools/call":
                name = body["params"]["name"]
                self.server.requests[name] += 1
                with suppress(OSError):
                    BEHAVIORS[name](self, body["id"])
                return
            case _ if "id" in body:
                self._json({"id": body["id"], "error": {"code": -32601, "message": "unknown"}})
                return
            case _:
                self._reply(JSON, b"", status=202)
                return
        self._json({"id": body["id"], "result": result})

    # ---- replies ---------------------------------------------------------------------------------

    def _json(self, message: dict[str, Any]) -> None:
        self._reply(JSON, json.dumps({"jsonrpc": "2.0", **message}).encode())

    def _reply(
        self, kind: str, body: bytes, *, status: int = 200, length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Mcp-Session-Id", "s")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _text(self, request: Any, text: str, **more: Any) -> None:
        self._json({"id": request, "result": {"content": [{"type": "text", "text": text}], **more}})

    def _forever(self, kind: str, part: bytes, pause_s: float = 0.0) -> None:
        self._reply(kind, b"", length=1 << 40)
        while not self.server.ended.is_set():
            self.wfile.write(part)
            time.sleep(pause_s)

    def _redirect(self, _: Any) -> None:
        self.send_response(307)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/mcp")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _no_http(self, _: Any) -> None:
        self.wfile.write(b"\x00\x1b[2J nonsense\r\n\r\n")
        self.close_connection = True

    def _unfinished(self, _: Any) -> None:
        self._reply(JSON, b'{"jsonrpc"', length=100)
        self.close_connection = True


BEHAVIORS: dict[str, Any] = {
    "good": lambda s, i: s._text(i, "good"),
    "silent": lambda s, i: s.server.ended.wait(),
    "drip": lambda s, i: s._forever(JSON, b" ", 0.02),
    "comments": lambda s, i: s._forever(EVENTS, b": still here\n\n", 0.02),
    "flood": lambda s, i: s._forever(EVENTS, NOTE),
    "line": lambda s, i: s._forever(EVENTS, b"data: " + b"x" * 65536),
    "huge": lambda s, i: s._text(i, "x" * (17 << 20)),
    "reconnect": lambda s, i: s._reply(EVENTS, b"id: 1\nretry: 0\ndata:\n\n"),
    "wrong_id": lambda s, i: s._json({"id": 10**6, "result": {"content": []}}),
    "garbage": lambda s, i: s._reply(JSON, b"<html>\x1b[2J"),
    "garbage_event": lambda s, i: s._reply(EVENTS, b"data: {\x1b[2J\n\n"),
    "nested": lambda s, i: s._reply(
        JSON, b'{"id":%d,"jsonrpc":"2.0","result":' % i + b"[" * 100_000
    ),
    "kind": lambda s, i: s._reply("text/\x1b[2Jhtml", b"x"),
    "wrong": lambda s, i: s._json({"id": i, "result": {"content": 5}}),
    "surrogate": lambda s, i: s._text(i, "a\ud800b"),
    "error": lambda s, i: s._reply(JSON, b"no", status=500),
    "accepted": lambda s, i: s._reply(JSON, b"", status=202),
    "redirect": _Handler._redirect,
    "no_http": _Handler._no_http,
    "unfinished": _Handler._unfinished,
    "long_error": lambda s, i: s._json(
        {"id": i, "error": {"code": -32050, "message": "\x1b[2J" + "x" * 100_000}}
    ),
    "server_error": lambda s, i: s._json(
        {"id": i, "error": {"code": -32000, "message": "Connection closed"}}
    ),
    "server_event": lambda s, i: s._reply(
        EVENTS,
        b'data: {"jsonrpc": "2.0", "id": %d, "error": {"code": -32600, "message": "busy"}}\n\n' % i,
    ),
    "status": lambda s, i: s._reply(
        JSON,
        b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": "no row"}}',
        status=500,
    ),
    "ansi": lambda s, i: s._text(i, "\x1b[2Jred", isError=True),
}  # fmt: skip

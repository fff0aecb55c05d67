"""MCP servers of the tests that misbehave: ``mcp_hostile.py MODE``.

``tiny`` serves tools that misbehave when they are called; the other modes misbehave from the start.
Written without the package ``mcp``, which would not send such messages."""

import json
import os
import signal
import subprocess
import sys
import time


def hang() -> None:
    time.sleep(1000)


def die() -> None:
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)


def pid() -> str:
    return str(os.getpid())


def huge() -> str:
    return "x" * (17 << 20)


def long() -> str:
    return "x" * 30_000


def garbage() -> str:
    lines = (b"Starting up...", b"\xff\xfe", b"{}", b"[1, 2", b'{"jsonrpc": "2.0", "id": 99}')
    os.write(1, b"\n".join(lines) + b"\n")
    return "printed"


def surrogates() -> str:
    return "a\ud800 \U0001f600"


def spawn() -> str:
    """Start processes in other sessions, one of them without a parent; return all ids."""
    sleep = ["sleep", "1000"]
    child = subprocess.Popen(sleep, start_new_session=True).pid
    deep = ["setsid", "sh", "-c", "sleep 1000 >&2 & echo $!"]
    orphan = subprocess.run(deep, stdout=subprocess.PIPE, check=True).stdout
    return json.dumps([child, int(orphan), os.getpid()])


def wrong() -> dict:
    return {"content": [{"type": "text", "text": 7}]}


def refuse(code: int, message: str) -> None:
    """Answer with an error of the protocol."""


TINY = (hang, die, pid, huge, long, garbage, surrogates, spawn, wrong, refuse)


def tiny(schema: dict) -> None:
    """Serve the hostile tools without the package, so that the start is fast."""
    tools = {tool.__name__: tool for tool in TINY}
    for line in sys.stdin:
        request = json.loads(line)
        reply = {"jsonrpc": "2.0", "id": request.get("id")}
        match request["method"]:
            case "initialize":
                reply["result"] = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "tiny", "version": "1"},
                }
            case "tools/list":
                listed = [{"name": name, "inputSchema": schema} for name in tools]
                reply["result"] = {"tools": listed}
            case "tools/call" if request["params"]["name"] == "refuse":
                reply["error"] = request["params"]["arguments"]
            case "tools/call":
                result = tools[request["params"]["name"]]()
                content = {"content": [{"type": "text", "text": result}]}
                reply["result"] = result if isinstance(result, dict) else content
            case _:
                reply["error"] = {"code": -32601, "message": "unknown"}
        if "id" in request:
            print(json.dumps(reply), flush=True)


def pages() -> None:
    """List tools without an end."""
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("method") == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "pages", "version": "1"}
        else:
            result = {"tools": [], "nextCursor": str(request.get("id"))}
        if request.get("method") == "server/discover":
            reply = {"error": {"code": -32601, "message": "unknown"}}
        else:
            reply = {"result": result}
        if "id" in request:
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "crash":
        sys.exit("cannot open the database")
    if mode == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if mode == "endless":
        while True:
            os.write(1, b"{" + b"x" * 65536)
    if mode == "schema":
        tiny({"type": "object", "properties": {"x": {"type": 5}}})
    if mode == "tiny":
        tiny({"type": "object"})
    if mode == "pages":
        pages()

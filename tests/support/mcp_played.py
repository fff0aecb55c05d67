"""Episodes with MCP servers in this process, for the tests of their tools and sessions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.environments.multi_turn import Message
from burnish.environments.tools import ToolEnvironment

SERVERS = Path(__file__).parents[1] / "environments"


def calls(*given: tuple[str, Any]) -> Message:
    made = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": args}}
        for i, (name, args) in enumerate(given)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


class Played:
    """An episode in this process. ``counts``: those of the last turn."""

    def __init__(self, **options: Any) -> None:
        self.environment = ToolEnvironment(**options)

    def __call__(self, name: str, **arguments: Any) -> str:
        return self.all((name, arguments))[0]

    def all(self, *given: tuple[str, Any]) -> list[str]:
        step = asyncio.run(self.environment.step(calls(*given)))
        self.counts = step.counts
        return [message["content"] for message in step.messages]


@contextmanager
def episode(**options: Any) -> Iterator[Played]:
    played = Played(**options)
    try:
        yield played
    finally:
        played.environment.close()


@contextmanager
def http_server(
    token: str = "", port: int = 0, odd: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [
        sys.executable,
        str(SERVERS / "mcp_server.py"),
        "http",
        token,
        str(port),
        str(odd or ""),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

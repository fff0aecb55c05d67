"""The client of an external service, against a server on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import TypeAdapter

from burnish.config.sandbox import AnySandbox, SandboxConfig, ServiceSandbox
from burnish.sandbox.base import Program, Result, SandboxError, python_program
from burnish.sandbox.make import SyncSandbox, check_sandbox


class Service:
    """A server that answers with ``reply`` (status, body) and keeps the requests."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], tuple[int, bytes]] = run
        self.requests: list[tuple[str | None, dict[str, Any]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((self.headers["Authorization"], body))
                status, reply = service.reply(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/run"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def run(body: dict[str, Any]) -> tuple[int, bytes]:
    """Reply as a service would to the program ``print(EXPRESSION)``."""
    source = base64.b64decode(body["files"]["program.py"]).decode()
    output = str(eval(source.removeprefix("print(").removesuffix(")"))) + "\n"
    return 200, reply_of(stdout=base64.b64encode(output.encode()).decode())


def reply_of(**changes: Any) -> bytes:
    reply = {"stdout": "", "stderr": "ZQ==", "exit_code": 0, "ended": "exit", "seconds": 0.5}
    return json.dumps(reply | changes).encode()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def fresh(service: Service) -> None:
    service.reply, service.requests = run, []


def config_of(service: Service, **more: Any) -> ServiceSandbox:
    return ServiceSandbox(kind="service", url=service.url, **more)


def test_a_program_is_sent_with_its_limits_and_the_token(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_TOKEN", "abc")
    made = SyncSandbox(config_of(service, token_env="RUN_TOKEN", memory_bytes=1 << 30))
    result = made.run(python_program("print(2 ** 10)", stdin=b"\xff", wall_s=1.5))
    assert result == Result(b"1024\n", b"e", 0, "exit", 0.5)
    token, body = service.requests[-1]
    assert token == "Bearer abc" and base64.b64decode(body["stdin"]) == b"\xff"
    assert body["command"] == ["python3", "-I", "program.py"]
    assert body["limits"] == {
        "wall_s": 1.5, "cpu_s": 2, "memory_bytes": 1 << 30, "processes": 32,
        "files_bytes": 64 << 20, "output_bytes": 1 << 20,
    }  # fmt: skip
    made.close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b"busy", "status 503: 'busy'"),
        (200, b"[" * 100_000, "invalid reply"),
        (200, b"{}", "invalid reply.*KeyError"),
        (200, reply_of(ended="magic"), "unknown value"),
        (200, reply_of(exit_code="0"), "unknown value"),
        (200, reply_of(stdout="%%"), "invalid reply"),
        (200, b" " * (5 << 20), "longer than"),
    ],
)
def test_any_other_reply_is_a_failure_of_the_service(
    service: Service, status: int, body: bytes, says: str
) -> None:
    made = SyncSandbox(config_of(service))
    service.reply = lambda request: (status, body)
    with pytest.raises(SandboxError, match=says):
        made.run(Program(("true",)))
    service.reply = run
    assert made.run(python_program("print(1)")).stdout == b"1\n"
    made.close()


def test_output_is_cut_and_a_service_that_does_not_run_python_is_refused(service: Service) -> None:
    made = SyncSandbox(config_of(service, output_bytes=10))
    assert made.run(python_program("print('x' * 100)")).stdout == b"x" * 10
    made.close()
    service.reply = lambda request: (200, reply_of())
    with pytest.raises(SandboxError, match="does not run Python"):
        check_sandbox(config_of(service))


def test_an_absent_service_and_a_missing_token_are_errors(service: Service) -> None:
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9/run cannot be reached"):
        check_sandbox(ServiceSandbox(kind="service", url="http://127.0.0.1:9/run"))
    with pytest.raises(SandboxError, match="BURNISH_NO_TOKEN, which is not set"):
        check_sandbox(config_of(service, token_env="BURNISH_NO_TOKEN"))


def test_kinds_of_sandboxes_in_a_recipe() -> None:
    read = TypeAdapter[AnySandbox](SandboxConfig).validate_python
    assert read({}).kind == read("bubblewrap").kind == "bubblewrap"
    weaker = read({"kind": "unsafe_subprocess"})
    assert "with your rights" in weaker.warnings()[0]
    bad = read({"kind": "service", "url": "ftp://x", "token_env": "a b"})
    assert len(bad.broken_rules()) == 2 and not read({"kind": "bubblewrap"}).warnings()
    assert "unencrypted" in read({"kind": "service", "url": "http://far/run"}).warnings()[0]

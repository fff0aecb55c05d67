"""Small groups to score, and a reward server on a loopback port."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from burnish.rewards.base import RewardInput
from burnish.rewards.remote.config import RemoteReward
from burnish.rewards.remote.reward import RemoteScorer
from burnish.types import Group, Prompt, Sample


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """``make_group(3, ["a", "b"], label=...)``: prompt ``q:3`` with these responses."""

    def make(i: int, responses: list[str], *, finish: str = "stop", **prompt: Any) -> Group:
        prompt_id = f"q:{i}"
        made = Prompt(id=prompt_id, token_ids=(1,), text=f"question {i}", **prompt)
        samples = tuple(
            Sample(
                sample_id=f"{prompt_id}/{k}",
                prompt_id=prompt_id,
                group_id=i,
                prompt_ids=(1,),
                response_ids=(2, 3),
                sampler_logprobs=(0.0, 0.0),
                action_mask=(True, True),
                versions=(0, 0),
                text=text,
                finish_reason=finish,  # type: ignore[arg-type]
            )
            for k, text in enumerate(responses)
        )
        return Group(group_id=i, prompt=made, samples=samples)

    return make


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RewardServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            number = len(server.requests)
            server.requests.append(request)
            server.headers.append(dict(self.headers))
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            server.behave(self, request, number)
        finally:
            with server.lock:
                server.now -= 1

    def reply(self, body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def lengths(self, request: dict[str, Any]) -> None:
        """The length of each query is its reward."""
        self.reply({"rewards": [float(len(q)) for q in request["query"]]})

    def log_message(self, *_: Any) -> None:
        pass


Behaviour = Callable[[_Handler, dict[str, Any], int], None]


class RewardServer(ThreadingHTTPServer):
    """Records its requests; ``behave(handler, request, number)`` answers, or else the length of
    each query is its reward."""

    daemon_threads = True

    def __init__(self, behave: Behaviour | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave = behave or (lambda handler, request, number: handler.lengths(request))
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.stop = threading.Event()
        """Set at the end, so that a server that waits lets go."""
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/get_reward"

    def handle_error(self, *_: Any) -> None:
        """Some tests disconnect their client."""

    def end(self) -> None:
        self.stop.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., RewardServer]]:
    """``serve(behaviour)`` starts a server that ends with the test."""
    servers: list[RewardServer] = []

    def start(behave: Behaviour | None = None) -> RewardServer:
        servers.append(RewardServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteScorer]]:
    """``remote(url, ..., retries=1)``: a reward that loses no time, closed after the test."""
    made: list[RemoteScorer] = []

    def make(*urls: str, **options: Any) -> RemoteScorer:
        quick = {"backoff_s": 0.01, "max_backoff_s": 0.1, "retries": 2, "read_timeout_s": 20}
        made.append(RemoteScorer(RemoteReward(urls=urls, **{**quick, **options}), name="rm"))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


@pytest.fixture
def dead_url() -> str:
    """A URL without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/get_reward"


@pytest.fixture
def items(make_group: Callable[..., Group]) -> Callable[..., list[RewardInput]]:
    """``items("a", "bb")``: one prompt, these responses."""

    def make(*responses: str, **prompt: Any) -> list[RewardInput]:
        group = make_group(0, list(responses), **prompt)
        return [RewardInput(group.prompt, sample) for sample in group.samples]

    return make

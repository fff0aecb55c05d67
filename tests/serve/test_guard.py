"""Attacks on a server: each meets its limit, and others are answered meanwhile."""

from __future__ import annotations

import functools
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from burnish.models.scratch import scratch_tokenizer
from burnish.serve.guard import GuardedProtocol
from burnish.serve.scorer import TextError, TextScorer

Serving = Callable[..., Any]
HEAD = "POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def until(condition: Callable[[], bool]) -> None:
    """Wait for an action of another thread."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen in 30 seconds")


def limited(server: Any, **limits: Any) -> None:
    """Change limits of connections that are made from now on."""
    changed = replace(server.app.guard.limits, **limits)
    server.server.config.http_protocol_class = functools.partial(GuardedProtocol, limits=changed)


def everything(client: socket.socket) -> bytes:
    """The bytes that the server sends until it ends the connection."""
    found = b""
    try:
        while data := client.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


# ---- before a request is complete --------------------------------------------------------------


def test_an_endless_header_closes_the_connection(server: Any) -> None:
    """The limit is 16 KiB; the client sends until it is cut off, and never more than 8 MiB."""
    with connect(server) as client:
        sent = 0
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
            while sent < 8 << 20:
                client.sendall(b"a" * 65536)
                sent += 65536
        except ConnectionError:
            pass
        assert b" 200 " not in everything(client)
    assert sent < 8 << 20 and server.health()["ready"]


@pytest.mark.parametrize(
    "start",
    [
        "",
        "POST /get",
        HEAD + "X-Half: ",
        HEAD.replace("json", "text") + "Content-Length: 9\r\n\r\n",
        HEAD.replace("POST", "GET").replace("get_reward", "health") + "\r\nGET /he",
    ],
    ids=["nothing", "half a line", "half a header", "a refused body", "half a second request"],
)
def test_a_stalled_request_is_ended(start: str, serving: Serving) -> None:
    """The server ends the connection: `everything` returns before the socket's 30 seconds."""
    with serving() as server:
        limited(server, header_timeout_s=0.05)
        with connect(server) as client:
            client.sendall(start.encode())
            everything(client)


def test_incomplete_requests_are_displaced_by_complete_ones(serving: Serving) -> None:
    """30 incomplete headers with a limit of 10 open connections; a later request is answered."""
    with serving() as server, ExitStack() as opened:
        limited(server, max_per_address=10)
        for _ in range(30):
            client = opened.enter_context(connect(server))
            client.sendall(HEAD.encode())
        assert len(server.rewards(["1"])) == 1
        assert len(server.server.server_state.connections) <= 10


def test_requests_in_progress_are_not_displaced(serving: Serving) -> None:
    """Both connections of an address that may have two are busy: a third is refused at once."""
    with serving() as server, ThreadPoolExecutor(2) as pool:
        limited(server, max_per_address=2)
        server.gate.open.clear()
        busy = [pool.submit(server.rewards, [text]) for text in ("1", "2")]
        assert server.gate.entered.acquire(timeout=30)
        until(lambda: server.app.batcher.queue_length + len(server.gate.passes[0]) == 2)
        with connect(server) as third:
            third.sendall((HEAD.replace("POST /get_reward", "GET /health") + "\r\n").encode())
            assert everything(third).startswith(b"HTTP/1.1 503 ")
        server.gate.open.set()
        assert [len(future.result()) for future in busy] == [1, 1]


def test_a_refused_body_is_read_for_a_limited_time(serving: Serving) -> None:
    with serving(token="s3cret-token") as server:
        limited(server, header_timeout_s=0.05)
        with connect(server) as client, pytest.raises(ConnectionError):
            client.sendall(HEAD.encode() + b"Content-Length: 999999999999\r\n\r\n")
            for _ in range(1_000_000):  # 61 GiB
                client.sendall(b"a" * 65536)


# ---- the Host header ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:5000", "", "localhost.evil.example"]
)
def test_another_name_is_refused(host: str, server: Any) -> None:
    """DNS rebinding: a page at evil.example asks 127.0.0.1 under its own name."""
    headers = {"Host": host, "Content-Type": "application/json"}
    for call in (
        lambda: server.client.get(f"{server.url}/health", headers=headers),
        lambda: server.client.post(
            f"{server.url}/get_reward", json={"query": ["1"]}, headers=headers
        ),
    ):
        response = call()
        assert response.status_code == 421
        assert "is not a name of this server" in response.json()["error"]


def test_two_names_are_refused(server: Any) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert client.recv(65536).split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:5000", "10.1.2.3:80", "rewards.internal"],
)
def test_own_names_and_addresses_pass(host: str, serving: Serving) -> None:
    with serving(allowed_hosts=("Rewards.internal",)) as server:
        response = server.client.get(f"{server.url}/health", headers={"Host": host})
        assert response.status_code == 200
        name = {"Host": socket.gethostname()}
        assert server.client.get(f"{server.url}/health", headers=name).status_code == 200


# ---- after authentication ----------------------------------------------------------------------


class Characters:
    """A tokenizer of one token per character that records its inputs."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self._own: Any = scratch_tokenizer("abcdex")

    def __call__(self, text: str, **options: Any) -> Any:
        self.given.append(text)
        return self._own(text, **options)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.mark.parametrize("overlong", ["error", "truncate_left"])
def test_a_text_is_measured_before_it_is_tokenised(overlong: Any, server: Any) -> None:
    """10 tokens of up to 32 characters: the tokenizer never sees more than 320 of 15 million."""
    options = replace(server.app._options, overlong=overlong)
    tokenizer: Any = Characters()
    scorer = TextScorer(server.app._scorer.engine, tokenizer, options, max_len=10)
    text = "x" * 14_999_995 + "abcde"
    if overlong == "error":
        with pytest.raises(TextError, match="has 15000000 characters, but the limit is 320"):
            scorer.encode(text, None)
    else:
        row = scorer.encode(text, text[:-3])
        assert row.truncated and len(row.ids) == 10
        ends = [text for text in tokenizer.given if text.endswith("ab")]
        assert ends and "cde" in tokenizer.given, "the prompt still ends there"
    assert max(map(len, tokenizer.given), default=0) <= 320


def test_texts_of_a_client_that_left_are_not_tokenised(serving: Serving) -> None:
    """It leaves while the tokenizer is at the first of 20 texts; the others are never seen."""
    with serving(max_items=20) as server:
        scorer, seen = server.app._scorer, []
        entered, go_on = threading.Event(), threading.Event()

        class Slow:
            def encode(self, query: str, prompt: str | None) -> Any:
                seen.append(query)
                entered.set()
                assert go_on.wait(30)
                return scorer.encode(query, prompt)

        server.app._scorer = Slow()
        body = json.dumps({"query": ["1"] * 20}).encode()
        with connect(server) as client:
            client.sendall(HEAD.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert entered.wait(30)
        until(lambda: not server.app.guard.held_bytes)  # the handler has ended
        go_on.set()
        server.app._scorer = scorer
        assert len(server.rewards(["2"])) == 1
        assert len(seen) == 1 and server.app.guard.held_bytes == 0


def test_requests_take_turns_in_the_tokenizer(serving: Serving) -> None:
    """A request of one text that comes second is tokenised before the end of one of 20."""
    with serving(max_items=20) as server, ThreadPoolExecutor(2) as pool:
        scorer, order = server.app._scorer, []
        entered, go_on = threading.Event(), threading.Event()

        class Slow:
            def encode(self, query: str, prompt: str | None) -> Any:
                order.append(query)
                entered.set()
                assert go_on.wait(30)
                return scorer.encode(query, prompt)

        server.app._scorer = Slow()
        large = pool.submit(server.rewards, ["1"] * 20)
        assert entered.wait(30)
        small = pool.submit(server.rewards, ["2"])
        until(lambda: server.app._reader._work_queue.qsize() > 0)
        go_on.set()
        assert [len(large.result()), len(small.result())] == [20, 1]
        assert order.index("2") < 5


# ---- compressed bodies -------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_read_up_to_the_limit(encoding: str, serving: Serving) -> None:
    """100 MB of spaces are 100 KB compressed; the limit is 1 MiB."""
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}

    def post(content: bytes, **more: str) -> Any:
        url = f"{server.url}/get_reward"
        return server.client.post(url, content=content, headers={**headers, **more})

    with serving(max_request_bytes=1 << 20) as server:
        body = json.dumps({"query": ["1"]}).encode()
        assert post(compress(body)).json()["rewards"] == server.rewards(["1"])
        assert post(compress(b" " * 100_000_000)).status_code == 413
        for wrong in (body, compress(body)[:-9], compress(body) + b"{}"):
            assert post(wrong).status_code == 400
        assert post(body, **{"Content-Encoding": "br"}).status_code == 415
        assert server.app.guard.held_bytes == 0


# ---- clients that take the place of others -----------------------------------------------------


def test_incomplete_bodies_are_displaced_by_complete_requests(serving: Serving) -> None:
    """30 bodies that do not end, with a limit of 10 open connections; later requests are answered
    at once."""
    with serving() as server, ExitStack() as opened:
        limited(server, max_per_address=10)
        for _ in range(30):
            client = opened.enter_context(connect(server))
            client.sendall(HEAD.encode() + b'Content-Length: 99\r\n\r\n{"query"')
        assert len(server.rewards(["1"])) == 1
        assert len(server.server.server_state.connections) <= 10


def test_incomplete_bodies_make_room_for_others(serving: Serving) -> None:
    """Bodies of 900 KiB that do not end use all memory for bodies (2 MiB). The first ones are given
    up, and other requests are answered."""
    with serving(max_request_bytes=1 << 20) as server, ExitStack() as opened:
        server.app.guard.limits = replace(server.app.guard.limits, max_held=2)
        clients = [opened.enter_context(connect(server)) for _ in range(5)]
        for client in clients:
            client.sendall(HEAD.encode() + b"Content-Length: 999999\r\n\r\n" + b" " * 900_000)
        until(lambda: server.app.guard.held_bytes == 1_800_000)
        assert b" 408 " in everything(clients[0]).splitlines()[0]
        reply = server.client.post(
            f"{server.url}/get_reward",
            content=b" " * 900_000 + b'{"query": ["1"]}',
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 200


def test_headers_of_one_read_are_limited(serving: Serving) -> None:
    with serving() as server, connect(server) as client:
        head = HEAD.replace("POST /get_reward", "GET /health")
        client.sendall(f"{head}X: {'a' * 30_000}\r\n\r\n".encode())
        assert client.recv(65536).split()[1] in (b"431", b"400")


@pytest.mark.parametrize(
    ("padding", "size", "accepted"), [(100_000, 1, False), (400, 1, True), (200_000, 100, True)]
)
def test_a_body_in_tiny_chunks_is_refused(
    padding: int, size: int, accepted: bool, serving: Serving
) -> None:
    """The limit is 1,000 chunks and one for each 64 bytes."""
    body = " " * padding + json.dumps({"query": ["1"]})
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n"
    head = HEAD + "Transfer-Encoding: chunked\r\n\r\n"
    with serving() as server, connect(server) as client:
        with suppress(ConnectionError):
            client.sendall((head + chunks).encode())
        answer = everything(client) if not accepted else client.recv(65536)
        assert (answer[9:12] == b"200") == accepted

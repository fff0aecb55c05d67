"""Valid replies of a reward server, and the errors of invalid ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from burnish.rewards.base import RewardInput, SampleError
from burnish.rewards.remote.client import read_reply
from burnish.rewards.remote.reward import RemoteScorer

Serve = Callable[..., Any]
MakeRemote = Callable[..., RemoteScorer]
Items = Callable[..., list[RewardInput]]
Behaviour = Callable[[Any, dict[str, Any], int], None]


def says(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    return lambda handler, request, number: handler.reply(body, status=status, headers=headers)


def failure(reward: RemoteScorer, items: list[RewardInput]) -> str:
    """The error of the first item, if no item has a score."""
    scores = reward.score(items)
    assert len(scores) == len(items) and all(isinstance(s, SampleError) for s in scores)
    return str(scores[0])


DEEP = b"[" * 100_000
GARBAGE: dict[str, tuple[Any, str]] = {
    "html": (b"<html>Bad gateway</html>", "which is not JSON"),
    "nothing": (b"", "which is not JSON"),
    "truncated": (b'{"rewards": [1.0, 2', "which is not JSON"),
    "no utf-8": (b'{"rewards": [1.0, 2.0], "\xff": 1}', "which is not JSON"),
    "deep": (DEEP, "which is not JSON"),
    "long int": (b'{"rewards": [1, ' + b"9" * 5000 + b"]}", "which is not JSON"),
    "list": ([1.0, 2.0], "which has no 'rewards'"),
    "other key": ({"reward": [1.0, 2.0]}, "which has no 'rewards'"),
    "null": ({"rewards": None}, "in which 'rewards' is not a list"),
    "number for two": ({"rewards": 1.0}, "in which 'rewards' is not a list"),
    "text": ({"rewards": "1.0, 2.0"}, "in which 'rewards' is not a list"),
    "too few": ({"rewards": [1.0]}, "'rewards' has 1 entries"),
    "too many": ({"rewards": [1.0] * 3}, "'rewards' has 3 entries"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_invalid_reply_is_a_failure_that_quotes_it(
    kind: str, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    body, problem = GARBAGE[kind]
    server = serve(says(body))
    said = failure(remote(server.url), items("a", "b"))
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    for part in (server.url, problem, repr(raw[:10].decode())[1:-1], "with 2 finite numbers"):
        assert part in said
    assert "reward 'rm'" in said and "'q:0/0'" in said and len(said) < 2000
    assert len(server.requests) == 1


BAD_ENTRIES = {
    b"NaN": "got NaN",
    b"-Infinity": "got -Infinity",
    b"1e999": "got Infinity",
    b"null": "got null",
    b'"1.0"': 'got "1.0"',
    b"true": "got true",
    b"[1.0]": "got [1.0]",
    b"1" + b"0" * 400: "got 1000",
}


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda e: e[:9].decode())
def test_a_bad_entry_costs_its_own_item_only(
    entry: bytes, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve(says(b'{"rewards": [0.5, ' + entry + b", 2]}"))
    one, bad, two = remote(server.url).score(items("a", "b", "c"))
    assert (one, two) == (0.5, 2.0) and isinstance(bad, SampleError)
    assert BAD_ENTRIES[entry] in str(bad) and server.url in str(bad) and "'q:0/1'" in str(bad)


def test_one_item_may_have_a_bare_number(serve: Serve, remote: MakeRemote, items: Items) -> None:
    assert remote(serve(says({"rewards": 0.25})).url).score(items("a")) == [0.25]


def test_a_reply_over_the_limit_is_not_read(serve: Serve, remote: MakeRemote, items: Items) -> None:
    """The server would go on for ever."""

    def floods(handler: Any, request: dict[str, Any], number: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not handler.server.stop.is_set():
            handler.wfile.write(b"0" * 4096)

    server = serve(floods)
    said = failure(remote(server.url, max_reply_bytes=1000), items("a"))
    assert "more than max_reply_bytes=1000 bytes; raise it" in said and len(server.requests) == 1


def test_a_compressed_reply_is_refused(serve: Serve, remote: MakeRemote, items: Items) -> None:
    """A few bytes of gzip can be gigabytes of JSON."""
    server = serve(says({"rewards": [1.0]}, headers={"Content-Encoding": "gzip"}))
    assert "content-encoding 'gzip'" in failure(remote(server.url), items("a"))
    assert server.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (2.0, (6.0, 3)),
        ([1, 2.5, True], (4.5, 3)),
        ([1.0], None),
        ([1.0, None, 2.0], None),
        ("x", None),
        (math.nan, None),
    ],
)
def test_an_extra_log_is_a_number_or_one_for_each_item(value: Any, mean: Any) -> None:
    """A number counts for each of the 3 items: 3 x 2; a list is summed: 1 + 2.5 + 1."""
    reply = {"rewards": [1, 2, 3], "extra_logs": {"x": value}, "scores": [1, 0, 1]}
    read = read_reply(json.dumps(reply).encode(), 3)
    assert read.logs.get("x") == mean and read.logs["scores"] == (2.0, 3)
    assert len(read.bad_logs) == (mean is None)


def test_invalid_extra_logs_do_not_lose_rewards() -> None:
    for logs, problems in [(None, 0), ([1], 1), ("x", 1), ({"requests": 1}, 1), ({"": 1}, 1)]:
        read = read_reply(json.dumps({"rewards": [1], "extra_logs": logs}).encode(), 1)
        assert read.rewards == (1.0,) and len(read.bad_logs) == problems
    many = {"rewards": [1], "extra_logs": {str(i): i for i in range(100)}}
    read = read_reply(json.dumps(many).encode(), 1)
    assert (len(read.logs), len(read.bad_logs)) == (64, 36)


@pytest.mark.parametrize(
    "value", [1e308, -3.5e38, [1e308, 1e308], [1e39, -1e39], 10**300], ids=range(5)
)
def test_extra_logs_whose_sums_may_be_infinite_are_dropped(value: Any) -> None:
    """math.fsum raises OverflowError at the third of these."""
    reply = {"rewards": [1, 2], "extra_logs": {"x": value, "y": 3.4e38}}
    read = read_reply(json.dumps(reply).encode(), 2)
    assert list(read.logs) == ["y"] and read.rewards == (1.0, 2.0)
    assert len(read.bad_logs) == 1 and "fp32" in read.bad_logs[0]

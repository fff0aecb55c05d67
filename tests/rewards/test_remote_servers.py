"""Reward servers that fail, are slow, or are unreachable: retries and the choice of server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tenacity import AsyncRetrying

from burnish.rewards.base import RewardInput, SampleError
from burnish.rewards.remote import client as remote_client
from burnish.rewards.remote.client import _retry_after_s
from burnish.rewards.remote.reward import RemoteScorer

Serve = Callable[..., Any]
MakeRemote = Callable[..., RemoteScorer]
Items = Callable[..., list[RewardInput]]
Behaviour = Callable[[Any, dict[str, Any], int], None]


def says(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    return lambda handler, request, number: handler.reply(body, status=status, headers=headers)


def first(bad: Behaviour, *, times: int = 1) -> Behaviour:
    """``bad`` for the first ``times`` requests, then well."""

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        if number < times:
            bad(handler, request, number)
        else:
            handler.lengths(request)

    return behave


def hangs_up(handler: Any, request: dict[str, Any], number: int) -> None:
    """Dies in the middle of its reply."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [1.0')
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def is_silent(handler: Any, request: dict[str, Any], number: int) -> None:
    handler.server.stop.wait(30)
    handler.close_connection = True


def drips(handler: Any, request: dict[str, Any], number: int) -> None:
    """One byte now and then, for ever: no single wait is long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.stop.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def failure(reward: RemoteScorer, items: list[RewardInput]) -> str:
    """The error of the first item, if no item has a score."""
    scores = reward.score(items)
    assert len(scores) == len(items) and all(isinstance(s, SampleError) for s in scores)
    return str(scores[0])


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(says(b"oops", status=500), id="500"),
        pytest.param(says(b"", status=503), id="503"),
        pytest.param(says(b"", status=429, headers={"Retry-After": "0"}), id="429"),
        pytest.param(says(b"", status=408), id="408"),
        pytest.param(says(b"", status=425), id="425"),
        pytest.param(hangs_up, id="dies in its reply"),
    ],
)
def test_a_transient_failure_is_retried(
    bad: Behaviour, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve(first(bad, times=2))
    reward = remote(server.url, retries=2)
    assert reward.score(items("a")) == [11.0]
    assert reward.take_counts() == {"requests": 3, "retries": 2, "bad_logs": 0}
    assert reward.take_counts()["requests"] == 0
    assert server.requests == server.requests[:1] * 3


@pytest.mark.parametrize("behave", [is_silent, drips])
def test_a_server_that_is_too_slow_times_out(
    behave: Behaviour, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve(behave)
    times = {"read_timeout_s": 0.2, "connect_timeout_s": 0.2}
    said = failure(remote(server.url, retries=1, **times), items("a"))
    assert server.url in said and "read_timeout_s=0.2" in said and "tried 2 times" in said


def test_an_unreachable_server_is_named(
    dead_url: str, remote: MakeRemote, items: Items, caplog: pytest.LogCaptureFixture
) -> None:
    said = failure(remote(dead_url, retries=2), items("a"))
    assert f"{dead_url} sent no complete reply (ConnectError" in said and "tried 3 times" in said
    # Once, and not once for each try: it had not begun to work in between.
    assert sum(dead_url in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 301])
def test_permanent_failures_are_not_retried(
    status: int, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve(says(b"no such thing", status=status, headers={"Location": "/x"}))
    said = failure(remote(server.url), items("a"))
    assert len(server.requests) == 1
    assert f"{server.url} answered with status {status}: 'no such thing'; 200" in said


def test_a_retry_waits_as_long_as_the_server_asks_and_no_longer_than_the_limit(
    serve: Serve, remote: MakeRemote, items: Items, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Retry-After, waits are between a half and all of 4, 8 and (not 16) 10 seconds;
    Retry-After 7 is more than any first wait, and 60 more than the limit of 10."""
    server = serve()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(remote_client, "AsyncRetrying", partial(AsyncRetrying, sleep=sleep))

    def run(behave: Behaviour) -> list[float]:
        waits.clear()
        server.behave, server.requests = behave, []
        reward = remote(server.url, retries=3, backoff_s=4, max_backoff_s=10)
        assert reward.score(items("a")) == [11.0]
        return waits

    plain = run(first(says(b"", status=500), times=3))
    bounds = zip(plain, [(2, 4), (4, 8), (5, 10)], strict=True)
    assert all(low <= wait <= high for wait, (low, high) in bounds)
    assert run(first(says(b"", status=429, headers={"Retry-After": "7"}))) == [7.0]
    assert run(first(says(b"", status=503, headers={"Retry-After": "60"}))) == [10.0]


def test_retry_after_is_a_number_or_a_date() -> None:
    assert _retry_after_s("12") == 12.0
    assert _retry_after_s("-5") == _retry_after_s("soon") == _retry_after_s("") == 0.0
    assert _retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert _retry_after_s("Wed, 21 Oct 2122 07:28:00 GMT") > 1e9
    assert _retry_after_s("Wed, 21 Oct 99999999999999999999 07:28:00 GMT") == 0.0


def test_a_wait_too_large_for_a_float_is_the_maximum(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """400 digits: max_backoff_s (0.1 here) is waited."""
    server = serve(first(says(b"", status=503, headers={"Retry-After": "9" * 400})))
    assert remote(server.url).score(items("a")) == [11.0]


# ---- several servers ----


def test_requests_are_distributed_over_the_servers(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """The least busy server is used, in rotation: sequential requests alternate between them."""
    servers = [serve(), serve()]
    reward = remote(*(s.url for s in servers), batch_size=1, max_concurrency=1)
    assert reward.score(items(*"abcdefgh")) == [11.0] * 8
    assert [len(s.requests) for s in servers] == [4, 4]


def test_a_busy_server_gets_less(serve: Serve, remote: MakeRemote, items: Items) -> None:
    """While the first request waits in the slow server, the other takes all the rest."""
    quick = serve()

    def waits(handler: Any, request: dict[str, Any], number: int) -> None:
        for _ in range(2000):
            if len(quick.requests) == 7 or handler.server.stop.wait(0.01):
                break
        handler.lengths(request)

    slow = serve(waits)
    reward = remote(slow.url, quick.url, batch_size=1, max_concurrency=2)
    assert reward.score(items(*"abcdefgh")) == [11.0] * 8
    assert [len(slow.requests), len(quick.requests)] == [1, 7]


def test_all_requests_are_served_while_one_of_two_servers_is_dead(
    dead_url: str,
    serve: Serve,
    remote: MakeRemote,
    items: Items,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With retries 0: another server's answer does not count as a retry. The dead server rests, so
    it is not used again: 9 requests for 8 items."""
    server = serve()
    reward = remote(dead_url, server.url, batch_size=1, max_concurrency=1, retries=0, rest_s=1000)
    assert reward.score(items(*"abcdefgh")) == [11.0] * 8
    assert len(server.requests) == 8
    assert reward.take_counts()["requests"] == 9
    assert f"{dead_url} sent no complete reply" in caplog.text and "for 1000 s" in caplog.text


def test_a_server_is_used_again_after_its_rest(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    ill, well = serve(first(says(b"", status=500))), serve()
    reward = remote(ill.url, well.url, batch_size=1, max_concurrency=1, rest_s=0)
    assert reward.score(items(*"abcdef")) == [11.0] * 6
    assert len(ill.requests) > 1


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(says(b"no such thing", status=404), id="404"),
        pytest.param(says(b"who are you?", status=401), id="401"),
        pytest.param(says(b"", status=301, headers={"Location": "/x"}), id="301"),
        pytest.param(says(b"<html>"), id="nonsense"),
    ],
)
def test_a_server_that_refuses_quickly_does_not_draw_all_requests(
    bad: Behaviour, serve: Serve, remote: MakeRemote, items: Items, caplog: Any
) -> None:
    """It is quick, so it would always be the least busy. It gets one request, then rests; the other
    server answers the refused requests."""
    broken, well = serve(bad), serve()
    reward = remote(broken.url, well.url, batch_size=1, max_concurrency=1, rest_s=1000, retries=0)
    assert reward.score(items(*"abcdef")) == [11.0] * 6
    assert [len(broken.requests), len(well.requests)] == [1, 6]
    assert f"{broken.url} " in caplog.text and "for 1000 s" in caplog.text


def test_a_request_refused_by_all_is_sent_to_each_once_and_quotes_two(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """It is at fault, and not they: none rests, so the next requests are spread as before."""

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        bad = any("bad" in query for query in request["query"])
        handler.reply({"rewards": [11.0]}, status=422 if bad else 200)

    servers = [serve(behave) for _ in range(3)]
    urls = [server.url for server in servers]
    reward = remote(*urls, batch_size=1, max_concurrency=1, rest_s=1000)
    said = failure(reward, items("bad"))
    assert [len(server.requests) for server in servers] == [1, 1, 1]
    assert "tried 3 times; before that" in said and said.count("answered with status 422") == 2
    assert reward.score(items(*"abcdef")) == [11.0] * 6
    assert [len(server.requests) for server in servers] == [3, 3, 3]


def test_a_server_that_refused_a_request_is_not_retried_while_another_fails(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """The ill one answers at the third time of asking."""
    refuses, ill = serve(says(b"", status=404)), serve(first(says(b"", status=500), times=2))
    reward = remote(refuses.url, ill.url, retries=2, rest_s=0)
    assert reward.score(items("a")) == [11.0]
    assert [len(refuses.requests), len(ill.requests)] == [1, 3]


@pytest.mark.parametrize("entry", [b"null", b"NaN", b'"1.0"'], ids=["null", "nan", "text"])
def test_invalid_entries_are_requested_from_the_other_server_once(
    entry: bytes, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """The first server scores two of three, the second the first and the last: a score from either
    counts, the first server's before the second's."""
    first_one = serve(says(b'{"rewards": [0.5, 1.5, ' + entry + b"]}"))
    second = serve(says(b'{"rewards": [7, ' + entry + b", 2.5]}"))
    reward = remote(first_one.url, second.url)
    for _ in range(2):  # whichever is asked first
        scores = reward.score(items("a", "b", "c"))
        assert scores in ([0.5, 1.5, 2.5], [7.0, 1.5, 2.5])
    assert [len(first_one.requests), len(second.requests)] == [2, 2]
    assert reward.take_counts() == {"requests": 4, "retries": 2, "bad_logs": 0}


def test_an_entry_invalid_on_all_servers_fails_alone_and_rests_no_server(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    servers = [serve(says(b'{"rewards": [0.5, null]}')) for _ in range(2)]
    reward = remote(*(server.url for server in servers))
    for done in (1, 2):
        known, unknown = reward.score(items("a", "b"))
        assert known == 0.5 and isinstance(unknown, SampleError)
        assert [len(server.requests) for server in servers] == [done, done]


def test_invalid_entries_are_not_waited_for(
    dead_url: str, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve(says(b'{"rewards": [0.5, null]}'))
    known, unknown = remote(server.url, dead_url, retries=5).score(items("a", "b"))
    assert known == 0.5 and isinstance(unknown, SampleError)
    assert len(server.requests) <= 2  # the dead one may have been asked first


def test_replies_in_another_order_are_assigned_to_their_requests(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """A server that answers the last of four concurrent requests first, and so on: each reply waits
    until the one for the next longer query is sent."""
    sent = [threading.Event() for _ in range(5)]
    sent[4].set()

    def backwards(handler: Any, request: dict[str, Any], number: int) -> None:
        place = len(request["query"][0]) - len("question 0") - 1
        assert sent[place + 1].wait(20)
        handler.lengths(request)
        sent[place].set()

    server = serve(backwards)
    reward = remote(server.url, batch_size=1, max_concurrency=4)
    assert reward.score(items("a", "bb", "ccc", "dddd")) == [11.0, 12.0, 13.0, 14.0]
    assert len(server.requests) == 4

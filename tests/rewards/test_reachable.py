"""Servers of remote rewards are looked for before anything is loaded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from burnish.rewards.base import RewardError
from burnish.rewards.build import check_rewards
from burnish.rewards.math.config import MathReward
from burnish.rewards.remote.config import RemoteReward

Serve = Callable[..., Any]


def remote(*urls: str, **options: Any) -> RemoteReward:
    return RemoteReward(urls=urls, **{"backoff_s": 0, "retries": 2, "name": "rm", **options})


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(host, port) of every connection that is tried."""
    made: list[Any] = []
    connect = socket.create_connection

    def counted(address: Any, **options: Any) -> socket.socket:
        made.append(address)
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    return made


def test_a_listening_server_receives_no_bytes(serve: Serve) -> None:
    server = serve()
    check_rewards([MathReward(), remote(server.url)])
    assert server.requests == []


def test_an_unreachable_server_is_reported_with_url_key_and_fix(
    dead_url: str, attempts: list[Any]
) -> None:
    with pytest.raises(RewardError) as caught:
        check_rewards([MathReward(), remote(f"{dead_url}?key=s3cret")])
    said = str(caught.value)
    for part in (dead_url, "rewards.1.urls=", "reward 'rm'", "refused", "burnish serve-reward"):
        assert part in said
    assert "s3cret" not in said and "tried 3 times" in said and len(attempts) == 3


def test_urls_that_differ_only_in_their_query_are_distinct(
    dead_url: str, attempts: list[Any]
) -> None:
    with pytest.raises(RewardError, match="no server accepts connections"):
        check_rewards([remote(f"{dead_url}?model=a", f"{dead_url}?model=b")])
    assert len(attempts) == 6


def test_a_server_that_comes_up_meanwhile_is_waited_for(
    dead_url: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused twice, as by a port without a listener."""
    server, refused = serve(), []
    connect = socket.create_connection

    def late(address: Any, **options: Any) -> socket.socket:
        if len(refused) < 2:
            refused.append(address)
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", late)
    check_rewards([remote(server.url)])
    assert len(refused) == 2


def test_one_reachable_server_is_enough_and_the_others_are_warned_about(
    dead_url: str, serve: Serve, attempts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_rewards([remote(dead_url, serve().url)])
    assert len(attempts) == 2
    assert f"{dead_url} accepts no connections" in caplog.text


def test_ports_are_those_of_the_scheme_and_names_may_be_unknown(attempts: list[Any]) -> None:
    with pytest.raises(RewardError, match=r"http://x\.invalid/a: .*\n  https://y\.invalid: "):
        check_rewards([remote("http://x.invalid/a", "https://y.invalid", retries=0)])
    assert sorted(attempts) == [("x.invalid", 80), ("y.invalid", 443)]


def test_behind_a_proxy_no_connection_is_attempted(dead_url: str, attempts: list[Any]) -> None:
    check_rewards([remote(dead_url, use_proxy=True)])
    assert attempts == []

"""Checks of server addresses and token variables in recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit


class Client(Protocol):
    """Keys of a client of equivalent servers."""

    @property
    def urls(self) -> tuple[str, ...]: ...
    @property
    def token_env(self) -> str | None: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def max_backoff_s(self) -> float: ...


def client_problems(client: Client, example: str) -> Iterator[str]:
    """Yield the problems of a client's keys. ``example``: a valid URL."""
    for i, url in enumerate(client.urls):
        yield from (f"urls[{i}] {problem}" for problem in url_problems(url, example))
    if len({url.rstrip("/") for url in client.urls}) < len(client.urls):
        yield "urls contains the same URL twice; remove one"
    if client.token_env is not None:
        yield from token_env_problems(client.token_env)
    if client.max_backoff_s < client.backoff_s:
        yield (
            f"max_backoff_s={client.max_backoff_s:g} is below backoff_s={client.backoff_s:g}; "
            "lower backoff_s, or raise max_backoff_s"
        )


def client_advice(client: Client) -> Iterator[str]:
    """Yield a warning if the token leaves this machine unencrypted."""
    plain = [url for url in client.urls if url.startswith("http:") and not is_local(url)]
    if client.token_env is not None and plain:
        host = urlsplit(plain[0]).hostname
        yield f"the token would be sent to {host} unencrypted (http); use https"


def url_problems(url: str, example: str) -> Iterator[str]:
    """Yield the problems of a server's URL, without repeating a password in it.

    ``example``: a valid URL.
    """
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:  # the port, or an IPv6 address
        yield f"has an invalid host or port; use the form {example}"
        return
    if parts.username is not None or parts.password is not None:
        yield "contains a user name or password; use token_env"
    elif parts.scheme not in ("http", "https"):
        yield f"is {url!r}, which starts with neither http:// nor https://; use the form {example}"
    elif not parts.hostname or not port_ok or re.search(r"[\s#\x00-\x1f]", url):
        yield f"is {url!r}, which is not a valid server URL; use the form {example}"


def is_local(url: str) -> bool:
    """Return whether a URL names this machine."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def token_env_problems(name: str) -> Iterator[str]:
    """Yield the problem of a ``token_env`` that is not the name of an environment variable. The
    value may be a token, so it is not repeated."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        yield (
            "token_env must be the name of an environment variable (letters, digits and "
            "underscores); put the token into a variable, and set token_env to its name"
        )

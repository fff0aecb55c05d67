"""Check that the servers of remote rewards are reachable before a job loads its models: the first
request is only made after the first responses are sampled.

A connection is opened and closed, and nothing is sent. More is not known of all such servers: they
have no path in common that says how they are, and a made-up request could cost one of them a pass,
or be an error in its log.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential

from burnish.config.rewards import RemoteReward, RewardConfig
from burnish.rewards.base import RewardError

log = logging.getLogger("burnish")


def check_servers(rewards: Sequence[RewardConfig]) -> None:
    """Connect to the servers of every reward of kind ``remote``, as patiently as its requests
    would. (Behind a proxy, ``use_proxy``, that says nothing, and is left out.)

    Raises RewardError if none of a reward's servers takes connections; where some do, the
    others are warned of.
    """
    for i, entry in enumerate(rewards):
        if isinstance(entry, RemoteReward) and not entry.use_proxy:
            _check(entry, f"rewards.{i}")


def _check(entry: RemoteReward, key: str) -> None:
    retrying = Retrying(
        stop=stop_after_attempt(entry.retries + 1),
        wait=wait_exponential(entry.backoff_s, max=entry.max_backoff_s),
        retry=retry_if_result(lambda silent: len(silent) == len(entry.urls)),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else {},
    )
    silent: dict[str, str] = retrying(_silent, entry)
    name = entry.name or entry.kind
    if len(silent) < len(entry.urls):
        for url, why in silent.items():
            log.warning("reward %r: %s takes no connections (%s); others do", name, _told(url), why)
        return
    found = "\n".join(f"  {_told(url)}: {why}" for url, why in silent.items())
    tries = f" (tried {entry.retries + 1} times)" if entry.retries else ""
    raise RewardError(
        f"reward {name!r}: no server takes connections{tries}, and no model was loaded yet\n"
        f"{found}\n  What to do: start it (burnish serve-reward MODEL, with --host and --token-env "
        f"where it is on another machine), or say where it is: {key}.urls=[http://host:5000/"
        "get_reward]; the name is looked up, and the connection made, on the machine of the "
        "command, so look at names and firewalls there"
    )


def _silent(entry: RemoteReward) -> dict[str, str]:
    """Why there is no connection, by URL."""
    with ThreadPoolExecutor(len(entry.urls)) as pool:
        found = pool.map(lambda url: _why_not(url, entry.connect_timeout_s), entry.urls)
        reasons = zip(entry.urls, found, strict=True)
        return {url: why for url, why in reasons if why is not None}


def _told(url: str) -> str:
    """Without its query, which may hold a secret."""
    return url.partition("?")[0]


def _why_not(url: str, timeout_s: float) -> str | None:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be looked up
        return str(error) or type(error).__name__
    return None

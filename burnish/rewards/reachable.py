"""Check that the servers of remote rewards are reachable before a job loads its models.

Without this check an unreachable server is noticed only after the first responses are sampled. The
check opens and closes a connection and sends nothing. Reward servers have no common health
endpoint, and a dummy request could cost a forward pass or an error in the server's log.
"""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential

from burnish.config.rewards import RemoteReward
from burnish.rewards.base import RewardError

log = logging.getLogger("burnish")


def check_servers(entry: RemoteReward, key: str) -> None:
    """Connect to the servers of a reward, whose key in the recipe is ``key``.

    Timeouts and retries are those of the reward's requests. A reward with ``use_proxy`` is skipped,
    because a direct connection proves nothing for it.

    Raises RewardError if no server accepts connections. If only some do, logs a warning for each of
    the others.
    """
    if entry.use_proxy:
        return
    retrying = Retrying(
        stop=stop_after_attempt(entry.retries + 1),
        wait=wait_exponential(entry.backoff_s, max=entry.max_backoff_s),
        retry=retry_if_result(lambda unreachable: len(unreachable) == len(entry.urls)),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else {},
    )
    unreachable: dict[str, str] = retrying(_unreachable, entry)
    name = entry.name or entry.kind
    if len(unreachable) < len(entry.urls):
        for url, reason in unreachable.items():
            log.warning(
                "reward %r: %s accepts no connections (%s); others do",
                name,
                _without_query(url),
                reason,
            )
        return
    reasons = "\n".join(f"  {_without_query(url)}: {reason}" for url, reason in unreachable.items())
    tries = f" (tried {entry.retries + 1} times)" if entry.retries else ""
    raise RewardError(
        f"reward {name!r}: no server accepts connections{tries}; no model was loaded\n"
        f"{reasons}\n  What to do: start a server (burnish serve-reward MODEL, with --host and "
        f"--token-env if it runs on another machine), or set {key}.urls=[http://host:5000/"
        "get_reward]. The check runs on the machine of the command: check name resolution and "
        "firewalls there"
    )


def _unreachable(entry: RemoteReward) -> dict[str, str]:
    """Return URL -> reason for each server that accepts no connection."""
    with ThreadPoolExecutor(len(entry.urls)) as pool:
        errors = pool.map(lambda url: _connection_error(url, entry.connect_timeout_s), entry.urls)
        reasons = zip(entry.urls, errors, strict=True)
        return {url: reason for url, reason in reasons if reason is not None}


def _without_query(url: str) -> str:
    """Return ``url`` without its query, which may contain a secret."""
    return url.partition("?")[0]


def _connection_error(url: str, timeout_s: float) -> str | None:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        return str(error) or type(error).__name__
    return None

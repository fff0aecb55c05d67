"""HTTP client of remote rewards: server selection, retries and validation of replies.

Reading order: ``RewardClient.ask_all`` -> ``_ask`` (tries) -> ``_try`` (one server) -> ``_send``;
then ``read_reply``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import torch
from tenacity import AsyncRetrying, RetryCallState, stop_after_attempt

from burnish.errors import BurnishError
from burnish.rewards.remote.config import RemoteReward
from burnish.types import is_metric_name

log = logging.getLogger("burnish")

COUNTS = ("requests", "retries", "bad_logs")
"""Names of the client's counts. Entries of ``extra_logs`` may not have these names."""

_MAX_LOGS = 64
_EXCERPT = 200
_ERROR_BODY_BYTES = 64 << 10
_TRANSIENT_STATUSES = (408, 425, 429)
"""Transient statuses below 500: Request Timeout, Too Early, Too Many Requests."""


class RemoteRewardError(BurnishError):
    """A request got no usable reply. The message contains the URL, the reply and what was expected.

    The same server would fail again, so the request is retried only on other servers.
    """


class _TransientError(RemoteRewardError):
    """A transient failure. The request may succeed later, or on another server."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _PartialError(RemoteRewardError):
    """Some entries of a valid reply are not finite numbers. Another server may have them."""


@dataclass(frozen=True)
class Reply:
    """A checked reply to a request for n rewards."""

    rewards: tuple[float | str, ...]
    """[n]. A string is the JSON of an entry that is not a finite number."""
    logs: Mapping[str, tuple[float, int]]
    """(sum, count) of each valid entry of ``extra_logs``, and of ``scores``."""
    bad_logs: tuple[str, ...] = ()
    """Reasons why entries of ``extra_logs`` were left out."""


class ReplyLogs:
    """Values that the replies of a reward logged."""

    def __init__(self, reward: str) -> None:
        self._reward, self._num_bad, self._warned = reward, 0, False
        self._means: dict[str, tuple[float, float]] = {}

    def add(self, reply: Reply) -> None:
        """Add the values of a reply. The first entries that are left out are logged."""
        for name, (total, count) in reply.logs.items():
            have_total, have_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (have_total + total, have_count + count)
        self._num_bad += len(reply.bad_logs)
        if reply.bad_logs and not self._warned:
            self._warned = True
            log.warning("reward %r: not added to the metrics: %s", self._reward, reply.bad_logs[0])

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of each value since the last call."""
        means, self._means = self._means, {}
        return means

    def take_num_bad(self) -> int:
        """Return the number of entries that were left out since the last call."""
        count, self._num_bad = self._num_bad, 0
        return count


@dataclass
class _Server:
    url: str
    busy: int = 0
    """Requests in flight."""
    backoff_until: float = 0.0
    """End of the backoff after its last failure, in time.monotonic seconds."""
    warned_until: float = 0.0
    """Failures before this time (time.monotonic seconds) are not logged."""
    turn: int = 0
    """Sequence number of the last request sent to it."""
    shown: str = field(init=False)
    """The URL without its query, which may contain a secret."""

    def __post_init__(self) -> None:
        self.shown = self.url.partition("?")[0]


@dataclass
class _Attempts:
    """State of one request over its tries."""

    tried: set[str] = field(default_factory=set)
    """URLs of the servers that received it."""
    refused: dict[str, RemoteRewardError] = field(default_factory=dict)
    """Permanent errors by server URL. These servers are not asked again."""
    partial: Reply | None = None
    """The first reply, with its bad entries filled in from other servers."""

    def add(self, reply: Reply) -> Reply:
        """Fill bad entries of earlier replies from ``reply``. Return the merged reply."""
        before = self.partial or reply
        pairs = zip(before.rewards, reply.rewards, strict=True)
        rewards = tuple(new if isinstance(old, str) else old for old, new in pairs)
        self.partial = replace(before, rewards=rewards)
        return self.partial


class RewardClient:
    """An HTTP client for interchangeable servers. All methods must run on one event loop."""

    def __init__(self, config: RemoteReward, *, name: str, token: str | None) -> None:
        self._config, self._name, self._token = config, name, token
        self._servers = [_Server(url) for url in config.urls]
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._random = random.Random()  # not the global one, whose state is checkpointed
        self._turn = 0
        self.counts: Counter[str] = Counter()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connections = config.max_concurrency
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=config.use_proxy,
            verify=httpx.create_ssl_context(trust_env=True),  # SSL_CERT_FILE, also without a proxy
        )
        self._retrying = AsyncRetrying(
            stop=stop_after_attempt(config.retries + len(self._servers)),
            wait=self._wait_s,
            retry=self._may_retry,
            before_sleep=lambda _: self.counts.update(retries=1),
            reraise=True,
        )

    async def ask_all(
        self, requests: Sequence[tuple[bytes, int]]
    ) -> list[Reply | RemoteRewardError]:
        """Send each (JSON body, number of expected rewards). Return its reply or its error."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(body, count)) for body, count in requests]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, body: bytes, count: int) -> Reply | RemoteRewardError:
        retrying, attempts = self._retrying.copy(), _Attempts()  # the state of one request
        try:
            return await retrying(self._try, body, count, attempts)
        except RemoteRewardError as error:
            if attempts.partial is not None:
                return attempts.partial
            tries = int(retrying.statistics.get("attempt_number", 1))
            before = [str(other) for other in attempts.refused.values() if other is not error]
            tries_text = "; before that ".join([f"tried {tries} times", *before[:1]])
            return RemoteRewardError(f"{error} ({tries_text})") if tries > 1 else error

    async def _try(self, body: bytes, count: int, attempts: _Attempts) -> Reply:
        async with self._slots:
            server = self._pick(attempts)
            attempts.tried.add(server.url)
            server.busy += 1
            self.counts["requests"] += 1
            try:
                data, kind = await self._send(server, body)
                reply = attempts.add(self._reply(server, data, kind, count=count))
                is_partial = any(isinstance(value, str) for value in reply.rewards)
                if is_partial and self._has_untried(attempts):
                    raise _PartialError(f"{server.shown} returned no reward for some responses")
                return reply
            except RemoteRewardError as error:
                self._note_failure(server, error, attempts)
                raise
            finally:
                server.busy -= 1

    def _has_untried(self, attempts: _Attempts) -> bool:
        """Return whether a server that is not in backoff has not received the request."""
        now = time.monotonic()
        return any(s.backoff_until <= now and s.url not in attempts.tried for s in self._servers)

    def _pick(self, attempts: _Attempts) -> _Server:
        """Choose a server among those without a permanent error for the request.

        Servers not in backoff come first, then those that have not received the request, then
        the least busy, in round-robin order. If all are in backoff, choose the one whose backoff
        ends first.
        """
        now = time.monotonic()
        left = [server for server in self._servers if server.url not in attempts.refused]
        awake = [server for server in left if server.backoff_until <= now]
        if awake:
            chosen = min(awake, key=lambda s: (s.url in attempts.tried, s.busy, s.turn))
        else:
            chosen = min(left, key=lambda s: (s.url in attempts.tried, s.backoff_until, s.busy))
        self._turn += 1
        chosen.turn = self._turn
        return chosen

    def _note_failure(self, server: _Server, error: RemoteRewardError, attempts: _Attempts) -> None:
        if not isinstance(error, _PartialError):
            retry_after_s = error.retry_after_s if isinstance(error, _TransientError) else 0.0
            now, seconds = time.monotonic(), retry_after_s or self._config.rest_s
            if server.warned_until <= now:
                others = len(self._servers) > 1
                more = f"; it is not used for {seconds:g} s while others work" if others else ""
                log.warning("reward %r: %s%s", self._name, error, more)
            server.backoff_until = max(server.backoff_until, now + seconds)
            server.warned_until = max(server.warned_until, server.backoff_until)
        if not isinstance(error, _TransientError):
            attempts.refused[server.url] = error
        if len(attempts.refused) == len(self._servers):  # the request is at fault, not the servers
            for each in self._servers:
                each.backoff_until = 0.0

    def _may_retry(self, state: RetryCallState) -> bool:
        """Return whether to retry: after a transient failure, or while a server has not refused."""
        error = state.outcome.exception() if state.outcome is not None else None
        attempts: _Attempts = state.args[2]
        left = len(attempts.refused) < len(self._servers)
        if attempts.partial is not None:  # retried at once on another server, never after a wait
            return isinstance(error, _PartialError)
        return isinstance(error, _TransientError) or (isinstance(error, RemoteRewardError) and left)

    def _wait_s(self, state: RetryCallState) -> float:
        """Return the seconds before the next try. No wait while there are untried servers."""
        error = state.outcome.exception() if state.outcome is not None else None
        attempts: _Attempts = state.args[2]
        if self._has_untried(attempts):
            return 0.0
        config = self._config
        rounds = max(state.attempt_number - len(self._servers), 0)
        grown = min(config.backoff_s * 2.0**rounds, config.max_backoff_s)
        retry_after_s = error.retry_after_s if isinstance(error, _TransientError) else 0.0
        return max(retry_after_s, grown * self._random.uniform(0.5, 1.0))

    async def _send(self, server: _Server, body: bytes) -> tuple[bytes, str]:
        """Send ``body``. Return (body, content type) of a reply with status 200."""
        config = self._config
        try:
            async with asyncio.timeout(config.connect_timeout_s + config.read_timeout_s):
                async with self._client.stream("POST", server.url, content=body) as response:
                    data = await self._read(server, response)
        except TimeoutError as error:
            problem = f"sent no complete reply within read_timeout_s={config.read_timeout_s:g}"
            raise _TransientError(f"{server.shown} {problem}") from error
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            if isinstance(error, httpx.ConnectTimeout):
                problem += f"; connect_timeout_s={config.connect_timeout_s:g}"
            elif isinstance(error, httpx.TimeoutException):
                problem += f"; read_timeout_s={config.read_timeout_s:g}"
            message = f"{server.shown} sent no complete reply ({self._shown(problem)})"
            raise _TransientError(message) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            problem = self._shown(f"{type(error).__name__}: {error}")
            message = (
                f"the request to {server.shown} failed ({problem}); check the url and the server"
            )
            raise RemoteRewardError(message) from error
        status = response.status_code
        if status == httpx.codes.OK:
            return data, response.headers.get("content-type", "no content type")
        excerpt = self._excerpt(data)
        message = f"{server.shown} answered with status {status}: {excerpt}; 200 was expected"
        if status in _TRANSIENT_STATUSES or status >= 500:
            after = _retry_after_s(response.headers.get("retry-after", ""))
            raise _TransientError(message, retry_after_s=min(after, config.max_backoff_s))
        raise RemoteRewardError(f"{message}. Check the url, the token, and the log of the server")

    async def _read(self, server: _Server, response: httpx.Response) -> bytes:
        """Return the body, or its beginning if the status is not 200."""
        ok = response.status_code == httpx.codes.OK
        limit = self._config.max_reply_bytes if ok else _ERROR_BODY_BYTES
        encoding = response.headers.get("content-encoding", "identity")
        if ok and encoding != "identity":
            raise RemoteRewardError(
                f"{server.shown} replied with content-encoding {self._excerpt(encoding)}, but "
                "identity was requested; switch off the compression of the server or its proxy"
            )
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > limit and ok:
                raise RemoteRewardError(
                    f"{server.shown} replied with more than max_reply_bytes={limit} bytes; "
                    "raise it, or let the server return only rewards and logs"
                )
            if len(data) > limit:  # drop the last bytes: they may be the beginning of the token
                token = (self._token or "").encode()
                safe = bytes(data).replace(token, b"[token]") if token else bytes(data)
                return safe[: len(safe) - len(token)]
        return bytes(data)

    def _reply(self, server: _Server, data: bytes, kind: str, *, count: int) -> Reply:
        try:
            reply = read_reply(data, count)
        except (ValueError, RecursionError) as error:
            wrong = isinstance(error, _WrongShapeError)
            problem = str(error) if wrong else f"which is not JSON ({error})"
            raise RemoteRewardError(
                f"{server.shown} replied with {self._excerpt(data)} ({self._excerpt(kind)}), "
                f'{problem}; expected {{"rewards": [...]}} with {count} finite '
                f"number{'s' if count > 1 else ''}. Correct the server (docs/rewards.md)"
            ) from error
        return Reply(
            tuple(self._shown(v) if isinstance(v, str) else v for v in reply.rewards),
            {self._shown(name): mean for name, mean in reply.logs.items()},
            tuple(self._shown(text) for text in reply.bad_logs),
        )

    def _excerpt(self, reply: bytes | str) -> str:
        text = reply.decode("utf-8", errors="replace") if isinstance(reply, bytes) else reply
        return self._shown(repr(text))

    def _shown(self, text: str) -> str:
        """Shorten ``text`` and redact the token, which a server may echo."""
        text = text.replace(self._token, "[token]") if self._token else text
        half = _EXCERPT // 2
        return text if len(text) <= _EXCERPT else f"{text[:half]} ... {text[-half:]}"


class _WrongShapeError(BurnishError, ValueError):
    """Valid JSON that is not a valid reply."""


def read_reply(data: bytes, count: int) -> Reply:
    """Parse the body of a reply to a request for ``count`` rewards.

    Bad rewards (null, NaN, a string) are returned as strings and do not affect other items. Raises
    ValueError for any other error. Bad entries of ``extra_logs`` are left out and listed in
    ``bad_logs``.
    """
    return checked_reply(json.loads(data.decode("utf-8")), count)


def checked_reply(reply: Any, count: int) -> Reply:
    """Return the checked form of a decoded reply to a request for ``count`` rewards.

    Names of ``extra_logs`` are metrics, so they have at most 64 printable characters. Raises
    ValueError if ``rewards`` is missing or has another length.
    """
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise _WrongShapeError("which has no 'rewards'")
    rewards = reply["rewards"]
    if count == 1 and _is_number(rewards):
        rewards = [rewards]
    if not isinstance(rewards, list):
        raise _WrongShapeError("in which 'rewards' is not a list")
    if len(rewards) != count:
        raise _WrongShapeError(f"in which 'rewards' has {len(rewards)} entries")
    checked = [float(v) if _is_number(v) else json.dumps(v, default=repr) for v in rewards]
    extra_logs = reply.get("extra_logs")
    entries: dict[str, Any] = extra_logs if isinstance(extra_logs, dict) else {}
    logs: dict[str, tuple[float, int]] = {}
    is_mapping = extra_logs is None or isinstance(extra_logs, dict)
    bad = [] if is_mapping else ["extra_logs is not a mapping"]
    scores = {} if reply.get("scores") is None else {"scores": reply["scores"]}
    for key, value in (scores | entries).items():
        mean = _mean(value, count)
        if not is_metric_name(key) or len(key) > _MAX_LOGS or key in COUNTS:
            bad.append(f"extra_logs has the invalid name {str(key)[: _MAX_LOGS + 1]!r}")
        elif mean is None or len(logs) == _MAX_LOGS:
            expected = f"neither a number nor a list of {count}, within fp32's range"
            bad.append(f"extra_logs[{key!r}] is {expected}")
        else:
            logs[key] = mean
    return Reply(tuple(checked), logs, tuple(bad))


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite JSON number. Booleans are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def _mean(value: Any, count: int) -> tuple[float, int] | None:
    """Return (sum, count) of one entry of ``extra_logs``. A single number counts for every item.

    Return None if the entry is invalid, or so large that sums of it may be infinite.
    """
    values = value if isinstance(value, list) else [value] * count
    numbers = [float(v) for v in values if isinstance(v, bool) or _is_number(v)]
    numbers = [number for number in numbers if abs(number) <= torch.finfo(torch.float32).max]
    return (math.fsum(numbers), count) if len(numbers) == len(values) == count else None


def _retry_after_s(header: str) -> float:
    """Return the seconds in a Retry-After header (a number or a date, RFC 9110 10.2.3), or 0 if it
    is invalid."""
    if header.strip().isascii() and header.strip().isdigit():
        return float(header)  # infinity if it has too many digits
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)

"""Reward from an HTTP server, which receives texts and returns one number per text.

This file builds the requests and converts failures; ``client.py`` is the HTTP client.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential
from transformers import PreTrainedTokenizerBase

from burnish import secret
from burnish.loop_thread import LoopThread
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.build import RewardInputs
from burnish.rewards.remote.client import COUNTS, RemoteRewardError, ReplyLogs, RewardClient
from burnish.rewards.remote.config import RemoteReward
from burnish.rewards.texts import prompt_and_query

log = logging.getLogger("burnish")

_ADVICE = (
    "check the server's log; if it is only slow or temporarily down, raise read_timeout_s or "
    "retries of this reward"
)


class RemoteScorer:
    """A reward that sends prompt + response to a server. Implements ``rewards.base.Reward``.

    A request contains at most ``batch_size`` responses. If a request gets no valid reply, only its
    own responses have no score (a SampleError in place of each). Means of the server's
    ``extra_logs`` become metrics. Requests, retries and invalid ``extra_logs`` are counted.

    ``tokenizer``: the policy's tokenizer, required for episodes. If ``special_tokens`` is set,
    ``query`` includes the special tokens of the response.

    Raises RewardError if the variable named by ``token_env`` is not set or is not a bearer token.
    """

    def __init__(
        self,
        config: RemoteReward,
        *,
        name: str = "remote",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.name, self._config = name, config
        self.location = ", ".join(url.partition("?")[0] for url in config.urls)
        self._tokenizer = tokenizer
        self._token = None if config.token_env is None else read_token(config.token_env)
        self._loop: LoopThread | None = None
        self._client: RewardClient | None = None
        self._logs = ReplyLogs(name)

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score or SampleError per item.

        Raises SampleError if a label is not JSON-serializable.
        """
        size = self._config.batch_size
        parts = [items[i : i + size] for i in range(0, len(items), size)]
        requests = [(self._request(part), len(part)) for part in parts]
        if self._loop is None or self._client is None:
            self._client = RewardClient(self._config, name=self.name, token=self._token)
            self._loop = LoopThread(f"reward-{self.name}")
        answers = self._loop.run(self._client.ask_all, requests)
        scores: list[float | SampleError] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, RemoteRewardError):
                problem = f"failed: {answer}"
                scores += [SampleError(self, item, problem, advice=_ADVICE) for item in part]
                continue
            self._logs.add(answer)
            for item, value in zip(part, answer.rewards, strict=True):
                if isinstance(value, float):
                    scores.append(value)
                else:
                    problem = f"got {value} instead of a finite number"
                    scores.append(SampleError(self, item, problem))
        return scores

    def take_counts(self) -> Mapping[str, int]:
        """Return the counts since the last call. ``requests`` includes retries."""
        counts = Counter(bad_logs=self._logs.take_num_bad())
        if self._client is not None:
            counts += self._client.counts
            self._client.counts = Counter()
        return {name: counts[name] for name in COUNTS}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of each entry of ``extra_logs`` since the last call."""
        return self._logs.take_means()

    def close(self) -> None:
        """Close the connections and stop the event loop's thread, if they were opened."""
        loop, client = self._loop, self._client
        self._loop = self._client = None
        if loop is not None and client is not None:
            try:
                loop.run(client.close)
            finally:
                loop.close()

    def _request(self, items: Sequence[RewardInput]) -> bytes:
        # OpenRLHF's protocol has an empty string for a missing label.
        labels = ["" if item.prompt.label is None else item.prompt.label for item in items]
        for item, label in zip(items, labels, strict=True):
            try:
                json.dumps(label, allow_nan=False)
            except (TypeError, ValueError) as error:
                problem = f"cannot encode the label as JSON ({error})"
                advice = "in the data, use text, a finite number, or lists and mappings of these"
                raise SampleError(self, item, problem, advice=advice) from error
        special = self._config.special_tokens
        texts = [prompt_and_query(i, self._tokenizer, special_tokens=special) for i in items]
        request = {
            "query": [query for _, query in texts],
            "prompts": [prompt for prompt, _ in texts],
            "labels": labels,
        }
        # errors="replace": a Python string may contain a lone surrogate, UTF-8 may not
        return json.dumps(request, ensure_ascii=False).encode("utf-8", errors="replace")


def read_token(variable: str) -> str:
    """Return the bearer token in an environment variable. Raises RewardError."""
    try:
        return secret.read_token(variable)
    except ValueError as error:
        raise RewardError(str(error)) from error


def check(config: RemoteReward, key: str) -> None:
    """Connect to the servers of a reward, whose key in the recipe is ``key``.

    Without this check an unreachable server is noticed only after the first responses are sampled.
    It opens and closes a connection and sends nothing: reward servers have no common health
    endpoint, and a dummy request could cost a forward pass or an error in the server's log.

    Timeouts and retries are those of the reward's requests. A reward with ``use_proxy`` is skipped,
    because a direct connection proves nothing for it.

    Raises RewardError if no server accepts connections. If only some do, logs a warning for each of
    the others.
    """
    if config.use_proxy:
        return
    retrying = Retrying(
        stop=stop_after_attempt(config.retries + 1),
        wait=wait_exponential(config.backoff_s, max=config.max_backoff_s),
        retry=retry_if_result(lambda unreachable: len(unreachable) == len(config.urls)),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else {},
    )
    unreachable: dict[str, str] = retrying(_unreachable, config)
    # The query of a URL may contain a secret.
    shown = [(url.partition("?")[0], reason) for url, reason in unreachable.items()]
    name = config.name or config.kind
    if len(unreachable) < len(config.urls):
        for url, reason in shown:
            log.warning("reward %r: %s accepts no connections (%s); others do", name, url, reason)
        return
    reasons = "\n".join(f"  {url}: {reason}" for url, reason in shown)
    tries = f" (tried {config.retries + 1} times)" if config.retries else ""
    raise RewardError(
        f"reward {name!r}: no server accepts connections{tries}; no model was loaded\n"
        f"{reasons}\n  What to do: start a server (burnish serve-reward MODEL, with --host and "
        f"--token-env if it runs on another machine), or set {key}.urls=[http://host:5000/"
        "get_reward]. The check runs on the machine of the command: check name resolution and "
        "firewalls there"
    )


def _unreachable(config: RemoteReward) -> dict[str, str]:
    """Return URL -> reason for each server that accepts no connection."""

    def problem(url: str) -> str | None:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        address = (parts.hostname or "", port)
        try:
            socket.create_connection(address, timeout=config.connect_timeout_s).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            return str(error) or type(error).__name__
        return None

    with ThreadPoolExecutor(len(config.urls)) as pool:
        problems = zip(config.urls, pool.map(problem, config.urls), strict=True)
        return {url: reason for url, reason in problems if reason is not None}


def make_reward(config: RemoteReward, inputs: RewardInputs) -> RemoteScorer:
    return RemoteScorer(config, name=inputs.name, tokenizer=inputs.tokenizer)

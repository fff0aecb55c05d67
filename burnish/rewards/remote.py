"""Reward from an HTTP server, which receives texts and returns one number per text.

This file builds the requests and converts failures; ``remote_client.py`` is the HTTP client.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish import secret
from burnish.config.rewards import RemoteReward as RemoteRewardConfig
from burnish.data.chat import response_text
from burnish.loop_thread import LoopThread
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.remote_client import COUNTS, RemoteError, Reply, RewardClient
from burnish.rewards.rows import text_before

log = logging.getLogger("burnish")

_ADVICE = (
    "check the server's log; if it is only slow or temporarily down, raise read_timeout_s or "
    "retries of this reward"
)


class RemoteReward:
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
        config: RemoteRewardConfig,
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
        self._counts: Counter[str] = Counter()
        self._means: dict[str, tuple[float, float]] = {}
        self._warned = False

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score or SampleError per item.

        Raises SampleError if a label is not JSON-serializable.
        """
        size = self._config.batch_size
        parts = [items[i : i + size] for i in range(0, len(items), size)]
        requests = [(self._body(part), len(part)) for part in parts]
        if self._loop is None or self._client is None:
            self._client = RewardClient(self._config, name=self.name, token=self._token)
            self._loop = LoopThread(f"reward-{self.name}")
        answers = self._loop.run(self._client.ask_all, requests)
        scores: list[float | SampleError] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Reply):
                self._note(answer)
            scores += self._scores(part, answer)
        return scores

    def take_counts(self) -> Mapping[str, int]:
        """Return the counts since the last call. ``requests`` includes retries."""
        counts, self._counts = self._counts, Counter()
        if self._client is not None:
            counts += self._client.counts
            self._client.counts = Counter()
        return {name: counts[name] for name in COUNTS}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of each entry of ``extra_logs`` since the last call."""
        means, self._means = self._means, {}
        return means

    def close(self) -> None:
        """Close the connections and stop the event loop's thread, if they were opened."""
        loop, client = self._loop, self._client
        self._loop = self._client = None
        if loop is not None and client is not None:
            try:
                loop.run(client.close)
            finally:
                loop.close()

    def _body(self, items: Sequence[RewardInput]) -> bytes:
        labels = [self._label(item) for item in items]
        special = self._config.special_tokens
        texts = [prompt_and_query(i, self._tokenizer, special_tokens=special) for i in items]
        request = {
            "query": [query for _, query in texts],
            "prompts": [prompt for prompt, _ in texts],
            "labels": labels,
        }
        # errors="replace": a Python string may contain a lone surrogate, UTF-8 may not
        return json.dumps(request, ensure_ascii=False).encode("utf-8", errors="replace")

    def _label(self, item: RewardInput) -> Any:
        """Return the label. OpenRLHF's protocol has an empty string for a missing label."""
        label = "" if item.prompt.label is None else item.prompt.label
        try:
            json.dumps(label, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"cannot encode the label as JSON ({error})"
            advice = "in the data, use text, a finite number, or lists and mappings of these"
            raise SampleError(self, item, problem, advice=advice) from error
        return label

    def _scores(
        self, items: Sequence[RewardInput], answer: Reply | RemoteError
    ) -> list[float | SampleError]:
        if isinstance(answer, RemoteError):
            return [SampleError(self, item, f"failed: {answer}", advice=_ADVICE) for item in items]
        return [
            value
            if isinstance(value, float)
            else SampleError(self, item, f"got {value} instead of a finite number")
            for item, value in zip(items, answer.rewards, strict=True)
        ]

    def _note(self, reply: Reply) -> None:
        for name, (total, count) in reply.logs.items():
            have_total, have_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (have_total + total, have_count + count)
        self._counts["bad_logs"] += len(reply.bad_logs)
        if reply.bad_logs and not self._warned:
            self._warned = True
            log.warning("reward %r: not added to the metrics: %s", self.name, reply.bad_logs[0])


def prompt_and_query(
    item: RewardInput, tokenizer: PreTrainedTokenizerBase | None, *, special_tokens: bool = True
) -> tuple[str, str]:
    """Return the texts of the prompt, and of prompt + response, which starts with the former.

    With ``special_tokens`` and a tokenizer, the response includes its special tokens. It is decoded
    together with the prompt, because decoded alone it could lose a leading space. Of an episode,
    the response is its last one, and the prompt all that the policy read before it. Raises
    RewardError for an episode without a tokenizer.
    """
    sample = item.sample
    if sample.episode is None and not (special_tokens and tokenizer):
        return item.prompt.text, item.prompt.text + sample.text
    if tokenizer is None:
        raise RewardError("texts of episodes need the policy's tokenizer; pass it to RemoteReward")
    prompt, (prompt_ids, response_ids) = text_before(item, tokenizer), sample.last_response
    if not special_tokens:
        return prompt, prompt + response_text(tokenizer, prompt_ids, response_ids)
    head, both = _decode(tokenizer, prompt_ids), _decode(tokenizer, prompt_ids + response_ids)
    tail = both[len(head) :] if both.startswith(head) else _decode(tokenizer, response_ids)
    return prompt, prompt + tail


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def read_token(variable: str) -> str:
    """Return the bearer token in an environment variable. Raises RewardError."""
    try:
        return secret.read_token(variable)
    except ValueError as error:
        raise RewardError(str(error)) from error

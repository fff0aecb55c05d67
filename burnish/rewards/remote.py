"""Rewards from a server over HTTP: texts out, one number each back.

This file says what is sent and what a failure costs; ``remote_client.py`` is the HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.rewards import RemoteReward as RemoteRewardConfig
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.loop_thread import LoopThread
from burnish.rewards.remote_client import COUNTS, RemoteError, Reply, RewardClient

log = logging.getLogger("burnish")

_ADVICE = (
    "look at the server's own log; if it is only slow or not always up, raise read_timeout_s or "
    "retries of this reward"
)


class RemoteReward:
    """Scores prompt + response by asking a server. Implements ``rewards.base.Reward``.

    ``batch_size`` responses go into one request. A request without a usable reply costs its own
    responses their score (SampleError in their place), and no others. Means of the server's
    ``extra_logs`` become measurements; requests, retries and unusable ``extra_logs`` are counted.

    ``tokenizer``: the policy's. With it, and ``special_tokens``, ``query`` holds the special tokens
    of the response.

    Raises RewardError: ``token_env`` names a variable that is not set or holds no token.
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
        self._tokenizer = tokenizer if config.special_tokens else None
        self._token = None if config.token_env is None else read_token(config.token_env)
        self._loop: LoopThread | None = None
        self._client: RewardClient | None = None
        self._counts: Counter[str] = Counter()
        self._means: dict[str, tuple[float, float]] = {}
        self._warned = False

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """One score or SampleError per item. Raises SampleError for a label that JSON lacks."""
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
        """``requests`` (all tries), ``retries`` and ``bad_logs`` since the last call."""
        counts, self._counts = self._counts, Counter()
        if self._client is not None:
            counts += self._client.counts
            self._client.counts = Counter()
        return {name: counts[name] for name in COUNTS}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """(sum, count) of each entry of ``extra_logs`` since the last call."""
        means, self._means = self._means, {}
        return means

    def close(self) -> None:
        """Close the connections and end the event loop's thread, where there is one."""
        loop, client = self._loop, self._client
        self._loop = self._client = None
        if loop is not None and client is not None:
            try:
                loop.run(client.close)
            finally:
                loop.close()

    def _body(self, items: Sequence[RewardInput]) -> bytes:
        labels = [self._label(item) for item in items]
        request = {
            "query": [full_text(item, self._tokenizer) for item in items],
            "prompts": [item.prompt.text for item in items],
            "labels": labels,
        }
        # replace: half of a surrogate pair can stand in a Python string, and not in UTF-8
        return json.dumps(request, ensure_ascii=False).encode("utf-8", errors="replace")

    def _label(self, item: RewardInput) -> Any:
        """The label; an empty text for none, which is what such servers expect."""
        label = "" if item.prompt.label is None else item.prompt.label
        try:
            json.dumps(label, allow_nan=False)
        except (TypeError, ValueError) as error:
            what = f"cannot send the label as JSON ({error})"
            advice = "make it text, a finite number, or lists and mappings of them in the data"
            raise SampleError(self, item, what, advice=advice) from error
        return label

    def _scores(
        self, items: Sequence[RewardInput], answer: Reply | RemoteError
    ) -> list[float | SampleError]:
        if isinstance(answer, RemoteError):
            return [SampleError(self, item, f"failed: {answer}", advice=_ADVICE) for item in items]
        return [
            value
            if isinstance(value, float)
            else SampleError(self, item, f"got {value} where a finite number is needed")
            for item, value in zip(items, answer.rewards, strict=True)
        ]

    def _note(self, reply: Reply) -> None:
        for name, (total, count) in reply.logs.items():
            have_total, have_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (have_total + total, have_count + count)
        self._counts["bad_logs"] += len(reply.bad_logs)
        if reply.bad_logs and not self._warned:
            self._warned = True
            log.warning("reward %r: left out of the metrics: %s", self.name, reply.bad_logs[0])


def full_text(item: RewardInput, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Prompt + response. It begins with ``item.prompt.text``.

    With a tokenizer the response has its special tokens, and is cut out of the decoded whole: on
    its own it could lose a space at its beginning.
    """
    if tokenizer is None:
        return item.prompt.text + item.sample.text
    prompt, response = list(item.sample.prompt_ids), list(item.sample.response_ids)
    head, whole = _decode(tokenizer, prompt), _decode(tokenizer, prompt + response)
    tail = whole[len(head) :] if whole.startswith(head) else _decode(tokenizer, response)
    return item.prompt.text + tail


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def read_token(variable: str) -> str:
    """The bearer token in an environment variable, without surrounding white space.

    Raises RewardError, without the value, if there is none or it cannot stand in a header.
    """
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"token_env names the environment variable {variable}, which is not set or is empty; "
            f"export {variable}=..., or leave token_env out"
        )
    if not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token):  # RFC 6750, 2.1
        raise RewardError(
            f"the environment variable {variable} (token_env) holds characters that no bearer "
            "token has; it must be the token alone: letters, digits and -._~+/, = at the end"
        )
    return token

"""A reward file of OpenRLHF (``--reward.remote_url path/to/file.py``), which runs as it is.

The file defines ``reward_func(queries, prompts, labels, **kwargs)``. It returns one reward per
query, as a tensor or list, or a mapping ``{"rewards", "scores", "extra_logs"}``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from burnish.environments.importing import LoadError, load_object
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.function import TIMEOUT_S, location_of
from burnish.rewards.interface import late
from burnish.rewards.remote import prompt_and_query
from burnish.rewards.remote_client import Reply, checked_reply
from burnish.transcript import plain
from burnish.user_calls import CallTimeoutError, UserCalls

log = logging.getLogger("burnish")

PREFIX = "openrlhf:"
FUNCTION = "reward_func"


class OpenRLHFReward:
    """Scores with ``reward_func`` of a file of OpenRLHF.

    ``queries`` are the texts of prompt and response with special tokens, ``labels`` the labels, or
    an empty string for a missing one. Means of ``scores`` and ``extra_logs`` become metrics.

    Raises RewardError if the file has no such function.
    """

    takes_label = True

    def __init__(
        self,
        spec: str,
        *,
        name: str,
        tokenizer: PreTrainedTokenizerBase | None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.name, self._tokenizer = name, tokenizer
        try:
            self._function = load_object(f"{spec.removeprefix(PREFIX)}:{FUNCTION}")
        except LoadError as error:
            raise RewardError(f"reward {name!r}: function {spec}: {error}") from error
        self.location = location_of(self._function)
        self._calls = UserCalls(f"reward {name!r} ({self.location})", limit_s=timeout_s)
        self._means: dict[str, tuple[float, float]] = {}
        self._counts: Counter[str] = Counter()
        self._warned = False

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score or SampleError per item. Raises SampleError if the call is late, and
        RewardError if its result has another form."""
        texts = [prompt_and_query(item, self._tokenizer) for item in items]
        queries, prompts = [query for _, query in texts], [prompt for prompt, _ in texts]
        labels = ["" if i.prompt.label is None else plain(i.prompt.label) for i in items]
        try:
            result = self._calls.run(self._call, queries, prompts, labels)
        except CallTimeoutError as error:
            raise late(self, items[0], len(items), error) from error
        try:
            reply = checked_reply(_plain(result), len(items))
        except ValueError as error:
            raise RewardError(
                f"reward {self.name!r} ({self.location}) returned {type(result).__name__}, "
                f"{error}; return {len(items)} rewards for {len(items)} queries, or a mapping "
                "with 'rewards'"
            ) from error
        self._note(reply)
        return [
            value
            if isinstance(value, float)
            else SampleError(self, item, f"returned {value} instead of a finite number")
            for item, value in zip(items, reply.rewards, strict=True)
        ]

    def take_counts(self) -> Mapping[str, int]:
        """Return the number of invalid entries of ``extra_logs`` since the last call."""
        counts, self._counts = self._counts, Counter()
        return {"bad_logs": counts["bad_logs"]}

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of ``scores`` and each entry of ``extra_logs`` since the last
        call."""
        means, self._means = self._means, {}
        return means

    def close(self) -> None:
        self._calls.close()

    def _call(self, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
        result = self._function(queries, prompts, labels)
        return asyncio.run(_finished(result)) if inspect.isawaitable(result) else result

    def _note(self, reply: Reply) -> None:
        for name, (total, count) in reply.logs.items():
            have_total, have_count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (have_total + total, have_count + count)
        self._counts["bad_logs"] += len(reply.bad_logs)
        if reply.bad_logs and not self._warned:
            self._warned = True
            log.warning("reward %r: not added to the metrics: %s", self.name, reply.bad_logs[0])


async def _finished(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    """Return the result of a reward function as a mapping of lists and numbers."""
    result = dict(value) if isinstance(value, Mapping) else {"rewards": value}
    logs = result.get("extra_logs")
    plain = {key: _numbers(result[key]) for key in ("rewards", "scores") if key in result}
    if isinstance(logs, Mapping):
        return plain | {"extra_logs": {key: _numbers(log) for key, log in logs.items()}}
    return plain if logs is None else plain | {"extra_logs": logs}


def _numbers(value: Any) -> Any:
    """Return tensors and arrays as flat lists of numbers, those without dimension as numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist() if value.ndim else value.item()
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value

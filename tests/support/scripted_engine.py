"""A rollout engine that answers with given token ids, so that episodes really use their tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from burnish.data.decoding import response_decoder
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan

Answer = Callable[[Request], Sequence[int]]


class ScriptedEngine:
    """Answers each request with the ids that ``answer`` returns for it, at most its ``max_tokens``.

    Requests finish in a random order. ``log`` has every request and its ids: the record that the
    rows of episodes are compared with.
    """

    def __init__(self, answer: Answer, tokenizer: Any, *, seed: int = 0) -> None:
        self.answer, self.tokenizer = answer, tokenizer
        self.version = 0
        self.log: list[tuple[Request, tuple[int, ...]]] = []
        self.released: list[str] = []
        self._open: dict[str, tuple[Request, Sampling]] = {}
        self._answers: dict[str, tuple[int, ...]] = {}
        self._reported: dict[str, int] = {}
        """Tokens of a request that its listener got."""
        self._random = random.Random(seed)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for request in requests:
            self._open[request.request_id] = (request, sampling)

    def poll(self) -> list[Completion]:
        if self._random.random() < 0.3:
            return []
        name = self._random.choice(list(self._open))
        request, sampling = self._open[name]
        if name not in self._answers:
            self._answers[name] = tuple(self.answer(request))
        ids = self._answers[name]
        limit = request.limit(sampling)
        cut, ids = len(ids) > limit, ids[:limit]
        if request.on_tokens is not None:
            reported = self._reported[name] = self._reported.get(name, 0) + self._random.choice(
                (1, 2, 9)
            )
            if reported < len(ids):
                request.on_tokens(ids[:reported])
                return []
        del self._open[name], self._answers[name]
        self._reported.pop(name, None)
        self.log.append((request, ids))
        return [
            Completion(
                request_id=request.request_id,
                index=0,
                token_ids=ids,
                logprobs=tuple(-1.0 / (1 + t) for t in ids),
                finish_reason="length" if cut else "stop",
                text=response_decoder(self.tokenizer)(ids),
                spans=(VersionSpan(self.version, 0, len(ids)),),
            )
        ]

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for kept in (self._open, self._answers, self._reported):
                kept.pop(request_id, None)

    def release(self, conversations: Iterable[str]) -> None:
        self.released += conversations

    def close(self) -> None:
        self._open.clear()

"""Samples in progress, as every engine in this process keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.compact import FloatArray, IntArray, IntLists
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.rollout.requests import StopRule
from burnish.transcript import FinishReason


@dataclass(eq=False)
class LiveSample:
    """One sample of a request, while it is sampled."""

    request: Request
    index: int
    sampling: Sampling
    stop: StopRule
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Sequence[int]] = field(default_factory=list)
    """Ids that top-k and top-p kept for each token. Empty: not recorded."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from a cache."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it sampled), in order."""
    reason: FinishReason | None = None
    """Why the sample is finished; None: it is not."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of the prompt and of the tokens so far."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def length(self) -> int:
        """Return the current length of prompt and response in tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def add(
        self, token: int, logprob: float, version: int, *, kept_ids: Sequence[int] | None = None
    ) -> None:
        """Append a token sampled from ``version`` of the weights, and set ``reason`` if it ends the
        sample. ``kept_ids``: the ids that top-k and top-p kept, if they are recorded."""
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if kept_ids is not None:
            self.kept.append(kept_ids)
        self.reason = self.stop.finished(self.tokens, self.request.limit(self.sampling))
        if self.reason is None and self.request.on_tokens is not None:
            self.request.on_tokens(self.tokens)

    def completion(self) -> Completion:
        """Return the finished sample."""
        assert self.reason is not None
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            token_ids=IntArray(self.tokens),
            logprobs=FloatArray(self.logprobs),
            finish_reason=self.reason,
            text=self.stop.text_of(self.tokens),
            spans=version_spans(self.marks, len(self.tokens)),
            cached_tokens=self.cached_tokens,
            kept_ids=IntLists(self.kept),
        )


def version_spans(marks: Sequence[tuple[int, int]], length: int) -> tuple[VersionSpan, ...]:
    """Return the spans of ``length`` tokens. ``marks``: (version, index of its first token)."""
    ends = [begin for _, begin in marks[1:]] + [length]
    return tuple(
        VersionSpan(version, begin, end) for (version, begin), end in zip(marks, ends, strict=True)
    )

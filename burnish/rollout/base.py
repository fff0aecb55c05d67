"""Contract of rollout engines: token ids in, token ids and log-probs out. One contract, every
backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burnish.errors import BurnishError
from burnish.types import FinishReason


class SamplingError(BurnishError, ArithmeticError):
    """The policy's logits are not numbers, so nothing can be sampled from them."""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; see ``config.rollout.SamplingConfig`` for the fields' meaning."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """``n`` responses to one prompt.

    ``seed`` owns the randomness: the same request with the same weights gives the same tokens,
    whatever else is in the batch.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int = 1
    seed: int = 0
    max_tokens: int | None = None
    """Most new tokens of this request. None: the sampling's."""

    def limit(self, sampling: Sampling) -> int:
        """Most new tokens of each response."""
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Completion:
    """One finished response. ``logprobs`` [T] are of the full distribution at the sampling
    temperature (before top-k and top-p), which is what the trainer computes for the same tokens."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    version: int


class RolloutEngine(Protocol):
    """Samples from one policy."""

    version: int
    """Version of the weights it samples from."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish, in any order; n per request."""
        ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights; afterwards ``self.version == version``."""
        ...

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches (and device memory) until :meth:`wake` or the next generate.

        ``new_weights_follow``: the weights may be dropped too, because :meth:`load_weights` is
        called before the next generate.
        """
        ...

    def wake(self) -> None:
        """Take memory again."""
        ...

    def close(self) -> None:
        """End what the engine started (processes, shared memory). Nothing is sampled after it."""
        ...

"""The contract of all rollout engines: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burnish.errors import BurnishError
from burnish.types import FinishReason


class SamplingError(BurnishError, ArithmeticError):
    """The policy's log-probs are not finite, so no token can be sampled."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; ``config.rollout.SamplingConfig`` documents the fields."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request for ``n`` responses to a prompt.

    All randomness comes from ``seed``: the same request with the same weights gives the same
    tokens, independent of the rest of the batch.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int = 1
    seed: int = 0
    max_tokens: int | None = None
    """Maximum new tokens per response. None: the value in :class:`Sampling`."""

    def limit(self, sampling: Sampling) -> int:
        """Return the maximum number of new tokens per response."""
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Completion:
    """A finished response.

    ``logprobs`` [T] are those of the full distribution at the sampling temperature, before top-k
    and top-p. The trainer computes the same for these tokens.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str
    version: int


class RolloutEngine(Protocol):
    """An engine that samples from one policy."""

    version: int
    """Version of its current weights."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish, in any order; ``n`` per request."""
        ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights; afterwards ``self.version == version``."""
        ...

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches (and device memory) until :meth:`wake` or the next generate.

        With ``new_weights_follow`` the weights may be dropped too, because :meth:`load_weights`
        will be called before the next generate.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory freed by :meth:`sleep` again."""
        ...

    def close(self) -> None:
        """Release the engine's processes and shared memory. It cannot be used afterwards."""
        ...

"""The two ends of a hand-over: the trainer that pushes and the rollout engine that receives.

What a failed hand-over leaves behind decides what the rollout engine may do. Nothing was written
yet: its old weights are whole, and it refuses to sample until a good hand-over. Something was
written: it holds half of two versions, and refuses as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from burnish.config.model import Dtype
from burnish.models.load import DTYPES
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling
from burnish.sync.base import (
    Abort,
    Bucket,
    End,
    InvalidWeightsError,
    Metrics,
    Receiver,
    SendLink,
    SyncError,
    WeightMismatchError,
    sync_metrics,
    transfer_metrics,
)
from burnish.sync.buckets import pack
from burnish.sync.checksum import checksum


class HasWeights(Protocol):
    """All that a hand-over needs of a train engine."""

    version: int

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor), LoRA merged. With several ranks a collective: all iterate."""
        ...


class WeightSender:
    """Pushes a train engine's weights over a link.

    Every rank of the trainer has one and calls :meth:`push` at the same time; all but one have no
    ``link``: they take part in gathering the weights and send nothing.
    """

    def __init__(
        self,
        policy: HasWeights,
        link: SendLink | None,
        *,
        dtype: Dtype | None = None,
        check: bool = True,
    ) -> None:
        self.policy, self.link, self.check = policy, link, check
        self.dtype = None if dtype is None else DTYPES[dtype]
        self._push = -1

    def push(self) -> Metrics:
        """Hand the weights and their version over; returns when every receiver has accepted them.

        Raises SyncError where a receiver refused or said nothing in time; the others have the new
        weights then. Pushing again is always allowed. Ranks without a link return nothing.
        """
        started, weights = time.perf_counter(), self.policy.weights()
        if self.link is None:
            exhaust(weights)
            return {}
        self._push += 1
        version, end = self.policy.version, None
        try:
            for message, payload in messages(
                weights,
                self.link.buffer,
                push=self._push,
                version=version,
                dtype=self.dtype,
                check=self.check,
            ):
                if isinstance(message, End):
                    end = message
                else:
                    self.link.send(message, payload)
        except Exception as error:
            exhaust(weights)  # the other ranks wait in the same gathers
            with suppress(SyncError):
                self.link.finish(Abort(self._push, version, f"{type(error).__name__}: {error}"))
            raise
        assert end is not None
        self.link.finish(end)
        seconds = time.perf_counter() - started
        return sync_metrics(version, end.num_bytes, buckets=end.num_buckets, seconds=seconds)

    def close(self) -> None:
        """Leave the connection."""
        if self.link is not None:
            self.link.close()


def messages(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    *,
    push: int,
    version: int,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> Iterator[tuple[Bucket, Tensor] | tuple[End, Tensor]]:  # house: ok all that a hand-over is
    """All of a hand-over: (header, uint8 payload) of every bucket, then the end (with no bytes).
    ``take_buffer`` and ``dtype`` as in :func:`burnish.sync.buckets.pack`."""
    index = num_tensors = num_bytes = 0
    for entries, payload in pack(weights, take_buffer, dtype=dtype):
        digest = checksum(payload) if check else ""
        yield Bucket(push, version, index, payload.numel(), digest, entries=entries), payload
        index += 1
        num_tensors += sum(entry.begin == 0 for entry in entries)
        num_bytes += sum(entry.num_bytes for entry in entries)
    yield End(push, version, index, num_tensors, num_bytes), torch.empty(0, dtype=torch.uint8)


def exhaust(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering what is left, for the ranks that wait in the same gathers."""
    for _ in weights:
        pass


@dataclass(frozen=True)
class InvalidReason:
    """Why a rollout engine may not sample."""

    reason: str
    consistent: bool
    """The engine holds one version's weights, all of them."""


class SyncedEngine:
    """A rollout engine whose weights come from a trainer in another process. Implements
    :class:`burnish.rollout.base.RolloutEngine`.

    ``ready``: the weights it was made with may be sampled from before the first hand-over.
    """

    def __init__(self, engine: RolloutEngine, receiver: Receiver, *, ready: bool = False) -> None:
        self.engine, self.receiver = engine, receiver
        self.invalid_reason = (
            None if ready else InvalidReason("no weights have come yet", consistent=False)
        )
        """None: ready to sample."""

    @property
    def version(self) -> int:
        """Version of the weights it samples from (the last good one, while it refuses to)."""
        return self.engine.version

    def receive(self, version: int | None = None) -> Metrics:
        """Take one hand-over (of ``version``; None: whichever comes) into the engine.

        Raises SyncError where it fails; the engine then refuses to sample, see the module.
        """
        started = time.perf_counter()
        try:
            incoming = self.receiver.open(version)
        except Exception as error:
            self._mark_invalid(error, wrote=False)
            raise
        try:
            self._load(incoming.version, incoming)
        except Exception as error:
            with suppress(SyncError):  # what went wrong first is what to tell
                incoming.close(str(error) or type(error).__name__)
            if isinstance(error, SyncError):
                raise
            kind = WeightMismatchError if isinstance(error, ValueError) else SyncError
            raise kind(
                f"the rollout engine did not take version {incoming.version}: {error}"
            ) from error
        incoming.close(None)
        return transfer_metrics(incoming, time.perf_counter() - started)

    # ---- the rollout engine ------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish. Raises InvalidWeightsError after a hand-over that failed."""
        self._check_ready()
        for completion in self.engine.generate(requests, sampling):
            self._check_ready()
            yield completion

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by hand; as good as a hand-over."""
        self._load(version, tensors)

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches until the next generate."""
        self.engine.sleep(new_weights_follow=new_weights_follow)

    def wake(self) -> None:
        """Take memory again."""
        self.engine.wake()

    def close(self) -> None:
        """End the engine and leave the connection."""
        self.receiver.close()
        self.engine.close()

    # ---- parts -------------------------------------------------------------------------------

    def _load(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        begun = False

        def watched() -> Iterator[tuple[str, Tensor]]:
            nonlocal begun
            for item in tensors:
                begun = True
                yield item
            ended.append(True)

        ended: list[bool] = []
        try:
            self.engine.load_weights(version, watched())
            if not ended:
                raise SyncError(
                    f"the rollout engine did not read version {version} to its end, so nothing "
                    "says that it is whole"
                )
            if self.engine.version != version:
                raise SyncError(
                    f"the rollout engine says version {self.engine.version} after version "
                    f"{version} was loaded"
                )
        except Exception as error:
            self._mark_invalid(error, wrote=begun)
            raise
        self.invalid_reason = None

    def _mark_invalid(self, error: Exception, *, wrote: bool) -> None:
        had = self.invalid_reason
        if wrote:
            reason = f"a hand-over failed half-way, so two versions are mixed ({error})"
            self.invalid_reason = InvalidReason(reason, consistent=False)
        elif had is None or had.consistent:
            reason = f"a hand-over failed before version {self.version} was touched ({error})"
            self.invalid_reason = InvalidReason(reason, consistent=True)

    def _check_ready(self) -> None:
        if self.invalid_reason is not None:
            raise InvalidWeightsError(
                f"the rollout engine has no weights to sample from: {self.invalid_reason.reason}; "
                f"push "
                "and receive again"
            )

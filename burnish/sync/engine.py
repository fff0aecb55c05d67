"""The two ends of a transfer: the trainer that pushes and the rollout engine that receives.

What a failed transfer leaves behind decides what the rollout engine may do. Nothing was written
yet: its old weights are whole, and it refuses to sample until a good transfer. Something was
written: it holds half of two versions, and refuses as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burnish.config.model import Dtype
from burnish.models.load import DTYPES
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling
from burnish.sync.base import (
    Abort,
    End,
    InvalidWeightsError,
    Metrics,
    SyncError,
    WeightMismatchError,
    WeightSource,
    sync_metrics,
)
from burnish.sync.buckets import messages
from burnish.sync.links import ChannelSender


class HasWeights(Protocol):
    """All that a transfer needs of a train engine."""

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
        link: ChannelSender | None,
        *,
        dtype: Dtype | None = None,
        check: bool = True,
    ) -> None:
        self.policy, self.link, self.check = policy, link, check
        self.dtype = None if dtype is None else DTYPES[dtype]
        self._push = -1

    def push(self) -> Metrics:
        """Hand the weights and their version over; returns when every receiver has accepted them.

        Raises SyncError if a receiver refused or said nothing in time; the others have the new
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

    ``ready``: the weights it was made with may be sampled from before the first transfer.
    """

    def __init__(self, engine: RolloutEngine, source: WeightSource, *, ready: bool = False) -> None:
        self.engine, self.source = engine, source
        self.invalid_reason = (
            None if ready else InvalidReason("no weights have come yet", consistent=False)
        )
        """None: ready to sample."""

    @property
    def version(self) -> int:
        """Version of the weights it samples from (the last good one, while it refuses to)."""
        return self.engine.version

    def receive(self, version: int | None = None) -> Metrics:
        """Load one transfer (of ``version``; None: whichever comes) into the engine.

        Raises SyncError if it fails; the engine then refuses to sample, see the module.
        """
        started, transfer = time.perf_counter(), None
        try:
            with self.source.open(version) as transfer:
                self.load_weights(transfer.version, transfer)
        except Exception as error:
            if transfer is None:
                self._mark_invalid(error, wrote=False)
            if transfer is None or isinstance(error, SyncError):
                raise
            kind = WeightMismatchError if isinstance(error, ValueError) else SyncError
            raise kind(
                f"the rollout engine did not take version {transfer.version}: {error}"
            ) from error
        return sync_metrics(
            transfer.version,
            transfer.num_bytes,
            buckets=transfer.num_buckets,
            seconds=time.perf_counter() - started,
        )

    # ---- the rollout engine ------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish. Raises InvalidWeightsError after a transfer that failed."""
        self._check_ready()
        for completion in self.engine.generate(requests, sampling):
            self._check_ready()
            yield completion

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights. After a failure the engine refuses to sample, see the module."""
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

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches until the next generate."""
        self.engine.sleep(new_weights_follow=new_weights_follow)

    def wake(self) -> None:
        """Take memory again."""
        self.engine.wake()

    def close(self) -> None:
        """End the engine and leave the connection."""
        self.source.close()
        self.engine.close()

    # ---- parts -------------------------------------------------------------------------------

    def _mark_invalid(self, error: Exception, *, wrote: bool) -> None:
        had = self.invalid_reason
        if wrote:
            reason = f"a transfer failed half-way, so two versions are mixed ({error})"
            self.invalid_reason = InvalidReason(reason, consistent=False)
        elif had is None or had.consistent:
            reason = f"a transfer failed before version {self.version} was touched ({error})"
            self.invalid_reason = InvalidReason(reason, consistent=True)

    def _check_ready(self) -> None:
        if self.invalid_reason is not None:
            raise InvalidWeightsError(
                f"the rollout engine has no weights to sample from: {self.invalid_reason.reason}; "
                f"push "
                "and receive again"
            )

"""The two ends of a transfer: the trainer that pushes and the rollout engine that receives.

After a failed transfer the rollout engine refuses to sample until a transfer succeeds. If no tensor
had been passed to the engine, its weights are still those of its old version. Otherwise two
versions may be mixed.
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
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling, generate
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
    """Interface of a train engine that a transfer needs."""

    version: int

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), LoRA merged. With several ranks this is a collective: all
        ranks must iterate."""
        ...


class WeightSender:
    """Sender that pushes a train engine's weights over a link.

    Every rank of the trainer has one and calls :meth:`push` at the same time. All ranks but one
    have no ``link``. They take part in gathering the weights and send nothing.
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
        """Send the weights and their version; return when every receiver has accepted them.

        Raises SyncError if a receiver refused or timed out; the other receivers then have the new
        weights. The push may be repeated; after a failed broadcast it raises LinkError, and both
        ends need a new connection. Ranks without a link return no metrics.
        """
        started, weights = time.perf_counter(), self.policy.weights()
        if self.link is None:
            drain(weights)
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
            drain(weights)  # the other ranks wait in the same gathers
            with suppress(SyncError):
                self.link.finish(Abort(self._push, version, f"{type(error).__name__}: {error}"))
            raise
        assert end is not None
        self.link.finish(end)
        seconds = time.perf_counter() - started
        return sync_metrics(version, end.num_bytes, buckets=end.num_buckets, seconds=seconds)

    def close(self) -> None:
        """Close the connection."""
        if self.link is not None:
            self.link.close()


def drain(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Consume the remaining weights, for the ranks that wait in the same gathers."""
    for _ in weights:
        pass


@dataclass(frozen=True)
class InvalidReason:
    """Reason for which a rollout engine must not sample."""

    reason: str
    consistent: bool
    """True if all weights of the engine are of one version."""


class SyncedEngine:
    """Rollout engine that loads weights from a trainer in another process. Implements
    :class:`burnish.rollout.base.RolloutEngine`.

    ``ready``: the engine may sample from its initial weights before the first transfer.
    """

    def __init__(self, engine: RolloutEngine, source: WeightSource, *, ready: bool = False) -> None:
        self.engine, self.source = engine, source
        self.invalid_reason = (
            None if ready else InvalidReason("it has not received weights yet", consistent=False)
        )
        """Reason not to sample; None: ready to sample."""

    @property
    def version(self) -> int:
        """Version of the weights it samples from. While it refuses to sample: the last successful
        version."""
        return self.engine.version

    @property
    def keeps_cache_on_update(self) -> bool:
        """Return whether the engine keeps caches of the old weights if it is told to."""
        return self.engine.keeps_cache_on_update

    def receive(self, version: int | None = None, *, keep_cache: bool = False) -> Metrics:
        """Load one transfer (of ``version``; None: of any version) into the engine. ``keep_cache``
        is that of :meth:`RolloutEngine.load_weights`.

        Raises SyncError if the transfer fails. The engine then refuses to sample until one
        succeeds.
        """
        started, transfer = time.perf_counter(), None
        try:
            with self.source.open(version) as transfer:
                self.load_weights(transfer.version, transfer, keep_cache=keep_cache)
        except Exception as error:
            if transfer is None:
                self._mark_invalid(error, wrote=False)
            if transfer is None or isinstance(error, SyncError):
                raise
            kind = WeightMismatchError if isinstance(error, ValueError) else SyncError
            raise kind(
                f"the rollout engine did not load version {transfer.version}: {error}"
            ) from error
        return sync_metrics(
            transfer.version,
            transfer.num_bytes,
            buckets=transfer.num_buckets,
            seconds=time.perf_counter() - started,
        )

    # ---- the rollout engine ------------------------------------------------------------------

    @property
    def max_len(self) -> int | None:
        """Return the maximum length of prompt and response in tokens; None: unlimited."""
        return self.engine.max_len

    @property
    def busy(self) -> bool:
        """Return whether any request is open."""
        return self.engine.busy

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``. Raises InvalidWeightsError after a failed transfer."""
        self._check_ready()
        self.engine.submit(requests, sampling)

    def poll(self) -> list[Completion]:
        """Advance the open requests and return what finished. Raises InvalidWeightsError after a
        failed transfer; the requests stay open."""
        self._check_ready()
        return self.engine.poll()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop open requests. Unknown ids are ignored."""
        self.engine.cancel(request_ids)

    def release(self, conversations: Iterable[str]) -> None:
        """Free the kept cache of conversations."""
        self.engine.release(conversations)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish. Raises InvalidWeightsError after a failed transfer."""
        return generate(self, requests, sampling)

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Replace the weights. After a failure the engine refuses to sample until a load
        succeeds."""
        begun = False

        def watched() -> Iterator[tuple[str, Tensor]]:
            nonlocal begun
            for item in tensors:
                begun = True
                yield item
            ended.append(True)

        ended: list[bool] = []
        try:
            self.engine.load_weights(version, watched(), keep_cache=keep_cache)
            if not ended:
                raise SyncError(
                    f"the rollout engine did not consume all weights of version {version}, so "
                    "its weights may be incomplete"
                )
            if self.engine.version != version:
                raise SyncError(
                    f"the rollout engine reports version {self.engine.version} after loading "
                    f"version {version}"
                )
        except Exception as error:
            self._mark_invalid(error, wrote=begun)
            raise
        self.invalid_reason = None

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free caches until the next generate."""
        self.engine.sleep(new_weights_follow=new_weights_follow)

    def wake(self) -> None:
        """Allocate the freed memory again."""
        self.engine.wake()

    def close(self) -> None:
        """Close the connection and the engine."""
        self.source.close()
        self.engine.close()

    # ---- parts -------------------------------------------------------------------------------

    def _mark_invalid(self, error: Exception, *, wrote: bool) -> None:
        had = self.invalid_reason
        if wrote:
            reason = (
                "a transfer failed after it had replaced some weights, so two versions are mixed "
                f"({error})"
            )
            self.invalid_reason = InvalidReason(reason, consistent=False)
        elif had is None or had.consistent:
            reason = (
                f"a transfer failed before it changed the weights of version {self.version} "
                f"({error})"
            )
            self.invalid_reason = InvalidReason(reason, consistent=True)

    def _check_ready(self) -> None:
        if self.invalid_reason is not None:
            raise InvalidWeightsError(
                f"the rollout engine has no valid weights: {self.invalid_reason.reason}; push "
                "and receive again"
            )

"""A rollout service (``service.py``) as an evaluation sees it: requests of its own, which share the
engine with those of training, or a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import chain
from typing import Protocol

from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling


class RequestSink(Protocol):
    """The part of a service that samples responses."""

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]: ...

    def stopped_s(self) -> float:
        """Return the seconds so far in which requests waited although the engine could sample: the
        service was paused, or held new requests back."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def release(self, conversation: str) -> None: ...


class EvaluationLane:
    """Requests of an evaluation to a service that others use at the same time. Their ids and
    conversations get a prefix, so that they never equal those of training."""

    def __init__(self, service: RolloutService) -> None:
        self.service = service

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        return self.service.submit(_for_evaluation(request), sampling, lane="evaluation")

    def submit_all(self, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        return self.service.submit_all(_for_evaluation(request), sampling, lane="evaluation")

    def stopped_s(self) -> float:
        """Return 0: requests of evaluations are not held back."""
        return 0.0

    def cancel(self, request_id: str) -> None:
        self.service.cancel(_PREFIX + request_id)

    def release(self, conversation: str) -> None:
        self.service.release(_PREFIX + conversation)


_PREFIX = "evaluation/"


def _for_evaluation(request: Request) -> Request:
    name = request.conversation
    conversation = None if name is None else _PREFIX + name
    return replace(request, request_id=_PREFIX + request.request_id, conversation=conversation)


class ServiceEngine:
    """The part of a rollout engine that samples entire rollouts, over a service that others use at
    the same time. Its requests are those of an evaluation."""

    def __init__(self, service: RolloutService) -> None:
        self.lane = EvaluationLane(service)

    @property
    def version(self) -> int:
        return self.lane.service.version

    @property
    def max_len(self) -> int | None:
        return self.lane.service.max_len

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as the requests finish. Raises ValueError if the engine refuses one of
        them. Requests that are unfinished when the caller closes the iterator are canceled."""
        left: set[Future[list[Completion]]] = set()
        try:
            for request in requests:
                left.add(self.lane.submit_all(request, sampling))
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for completion in chain.from_iterable(future.result() for future in done):
                    name = completion.request_id.removeprefix(_PREFIX)
                    yield replace(completion, request_id=name)
        finally:
            for future in left:
                future.cancel()

    def close(self) -> None:
        """Do nothing: the owner of the service closes it and the engine."""


Sampler = RolloutEngine | ServiceEngine
"""The engine of a runner: one that it uses alone, or one that it shares with training."""

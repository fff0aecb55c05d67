"""The loop over ``submit`` and ``poll`` that all rollout engines share as their ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from burnish.rollout.base import Completion, Request, Sampling


class TakesRequests(Protocol):
    """The part of ``rollout.base.RolloutEngine`` that the loop needs."""

    @property
    def busy(self) -> bool: ...

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None: ...

    def poll(self) -> list[Completion]: ...

    def cancel(self, request_ids: Iterable[str]) -> None: ...


def generate(
    engine: TakesRequests, requests: Sequence[Request], sampling: Sampling
) -> Iterator[Completion]:
    """Submit ``requests``, poll until all are complete, and yield completions as they finish.

    Requests that are unfinished when the caller closes the iterator are canceled. Raises
    RuntimeError if other requests are open, because their completions would be lost, or if the
    requests are canceled meanwhile.
    """
    if engine.busy:
        raise RuntimeError(
            "generate needs a rollout engine without open requests, and this one has some: finish "
            "or close the other generate first, or use submit and poll "
            "(rollout/asynchronous/service.py shares an engine between threads)"
        )
    engine.submit(requests, sampling)
    left = sum(request.n for request in requests)
    try:
        while left:
            if not engine.busy:
                raise RuntimeError(
                    f"{left} samples of this generate were canceled (by cancel or close) before "
                    "they were finished; take all completions first"
                )
            for completion in engine.poll():
                left -= 1
                yield completion
    finally:
        if left:
            engine.cancel([request.request_id for request in requests])

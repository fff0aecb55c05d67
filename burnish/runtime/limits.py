"""Timeouts of collectives in which ranks wait for each other: a shorter one for passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from burnish.distributed.process_group import CollectiveTimeoutError, timed_out_collective


@dataclass(frozen=True)
class Limits:
    """Timeouts of one rank in one collective, in seconds."""

    call_s: float
    """Timeout of calls in which a rank may wait for a disk or a transfer."""
    pass_s: float
    """Timeout of passes and optimizer steps."""


def groups_here() -> list[Any]:
    """Return the process groups of this process, including those made by libraries."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def limit_collectives(seconds: float, groups: Iterable[Any]) -> None:
    """Set the timeout of collectives of ``groups``. Libraries make groups with their own
    timeouts."""
    from torch.distributed import distributed_c10d

    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def limited(limits: Limits | None, groups: Sequence[Any]) -> Iterator[None]:
    """Set the timeout of ``groups`` to ``pass_s`` inside the context, and to ``call_s`` afterward.
    None: no change.

    Raises CollectiveTimeoutError when this rank reached the timeout."""
    if limits is None:
        yield
        return
    limit_collectives(limits.pass_s, groups)
    try:
        yield
    except RuntimeError as error:
        collective = timed_out_collective(error)
        if collective is None:
            raise
        raise CollectiveTimeoutError(
            f"timed out after {limits.pass_s:g} s waiting for the other ranks in {collective}"
        ) from error
    finally:
        limit_collectives(limits.call_s, groups)

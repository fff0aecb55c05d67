"""Models of a job whose heads are split over several processes. ``preflight/ranks.py`` checks
against the models' own configs whether they can be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.config.model import ModelConfig
from burnish.config.roles import Role, RolloutRole

ParallelKind = Literal["rollout", "tensor", "sequence"]


@dataclass(frozen=True)
class ParallelDegree:
    """A model, and the number of processes over which its heads are split."""

    model: ModelConfig
    kind: ParallelKind
    """rollout: vLLM's processes. tensor, sequence: a group of the torch engine's ranks."""
    size: int


def parallel_degrees(roles: Sequence[Role]) -> list[ParallelDegree]:
    """Return every such model once; empty for most jobs."""
    return list(dict.fromkeys(degree for role in roles for degree in _of(role) if degree.size > 1))


def models_of(roles: Sequence[Role]) -> list[ModelConfig]:
    """Return all models of a job, each once."""
    return list(dict.fromkeys(role.model for role in roles))


def _of(role: Role) -> Iterator[ParallelDegree]:
    if isinstance(role, RolloutRole):
        yield ParallelDegree(role.model, "rollout", role.tensor_parallel)
    else:
        yield ParallelDegree(role.model, "tensor", role.tensor_parallel)
        yield ParallelDegree(role.model, "sequence", role.sequence_parallel)

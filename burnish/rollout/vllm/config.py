"""Config of the vLLM rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from burnish.config.vllm_arguments import problems
from burnish.rollout.config import RolloutEngineSettings

MOST_CPU_CACHE = 4 << 30
"""Bytes of the largest cache on a CPU, unless one row needs more or the recipe sets the size."""


class VllmEngine(RolloutEngineSettings):
    """vLLM, in the trainer's process or on Ray in each rollout worker (more processes if
    tensor_parallel_size > 1). Weights are copied in and verified after every step, never read from
    the model's folder."""

    kind: Literal["vllm"]
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs (on CPU: processes) per copy of the model, on one node. Must divide its attention and
    key/value heads and, with a layout that shares GPUs, the number of ranks."""
    max_num_seqs: int = Field(128, ge=1)
    """Maximum responses decoded at once; others wait for a free slot."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum tokens of prompt + response. None: prompt_max_len + generate_max_len, the larger of
    training and evaluation."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """CUDA: share of GPU memory for vLLM's weights and cache; the trainer needs the rest."""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """Bytes of each process's key/value cache. None: on CPU ``max_num_seqs`` sequences of full
    length, at most 4 GiB; on CUDA the rest of gpu_memory_utilization."""
    prefix_caching: bool = True
    """Compute common blocks of prompts once: n samples of a prompt share its prefill except for the
    last block."""
    enforce_eager: bool = False
    """CUDA: disable compilation and graphs. On CPU they are always disabled."""
    sleep_between_rollouts: bool = False
    """CUDA: free weights and cache after every training rollout; updated weights are loaded before
    the next. No effect on CPU."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, such as ``{max_num_batched_tokens: 16384}``.
    Refused: those that a key of Burnish sets, or that change samples or weights."""

    not_spmd: ClassVar[str | None] = (
        "vLLM forms process groups of its own from the same environment variables"
    )

    def rules(self) -> Iterator[str]:
        yield from problems(self.engine_args, path="engine_args")

    def cpu_cache_bytes(self, row_bytes: int) -> int:
        """Return the bytes of one process's cache on a CPU: ``max_num_seqs`` rows of full length,
        at most 4 GiB, at least one row. ``row_bytes``: keys and values of the longest row."""
        size = min(row_bytes * self.max_num_seqs, max(MOST_CPU_CACHE, row_bytes))
        return self.kv_cache_bytes or size // self.tensor_parallel_size

    @property
    def slots(self) -> int:
        """Maximum number of responses that a worker decodes at once."""
        return self.max_num_seqs

    @property
    def tensor_parallel(self) -> int:
        return self.tensor_parallel_size

    @property
    def sleeps(self) -> bool:
        return self.sleep_between_rollouts

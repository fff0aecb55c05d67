"""Sampling parameters that vLLM does not use exactly as they are.

vLLM rounds some values silently and refuses others at the first request. The local engine takes all
of them.
"""

from __future__ import annotations

from collections.abc import Iterator

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature instead of a lower one above 0."""
MAX_TEMPERATURE = 2.0


def vllm_sampling_problems(
    temperature: float, *, num_recorded: int = 0, max_recorded: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each parameter that vLLM rounds or refuses. All others are used
    exactly.

    ``num_recorded``: kept tokens that are recorded per position (``top_k`` with a sampling mask).
    ``max_recorded``: tokens of the vocabulary or, for a server with ``--max-logprobs``, fewer.
    None: unknown.
    """
    if 0 < temperature < MIN_TEMPERATURE:
        yield (
            "temperature",
            f"temperature={temperature:g}: vLLM samples at {MIN_TEMPERATURE:g} instead of a lower "
            f"temperature above 0; use 0 (greedy), {MIN_TEMPERATURE:g} or more, or the local "
            "engine (kind=local)",
        )
    if temperature > MAX_TEMPERATURE:
        yield (
            "temperature",
            f"temperature={temperature:g}: vLLM takes at most {MAX_TEMPERATURE:g}; use "
            f"{MAX_TEMPERATURE:g} or less, or the local engine (kind=local)",
        )
    if max_recorded is not None and num_recorded > max_recorded:
        yield (
            "top_k",
            f"top_k={num_recorded} with sampling_mask: vLLM records at most {max_recorded} tokens "
            "per position (the vocabulary or, on a server, --max-logprobs); use "
            f"top_k={max_recorded} or less, or the local engine (kind=local)",
        )

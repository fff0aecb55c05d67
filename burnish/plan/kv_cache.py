"""Memory of a rollout engine: weights, the key/value cache, and the temporary tensors of a step.

The local engine allocates slots that grow (``rollout/local/engine.py``, ``models/kv_cache.py``). If
it records CUDA graphs, it allocates all positions at once.

vLLM takes its share of the GPU. The part not needed by weights and its profiling pass becomes
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.model import Dtype
from burnish.config.rollout import LocalEngine, VllmEngine
from burnish.plan.model_state import SIZES, Item
from burnish.plan.shapes import ModelShape

CPU_BLOCK = 32
MOST_CPU_CACHE = 4 << 30
_FIRST_ROOM = 64  # initial number of positions for new tokens


@dataclass(frozen=True)
class Demand:
    """Load of a rollout engine."""

    sequences: int
    """Number of responses of one generate call."""
    prompt: int
    """Longest prompt, in tokens."""
    new_tokens: int
    """Longest response, in tokens."""

    @property
    def longest(self) -> int:
        """Longest prompt with its response, in tokens."""
        return self.prompt + self.new_tokens


def bytes_per_token(shape: ModelShape, dtype: Dtype) -> int:
    """Return the bytes of keys and values of one token in all layers; 0 for models without
    attention, whose state does not grow."""
    return 2 * len(shape.layers) * shape.kv_heads * shape.head_dim * SIZES[dtype]


def local_cache(
    shape: ModelShape, config: LocalEngine, demand: Demand, dtype: Dtype, *, graphs: bool
) -> tuple[Item, int]:
    """Return the local engine's cache and its number of slots."""
    slots = min(config.max_batch_size, max(demand.sequences, 1))
    if graphs:
        slots, capacity = _power_of_two(slots), demand.longest
    else:
        capacity = demand.prompt + min(demand.new_tokens, _FIRST_ROOM)
        while capacity < demand.longest:
            capacity = (capacity + 1) + (capacity + 1) // 2
    size = slots * capacity * bytes_per_token(shape, dtype)
    grow = (
        0 if graphs else size // max(2 * len(shape.layers), 1)
    )  # tensors are copied one at a time
    how = f"{slots} slots x {capacity} positions x {bytes_per_token(shape, dtype)} B"
    return Item("KV cache", size + grow, how), slots


def local_logits(shape: ModelShape, slots: int, *, graphs: bool, longest: int) -> Item:
    """Return the memory of a decode step's logits and of the sampling tensors derived from them:
    [slots, vocabulary] fp32."""
    vocabulary = shape.vocab_size
    size, how = 4 * 4 * slots * vocabulary, f"4 x {slots} x {vocabulary} x 4 B"
    if graphs:  # each recorded graph keeps its own result
        lengths = max(1, (_power_of_two(longest) // 64).bit_length())
        size += 2 * 4 * _power_of_two(slots) * vocabulary * lengths
        how += f", and the outputs of CUDA graphs for {lengths} lengths"
    return Item("logits/loss", size, how)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True)
class VllmMemory:
    """Memory of vLLM on one GPU."""

    weights: Item
    cache: Item
    rest: Item
    """Activations of the profiling pass, and recorded graphs."""
    cache_tokens: int
    """Capacity of the cache in tokens, over all GPUs of the engine."""
    problem: str | None = None
    """Reason why vLLM cannot start."""


def vllm_on_gpu(
    shape: ModelShape,
    config: VllmEngine,
    demand: Demand,
    *,
    dtype: Dtype,
    gpu_bytes: float,
    overhead: dict[str, float],
) -> VllmMemory:
    """Return vLLM's memory within ``gpu_memory_utilization`` of a GPU: weights, activations and
    graphs, and the rest as cache."""
    parts = config.tensor_parallel_size
    size = shape.parameters * SIZES[dtype] / parts
    weights = Item(
        "parameters", size, f"{shape.parameters / 1e9:.3f}e9 x {SIZES[dtype]} B / {parts}"
    )
    tokens = int(max(overhead["vllm_profile_tokens"], config.max_num_seqs))
    width = max(shape.inner_size, shape.hidden_size)
    pass_bytes = tokens * (6 * shape.hidden_size + 3 * width / parts) * SIZES[dtype]
    pass_bytes += config.max_num_seqs * shape.vocab_size * 4 * 3
    graphs = 0.0 if config.enforce_eager else overhead["vllm_graphs_gb"] * 1e9
    how = f"profiling pass of {tokens} tokens, logits of {config.max_num_seqs} rows, CUDA graphs"
    rest = Item("activations", pass_bytes + graphs, how)
    share = config.gpu_memory_utilization * gpu_bytes
    left = config.kv_cache_bytes or share - weights.bytes - rest.bytes
    per_token = bytes_per_token(shape, dtype) / min(parts, max(1, shape.kv_heads))
    held = int(max(left, 0) / max(1.0, per_token))
    cache_how = (
        f"kv_cache_bytes: {held} tokens"
        if config.kv_cache_bytes
        else f"rest of {config.gpu_memory_utilization:g} x {gpu_bytes / 1e9:.1f} GB: {held} tokens"
    )
    problem = None
    if held < demand.longest:
        problem = (
            f"vLLM's KV cache has space for {held} tokens, but a row has up to {demand.longest}; "
            f"weights take {weights.bytes / 1e9:.1f} of vLLM's {share / 1e9:.1f} GB: raise "
            "rollout.engine.gpu_memory_utilization or tensor_parallel_size"
        )
    cache = Item("KV cache", max(left, 0), cache_how)
    return VllmMemory(weights, cache, rest, held, problem)


def vllm_on_cpu(
    shape: ModelShape, config: VllmEngine, demand: Demand, dtype: Dtype
) -> tuple[Item, Item]:
    """Return the weights and the cache of one process."""
    size = shape.parameters * SIZES[dtype] / config.tensor_parallel_size
    blocks = -(-demand.longest // CPU_BLOCK) + 1
    least = blocks * CPU_BLOCK * bytes_per_token(shape, dtype)
    wanted = min(least * config.max_num_seqs, max(MOST_CPU_CACHE, least))
    cache = config.kv_cache_bytes or wanted // config.tensor_parallel_size
    return (
        Item("parameters", size, f"{shape.parameters} x {SIZES[dtype]} B"),
        Item("KV cache", cache, f"{config.max_num_seqs} rows, at most 4 GiB"),
    )
